"""The formats in which models write tool calls and reasoning, and how a chat template shows which one it teaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from qcompile.errors import UsageError, shown
from qcompile.runtime.parsers.action_tokens import ActionTokensParser
from qcompile.runtime.parsers.argument_tags import ArgumentTagsParser
from qcompile.runtime.parsers.bracket_token import BracketTokenParser
from qcompile.runtime.parsers.call_parser import CallParser
from qcompile.runtime.parsers.channels import ChannelsParser, StructuredChannelsParser
from qcompile.runtime.parsers.fenced_tokens import FencedTokensParser
from qcompile.runtime.parsers.function_tags import FunctionTagsParser, SeedTagsParser
from qcompile.runtime.parsers.invoke_tags import InvokeTagsParser
from qcompile.runtime.parsers.plain_json import PlainJsonParser
from qcompile.runtime.parsers.pythonic import PYTHONIC_TOKENS, PythonicParser
from qcompile.runtime.parsers.reasoning import ReasoningTags
from qcompile.runtime.parsers.section_tokens import SectionTokensParser
from qcompile.runtime.parsers.tagged_json import TaggedJsonParser
from qcompile.runtime.parsers.tagged_list import TaggedListParser, TokenListParser
from qcompile.runtime.parsers.tools import DeclaredTools
from qcompile.runtime.sampling.structured import Reasoning

Format = TypeVar("Format")
NONE = "none"
"""The name that turns a parser off."""


@dataclass(frozen=True)
class MessageFormat:
    """How a reply of several messages has structured output or a forced call, as its last message.

    content_start, call_start: what stands before it, and before the arguments of a call of the tool NAME. heads: what
    may stand before it instead, where reasoning precedes it. reasoning: the messages before. parser: for such a reply.
    """

    content_start: str
    heads: tuple[str, ...]
    call_start: str
    reasoning: Reasoning
    parser: Callable[[DeclaredTools], CallParser]


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    marks: a template with all texts of one of these teaches the format. tokens: texts in replies that may be special
    tokens. id_characters: length of call ids, where templates demand one. whole: given if the parser reads every reply,
    with reasoning, not only those of requests with tools.
    """

    parser: Callable[[DeclaredTools], CallParser]
    marks: Sequence[Sequence[str]]
    tokens: Sequence[str] = ()
    id_characters: int | None = None
    whole: MessageFormat | None = None


TOOL_FORMATS = {
    "harmony": ToolFormat(
        ChannelsParser,
        [("<|channel|>", "<|message|>")],
        ("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|constrain|>"),
        whole=MessageFormat(
            "<|channel|>final<|message|>",
            ("<|channel|>final <|constrain|>json<|message|>",),
            "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
            Reasoning("<|channel|>analysis<|message|>", "<|end|>", again="<|start|>assistant"),
            StructuredChannelsParser,
        ),
    ),
    "kimi_k2": ToolFormat(
        SectionTokensParser,
        [("<|tool_calls_section_begin|>",)],
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    ),
    "minimax_m2": ToolFormat(InvokeTagsParser, [("<minimax:tool_call>",)], ("<minimax:tool_call>",)),
    "seed_oss": ToolFormat(SeedTagsParser, [("<seed:tool_call>",)], ("<seed:tool_call>",)),
    "command_a": ToolFormat(
        ActionTokensParser, [("<|START_ACTION|>",)], ("<|START_ACTION|>", "<|START_THINKING|>", "<|START_RESPONSE|>")
    ),
    "granite": ToolFormat(TokenListParser, [("<|tool_call|>",)], ("<|tool_call|>",)),
    "deepseek": ToolFormat(
        FencedTokensParser,
        [("<｜tool▁calls▁begin｜>",)],
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    ),
    "mistral": ToolFormat(
        BracketTokenParser, [("[TOOL_CALLS]",)], ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), id_characters=9
    ),
    "glm45": ToolFormat(ArgumentTagsParser, [("<arg_key>", "<tool_call>")], ("<tool_call>", "<arg_key>")),
    "qwen3_coder": ToolFormat(FunctionTagsParser, [("<function=", "<parameter=")], ("<tool_call>",)),
    "hermes": ToolFormat(TaggedJsonParser, [("<tool_call>",)], ("<tool_call>",)),
    "jamba": ToolFormat(TaggedListParser, [("<tool_calls>",)], ("<tool_calls>",)),
    "pythonic": ToolFormat(
        PythonicParser, [("[func_name1(",), ("<|python_start|>",), ("<|tool_call_start|>",)], PYTHONIC_TOKENS
    ),
    "llama3_json": ToolFormat(
        PlainJsonParser, [("<|python_tag|>",), ('{"name": function name, "parameters":',)], ("<|python_tag|>",)
    ),
}
"""By name, in the order in which templates are searched: a later one may have the marks of an earlier one, too."""

REASONING_FORMATS = {
    "think": ReasoningTags("<think>", "</think>"),
    "think_brackets": ReasoningTags("[THINK]", "[/THINK]"),
    "seed_think": ReasoningTags("<seed:think>", "</seed:think>"),
}
"""By name. A template that has the closing tag teaches the format."""


def tool_format(template: str, name: str | None = None) -> ToolFormat | None:
    """The format of tool calls by its name, or else of a template's text; None if there is none. Raises UsageError."""
    if name == NONE:
        return None
    if name is not None:
        return _named(TOOL_FORMATS, name, "tool-parser")
    fitting = (form for form in TOOL_FORMATS.values() if any(all(t in template for t in texts) for texts in form.marks))
    return next(fitting, None)


def reasoning_tags(template: str, name: str | None = None) -> ReasoningTags | None:
    """The tags of reasoning by the name of their format, or else of a template's text, likewise."""
    if name == NONE:
        return None
    if name is not None:
        return _named(REASONING_FORMATS, name, "reasoning-parser")
    return next((tags for tags in REASONING_FORMATS.values() if tags.closing in template), None)


def check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise UsageError if there is no format of one of these names."""
    tool_format("", tool_parser)
    reasoning_tags("", reasoning_parser)


def _named(formats: dict[str, Format], name: str, option: str) -> Format:
    if name not in formats:
        raise UsageError(f"there is no {option} {shown(name)}: use one of {', '.join((*formats, NONE))}")
    return formats[name]
