"""Messages with blocks as contents, as a request has them, and their translation to messages for chat templates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from qcompile.errors import UsageError, shown
from qcompile.runtime.server.api import BodyPart, CachedPart

Message = dict[str, Any]


class CitingPart(CachedPart):
    """What may have citations, of which there are none here."""

    idle: ClassVar[dict[str, tuple[object, ...]]] = {"citations": ([],)}


class TextBlock(CitingPart):
    """A text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(CitingPart):
    """A call of a tool by the model. caller: without effect."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ThinkingBlock(BodyPart):
    """The model's reasoning. signature: without effect."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


def _blocks(given: Any) -> Any:
    """Turn a text into a list of blocks, so that errors name a position rather than a type of a union."""
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


Texts = Annotated[list[TextBlock], Field(fail_fast=True), BeforeValidator(_blocks, str | list[TextBlock])]


class ToolResultBlock(CitingPart):
    """The result of a call. is_error: the content tells of an error."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool = False


def _known_alone(given: Any) -> Any:
    """Refuse a block of another type before the types that there are would be listed."""
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind not in ("text", "tool_use", "thinking", "tool_result"):
        message = "{kind} is not supported: only the text decoder is compiled, and blocks are text, thinking and calls"
        raise PydanticCustomError("block", message, {"kind": shown(kind)})
    return given


_Block = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | ToolResultBlock,
    Field(discriminator="type"),
    BeforeValidator(_known_alone),
]


class MessagePart(BodyPart):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_Block], Field(fail_fast=True), BeforeValidator(_blocks, str | list[_Block])]

    def plain(self, place: str) -> Iterator[Message]:
        """The message in the form of chat completions, where results of calls are messages. Raises UsageError."""
        mine = (TextBlock, ToolUseBlock, ThinkingBlock) if self.role == "assistant" else (TextBlock, ToolResultBlock)
        for at, block in enumerate(self.content):
            if not isinstance(block, mine):
                raise UsageError(f"{place}.content.{at}: {block.type} is no part of a message of the {self.role}")
        yield from [self._reply()] if self.role == "assistant" else self._said()

    def _reply(self) -> Message:
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        message: Message = {"role": "assistant", "content": "".join(texts) if texts else None}
        if thought := "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock)):
            message["reasoning_content"] = thought
        if calls := [_call(block) for block in self.content if isinstance(block, ToolUseBlock)]:
            message["tool_calls"] = calls
        return message

    def _said(self) -> Iterator[Message]:
        texts: list[str] = []
        for block in self.content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolResultBlock):
                if texts:
                    yield {"role": self.role, "content": "\n".join(texts)}
                    texts = []
                text = joined(block.content or ())
                result = f"Error: {text}" if block.is_error else text
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
        if texts or not self.content:
            yield {"role": self.role, "content": "\n".join(texts)}


def _call(block: ToolUseBlock) -> Message:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def joined(blocks: Iterable[TextBlock]) -> str:
    """The text of blocks that the caller wrote: each is lines of its own."""
    return "\n".join(block.text for block in blocks)
