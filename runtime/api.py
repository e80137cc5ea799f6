"""Requests and answers of the HTTP server, shaped as OpenAI's. What is not served is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from qcompile.errors import UsageError
from qcompile.runtime.outputs import CompletionOutput, RequestOutput
from qcompile.runtime.sampling import Logprob, SamplingParams
from qcompile.runtime.tokenizer import BROKEN

MOST_LOGPROBS = 20
MOST_STOP_CHARACTERS = 4096
"""Of all stop texts of a request: they are looked for at every token, while all others wait."""


Count = Annotated[int, Field(ge=1)]


class Part(BaseModel):
    """A part of a request. Little is told of what is wrong with it: to describe a million things takes a minute."""

    model_config = ConfigDict(extra="forbid", strict=True)
    idle: ClassVar[dict[str, tuple[object, ...]]] = {}
    """Fields that are not served, with the values that ask for nothing: clients send them unasked."""

    @model_validator(mode="before")
    @classmethod
    def _given(cls, body: Any) -> Any:
        """Null, or what asks for nothing, is as good as not given. Of fields that are none the first, to be named."""
        if not isinstance(body, dict):
            return body
        nothing = {name for name, values in cls.idle.items() if name in body and body[name] in values}
        given = {name: value for name, value in body.items() if value is not None and name not in nothing}
        unknown = next((name for name in given if name not in cls.model_fields), None)
        return {name: value for name, value in given.items() if name in cls.model_fields or name == unknown}


class StreamOptions(Part):
    """`include_usage`: a last message with the counts of tokens."""

    idle = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}
    include_usage: bool = False


def _stops(given: Any) -> Any:
    """One text as a list, so that errors tell of a text's place in what was sent and of no type's name."""
    return [given] if isinstance(given, str) else given


class Common(Part):
    """What both kinds of request may hold. Ranges that SamplingParams checks are not repeated here."""

    idle = {
        **{"logit_bias": ({},), "echo": (False,), "suffix": ("",), "best_of": (1,), "min_tokens": (0,)},
        **{"stop_token_ids": ([],), "skip_special_tokens": (True,)},
        **{"include_stop_str_in_output": (False,), "response_format": ({"type": "text"},), "modalities": (["text"],)},
        **{"tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (False, True)},
        **{"function_call": ("none", "auto"), "store": (False,), "service_tier": ("auto", "default")},
        **{"reasoning_effort": ("none",), "verbosity": ("medium",), "length_penalty": (1,), "priority": (0,)},
        **{"use_beam_search": (False,), "spaces_between_special_tokens": (True,), "return_token_ids": (False,)},
        **{"add_generation_prompt": (True,), "chat_template_kwargs": ({},)},
    }
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: Annotated[list[str], Field(fail_fast=True), BeforeValidator(_stops)] | None = None
    ignore_eos: bool | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    """It and those before it say who asks, which changes no answer."""

    def sampling(self, **more: Any) -> SamplingParams:
        """Its options, those not given as SamplingParams has them. Raises UsageError."""
        length = len("".join(self.stop or ()))
        if length > MOST_STOP_CHARACTERS:
            raise UsageError(f"stop has {length} characters in all, of at most {MOST_STOP_CHARACTERS}")
        names = ("temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "ignore_eos")
        penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        given = {name: getattr(self, name) for name in names + penalties} | more
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Common):
    """POST /v1/completions: one prompt or several, each a text or token numbers."""

    prompt: Any  # checked where it is encoded, with clearer words than a union's
    max_tokens: Count = 16
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    def prompts(self) -> list[str | Sequence[int]]:
        """As a list."""
        given = self.prompt
        if isinstance(given, list) and not all(type(token) is int for token in given):
            return list(given)
        return [given]

    def params(self) -> SamplingParams:
        """Raises UsageError."""
        return self.sampling(max_tokens=self.max_tokens, logprobs=self.logprobs)


class TextPart(Part):
    """A part of a message. Only text is taken."""

    type: Literal["text"]
    text: str


def _parts(given: Any) -> Any:
    """A text as a list of parts, for the same reason."""
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


class ChatMessage(Part):
    """One turn."""

    idle = {"tool_calls": ([],), "annotations": ([],)}
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], Field(fail_fast=True), BeforeValidator(_parts)]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
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
        """Raises UsageError."""
        if self.top_logprobs and not self.logprobs:
            raise UsageError("top_logprobs needs logprobs: true")
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        params = self.sampling(logprobs=(self.top_logprobs or 0) if self.logprobs else None)
        return SamplingParams(**(vars(params) | {"max_tokens": most}))


def usage(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """Counts of tokens."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def completion_choice(
    index: int, sample: CompletionOutput, characters: int, tokens: int, offset: int
) -> tuple[dict[str, Any], int]:
    """A choice of /v1/completions: what it has gained since it had that many characters and tokens.

    offset: of its next token, counted in the spellings of those before it (text may lag behind them, being held back
    for a stop text or the rest of a character). Beside the choice is that of the token after all of these.
    """
    found = None
    if sample.logprobs is not None:
        chosen = list(zip(sample.token_ids[tokens:], sample.logprobs[tokens:], strict=True))
        spelled = [_spelled(each[token]) for token, each in chosen]
        *offsets, offset = accumulate(map(len, spelled), initial=offset)
        found = {
            "tokens": spelled,
            "token_logprobs": [each[token].logprob for token, each in chosen],
            "top_logprobs": [_by_spelling(each.values()) for _, each in chosen],
            "text_offset": offsets,
        }
    text = sample.text[characters:]
    return {"index": index, "text": text, "logprobs": found, "finish_reason": sample.finish_reason}, offset


def chat_logprobs(sample: CompletionOutput, first: int, top: int) -> dict[str, Any] | None:
    """A chat choice's log probabilities, from token `first` on; of each place the `top` likeliest tokens."""
    if sample.logprobs is None:
        return None
    content = []
    for token, each in zip(sample.token_ids[first:], sample.logprobs[first:], strict=True):
        likeliest = sorted(each.values(), key=lambda one: one.rank)[:top]
        content.append(_chat_token(each[token]) | {"top_logprobs": [_chat_token(one) for one in likeliest]})
    return {"content": content}


def _spelled(one: Logprob) -> str:
    return one.decoded_token or ""


def _by_spelling(found: Iterable[Logprob]) -> dict[str, float]:
    """Of tokens spelled alike (those of parts of a character are) the first: the one chosen, or else the likeliest."""
    told: dict[str, float] = {}
    for one in found:
        told.setdefault(_spelled(one), one.logprob)
    return told


def _chat_token(one: Logprob) -> dict[str, Any]:
    text = _spelled(one)
    known = None if BROKEN in text else list(text.encode())  # of parts of a character those that stand for them are not
    return {"token": text, "logprob": one.logprob, "bytes": known}


def failure(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error as clients of OpenAI expect it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(data: dict[str, Any] | str) -> str:
    """A server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n"
