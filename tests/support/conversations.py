"""Random replies with reasoning, content and tool calls, and how each format writes them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qcompile.runtime.parsers.tools import DeclaredTools

Arguments = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "deep": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "options": {"type": "object"},
                    "limit": {"type": ["integer", "null"]},
                },
            },
        },
    }
    for name in ("search", "write_file", "get-weather", "noop")
]
DECLARED = DeclaredTools.of(TOOLS)

_TEXTS = [
    "a",
    "naïve café 你好 🙂",
    'quote " and back\\slash',
    "line one\nline two\n\n  indented\tend",
    "<b>&amp;</b> < > {x} [y] (z)",
    "</tool> <tool_calls> ]} }} ```python\nprint('hi')\n```",
    "5",
    "true",
    "null",
    "'single' \"double\"",
    "",
]
_WORDS = ["I", "will", "look", "at", "{this}", "[list]", "x < y", "café", "3.", "so:\n", '"no"']


@dataclass
class Spoken:
    """A reply: its reasoning, its content, and its calls."""

    reasoning: str | None = None
    content: str | None = None
    calls: list[tuple[str, Arguments]] = field(default_factory=list)


def _sentence(draw: random.Random) -> str:
    return " ".join(draw.choice(_WORDS) for _ in range(draw.randrange(1, 12))).strip()


def _value(draw: random.Random, key: str) -> Any:
    if key == "path":
        return draw.choice(_TEXTS)
    if key == "count":
        return draw.choice([0, -3, 17, 10**12])
    if key == "ratio":
        return draw.choice([0.5, -1.25, 1e-9, 3, 2.5e20])
    if key == "deep":
        return draw.random() < 0.5
    if key == "tags":
        return [draw.choice(_TEXTS) for _ in range(draw.randrange(3))]
    if key == "options":
        return {"a": [1, {"b": None}], "é": draw.choice(_TEXTS)} if draw.random() < 0.7 else {}
    return draw.choice([None, 4])


def spoken(draw: random.Random, content_with_calls: bool = True) -> Spoken:
    """A random reply. content_with_calls: whether content may stand before calls."""
    names = [tool["function"]["name"] for tool in TOOLS]
    keys = ["path", "count", "ratio", "deep", "tags", "options", "limit"]
    calls = []
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        chosen = draw.sample(keys, draw.randrange(len(keys)))
        calls.append((draw.choice(names), {key: _value(draw, key) for key in chosen}))
    content = _sentence(draw) if not calls or (content_with_calls and draw.random() < 0.5) else None
    return Spoken(_sentence(draw) if draw.random() < 0.5 else None, content, calls)


def _json(value: Any, draw: random.Random) -> str:
    return json.dumps(value, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, None, 2]))


def tagged_json(said: Spoken, draw: random.Random) -> str:
    parts = [said.content] if said.content else []
    for name, arguments in said.calls:
        keys = ["name", "arguments"] if draw.random() < 0.8 else ["arguments", "name"]
        call = {key: {"name": name, "arguments": arguments}[key] for key in keys}
        parts.append(f"<tool_call>\n{_json(call, draw)}\n</tool_call>")
    return "\n".join(parts)


def plain_json(said: Spoken, draw: random.Random) -> str:
    if not said.calls:
        return said.content or ""
    calls = [{"name": name, "parameters": arguments} for name, arguments in said.calls]
    if draw.random() < 0.3:
        return _json(calls, draw)
    return draw.choice(["", "<|python_tag|>", "\n"]) + "; ".join(_json(call, draw) for call in calls)


def bracket_token(said: Spoken, draw: random.Random) -> str:
    text = said.content or ""
    if not said.calls:
        return text
    if draw.random() < 0.5:
        calls = [{"name": n, "arguments": a, "id": "a1b2c3d4e"} for n, a in said.calls]
        return text + "[TOOL_CALLS]" + draw.choice(["", " "]) + _json(calls, draw)
    between = draw.choice(["[ARGS]", "[CALL_ID]a1b2c3d4e[ARGS]", ""])
    return text + "".join(f"[TOOL_CALLS]{n}{between}{_json(a, draw)}" for n, a in said.calls)


def fenced_tokens(said: Spoken, draw: random.Random) -> str:
    text = said.content or ""
    if not said.calls:
        return text
    old = draw.random() < 0.5
    calls = []
    for name, arguments in said.calls:
        written = _json(arguments, draw)
        inner = f"function<｜tool▁sep｜>{name}\n```json\n{written}\n```" if old else f"{name}<｜tool▁sep｜>{written}"
        calls.append(f"<｜tool▁call▁begin｜>{inner}<｜tool▁call▁end｜>")
    return f"{text}<｜tool▁calls▁begin｜>{draw.choice(['', chr(10)]).join(calls)}<｜tool▁calls▁end｜>"


def function_tags(said: Spoken, draw: random.Random) -> str:
    parts = [said.content] if said.content else []
    for name, arguments in said.calls:
        lines = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else _python_or_json(value, draw)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        parts.append(f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>")
    return "\n".join(parts)


def seed_tags(said: Spoken, draw: random.Random) -> str:
    parts = [said.content] if said.content else []
    for name, arguments in said.calls:
        lines = "".join(
            f"<parameter={key}>{value if isinstance(value, str) else _json(value, draw)}</parameter>\n"
            for key, value in arguments.items()
        )
        parts.append(f"<seed:tool_call>\n<function={name}>\n{lines}</function>\n</seed:tool_call>")
    return "\n".join(parts)


def invoke_tags(said: Spoken, draw: random.Random) -> str:
    text = said.content or ""
    if not said.calls:
        return text
    calls = []
    for name, arguments in said.calls:
        lines = "".join(
            f'<parameter name="{key}">{value if isinstance(value, str) else _json(value, draw)}</parameter>\n'
            for key, value in arguments.items()
        )
        calls.append(f'<invoke name="{name}">\n{lines}</invoke>\n')
    return f"{text}\n<minimax:tool_call>\n{''.join(calls)}</minimax:tool_call>"


def section_tokens(said: Spoken, draw: random.Random) -> str:
    text = said.content or ""
    if not said.calls:
        return text
    begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    calls = "".join(
        f"{begin}functions.{name}:{number}{middle}{_json(arguments, draw)}{end}"
        for number, (name, arguments) in enumerate(said.calls)
    )
    return f"{text}<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


def action_tokens(said: Spoken, draw: random.Random) -> str:
    text = f"<|START_RESPONSE|>{said.content}<|END_RESPONSE|>" if said.content else ""
    calls = [
        {"tool_call_id": str(number), "tool_name": name, "parameters": arguments}
        for number, (name, arguments) in enumerate(said.calls)
    ]
    return f"{text}<|START_ACTION|>{draw.choice(['', chr(10)])}{_json(calls, draw)}<|END_ACTION|>" if calls else text


def token_list(said: Spoken, draw: random.Random) -> str:
    return _listed(said, draw, "<|tool_call|>", draw.choice(["", "<|/tool_call|>"]))


def tagged_list(said: Spoken, draw: random.Random) -> str:
    return _listed(said, draw, "<tool_calls>", "</tool_calls>")


def _listed(said: Spoken, draw: random.Random, opening: str, closing: str) -> str:
    calls = [{"name": name, "arguments": arguments} for name, arguments in said.calls]
    return (said.content or "") + (f"{opening}{_json(calls, draw)}{closing}" if calls else "")


def _python_or_json(value: Any, draw: random.Random) -> str:
    """Some templates write constants as Python does."""
    return str(value) if value in (None, True, False) and draw.random() < 0.5 else _json(value, draw)


def argument_tags(said: Spoken, draw: random.Random) -> str:
    parts = [said.content] if said.content else []
    gap = draw.choice(["", "\n"])
    for name, arguments in said.calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>{gap}<arg_value>{value if isinstance(value, str) else _json(value, draw)}"
            f"</arg_value>{gap}"
            for key, value in arguments.items()
        )
        parts.append(f"<tool_call>{name}{gap}{pairs}</tool_call>")
    return "\n".join(parts)


def pythonic(said: Spoken, draw: random.Random) -> str:
    if not said.calls:
        return said.content or ""
    calls = (
        f"{name.replace('-', '_')}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in said.calls
    )
    breaks = "\n" if draw.random() < 0.2 else "\\n"
    around = draw.choice(["{}", "\n{}", "<|python_start|>{}<|python_end|>", "<|tool_call_start|>{}<|tool_call_end|>"])
    return around.format(f"[{', '.join(calls)}]".replace("\\n", breaks))


def channels(said: Spoken, draw: random.Random) -> str:
    messages = []
    if said.reasoning:
        messages.append(f"<|channel|>analysis<|message|>{said.reasoning}")
    if said.content:
        kind = "commentary" if said.calls else "final"
        messages.append(f"<|channel|>{kind}<|message|>{said.content}")
    for name, arguments in said.calls:
        to = f"to=functions.{name}"
        head = draw.choice(
            [
                f"<|channel|>commentary {to} <|constrain|>json",
                f" {to}<|channel|>commentary json",
                f"<|channel|>commentary {to}",
            ]
        )
        messages.append(f"{head}<|message|>{_json(arguments, draw)}")
    return draw.choice(["<|end|>", "<|call|>", "<|end|>"]).join(
        ("<|start|>assistant" if number else "") + message for number, message in enumerate(messages)
    )


def thinking(opening: str, closing: str, said: Spoken, rest: str) -> str:
    """Reasoning between tags, and the rest of the reply."""
    return f"{opening}\n{said.reasoning}\n{closing}\n\n{rest}" if said.reasoning else rest


@dataclass(frozen=True)
class Writer:
    """Writes replies in a format. mixes: whether content may stand before calls."""

    write: Callable[[Spoken, random.Random], str]
    mixes: bool = True


WRITERS = {
    "harmony": Writer(channels),
    "kimi_k2": Writer(section_tokens),
    "minimax_m2": Writer(invoke_tags),
    "seed_oss": Writer(seed_tags),
    "command_a": Writer(action_tokens),
    "granite": Writer(token_list),
    "jamba": Writer(tagged_list),
    "deepseek": Writer(fenced_tokens),
    "mistral": Writer(bracket_token),
    "glm45": Writer(argument_tags),
    "qwen3_coder": Writer(function_tags),
    "hermes": Writer(tagged_json),
    "pythonic": Writer(pythonic, mixes=False),
    "llama3_json": Writer(plain_json, mixes=False),
}
"""By the name of the format."""
