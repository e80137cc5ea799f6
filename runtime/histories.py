"""Messages in OpenAI's form, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qcompile.errors import UsageError, shown

Message = dict[str, Any]

_TESTS_FOR_NONE = tuple(
    f"{content} is {test}"
    for content in ("message['content']", 'message["content"]', "message.content")
    for test in ("none", "not none")
)


_NUMBERED = "<|tool_call_argument_begin|>"
"""A text in templates that print the ids of calls. Their models write ids of the form `functions.NAME:NUMBER`."""


@dataclass(frozen=True)
class HistoryStyle:
    """What a template reads where templates differ.

    missing: stands for the content of a message that only calls tools. thinking: whether reasoning is read as
    `thinking`, too. one_call: whether only the first call of a message is read. numbered: whether the ids of calls,
    which the template prints, must have the form `functions.NAME:NUMBER`, as such models write them.
    """

    missing: str | None = ""
    thinking: bool = False
    one_call: bool = False
    numbered: bool = False

    @classmethod
    def of(cls, template: str, one_call: bool = False) -> HistoryStyle:
        """The style of a template's text. Most print a missing content as `None`, unless they test for it."""
        missing = None if any(test in template for test in _TESTS_FOR_NONE) else ""
        thinking = any(name in template for name in ("message.thinking", "message['thinking']", 'message["thinking"]'))
        return cls(missing, thinking, one_call, _NUMBERED in template)


def template_messages(messages: Sequence[Mapping[str, Any]], style: HistoryStyle, as_text: bool) -> list[Message]:
    """The messages for a template. Raises UsageError for malformed messages, such as arguments that are no JSON object.

    as_text: whether the arguments of calls are given as JSON text instead of as dictionaries.
    """
    try:
        names = {call["id"]: call["function"]["name"] for call in _calls(messages) if "id" in call}
        written = [_written(place, message, names, style, as_text) for place, message in enumerate(messages)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"a message is not in OpenAI's form: {type(error).__name__} {error}") from error
    if style.numbered:
        _number_calls(written)
    return list(_one_call_each(written)) if style.one_call else written


def _number_calls(messages: Sequence[Message]) -> None:
    """Replace the ids of calls by `functions.NAME:NUMBER`, counted over all messages, also where results name them."""
    numbered: dict[str, str] = {}
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            new = f"functions.{call['function']['name']}:{count}"
            count += 1
            if "id" in call:
                numbered[call["id"]] = new
            call["id"] = new
        if message.get("tool_call_id") in numbered:
            message["tool_call_id"] = numbered[message["tool_call_id"]]


def _calls(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        yield from message.get("tool_calls") or ()


def _written(
    place: int, message: Mapping[str, Any], names: Mapping[str, str], style: HistoryStyle, as_text: bool
) -> Message:
    given = {name: value for name, value in message.items() if value is not None and value != []}
    calls = given.pop("tool_calls", [])
    given["content"] = _text(place, given.get("content", style.missing if calls else ""))
    reasoning = given.get("reasoning")  # vLLM's newer name; templates read the older one
    if reasoning is not None and given.setdefault("reasoning_content", reasoning) != reasoning:
        raise UsageError(f"messages.{place} has reasoning and reasoning_content, which differ: give one of them")
    if calls:
        given["tool_calls"] = [
            _call(f"messages.{place}.tool_calls.{at}", call, as_text) for at, call in enumerate(calls)
        ]
    if given["role"] == "tool" and "name" not in given and given.get("tool_call_id") in names:
        given["name"] = names[given["tool_call_id"]]
    # A template that reads `thinking` refuses it beside content in a message with calls.
    if style.thinking and "reasoning_content" in given and not (calls and given["content"]):
        given["thinking"] = given["reasoning_content"]
    return given


def _text(place: int, content: Any) -> str | None:
    """The text of a content: a text, or a list of parts `{"type": "text", "text": ...}`."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UsageError(f"messages.{place}.content must be a text or a list of parts, not {shown(content)}")
    other = next((part["type"] for part in content if part["type"] != "text"), None)
    if other is not None:
        raise UsageError(f"messages.{place} has a part {shown(other)}: only the text decoder is compiled")
    return "".join(part["text"] for part in content)


def _call(place: str, call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    function = dict(call["function"])
    text = function.get("arguments") or "{}"
    try:
        arguments = text if isinstance(text, Mapping) else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: the arguments are not JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise UsageError(f"{place}: the arguments are JSON, but no object")
    function["arguments"] = json.dumps(arguments, ensure_ascii=False) if as_text else dict(arguments)
    return {**call, "type": "function", "function": function}


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Divide messages of several calls, and put the result of each call behind it."""
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        for at, call in enumerate(calls):
            alone = message if at == 0 else {"role": message["role"], "content": ""}
            yield {**alone, "tool_calls": [call]}
            mine = [each for each in results if call.get("id") and each.get("tool_call_id") == call["id"]]
            yield from mine
            results = [each for each in results if each not in mine]
        yield from results
