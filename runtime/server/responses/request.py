"""Requests of /v1/responses in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from qcompile.errors import UsageError, shown
from qcompile.runtime.dialogue import Dialogue
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.structured import FORCED, StructuredOutputsParams, named_as
from qcompile.runtime.server.api import MOST_LOGPROBS, BodyPart, Count, FunctionName, SamplingFields, Stops
from qcompile.runtime.server.responses.items import Input, Message, messages_of
from qcompile.runtime.server.tool_choice import allowed_tools, field_of_each

FORMAT = "text.format"
"""How errors name the language of structured outputs."""


class FunctionTool(BodyPart):
    """A function that the model may call. parameters: a JSON schema. strict: without effect."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def plain(self) -> Message:
        """The tool in the form of chat completions."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _function_alone(given: Any) -> Any:
    """Refuse a tool that OpenAI's servers run, before its fields are refused one by one."""
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise PydanticCustomError("tool", "{kind} is not supported: only functions are", {"kind": shown(kind)})
    return given


Tool = Annotated[FunctionTool, BeforeValidator(_function_alone)]


class TextFormat(BodyPart):
    """The language of the output. name, description, strict: without effect."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(BodyPart):
    """How texts are written."""

    idle: ClassVar[dict[str, tuple[object, ...]]] = {"verbosity": ("medium",)}
    format: TextFormat | None = None


class ReasoningConfig(BodyPart):
    """How much the model reasons. The reasoning itself is returned: there is no summary of it."""

    idle: ClassVar[dict[str, tuple[object, ...]]] = {
        **{"summary": ("auto",), "generate_summary": ("auto",), "context": ("auto", "all_turns")},
        **{"mode": ("standard",)},
    }
    effort: str | None = None


_LOGPROBS = "message.output_text.logprobs"


def _includable(given: Any) -> Any:
    """Refuse what responses never have. `reasoning.encrypted_content` serves to give reasoning back: here, items of
    reasoning have it as it is."""
    for place, name in enumerate(given) if isinstance(given, list) else ():
        if name not in (_LOGPROBS, "reasoning.encrypted_content"):
            facts = {"place": place, "name": shown(name)}
            raise PydanticCustomError("include", "{name} (number {place}) is not supported", facts)
    return given


Included = Annotated[list[str], BeforeValidator(_includable)]


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    idle: ClassVar[dict[str, tuple[object, ...]]] = {
        **{"background": (False,), "truncation": ("disabled",)},
        "stream_options": ({}, {"include_obfuscation": False}),
        **{"prompt_cache_retention": ("in_memory", "24h")},
    }
    input: Input
    include: Included | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stop: Stops | None = None
    tools: Annotated[list[Annotated[FunctionTool, BeforeValidator(_function_alone)]], Field(fail_fast=True)] | None = (
        None
    )
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    previous_response_id: str | None = None
    store: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    """Identifies the caller or concerns OpenAI's own service, like the four fields before it, and has no effect."""

    def messages(self) -> list[Message]:
        """The messages of the input."""
        return messages_of(self.input)

    def dialogue(self, before: Sequence[Message]) -> Dialogue:
        """What the model is asked. before: the messages of the previous response. Raises UsageError."""
        tools, choice = self._tools()
        if not tools and choice not in ("auto", "none"):
            raise UsageError("tool_choice needs tools")
        instructed = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages = [*instructed, *before, *self.messages()]
        if not messages:
            raise UsageError("input has no message")
        return Dialogue(
            messages,
            tools,
            choice,
            self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            variables=self.chat_template_kwargs or {},
            structured=self.structure() is not None,
        )

    def _tools(self) -> tuple[list[Message], Any]:
        """The tools that the model may call, and the choice among them, in the form of chat completions."""
        tools, choice = [tool.plain() for tool in self.tools or ()], self.tool_choice
        kind = choice.get("type") if isinstance(choice, Mapping) else None
        if kind == "function":
            return tools, {"type": "function", "function": {"name": choice.get("name")}}
        if kind != "allowed_tools":
            return tools, choice
        return allowed_tools(tools, field_of_each(choice.get("tools"), "name"), choice.get("mode"))

    def structure(self) -> StructuredOutputsParams | None:
        """The language of the output; None for any text. Raises UsageError."""
        form = self.text.format if self.text else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if form.schema_ is None:
            raise UsageError(f"{FORMAT}.schema is missing")
        with named_as(FORMAT):
            return StructuredOutputsParams(json=form.schema_)

    @property
    def structure_field(self) -> str:
        """The field that the language of the output comes from, as errors name it."""
        return FORMAT if self.structure() else FORCED

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The request's sampling parameters, with defaults as in `sampling`. Raises UsageError."""
        if self.top_logprobs and not self.tells_logprobs:
            raise UsageError(f'top_logprobs needs include: ["{_LOGPROBS}"]')
        reported = self.top_logprobs if self.tells_logprobs else None
        more = {"stop": self.stop, "structured_outputs": self.structure(), "logprobs": reported}
        return self.sampling(defaults, self.max_output_tokens, **more)

    @property
    def tells_logprobs(self) -> bool:
        """Whether texts of the response have the log probabilities of their tokens."""
        return _LOGPROBS in (self.include or ())
