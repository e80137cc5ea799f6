"""Answers of /v1/responses as pydantic models, for the OpenAPI schema."""

from __future__ import annotations

from typing import Literal

from qcompile.runtime.server.answers import AnswerPart, Json

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(AnswerPart):
    """A text."""

    type: Literal["output_text"]
    text: str
    annotations: list[Json]
    logprobs: list[Json]


class OutputMessage(AnswerPart):
    """A message of the model."""

    id: str
    status: Status
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoningText(AnswerPart):
    """A text of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(AnswerPart):
    """The model's reasoning. summary: always empty."""

    id: str
    status: Status
    type: Literal["reasoning"]
    summary: list[Json]
    content: list[OutputReasoningText]


class OutputCall(AnswerPart):
    """A call of a function. arguments: JSON, if the model wrote it."""

    id: str
    status: Status
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(AnswerPart):
    """Tokens of the prompt that were taken from the cache. cache_write_tokens: always 0."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(AnswerPart):
    """Tokens of the reasoning, counted by encoding its text."""

    reasoning_tokens: int


class ResponseUsage(AnswerPart):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseAnswer(AnswerPart):
    """A response. What it repeats of its request follows its output and usage."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: float | None
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    incomplete_details: Json | None
    error: Json | None
    output: list[OutputMessage | OutputReasoning | OutputCall]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    truncation: Literal["disabled"]
    tools: list[Json]
    tool_choice: str | Json
    parallel_tool_calls: bool
    text: Json
    reasoning: Json
    previous_response_id: str | None
    store: bool
    background: bool
    metadata: Json
    user: str | None
    service_tier: str


class InputTokensAnswer(AnswerPart):
    """The number of tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemsAnswer(AnswerPart):
    """A page of the items of a response's input. Each has the fields that it was given with."""

    object: Literal["list"]
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedAnswer(AnswerPart):
    """A response was forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
