"""Answers of the endpoints as pydantic models, for the OpenAPI schema. Tests hold real answers against them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, JsonValue


class AnswerPart(BaseModel):
    """A part of an answer, with no other fields than these."""

    model_config = ConfigDict(extra="forbid")


class FailureDetails(AnswerPart):
    """What is wrong. param: the field of the request, if one is."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class Failure(AnswerPart):
    """An error in OpenAI's format."""

    error: FailureDetails


class CachedTokens(AnswerPart):
    """Tokens of the prompt that were taken from the cache."""

    cached_tokens: int


class DraftTokens(AnswerPart):
    """Tokens that drafts proposed: those that were kept, and the others."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(AnswerPart):
    """Token counts; those of drafts where some were made."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: DraftTokens | None = None


class CompletionLogprobs(AnswerPart):
    """Log probabilities by token, as columns."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


PromptLogprobs = list[dict[str, Any] | None]


class CompletionChoice(AnswerPart):
    """One continuation. stop_reason: the stop text or token that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionAnswer(AnswerPart):
    """The answer of /v1/completions. With `stream`, choices come in pieces, as server-sent events."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class AnsweredFunction(AnswerPart):
    """The function of a call. arguments: JSON, if the model wrote it."""

    name: str
    arguments: str


class AnsweredCall(AnswerPart):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(AnswerPart):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class TokenAlternative(AnswerPart):
    """A token with its log probability; the bytes of its text, where they are known."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(TokenAlternative):
    """A token of a reply, and the most probable ones in its place."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(AnswerPart):
    """Log probabilities of a reply."""

    content: list[ChatToken]


class ChatChoice(AnswerPart):
    """One reply."""

    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None


class ChatAnswer(AnswerPart):
    """The answer of /v1/chat/completions. With `stream`, messages come in pieces, as server-sent events."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class Embedding(AnswerPart):
    """The embedding of one text: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(AnswerPart):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(AnswerPart):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class ModelEntry(AnswerPart):
    """A model. max_model_len: most tokens of prompt and output together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelsAnswer(AnswerPart):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelEntry]


class TokenizeAnswer(AnswerPart):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(AnswerPart):
    """The text of tokens."""

    prompt: str


class VersionAnswer(AnswerPart):
    """The version of qcompile."""

    version: str


class HealthAnswer(AnswerPart):
    """The engine runs, or sleeps."""

    status: Literal["ok", "asleep"]


class SleepAnswer(AnswerPart):
    """Whether the model sleeps."""

    is_sleeping: bool


Json = dict[str, JsonValue]
