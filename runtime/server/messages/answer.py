"""Answers of /v1/messages as pydantic models, for the OpenAPI schema."""

from __future__ import annotations

from typing import Literal

from qcompile.runtime.server.answers import AnswerPart, Json


class AnsweredText(AnswerPart):
    """A text."""

    type: Literal["text"]
    text: str


class AnsweredThinking(AnswerPart):
    """The model's reasoning. signature: always empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(AnswerPart):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


class MessageUsage(AnswerPart):
    """Token counts: of the prompt without those taken from the cache, those, and of the reply."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessageAnswer(AnswerPart):
    """A message. With `stream`, its blocks come in pieces, as server-sent events."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredText | AnsweredThinking | AnsweredToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class CountAnswer(AnswerPart):
    """The number of tokens of a prompt."""

    input_tokens: int


class MessagesFailureDetails(AnswerPart):
    """What is wrong."""

    type: str
    message: str


class MessagesFailure(AnswerPart):
    """An error in Anthropic's format."""

    type: Literal["error"]
    error: MessagesFailureDetails
