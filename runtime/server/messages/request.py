"""Requests of /v1/messages in Anthropic's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from qcompile.errors import UsageError, shown
from qcompile.runtime.dialogue import Dialogue, DialogueFormat
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.structured import FORCED, StructuredOutputsParams, named_as
from qcompile.runtime.server.api import BodyPart, Count, FunctionName, SamplingFields, Stops
from qcompile.runtime.server.messages.content import CitingPart, MessagePart, Texts, joined

FORMAT = "output_config.format"
"""How errors name the language of structured outputs."""


class ToolDeclaration(CitingPart):
    """A tool that the model may call. strict: without effect."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """The tool in the form of chat completions."""
        described = {"description": self.description} if self.description is not None else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


def _custom_alone(given: Any) -> Any:
    """Refuse a tool that Anthropic defines, before its fields are refused one by one."""
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise PydanticCustomError("tool", "{kind} is not supported: only custom tools are", {"kind": shown(kind)})
    return given


class ToolChoicePart(BodyPart):
    """Whether and which tools the model is to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def plain(self) -> Any:
        """The choice in the form of chat completions."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingPart(BodyPart):
    """Whether the model reasons. budget_tokens: without effect, `max_tokens` counts reasoning, too."""

    idle: ClassVar[dict[str, tuple[object, ...]]] = {"display": ("summarized",)}
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class OutputFormat(BodyPart):
    """The language of the output."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BodyPart):
    """How much the model reasons, and the language of its output."""

    effort: str | None = None
    format: OutputFormat | None = None


Tool = Annotated[ToolDeclaration, BeforeValidator(_custom_alone)]


class CountRequest(SamplingFields):
    """POST /v1/messages/count_tokens: all that a prompt follows from."""

    messages: Annotated[list[MessagePart], Field(min_length=1, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoicePart | None = None
    thinking: ThinkingPart | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    """Without effect: the server caches all prompts."""
    chat_template_kwargs: dict[str, Any] | None = None

    def dialogue(self, templates: DialogueFormat) -> Dialogue:
        """What the model is asked. Raises UsageError."""
        messages = [{"role": "system", "content": joined(self.system)}] if self.system else []
        for place, message in enumerate(self.messages):
            messages += message.plain(f"messages.{place}")
        if messages[-1]["role"] == "assistant":
            raise UsageError("messages: the last one must not be the assistant's: replies cannot be continued")
        tools = [tool.plain() for tool in self.tools or ()]
        choice = self.tool_choice.plain() if self.tool_choice else "auto"
        if not tools and choice not in ("auto", "none"):
            raise UsageError("tool_choice needs tools")
        return Dialogue(
            messages,
            tools,
            choice,
            not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            reasoning_effort=self._effort(),
            variables=self._variables(templates),
            structured=self.structure() is not None,
        )

    def _effort(self) -> str | None:
        if self.thinking and self.thinking.type == "disabled":
            return "none"
        return self.output_config.effort if self.output_config else None

    def _variables(self, templates: DialogueFormat) -> dict[str, Any]:
        """The variables of the chat template."""
        given = self.chat_template_kwargs or {}
        if self.thinking is None or self.thinking.type != "enabled":
            return given
        try:
            return templates.reasoning_on() | given
        except UsageError as error:
            raise UsageError(f"thinking: {error}") from None

    def structure(self) -> StructuredOutputsParams | None:
        """The language of the output; None for any text. Raises UsageError."""
        form = self.output_config.format if self.output_config else None
        if form is None:
            return None
        with named_as(FORMAT):
            return StructuredOutputsParams(json=form.schema_)

    @property
    def structure_field(self) -> str:
        """The field that the language of the output comes from, as errors name it."""
        return FORMAT if self.structure() else FORCED


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    idle: ClassVar[dict[str, tuple[object, ...]]] = {
        **{"speed": ("standard",), "mcp_servers": ([],)},
        "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    }
    max_tokens: Count
    stop_sequences: Stops | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    """Concerns Anthropic's own service, like the field before it, and has no effect."""

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The request's sampling parameters, with defaults as in `sampling`. Raises UsageError."""
        return self.sampling(defaults, self.max_tokens, stop=self.stop_sequences, structured_outputs=self.structure())
