"""Continuous batching: each step schedules requests, runs the model, and postprocesses the new tokens.

    plan = scheduler.schedule(...)        which rows of which requests   (scheduler.py, plan.py)
    updates = runner.run(plan)            one call of the executor       (runner.py, speculative.py, choose.py)
    postprocessor.publish(update)         text and log probabilities     (postprocess.py, stops.py)

An executor that can overlap with the host runs the next step while the host publishes this one's tokens (pending.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from qcompile.errors import UsageError
from qcompile.runtime.detokenizer import Detokenizer, TokenLengths
from qcompile.runtime.embeddings import Pooling
from qcompile.runtime.engine.bans import BanReader
from qcompile.runtime.engine.blocks import BlockPool
from qcompile.runtime.engine.forward import pooled_states, sequence_logits
from qcompile.runtime.engine.pending import PendingStep
from qcompile.runtime.engine.postprocess import Postprocessor, Update, text_ends
from qcompile.runtime.engine.runner import StepRunner
from qcompile.runtime.engine.scheduler import Scheduler
from qcompile.runtime.engine.sleep import Sleep
from qcompile.runtime.engine.snapshots import Snapshots
from qcompile.runtime.engine.speculative import Speculation
from qcompile.runtime.outputs import CompletionOutput, RequestMetrics
from qcompile.runtime.request import PromptReport, Request, RequestSpec, SequenceState, StreamState
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.biases import TokenBiases
from qcompile.runtime.sampling.grammars import Grammars
from qcompile.runtime.sampling.masks import Grammar
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.sampling import Sampler
from qcompile.runtime.sampling.supported import check_adapter
from qcompile.runtime.speculation.stages import Drafter
from qcompile.runtime.step import StepExecutor

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Engine:
    """Runs requests to completion, batched. Not safe for two threads.

    eos: the tokens that end a text. drafter: None if the model has no drafts; they are off until `speculation.gamma` is
    set.
    """

    def __init__(
        self,
        executor: StepExecutor,
        pool: BlockPool,
        tokenizer: Tokenizer | None,
        eos: Sequence[int],
        max_batch: int,
        drafter: Drafter | None = None,
    ) -> None:
        self.executor, self.pool, self.tokenizer = executor, pool, tokenizer
        self.context = min(executor.limits.max_position, pool.most_tokens)
        """Most tokens of prompt and output together."""
        self.overlaps = executor.overlaps
        """Whether a step may run on the executor while the host postprocesses the step before."""
        limits = executor.limits
        self.scheduler = Scheduler(pool, limits.max_tokens, max_batch, executor.samples, limits.max_outputs)
        self.scheduler.asks_for_masks = executor.asks_for_masks
        if executor.copies and pool.prefixes is not None:
            self.scheduler.snapshots = Snapshots(executor.copies)
        self.scheduler.drafts_have_states = drafter is not None and drafter.has_states
        self.speculation = Speculation(executor, self.scheduler.reserve, drafter)
        self.postprocessor = Postprocessor(self.scheduler.release, tokenizer, eos)
        self.runner = StepRunner(executor, self.scheduler, self.postprocessor, self.speculation)
        self.grammars = Grammars(tokenizer, executor.limits.vocab, eos)
        self._lengths: dict[bool, TokenLengths] = {}  # by whether special tokens have no text
        self.sleep = Sleep(pool)
        self._bans = BanReader(tokenizer, executor.limits.vocab)
        self._next_id = 0
        self._pending: PendingStep | None = None
        self._unpublished: list[Update] = []

    def end_at(self, tokens: Iterable[int]) -> None:
        """Let these tokens end a text, too."""
        known, eos = self.postprocessor.eos, self.postprocessor.eos.union(tokens)
        if eos != known:  # grammars that are compiled for other ends are forgotten
            self.postprocessor.eos = eos
            self.grammars.end_at(eos)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        index: int = 0,
        embeds: FloatArray | None = None,
        grammar: Grammar | None = None,
        owner: str = "",
        text: bool = True,
    ) -> Request:
        """Queue one sample of a checked prompt. The first sample alone (`index` 0) reports the prompt.

        embeds: the prompt's embeddings [tokens, width]; the numbers of its tokens then have no meaning. grammar: that
        of the parameters' structured outputs (`grammars`). owner: as in RequestSpec. text: whether the output gets a
        text, which stop texts need; else whoever reads the output makes it. The prompt has at least one token.
        The context has room for one token more, unless params.max_tokens is 0. Raises AsleepError.
        """
        self.sleep.check_awake()
        assert (grammar is None) == (params.structure is None)
        reports_prompt = params.prompt_logprobs is not None and index == 0
        wanted = self.context if params.max_tokens is None else len(prompt) + params.max_tokens
        report = PromptReport(len(prompt), scored=0 if reports_prompt else len(prompt) - 1)
        if reports_prompt and len(prompt) == 1:
            report.logprobs = [None]
        known, vocab = prompt if embeds is None else (), self.executor.limits.vocab
        biases = self._bans.table(params, text_ends(params, self.postprocessor.eos))
        state = grammar.start(sampled=params.temperature > 0) if grammar else None
        request = Request(
            spec=RequestSpec(self._next_id, len(prompt), min(wanted, self.context), params, owner),
            sequence=SequenceState(list(prompt), embeds=embeds),
            prompt_report=report,
            sampler=Sampler(params, index, known, vocab, state, TokenBiases(biases)),
            output=CompletionOutput(index),
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            stream=StreamState(self._detokenizer(known, params) if text else None, self._marks(params)),
        )
        if params.logprobs is not None:
            request.output.logprobs, request.output.cumulative_logprob = [], 0.0
        self.speculation.start(request)
        self._next_id += 1
        if params.max_tokens == 0 and report.complete:
            self._unpublished.append(Update(request, [], "length"))
        else:
            self.scheduler.add(request)
        return request

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may have."""
        return self.scheduler.adapters.names if self.scheduler.adapters else ()

    def check_bans(self, params: SamplingParams) -> None:
        """Raise UsageError if a request may come to a place where it may choose no token, or has no known adapter."""
        check_adapter(params.lora, self.adapters)
        self._bans.read(params, text_ends(params, self.postprocessor.eos))

    def _detokenizer(self, prompt: Sequence[int], params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        skips = bool(params.skip_special_tokens)
        if skips not in self._lengths:
            self._lengths[skips] = TokenLengths(self.tokenizer, skips)
        return Detokenizer(self.tokenizer, prompt, skips, self._lengths[skips])

    def _marks(self, params: SamplingParams) -> dict[int, str]:
        """The texts of special tokens in the request's stop texts; none if special tokens have text as others do."""
        if not (params.stops and params.skip_special_tokens):  # some tokenizers have thousands of special tokens
            return {}
        return {token: text for token, text in self._special.items() if any(text in stop for stop in params.stops)}

    @cached_property
    def _special(self) -> dict[int, str]:
        """The texts of all special tokens, which a tokenizer takes milliseconds to tell."""
        added = self.tokenizer.get_added_tokens_decoder() if self.tokenizer else {}
        return {token: each.content for token, each in added.items() if each.special and each.content}

    def cancel(self, request: Request) -> None:
        """End a request now and free its pages. Does nothing if it has ended."""
        if request.output.finish_reason is None:
            self._finish(request, "abort")

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._unpublished)

    def fall_asleep(self, level: int) -> None:
        """Give the memory of weights and cache back until `sleep.end`. Raises UsageError while requests are unfinished,
        or for an unknown level, and UnsupportedError if the model cannot sleep."""
        self.sleep.check_possible(level)
        if self.busy:
            raise UsageError("the model has unfinished requests: let them end before it sleeps")
        self._finish_pending()
        self.sleep.begin(level)

    def check(self) -> None:
        """Raise RuntimeError if a page or a slot is lost, or its number of holders is wrong."""
        running = [request.sequence for request in self.scheduler.running]
        self.pool.check(*(sequence.pages for sequence in running))
        self.scheduler.slots.check(sequence.slot for sequence in running)
        if self.scheduler.snapshots:
            self.scheduler.snapshots.check()

    def step(self) -> list[Request]:
        """Run one step. Returns the requests that gained tokens; finished ones have their finish_reason set.

        If the executor can overlap with the host, a step is started before the tokens of the step before are published,
        and a second one before the host waits for the first: it is planned without knowing the first one's tokens. A
        request that ends by its text has then computed some tokens in vain.
        """
        second = self.runner.start(self._pending) if self._pending else None
        self._finish_pending()
        self.executor.begin_masks()
        self._pending = second or (self.runner.start(None) if self.overlaps else None)
        updates, self._unpublished = self._unpublished, []
        grown = self._publish(updates)
        return grown if self._pending else grown + self._run_step()

    def _run_step(self) -> list[Request]:
        """Schedule, run and postprocess one step."""
        plan = self.scheduler.schedule(self.runner.steps)
        return self._publish(self.runner.run(plan)) if plan else []

    def _finish_pending(self) -> None:
        """Wait for the pending step, if there is one, and append its tokens."""
        pending, self._pending = self._pending, None
        if pending:
            self._unpublished += self.runner.finish(pending)

    def _publish(self, updates: Sequence[Update]) -> list[Request]:
        """Publish new tokens. Returns their requests, without those that were cancelled in the meantime."""
        grown = []
        for update in updates:
            if update.request.output.finish_reason is None:
                if self.postprocessor.publish(update):
                    self._finish(update.request, update.finish_reason or "stop")
                grown.append(update.request)
        return grown

    def rewind(self, request: Request, length: int) -> None:
        """Forget the tokens of a decoding request past the first `length`, so that measurements may repeat steps.

        The cache keeps the positions before. A hierarchical cache cannot rewind, nor may a step be pending. Recurrent
        states cannot rewind either: the steps that follow take as long, but their tokens are others.
        """
        sequence, output = request.sequence, request.output
        del sequence.tokens[length:], output.token_ids[length - request.spec.prompt_length :]
        sequence.computed = length - 1
        self.speculation.settle(request)

    def _finish(self, request: Request, reason: str) -> None:
        self.postprocessor.finish(request, reason)
        self.speculation.finish(request)

    def forward(
        self, sequences: Sequence[Sequence[int]], chunk: int, adapter: str | None = None
    ) -> Iterator[tuple[int, int, FloatArray]]:
        """Logits of every position of sequences of equal length: see `sequence_logits`."""
        self.sleep.check_awake()
        check_adapter(adapter, self.adapters)
        self._finish_pending()
        yield from sequence_logits(self.executor, self.scheduler, sequences, chunk, adapter)

    def pooled(self, texts: Sequence[Sequence[int]], pooling: Pooling, adapter: str | None = None) -> FloatArray:
        """Pooled hidden states of texts, float32 [texts, width]: see `pooled_states`. UsageError: no such adapter."""
        self.sleep.check_awake()
        check_adapter(adapter, self.adapters)
        self._finish_pending()
        return pooled_states(self.executor, self.scheduler, texts, pooling, adapter)
