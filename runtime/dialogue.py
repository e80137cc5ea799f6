"""How a model's conversations are written for it, and its replies are read: with tools and reasoning.

The formats of both follow from the text of the chat template, or are named by the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from qcompile.errors import UsageError, shown
from qcompile.runtime.chat import ChatTemplate, Render, up_to_content
from qcompile.runtime.forced_calls import calls_schema, named_function, schemas_by_name
from qcompile.runtime.histories import HistoryStyle, template_messages
from qcompile.runtime.parsers.call_parser import is_name
from qcompile.runtime.parsers.forced_calls import ForcedCallsParser
from qcompile.runtime.parsers.formats import MessageFormat, ToolFormat, reasoning_tags, tool_format
from qcompile.runtime.parsers.reasoning import ReasoningParser
from qcompile.runtime.parsers.reply import ReplyParser
from qcompile.runtime.parsers.tools import DeclaredTools
from qcompile.runtime.sampling.structured import FORCED, Reasoning, StructuredOutputsParams, named_as
from qcompile.runtime.turn import Turn

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off."""
_EFFORT = "reasoning_effort"
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_FIELDS = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of templates that have fields of their own."""


PromptEnd = Literal["reply", "turn", "message"]


def end_of_prompt(generation_prompt: bool, continues: bool) -> PromptEnd:
    """What a prompt ends with (Dialogue.end). Raises UsageError for fields that exclude each other."""
    if generation_prompt and continues:
        raise UsageError("continue_final_message needs add_generation_prompt: false")
    return "reply" if generation_prompt else "message" if continues else "turn"


@dataclass(frozen=True)
class Dialogue:
    """What a model is asked: messages, and how to answer, in OpenAI's form.

    tools: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": schema}}`. tool_choice:
    "auto", "none", "required", or `{"type": "function", "function": {"name": ...}}`. variables: further variables of
    the template. structured: whether the reply is structured output, of which no part is reasoning or calls. end: what
    the prompt ends with: the start of a "reply", the last "turn", or the last "message", which the reply continues.
    Raises UsageError for fields of other types.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    documents: Sequence[Mapping[str, Any]] | None = None
    reasoning_effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    structured: bool = False
    end: PromptEnd = "reply"

    def __post_init__(self) -> None:
        if not _is_list(self.tools):
            raise UsageError(f"tools must be a list of dictionaries, not {shown(self.tools)}")
        documents = () if self.documents is None else self.documents
        if not _is_list(documents) or not all(isinstance(each, Mapping) for each in documents):
            raise UsageError(f"documents must be a list of dictionaries, not {shown(self.documents)}")
        if not isinstance(self.variables, Mapping):
            raise UsageError(f"chat_template_kwargs must be a dictionary, not {shown(self.variables)}")

    @property
    def offered(self) -> list[Mapping[str, Any]]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else list(self.tools)


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)


class DialogueFormat:
    """The formats of one model. tool_parser, reasoning_parser: names of formats; None for what the template shows.

    Raises UsageError for unknown names.
    """

    def __init__(
        self,
        template: Render,
        tokenizer: Tokenizer | None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        text = template.text if isinstance(template, ChatTemplate) else ""
        self.template = template
        self._calls = tool_format(text, tool_parser)
        whole = self._calls is not None and self._calls.whole is not None
        self._tags = None if whole and reasoning_parser is None else reasoning_tags(text, reasoning_parser)
        self._style = HistoryStyle.of(text, one_call=whole)
        added = tokenizer.get_added_tokens_decoder().values() if tokenizer else ()
        self._special = frozenset(token.content for token in added if token.special)

    @property
    def several_messages(self) -> bool:
        """Whether a reply consists of several messages, of which each ends as a reply does in other formats."""
        return self._messages is not None

    @property
    def _messages(self) -> MessageFormat | None:
        return self._calls.whole if self._calls else None

    def reasoning_on(self) -> dict[str, Any]:
        """The variables of the template that turn reasoning on. Raises UsageError for a model that does not reason."""
        if self._tags is None and not self.several_messages:
            raise UsageError("the chat template of this model has no reasoning")
        return {name: True for name in _SWITCHES if name in self._reads}

    def turn(self, asked: Dialogue) -> Turn:
        """The prompt of a dialogue, and how to read the replies. Raises UsageError for what the template lacks."""
        tools = asked.offered
        declared = DeclaredTools.of(tools)
        if tools and "tools" not in self._reads:
            raise UsageError("tools: the chat template of this model takes none")
        if asked.end == "message" and self.several_messages:
            raise UsageError("continue_final_message: a reply of this model consists of several messages")
        if asked.tool_choice not in ("auto", "none"):
            return self._forced(asked, declared)
        if asked.structured:
            if self._asks_to_reason(asked):
                return self._reasoned(asked)
            return Turn(self._silent_prompt(asked), ReplyParser)
        if tools and self._calls is None:
            raise UsageError("tools: the format of this model's calls is unknown: name it (--tool-parser)")
        prompt = self._rendered(asked, self._variables(asked, tools))
        calls = self._calls if tools or self.several_messages else None
        return Turn(
            prompt,
            lambda: self._parser(prompt, calls, declared, None if asked.parallel_tool_calls else 1),
            not self._special.isdisjoint(self._marks(calls)),
            calls.id_characters if calls else None,
        )

    def _asks_to_reason(self, asked: Dialogue) -> bool:
        """Whether a request for structured output or a forced call asks for reasoning before it, and the model has a
        format of reasoning."""
        switched = any(asked.variables.get(switch) is True for switch in _SWITCHES)
        reasons = self._tags is not None or self.several_messages
        return reasons and (switched or asked.reasoning_effort not in (None, "none"))

    def _reasoned(self, asked: Dialogue, declared: DeclaredTools | None = None) -> Turn:
        """A turn with a reply of reasoning, followed by structured output, or by calls of the tools `declared`."""
        prompt = self._rendered(asked, self._variables(asked, asked.offered))
        tools = DeclaredTools.of(()) if declared is None else declared
        if messages := self._messages:
            heads = (messages.content_start, *messages.heads) if declared is None else ()
            reasoning = messages.reasoning._replace(heads=heads)
            return Turn(
                prompt,
                lambda: ReplyParser(calls=messages.parser(tools)),
                not self._special.isdisjoint(self._marks(self._calls)),
                reasoning=reasoning,
            )
        assert self._tags is not None
        begun, calls = self._begun(prompt), None if declared is None else ToolFormat(ForcedCallsParser, ())
        return Turn(
            prompt,
            lambda: self._parser(prompt, calls, tools, None),
            not self._special.isdisjoint(self._marks(None)),
            reasoning=Reasoning(self._tags.opening, self._tags.closing, begun),
        )

    def _forced(self, asked: Dialogue, declared: DeclaredTools) -> Turn:
        """A turn with a reply that must call tools. The reply is a list of calls as JSON from its first token on, in
        place of the model's own format, or behind reasoning; there, a reply of several messages has one call, in its
        own format."""
        if asked.structured:
            raise UsageError("tool_choice: structured outputs exclude calls; use 'auto' or 'none'")
        if not asked.offered:
            raise UsageError("tool_choice needs tools")
        name = named_function(asked.tool_choice)
        declared = declared if name is None else declared.only(name)
        reasons = self._asks_to_reason(asked)
        if reasons:
            turn = self._reasoned(asked, declared)
        else:
            turn = Turn(self._silent_prompt(asked), lambda: ReplyParser(calls=ForcedCallsParser(declared)))
        given: dict[str, Any]
        if reasons and self._messages:
            start = self._messages.call_start
            calls = schemas_by_name(asked.offered, name)
            if wrong := [called for called, _ in calls if not is_name(called)]:
                raise UsageError(f"tools: {shown(wrong[0])} is no name that a call can have in messages")
            given = {"calls": [(start.replace("NAME", called), schema) for called, schema in calls]}
        else:
            given = {"json": calls_schema(asked.offered, name, asked.parallel_tool_calls)}
        with named_as(FORCED):
            language = StructuredOutputsParams(**given, disable_any_whitespace=True)
        characters = self._calls.id_characters if self._calls else None
        return replace(turn, id_characters=characters, language=language, named=name is not None)

    def _silent_prompt(self, asked: Dialogue) -> str:
        """The prompt for a reply that is content from its first token on: reasoning is turned off or ended."""
        if asked.reasoning_effort not in (None, "none"):
            raise UsageError(f"reasoning_effort {shown(asked.reasoning_effort)}: the chat template has no reasoning")
        silent = dict(asked.variables) | {switch: False for switch in _SWITCHES if switch in self._reads}
        variables = self._variables(replace(asked, variables=silent, reasoning_effort=None), asked.offered)
        prompt = self._rendered(asked, variables)
        if self._messages:
            return prompt + self._messages.content_start
        return f"{prompt.rstrip()}\n\n{self._tags.closing}\n\n" if self._tags and self._begun(prompt) else prompt

    @property
    def _reads(self) -> frozenset[str]:
        return self.template.reads if isinstance(self.template, ChatTemplate) else frozenset()

    def _marks(self, calls: ToolFormat | None) -> list[str]:
        tags = [self._tags.opening, self._tags.closing] if self._tags else []
        return [*tags, *(calls.tokens if calls else ())]

    def _begun(self, prompt: str) -> bool:
        """Whether a prompt ends within reasoning."""
        return self._tags is not None and prompt.rstrip().endswith(self._tags.opening)

    def _parser(self, prompt: str, calls: ToolFormat | None, tools: DeclaredTools, most: int | None) -> ReplyParser:
        reasoning = ReasoningParser(self._tags, self._begun(prompt)) if self._tags else None
        return ReplyParser(reasoning, calls.parser(tools) if calls else None, most)

    def _rendered(self, asked: Dialogue, variables: Mapping[str, Any]) -> str:
        """The prompt. Most templates read the arguments of calls as dictionaries, some as text; some refuse messages of
        several calls."""
        called = any(message.get("tool_calls") for message in asked.messages)
        if called and isinstance(self.template, ChatTemplate) and "tool_calls" not in self.template.text:
            raise UsageError("messages: the chat template of this model reads no tool_calls")
        first: UsageError | None = None
        for style in (self._style, replace(self._style, one_call=True)):
            for as_text in (False, True):
                messages = template_messages(asked.messages, style, as_text)
                try:
                    if asked.end == "reply":
                        return self.template(messages, **variables)
                    text = self.template(messages, **variables, add_generation_prompt=False)
                    return (
                        up_to_content(text, asked.messages[-1].get("content") or "") if asked.end == "message" else text
                    )
                except UsageError as error:
                    first = first or error
                if not any("tool_calls" in message for message in messages):
                    raise first
        assert first is not None
        raise first

    def _variables(self, asked: Dialogue, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The variables of the template that a request sets."""
        for name, value in asked.variables.items():
            if name in _FIELDS:
                raise UsageError(f"chat_template_kwargs has {name}, which is no variable of its own there")
            if name not in self._reads and not (name in _SWITCHES and value is False):
                raise UsageError(f"chat_template_kwargs has {shown(name)}, which the chat template does not read")
        if asked.documents and "documents" not in self._reads:
            raise UsageError("documents: the chat template of this model takes none")
        given = {"tools": list(tools) or None, "documents": [dict(each) for each in asked.documents or ()] or None}
        set_here = {name: value for name, value in given.items() if value}
        known = {name: value for name, value in asked.variables.items() if name in self._reads}
        return set_here | self._effort(asked.reasoning_effort) | known

    def _effort(self, effort: str | None) -> dict[str, Any]:
        """The variables that set how much the model reasons."""
        if effort is not None and effort not in _EFFORTS:
            raise UsageError(f"reasoning_effort must be one of {', '.join(_EFFORTS)}, not {shown(effort)}")
        if effort is None:
            return {}
        switches: dict[str, Any] = {name: effort != "none" for name in _SWITCHES if name in self._reads}
        if _EFFORT in self._reads and (effort != "none" or self._knows_none):
            switches[_EFFORT] = effort
        reasons = self._tags is not None or self.several_messages
        if not switches and (reasons or effort != "none"):
            what = "cannot turn reasoning off" if effort == "none" else "reads no such variable"
            raise UsageError(f"reasoning_effort {shown(effort)}: the chat template {what}")
        return switches

    @property
    def _knows_none(self) -> bool:
        text = self.template.text if isinstance(self.template, ChatTemplate) else ""
        return "'none'" in text or '"none"' in text


def dialogue_format(
    template: Render | None, tokenizer: Tokenizer | None, tool_parser: str | None, reasoning_parser: str | None
) -> DialogueFormat:
    """The format of a model's dialogues. Raises UsageError without a template, and for unknown parsers."""
    if template is None:
        raise UsageError("this artifact has no chat template: give prompts to generate instead")
    return DialogueFormat(template, tokenizer, tool_parser, reasoning_parser)
