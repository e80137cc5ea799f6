"""The items of a response's input, and the messages that they are for chat templates."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from qcompile.errors import shown
from qcompile.runtime.server.api import BodyPart

Message = dict[str, Any]
_TEXTS = ("input_text", "output_text", "text")
_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fc", "reasoning": "rs"}
_Status = Literal["in_progress", "completed", "incomplete"]


def new_id(prefix: str) -> str:
    """An id of an object."""
    return f"{prefix}_{secrets.token_hex(24)}"


class ItemText(BodyPart):
    """A part of a content. Only text is supported. annotations, logprobs: of outputs given back; without effect."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _text_alone(given: Any) -> Any:
    """Refuse a part of another type than text before its fields are refused one by one."""
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind not in _TEXTS:
        message = "{kind} is not supported: only the text decoder is compiled, and contents are text alone"
        raise PydanticCustomError("text_alone", message, {"kind": shown(kind)})
    return given


def _parts(given: Any) -> Any:
    """Turn a text into a list of parts, so that errors name a position rather than a type of a union."""
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


Content = Annotated[
    list[Annotated[ItemText, BeforeValidator(_text_alone)]],
    Field(fail_fast=True),
    BeforeValidator(_parts, str | list[ItemText]),
]


class MessageItem(BodyPart):
    """A message. id, status, phase: of an output that is given back; without effect."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(BodyPart):
    """A call of a function by the model. arguments: JSON."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status | None = None


class FunctionOutputItem(BodyPart):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: _Status | None = None


class ReasoningText(BodyPart):
    """A text of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(BodyPart):
    """The model's reasoning. Summaries do not reach the model."""

    idle: ClassVar[dict[str, tuple[object, ...]]] = {"encrypted_content": ("",)}
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    summary: list[Any] | None = None
    id: str | None = None
    status: _Status | None = None


def _typed(given: Any) -> Any:
    """Say that an item without a type is a message, as OpenAI has it."""
    if isinstance(given, Mapping) and given.get("type") is None and "role" in given:
        return {**given, "type": "message"}
    return given


InputItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem
Item = Annotated[
    InputItem,
    Field(discriminator="type"),
    BeforeValidator(_typed),
]


def _said(given: Any) -> Any:
    """Turn a text into a message of the user."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


Input = Annotated[list[Item], Field(fail_fast=True), BeforeValidator(_said, str | list[Item])]


def input_items(items: Iterable[InputItem]) -> list[Message]:
    """The items as a client reads them again: each with an id and a status."""
    listed = []
    for item in items:
        plain = item.model_dump(exclude_none=True)
        if isinstance(item, MessageItem):
            text = "output_text" if item.role == "assistant" else "input_text"
            plain["content"] = [{**part, "type": text} for part in plain["content"]]
        listed.append({"id": new_id(_PREFIX[item.type]), "status": "completed"} | plain)
    return listed


def messages_of(items: Iterable[InputItem]) -> list[Message]:
    """The items as messages in the form of chat completions. What one reply consists of is one message."""
    messages: list[Message] = []
    for item in items:
        if isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
        else:
            _add_to_reply(messages, item)
    return messages


def _add_to_reply(messages: list[Message], item: MessageItem | FunctionCallItem | ReasoningItem) -> None:
    """Add an item to the model's newest message, or begin one where the item cannot belong to it."""
    newest = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    called = newest is not None and "tool_calls" in newest
    if isinstance(item, FunctionCallItem):
        newest = newest or _begun(messages)
        function = {"name": item.name, "arguments": item.arguments}
        newest.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, ReasoningItem):
        text = "".join(part.text for part in item.content or ())
        if text:
            if newest is None or called or newest["content"] is not None:
                newest = _begun(messages)
            newest["reasoning_content"] = newest.get("reasoning_content", "") + text
    else:
        if newest is None or (newest["content"] is not None and not called):
            newest = _begun(messages)
        newest["content"] = (newest["content"] or "") + _text(item.content)


def _begun(messages: list[Message]) -> Message:
    messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(parts: list[ItemText]) -> str:
    return "".join(part.text for part in parts)
