"""Requests of /v1/chat/completions in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from qcompile.errors import UsageError, shown
from qcompile.runtime.sampling.sampling import SamplingParams
from qcompile.runtime.server.api import MOST_LOGPROBS, BodyPart, Common, Count


class TextPart(BodyPart):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: str


def _text_alone(given: Any) -> Any:
    """Refuse a part of another type than text, such as `image_url`, before its fields are refused one by one."""
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind != "text":
        message = "{kind} is not supported: only the text decoder is compiled, and messages are text alone"
        raise PydanticCustomError("text_alone", message, {"kind": shown(kind)})
    return given


def _parts(given: Any) -> Any:
    """Turn a text into a list of parts, for the same reason as in `_stops`."""
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


class ChatMessage(BodyPart):
    """One message of a conversation."""

    idle: ClassVar[dict[str, tuple[object, ...]]] = {"tool_calls": ([],), "annotations": ([],)}
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[Annotated[TextPart, BeforeValidator(_text_alone)]], Field(fail_fast=True), BeforeValidator(_parts)
    ]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _silent(cls, body: Any) -> Any:
        """A reply may have no content: some clients send back null where a reply was empty."""
        if isinstance(body, dict) and body.get("role") == "assistant" and body.get("content") is None:
            return body | {"content": ""}
        return body

    def plain(self) -> dict[str, str]:
        """The message in the form that chat templates take."""
        text = "".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    def params(self) -> SamplingParams:
        """The request's sampling parameters. Raises UsageError."""
        if self.top_logprobs and not self.logprobs:
            raise UsageError("top_logprobs needs logprobs: true")
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        params = self.sampling(logprobs=(self.top_logprobs or 0) if self.logprobs else None)
        return SamplingParams(**(vars(params) | {"max_tokens": most}))
