"""Requests of /v1/chat/completions in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from qcompile.errors import UsageError, shown
from qcompile.runtime.dialogue import Dialogue, end_of_prompt
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.server.api import MOST_LOGPROBS, BodyPart, CachedPart, Common, Count, FunctionName
from qcompile.runtime.server.tool_choice import Tool, allowed_tools, field_of_each

_CHAT_FIELDS = (
    *("tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)
"""Fields that have no effect on completions."""


class TextPart(CachedPart):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: str


def _text_alone(given: Any) -> Any:
    """Refuse a part of another type than text, such as `image_url`, before its fields are refused one by one."""
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind != "text":
        message = "{kind} is not supported: only the text decoder is compiled, and messages are text alone"
        raise PydanticCustomError("text_alone", message, {"kind": shown(kind)})
    return given


def _parts(given: Any) -> Any:
    """Turn a text into a list of parts, for the same reason as in `_stops`."""
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


class CalledFunction(BodyPart):
    """The function of a call: arguments are an object, as JSON text or not."""

    name: str
    arguments: Any = ""  # checked where templates get it


class CallPart(BodyPart):
    """A call of a tool in a message. index: its number, which some clients keep from a stream."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


_NOT_PLAIN: Any = {"content": True, "cache_control": True, "tool_calls": {"__all__": {"index"}}}
"""What chat templates do not get of a message, or in another form."""
_NO_PART_OF_A_TOOL: Any = {"function": {"strict", "cache_control"}, "cache_control": True}
"""What they do not get of a tool."""


class ChatMessage(CachedPart):
    """One message of a conversation."""

    idle: ClassVar[dict[str, tuple[object, ...]]] = {"tool_calls": ([],), "annotations": ([],)}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[Annotated[TextPart, BeforeValidator(_text_alone)]],
        Field(fail_fast=True),
        BeforeValidator(_parts, str | list[TextPart]),
    ]
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's newer name of `reasoning_content`."""
    tool_calls: Annotated[list[CallPart], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _silent(cls, body: Any) -> Any:
        """A reply may have no content: some clients send back null where a reply was empty."""
        if isinstance(body, dict) and body.get("role") == "assistant" and body.get("content") is None:
            return body | {"content": ""}
        return body

    @model_validator(mode="after")
    def _of_its_role(self) -> ChatMessage:
        """Refuse what only other roles have."""
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content or self.reasoning):
            raise PydanticCustomError("role", "only messages of the assistant have tool_calls and reasoning_content")
        if self.role != "tool" and self.tool_call_id is not None:
            raise PydanticCustomError("role", "only messages of tools have a tool_call_id")
        return self

    def plain(self) -> dict[str, Any]:
        """The message in OpenAI's form, with its text in one piece. A message that only calls tools has none."""
        given = self.model_dump(exclude_none=True, exclude=_NOT_PLAIN)
        text = "".join(part.text for part in self.content)
        return given if self.tool_calls and not text else {"role": self.role, "content": text} | given


class FunctionPart(CachedPart):
    """A function that the model may call. parameters: a JSON schema. strict: without effect."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolPart(CachedPart):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionPart


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    idle: ClassVar[dict[str, tuple[object, ...]]] = {
        name: values for name, values in Common.idle.items() if name not in _CHAT_FIELDS
    }
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[ToolPart], Field(fail_fast=True)] | None = None
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Whether the reply goes on where the last message ends; `add_generation_prompt` is then false."""

    def dialogue(self, structured: bool = False) -> Dialogue:
        """What the model is asked. structured: whether for structured output. Raises UsageError."""
        tools = [tool.model_dump(exclude_none=True, exclude=_NO_PART_OF_A_TOOL) for tool in self.tools or ()]
        if not tools and self.tool_choice not in ("auto", "none"):
            raise UsageError("tool_choice needs tools")
        tools, choice = self._chosen(tools)
        return Dialogue(
            [message.plain() for message in self.messages],
            tools,
            choice,
            self.parallel_tool_calls,
            self.documents,
            self.reasoning_effort,
            self.chat_template_kwargs or {},
            structured,
            end_of_prompt(self.add_generation_prompt, self.continue_final_message),
        )

    def _chosen(self, tools: list[Tool]) -> tuple[list[Tool], Any]:
        """The tools that the model may call, and the choice among them."""
        choice = self.tool_choice
        if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
            return tools, choice
        allowed = choice.get("allowed_tools")
        listed = field_of_each(allowed.get("tools") if isinstance(allowed, Mapping) else None, "function")
        names = None if listed is None else field_of_each(listed, "name")
        return allowed_tools(tools, names, allowed.get("mode") if isinstance(allowed, Mapping) else None)

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The request's sampling parameters, with defaults as in `sampling`. Raises UsageError."""
        if self.top_logprobs and not self.logprobs:
            raise UsageError("top_logprobs needs logprobs: true")
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        reported = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling(defaults, most, logprobs=reported, prompt_logprobs=self.prompt_logprobs)
