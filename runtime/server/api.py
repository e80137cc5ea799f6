"""Requests and responses of the HTTP server in OpenAI's format. Fields that are not supported are refused by name."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from qcompile.errors import UsageError
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.parsers.call_parser import is_name
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.server.structured import StructureFields, asked_structure

MOST_LOGPROBS = 20
MOST_STOP_CHARACTERS = 4096
"""Most characters of a request's stop texts together: each search for them delays all other requests."""


Count = Annotated[int, Field(ge=1)]


def _function_name(given: str) -> str:
    if not is_name(given):
        raise PydanticCustomError("name", "not a name: give 1 to 256 characters without spaces and brackets")
    return given


FunctionName = Annotated[str, AfterValidator(_function_name)]
"""The name of a function that the model may call, as the parsers of calls read it."""


class BodyPart(BaseModel):
    """A part of a request. Only one unknown field is reported: a description of a million errors takes a minute."""

    model_config = ConfigDict(extra="forbid", strict=True)
    idle: ClassVar[dict[str, tuple[object, ...]]] = {}
    """Unsupported fields, with the values that have no effect: some clients send these by default."""

    @model_validator(mode="before")
    @classmethod
    def _given(cls, body: Any) -> Any:
        """Drop nulls, values without effect, and all unknown fields but the first, which is then reported."""
        if not isinstance(body, dict):
            return body
        if body.get("model", "") is None:
            raise PydanticCustomError("no_model", "model must be the name of a model, not null")
        nothing = {name for name, values in cls.idle.items() if name in body and body[name] in values}
        given = {name: value for name, value in body.items() if value is not None and name not in nothing}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in given if name not in known), None)
        return {name: value for name, value in given.items() if name in known or name == unknown}


def _token_number(name: str) -> int | str:
    """The token number that names a field, as a number (JSON has only texts as names); anything else unchanged."""
    return int(name) if name.isascii() and name.isdigit() and len(name) < 19 else name


class CachedPart(BodyPart):
    """What may have `cache_control`, which has no effect: the server caches all prompts."""

    cache_control: dict[str, Any] | None = None


class StreamOptions(BodyPart):
    """`include_usage`: end the stream with a message that has the token counts.

    continuous_usage_stats: the counts so far are in every other message, too.
    """

    idle = {"include_obfuscation": (False,)}
    include_usage: bool = False
    continuous_usage_stats: bool = False


def _stops(given: Any) -> Any:
    """Turn a single text into a list, so that errors name a position in the request rather than a type of a union.

    Empty texts ask for nothing.
    """
    if not isinstance(given, str | list):
        raise PydanticCustomError("stop", "must be a text or a list of texts")
    return [text for text in ([given] if isinstance(given, str) else given) if text != ""]


def _none_if_false(given: Any) -> Any:
    """Some clients send false, as chats have it, where no log probabilities are asked for."""
    return None if given is False else given


Stops = Annotated[list[str], Field(fail_fast=True), BeforeValidator(_stops, str | list[str])]
Tokens = Annotated[list[int], Field(fail_fast=True)]
OnePrompt = Annotated[Any, WithJsonSchema(TypeAdapter(str | list[int] | list[str] | list[list[int]]).json_schema())]
_AS_THEY_ARE = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("seed", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
    *("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "priority"),
)
"""Fields that SamplingParams has with the same names and values."""


class SamplingFields(BodyPart):
    """Fields of all requests for text that SamplingParams has, too. Ranges that it checks are not repeated here."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    seed: int | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: Tokens | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    stream: bool = False

    def sampling(self, defaults: Mapping[str, Any], max_tokens: int | None, **more: Any) -> SamplingParams:
        """The sampling parameters. Raises UsageError.

        Fields that were not given have the values in `defaults`, or else SamplingParams' own.
        """
        length = len("".join(more.get("stop") or ()))
        if length > MOST_STOP_CHARACTERS:
            raise UsageError(f"stop has {length} characters in all, of at most {MOST_STOP_CHARACTERS}")
        given = {name: getattr(self, name) for name in _AS_THEY_ARE} | more
        if self.logit_bias:
            given["logit_bias"] = {_token_number(token): bias for token, bias in self.logit_bias.items()}
        stated = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{**defaults, **stated, "max_tokens": max_tokens})


class Common(SamplingFields, StructureFields):
    """Fields of completions and chat completions."""

    idle = {
        **{"echo": (False,), "suffix": ("",)},
        **{"modalities": (["text"],)},
        **{"tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (False, True)},
        **{"function_call": ("none", "auto")},
        **{"reasoning_effort": ("none",), "verbosity": ("medium",), "length_penalty": (1,)},
        **{"use_beam_search": (False,), "spaces_between_special_tokens": (True,), "return_token_ids": (False,)},
        **{"add_generation_prompt": (True,), "chat_template_kwargs": ({},)},
        **{"prompt_cache_retention": ("in_memory", "24h")},
        **{"detokenize": (True,), "return_tokens_as_token_ids": (False,), "continue_final_message": (False,)},
        **{"cache_prompt": (True,), "include_reasoning": (True,), "separate_reasoning": (True,)},
        **{"stream_reasoning": (True,), "typical_p": (1,), "mirostat": (0,), "early_stopping": (False,)},
    }
    n: int | None = None
    best_of: int | None = None
    stop: Stops | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    """Identifies the caller, like the three fields before it, and does not affect the response."""
    store: bool | None = None
    service_tier: str | None = None
    """Concerns OpenAI's own service, like the field before it: nothing is stored here, and there is one tier."""

    def sampling(self, defaults: Mapping[str, Any], max_tokens: int | None, **more: Any) -> SamplingParams:
        given = {"n": self.n, "best_of": self.best_of, "stop": self.stop, "structured_outputs": asked_structure(self)}
        return super().sampling(defaults, max_tokens, **given, **more)

    @property
    def usage_options(self) -> StreamOptions:
        """Which messages of a stream have the token counts."""
        return self.stream_options or StreamOptions()


class CompletionRequest(Common):
    """POST /v1/completions: one prompt or several, each a text or token numbers."""

    suffix: str | None = None
    """What follows the text that is asked for, if the model was trained to write what is between."""
    prompt: OnePrompt  # checked where it is encoded: errors are clearer than those of a union type
    max_tokens: Annotated[int, Field(ge=0)] = 16
    echo: bool = False
    """Whether texts start with the prompt, and log probabilities with those of its tokens."""
    logprobs: Annotated[Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None, BeforeValidator(_none_if_false)] = None

    def prompts(self) -> list[str | Sequence[int]]:
        """The prompts as a list."""
        given = self.prompt
        if isinstance(given, list) and not all(type(token) is int for token in given):
            return list(given)
        return [given]

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The request's sampling parameters, with defaults as in `sampling`. Raises UsageError."""
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise UsageError("max_tokens must be at least 1, or echo true for the prompt alone")
        if self.echo and (self.suffix or self.prompt_logprobs is not None):
            raise UsageError("echo with suffix or prompt_logprobs is not possible")
        reported = self.logprobs
        if self.max_tokens == 0 and reported is None:
            reported = 0  # the prompt is all that is asked for: it is computed even if nothing of it is reported
        known = reported if self.echo else self.prompt_logprobs
        return self.sampling(defaults, max_tokens=self.max_tokens, logprobs=self.logprobs, prompt_logprobs=known)


def usage(outputs: Collection[RequestOutput]) -> dict[str, Any]:
    """The token counts of a response; where drafts were made, also how many of their tokens were kept."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(output.generated_tokens for output in outputs)
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    cached = {"cached_tokens": sum(out.metrics.cached_tokens for out in outputs)}
    drafts = [output.speculation for output in outputs if output.speculation]
    drafted, kept = sum(sum(one.drafted) for one in drafts), sum(sum(one.accepted) for one in drafts)
    details = {"accepted_prediction_tokens": kept, "rejected_prediction_tokens": drafted - kept}
    return counts | {"prompt_tokens_details": cached} | ({"completion_tokens_details": details} if drafts else {})


encode = json.JSONEncoder(ensure_ascii=False).encode
"""The JSON of a value; json.dumps would make an encoder for each."""


def failure(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(data: dict[str, Any] | str) -> str:
    """A server-sent event."""
    return f"data: {data if isinstance(data, str) else encode(data)}\n\n"


def named_event(data: dict[str, Any]) -> str:
    """A server-sent event with the name of its `type`."""
    return f"event: {data['type']}\ndata: {encode(data)}\n\n"
