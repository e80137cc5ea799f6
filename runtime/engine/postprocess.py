"""What a step's tokens change in their requests: tokens, text, log probabilities, and the end of the request.

It is done in two stages. `append` and its neighbours run as soon as tokens are known, and decide what the next step
needs: which requests continue, and with which tokens. `publish` adds text and log probabilities to the output; it may
run while the executor computes the next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from qcompile.runtime.detokenizer import spelled
from qcompile.runtime.engine.choose import NO_TOKEN
from qcompile.runtime.engine.plan import StepPlan
from qcompile.runtime.engine.stops import end_text, extend_text
from qcompile.runtime.request import Request
from qcompile.runtime.sampling.logprobs import Logprob, prompt_logprobs, reported_logprobs
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.step import Rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_NONE: frozenset[int] = frozenset()


class Update(NamedTuple):
    """New tokens of a request that are not published yet.

    finish_reason: why the request ends with them; None if it continues, as far as is known without the text. logprobs:
    of the tokens that the host has chosen.
    """

    request: Request
    tokens: list[int]
    finish_reason: str | None
    logprobs: Sequence[dict[int, Logprob]] = ()


class Postprocessor:
    """Changes the requests of an engine after a step.

    release: takes back the pages of a request that has ended (`Scheduler.release`). eos: the tokens that end a text;
    more may be added.
    """

    def __init__(self, release: Callable[[Request], None], tokenizer: Tokenizer | None, eos: Sequence[int]) -> None:
        self._release, self.eos = release, frozenset(eos)
        self.spell = cache(partial(spelled, tokenizer)) if tokenizer else None
        """Gives a token's text; None if the artifact has no tokenizer."""

    def append_all(self, plan: StepPlan, rows: Sequence[Rows], tokens: Sequence[int], now: float) -> list[Update]:
        """Append the tokens of a step without drafts that ended at `now`.

        A single step gives one token for each request that has its last token in it. A multi-step decode gives tokens
        [steps, requests], flattened.
        """
        updates, batch, at = [], len(plan.requests), 0
        for index, (request, row) in enumerate(zip(plan.requests, rows, strict=True)):
            start, first, at = at, at + row.known, at + row.outputs
            new = list(tokens[index::batch] if plan.steps > 1 else tokens[first:at])
            if request.output.finish_reason is not None:  # cancelled, or ended by a stop text, while the step ran
                continue
            request.sequence.computed += len(row.tokens) * plan.steps
            if (row.known or request.spec.is_prompt) and (end := self.note_prompt(request, tokens[start:first], now)):
                updates.append(end)
            elif new:
                request.sampler.took(new)
                updates.append(self.append(request, new, now))
        return updates

    def note_prompt(self, request: Request, chosen: Sequence[int], now: float) -> Update | None:
        """Keep the reports of the prompt's tokens that a step has written. Returns the end of the request, if it ends.

        `chosen` are the tokens that the step chose in their places: NO_TOKEN where logits are not finite.
        """
        if (reports := request.sampler.take_known()) is not None:
            request.prompt_report.add(reports)
        if NO_TOKEN in chosen:
            return self._end(request, [], "error", now)
        only_prompt = request.spec.is_prompt and request.prompt_report.complete
        return self._end(request, [], "length", now) if only_prompt else None

    def append(
        self, request: Request, tokens: list[int], now: float, logprobs: Sequence[dict[int, Logprob]] = ()
    ) -> Update:
        """Append new tokens, without text. Frees the pages at an end of text, the request's limit, or NO_TOKEN."""
        reason: str | None = None
        if NO_TOKEN in tokens:
            tokens, reason = tokens[: tokens.index(NO_TOKEN)], "error"
        ends = text_ends(request.params, self.eos)
        if not ends.isdisjoint(tokens):
            tokens = tokens[: next(i for i, token in enumerate(tokens) if token in ends) + 1]
            reason = "stop"
        output, written = request.output, request.sequence.tokens
        if not output.token_ids:
            request.metrics.first_token_time = now
        written += tokens
        output.token_ids += tokens
        if len(written) >= request.spec.max_length and reason != "stop":
            reason = "length"
        return self._end(request, tokens, reason, now, logprobs) if reason else Update(request, tokens, None, logprobs)

    def _end(
        self, request: Request, tokens: list[int], reason: str, now: float, logprobs: Sequence[dict[int, Logprob]] = ()
    ) -> Update:
        """Free the pages of a request that ends with these tokens."""
        request.metrics.finished_time = now
        self._release(request)
        return Update(request, tokens, reason, logprobs)

    def publish(self, update: Update) -> bool:
        """Add the text and the log probabilities of new tokens to the output. Returns whether the request ends.

        A stop text in the new text ends the request, too, possibly before the last of the tokens.
        """
        request, output, tokens = update.request, update.request.output, update.tokens
        if update.logprobs:
            output.add_logprobs(tokens, update.logprobs[: len(tokens)])
        # The token that ends the text has none, unless it is asked for.
        hidden = update.finish_reason == "stop" and not request.params.include_stop_str_in_output
        written = tokens[:-1] if hidden else tokens
        early = request.params.min_tokens - (len(output.token_ids) - len(tokens))
        if (kept := extend_text(request, written, early)) < len(written):
            surplus = len(tokens) - kept
            tokens = tokens[:-surplus]
            del request.sequence.tokens[-surplus:], output.token_ids[-surplus:]
        if request.prompt_report.pieces and request.prompt_report.complete and update.finish_reason != "error":
            self._publish_prompt(request)
        if output.logprobs is not None:
            if (reports := request.sampler.take_reports()) is not None:
                output.add_logprobs(tokens, reported_logprobs(reports, tokens, self.spell, request.params.logprobs))
            output.drop_logprobs()
        return output.stop_reason is not None or update.finish_reason is not None

    def _publish_prompt(self, request: Request) -> None:
        """Add the log probabilities of the whole prompt to the output."""
        report = request.prompt_report
        pieces, report.pieces = report.pieces, []
        most = request.params.prompt_logprobs or 0
        report.logprobs = prompt_logprobs(request.sequence.tokens, pieces, self.spell, most)

    def finish(self, request: Request, reason: str) -> None:
        """End a request: its output is complete, and its pages are free."""
        output = request.output
        if not request.metrics.finished_time:
            request.metrics.finished_time = time.monotonic()
        end_text(request)
        if reason == "stop" and output.stop_reason is None:
            last, ends = output.token_ids[-1], _NONE if request.params.ignore_eos else self.eos
            output.stop_reason = last if last in request.params.stop_tokens - ends else None
        output.finish_reason = "stop" if output.stop_reason is not None and reason != "abort" else reason
        self._release(request)


def text_ends(params: SamplingParams, eos: frozenset[int]) -> frozenset[int]:
    """The tokens that end a request's text, where those of the model are `eos`."""
    if not params.stop_token_ids:
        return _NONE if params.ignore_eos else eos
    return params.stop_tokens if params.ignore_eos else eos | params.stop_tokens
