"""Requests, their outputs and their errors as values of JSON, for the channels between the two processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

from qcompile import errors
from qcompile.errors import QCompileError
from qcompile.runtime.detokenizer import Detokenizer
from qcompile.runtime.embeddings import EmbeddingOptions
from qcompile.runtime.engine.samples import PromptSamples
from qcompile.runtime.engine.stops import read_text
from qcompile.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput, SpeculationMetrics
from qcompile.runtime.sampling.logprobs import Logprob
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.structured import Reasoning, StructuredOutputsParams, StructureError
from qcompile.runtime.speculation.explained import GammaFacts

Value = Any
"""A value of JSON."""


def params_value(params: SamplingParams) -> Value:
    """The parameters that differ from their defaults."""
    given = {field.name: getattr(params, field.name) for field in fields(params)}
    value = {
        field.name: given[field.name]
        for field in fields(params)
        if field.default is MISSING or given[field.name] != field.default
    }
    if params.logit_bias:
        value["logit_bias"] = list(params.logit_bias.items())
    if params.structure:
        value["structured_outputs"] = structure_value(params.structure)
    return value


def params_of(value: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a value from `params_value`."""
    given = dict(value)
    if biases := given.get("logit_bias"):
        given["logit_bias"] = {int(token): bias for token, bias in biases}
    if structure := given.get("structured_outputs"):
        given["structured_outputs"] = structure_of(structure)
    return SamplingParams(**given)


def structure_value(structure: StructuredOutputsParams) -> Value:
    """What was asked for of structured outputs."""
    given = {field.name: getattr(structure, field.name) for field in fields(structure)}
    return {name: each for name, each in given.items() if each is not None}


def structure_of(value: Mapping[str, Any]) -> StructuredOutputsParams:
    """The structured outputs of a value from `structure_value`."""
    given = dict(value)
    if reasoning := given.get("reasoning"):
        opening, closing, begun, again, heads = reasoning
        given["reasoning"] = Reasoning(opening, closing, begun, again, tuple(heads))
    return StructuredOutputsParams(**given)


def embedding_value(how: EmbeddingOptions) -> Value:
    """How embeddings are made."""
    return asdict(how)


def error_value(error: QCompileError) -> Value:
    """An error with its message."""
    return [type(error).__name__, str(error), getattr(error, "what", None)]


def error_of(value: Sequence[Any]) -> QCompileError:
    """The error of a value from `error_value`; one of a class that is not known here is of its base class."""
    name, text, what = value
    known = StructureError if name == StructureError.__name__ else getattr(errors, name, QCompileError)
    kind = known if isinstance(known, type) and issubclass(known, QCompileError) else QCompileError
    error: QCompileError = kind.__new__(kind, text)
    if what is not None and isinstance(error, StructureError):
        error.what = what
    return error


class Growth:
    """What the outputs of a prompt have that was not sent before. One object for each prompt.

    Made for each token of each stream: what changes seldom is left out unless it has changed.
    """

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, int]] = {}  # tokens and characters of each sample
        self._begun = False
        self._told = False  # whether the prompt's log probabilities were sent

    def value(self, samples: PromptSamples) -> Value:
        """The difference to the last call: number of the prompt, samples, whether they have finished, and the rest."""
        if samples.chosen:
            output = samples.output()
            grown, finished, dropped = (
                [self._grown(one) for one in output.outputs],
                output.finished,
                output.dropped_tokens,
            )
        else:
            grown, finished, dropped = [], True, 0
            for request in samples.requests:
                read_text(request)
                grown.append(self._grown(request.output))
                finished = finished and request.output.finish_reason is not None
        speculation, prompt = samples.speculation, None if self._told else samples.prompt_logprobs
        rest = None
        if finished or not self._begun or speculation or prompt:
            rest = [list(vars(samples.metrics(finished)).values()), speculation and asdict(speculation), None, dropped]
            if prompt is not None:
                rest[2], self._told = [one and _logprob_value(one) for one in prompt], True
        self._begun = True
        return [samples.number, grown, finished, rest]

    def _grown(self, now: CompletionOutput) -> Value:
        tokens, characters = self._sent.get(now.index, (0, 0))
        ids, text = now.token_ids, now.text
        self._sent[now.index] = len(ids), len(text)
        logprobs = None if now.logprobs is None else [_logprob_value(one) for one in now.logprobs[tokens:]]
        scores = now.cumulative_logprob, logprobs
        return [now.index, ids[tokens:], text[characters:], now.finish_reason, now.stop_reason, *scores]


class Grown:
    """The output of one prompt, put together from the values of `Growth`.

    tokens: those of the prompt. detokenizer: makes what decodes the tokens of a sample, if they come without text.
    hides_end: whether the token that ends a text has none.
    """

    def __init__(
        self, number: int, tokens: list[int], detokenizer: Callable[[], Detokenizer] | None, hides_end: bool
    ) -> None:
        self.output = RequestOutput(number, None, tokens, [], False, RequestMetrics())
        self._detokenizer, self._hides_end = detokenizer, hides_end
        self._decoding: list[Detokenizer] = []  # of each sample

    def add(self, value: Sequence[Any]) -> RequestOutput:
        """The output, which has grown. It is the same object each time."""
        _, samples, finished, rest = value
        output = self.output
        for at, (index, tokens, text, *others) in enumerate(samples):
            if at == len(output.outputs):
                output.outputs.append(CompletionOutput(index))
                if self._detokenizer is not None:
                    self._decoding.append(self._detokenizer())
            sample = output.outputs[at]
            ended = sample.finish_reason is not None
            _add(sample, tokens, *others)
            if self._detokenizer is None:
                sample.text += text
            elif not ended:
                sample.text += self._text(self._decoding[at], tokens, sample.finish_reason)
        if rest is not None:
            metrics, speculation, prompt, output.dropped_tokens = rest
            output.metrics = RequestMetrics(*metrics)
            output.speculation = SpeculationMetrics(**speculation) if speculation else None
            if prompt is not None:
                output.prompt_logprobs = [one and _logprob_of(one) for one in prompt]
        output.finished = finished
        return output

    def _text(self, decoding: Detokenizer, tokens: Sequence[int], finish_reason: str | None) -> str:
        """The text of a sample's new tokens."""
        if finish_reason is None:
            return decoding.push(tokens)
        hidden = self._hides_end and finish_reason == "stop"
        return decoding.push(tokens[:-1] if hidden else tokens) + decoding.push([], last=True)


def _add(
    sample: CompletionOutput,
    tokens: list[int],
    finish_reason: str | None,
    stop_reason: str | int | None,
    cumulative: float | None,
    logprobs: list[Value] | None,
) -> None:
    sample.token_ids += tokens
    sample.finish_reason, sample.stop_reason, sample.cumulative_logprob = finish_reason, stop_reason, cumulative
    if logprobs is not None:
        sample.logprobs = (sample.logprobs or []) + [_logprob_of(one) for one in logprobs]


def _logprob_value(one: Mapping[int, Logprob]) -> Value:
    return [[token, *chance] for token, chance in one.items()]


def _logprob_of(value: Value) -> dict[int, Logprob]:
    return {token: Logprob(*chance) for token, *chance in value}


def drafting_value(known: Sequence[GammaFacts]) -> Value:
    """What `auto` knows of drafts."""
    return [
        {**vars(facts), "expected": list(facts.expected.items()), "measured": list(facts.measured.items())}
        for facts in known
    ]


def drafting_of(value: Sequence[Mapping[str, Any]]) -> list[GammaFacts]:
    """The facts of a value from `drafting_value`."""
    return [
        GammaFacts(**{**given, "expected": dict(given["expected"]), "measured": dict(given["measured"])})
        for given in value
    ]
