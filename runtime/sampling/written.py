"""Languages of structured outputs as llguidance reads them: a grammar in Lark's format, or several as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from qcompile.runtime.sampling.rewritten import rewritten
from qcompile.runtime.sampling.structured import Reasoning, Source

_SPACES = r"[\x20\x0A\x0D\x09]{1,40}"
"""White space between parts of JSON. Without an end to it, models write spaces until max_tokens."""
_MARK = re.compile(r"(<\|\w+\|>)")
"""A text within others that may be a special token."""

MOST_GBNF = 2 << 10
"""Most characters of a grammar in GBNF: to convert as many short rules takes half a second."""


def written(source: Source, guide: Any) -> str:
    """A grammar for llguidance's tokenizer `guide`. Raises ValueError for JSON that is none."""
    from llguidance import LLMatcher

    if source.kind == "json":
        grammar = _of_schema(source.text, source.compact)
    elif source.kind == "calls":
        grammar = _of_calls(json.loads(source.text), source.compact, guide)
    elif source.kind == "regex":
        grammar = LLMatcher.grammar_from_regex(source.text)
    elif source.kind == "choice":
        texts = " | ".join(json.dumps(text) for text in json.loads(source.text))
        grammar = LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")  # a rule may have 2,000 texts at most
    else:
        grammar = LLMatcher.grammar_from_lark(_lark(source.text))
    return str(grammar) if source.reasoning is None else _behind(source.reasoning, str(grammar), guide)


def _lark(grammar: str) -> str:
    """A grammar in Lark's format, of one in that format or in GBNF (`root ::= ...`). Raises ValueError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if "::=" not in grammar or is_lark_syntax(grammar):
        return grammar
    if len(grammar) > MOST_GBNF:
        raise ValueError(f"GBNF of {len(grammar)} characters, of at most {MOST_GBNF}: give it in Lark's format")
    try:
        return str(gbnf_to_lark(grammar))
    except RecursionError:
        raise ValueError("GBNF that nests too deep") from None
    except Exception as error:  # llguidance raises plain exceptions for unknown rules
        raise ValueError(f"GBNF: {error}") from None


def _of_schema(schema: str, compact: bool) -> str:
    """The grammar of a JSON schema."""
    from llguidance import LLMatcher

    spaces: Any = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _SPACES}
    return str(LLMatcher.grammar_from_json_schema(rewritten(schema), overrides=spaces))


def _of_calls(calls: Sequence[tuple[str, str]], compact: bool, guide: Any) -> str:
    """The grammar of texts, each followed by JSON of its schema."""
    start = " | ".join(f"{_spelled(head, guide)} @call{number}" for number, (head, _) in enumerate(calls))
    parts = [_grammars(_of_schema(schema, compact))[0] for _, schema in calls]
    named = [part | {"name": f"call{number}"} for number, part in enumerate(parts)]
    return json.dumps({"grammars": [{"lark_grammar": f"start: {start}"}, *named]})


def _behind(reasoning: Reasoning, grammar: str, guide: Any) -> str:
    """A grammar behind reasoning."""
    opening, closing = _spelled(reasoning.opening, guide), _token(reasoning.closing, guide)
    end = f"[suffix={json.dumps(reasoning.closing)}]" if closing is None else ""
    thought = f"thinking {closing or ''} {_spelled(reasoning.again, guide) or 'SPACE?'}"
    if reasoning.again:
        start = f"({opening} {thought})*"
    else:
        start = thought if reasoning.begun else f"(SPACE? {opening} {thought})?"
    heads = " | ".join(_spelled(head, guide) for head in reasoning.heads)
    lines = [f"start: {start} {f'({heads})' if heads else ''} @output", f"thinking{end}: /(.|\\n)*/"]
    lines += [] if reasoning.again else [r"SPACE: /[ \t\r\n]{1,16}/"]
    first, *others = _grammars(grammar)
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, first | {"name": "output"}, *others]})


def _grammars(grammar: str) -> list[dict[str, Any]]:
    """The parts of a grammar. Of Lark's grammars llguidance takes the text itself, and of others JSON."""
    return json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]


def _spelled(text: str, guide: Any) -> str:
    """A text as a part of a rule. Its special tokens are no text for grammars, but tokens."""
    parts = [part for part in _MARK.split(text) if part]
    return " ".join(_token(part, guide) or json.dumps(part) for part in parts)


def _token(text: str, guide: Any) -> str | None:
    """A text as a part of a rule, if it is one special token."""
    ids = guide.tokenize_str(text)
    ids = guide.tokenize_bytes(text.encode(), parse_special=True) if len(ids) != 1 else ids
    return f"<[{ids[0]}]>" if len(ids) == 1 and guide.is_special_token(ids[0]) else None
