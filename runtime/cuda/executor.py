"""Runs an artifact's launch plan over the CUDA driver; an executor as runtime/step.py describes.

The plan (kernels/<target>/*.plan.json) lists the launches of a step; codegen/gpu/launches.py describes its format.
Steps of few rows per sequence become CUDA graphs, one for each combination of counts (runtime/cuda/launching.py). The
pages of the longest context are rounded up in these counts, so that few graphs suffice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from qcompile.artifact.abi import GPU_ABI
from qcompile.errors import ArtifactError, UsageError
from qcompile.runtime.cuda.counts import Counts, attention_counts
from qcompile.runtime.cuda.driver import Driver
from qcompile.runtime.cuda.features import DeviceFeatures, allocate_features
from qcompile.runtime.cuda.hidden import read_hidden, why_not
from qcompile.runtime.cuda.inputs import StepInputs
from qcompile.runtime.cuda.launching import BEFORE_HEAD, Launcher
from qcompile.runtime.cuda.masks import DeviceMasks
from qcompile.runtime.cuda.memory import MOST_DECODED, DeviceMemory, PinnedNumbers
from qcompile.runtime.cuda.plans import OtherRanks
from qcompile.runtime.cuda.sampling import DeviceSampling
from qcompile.runtime.cuda.slots import DeviceSlots
from qcompile.runtime.cuda.started import StartedSteps
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.inputs import SamplingInputs
from qcompile.runtime.step import HiddenStates, Limits, Rate, Rows

_PEAKS = {"memory": "memory_gb_s", "int8": "int8_gops", "f32": "f32_gflops", "bf16": "bf16_gflops"}
"""Names of peak rates in a plan, in the order of `probe`."""


def _check(plan: Mapping[str, Any], limits: Limits) -> None:
    """Raises ArtifactError for a plan of another version, and UsageError for steps of more rows than it takes."""
    if plan.get("abi") != GPU_ABI:
        raise ArtifactError(f"GPU plan {plan.get('abi')}, this qcompile has {GPU_ABI}: build the artifact again")
    if limits.max_tokens > plan["most_rows"]:
        raise UsageError(f"{limits.max_tokens} rows a step, the artifact's kernels take {plan['most_rows']}")


class CudaExecutor:
    """An opened model on a GPU. `step` and `decode` block until the GPU is done. Not safe for two threads.

    `plan` is the parsed plan, `functions` its kernels by label, `weights` addresses on the GPU by name. A draft path
    uses the cache of the path that it drafts for, `leader`, or with `own_cache` one of its own with as many pages; so
    for recurrent states. Raises ResourceError when memory is short.
    """

    threads, samples, asks_for_masks, overlaps = 0, True, False, True
    features: DeviceFeatures | None = None
    given: DeviceFeatures | None = None
    """What the rows of the last call return to a draft head, once wanted (`connect`), and what those of a head read."""

    def __init__(
        self,
        driver: Driver,
        plan: dict[str, Any],
        functions: Mapping[str, int],
        weights: Mapping[str, int],
        kv_pages: int,
        limits: Limits,
        leader: CudaExecutor | None = None,
        own_cache: bool = False,
    ) -> None:
        _check(plan, limits)
        self.driver, self.plan, self.limits, self.kv_pages = driver, plan, limits, kv_pages
        self.preparations = driver.preparations
        self.description = {"calls": [launch["name"] for launch in plan["launches"]], "weights": plan["weights"]}
        self.hidden: HiddenStates | str = why_not(plan) or HiddenStates(plan["hidden"]["width"], self._step_hidden)
        self.embed_width: int = plan.get("embeds", {}).get("width", 0)
        self.memory = DeviceMemory(driver, plan, limits, kv_pages)
        self.slots = DeviceSlots(driver, plan, limits, self.memory)
        self.state_slots, self.copies = self.slots.total, self.slots.copies
        # A draft path computes the last certain position again in a round (runtime/cuda/speculate.py).
        self.inputs = StepInputs(driver, plan, limits, self.memory, spare=kv_pages, repeated=int(own_cache))
        self.launcher = Launcher(driver, plan, functions, weights, self.memory, self.address)
        # A step may be queued while the one before it runs: its inputs and tokens take turns in the host's memory.
        self._tokens = PinnedNumbers(driver), PinnedNumbers(driver)
        self._turn = 0
        self._started = StartedSteps()
        self._sampling: DeviceSampling | None = None
        self._masks = DeviceMasks(driver, self.memory.outputs, limits.vocab)
        self._modules: list[ctypes.c_void_p] = []
        self.ranks: OtherRanks | None = None
        """The other processes of a divided model, for its rank 0."""
        self._failed = 0
        self._closed = False
        try:
            self._allocate(leader, own_cache)
        except BaseException:
            self.close()
            raise

    def _allocate(self, leader: CudaExecutor | None, own_cache: bool) -> None:
        self.driver.use()
        self.memory.allocate_activations()
        shared = leader.memory if leader and not own_cache else None
        self.memory.allocate_cache(shared.cache if shared else 0)
        self.memory.allocate_states(self.state_slots, shared.states if shared else 0)
        self.inputs.open()
        for tokens in self._tokens:
            tokens.open(max(self.memory.outputs, MOST_DECODED))
        self._sampling = DeviceSampling(self.driver, self.memory.outputs)
        same = leader is not None and leader.limits.vocab == self.limits.vocab
        self.memory.allocate_results(leader.memory.results["logits"] if leader and same else 0)
        self._logits: FloatArray = np.empty((self.memory.outputs, self.limits.vocab), np.float32)

    def join(self, rank: int, peers: list[int], failed: int, ranks: OtherRanks | None = None) -> None:
        """Be rank `rank` of a divided model, with the peer memory of all ranks and a word that says if one has failed.
        Rank 0 has the other processes, `ranks`, repeat its steps from now on."""
        self.memory.rank, self.memory.peers, self._failed = rank, peers, failed
        self.ranks = ranks
        if ranks:
            self.launcher.published, self.slots.plans = ranks.plans.run, ranks.plans

    def adopt(self, addresses: Iterable[int], modules: Iterable[ctypes.c_void_p] = ()) -> None:
        """Take ownership of the weights' memory and of modules of kernels, to free them when the model is closed."""
        self.memory.adopt(addresses)
        self._modules += modules

    # ---- a step -------------------------------------------------------------------------------

    def fill(
        self, sequences: Sequence[Rows], ahead: int = 0, sampling: Sequence[SamplingInputs] = (), behind: bool = False
    ) -> Counts:
        """Write the rows into the inputs and queue their copy to the GPU. Returns the step's counts.

        Waits for what `start` has queued, or with `behind` for all but the last of that. `sampling` has the inputs of
        each sequence; without any, all are greedy. Sequences may advance `ahead` positions before the next call.
        """
        if self._closed or self._sampling is None:
            raise UsageError("the model is closed: load it again")
        if self.ranks:
            self.ranks.check()
        self.driver.use()
        turn = 1 - self._turn
        self._started.wait_for(turn)
        written = self.inputs.write(sequences, ahead, turn)
        self._started.send_masks()  # other threads may have computed them until here
        if not behind:
            self._started.wait_for(self._turn)
        self._turn = turn
        self.inputs.send(turn)
        masked = self._masks.want(sequences, sampling)
        if self._masks.lacks_room or self._sampling.lacks_room(sampling):
            self.launcher.forget()
            self._sampling.grow(sampling)
            self._masks.grow()
        assert not (masked and ahead > 1)  # masks of later steps follow from the tokens of these
        sampled = self._sampling.send(sampling, written.outputs)
        if self.ranks:
            self.ranks.plans.inputs(self.inputs.content(self._turn), self._turn)
            self.ranks.plans.numbers(*self._sampling.content())
        return {
            "tokens": written.tokens,
            "outputs": written.outputs,
            "sequences": len(sequences),
            "queries": written.queries,
            "table_stride": written.stride,
            "adapted": written.adapted,
            "featured": self.features.begin(written.tokens) if self.features else 0,
            **sampled,
            **attention_counts(self.plan, written.decoding, written.prompts),
        }

    def address(self, name: str) -> int:
        """Address of a step's input or result on the GPU."""
        if self._sampling and name in self._sampling.addresses:
            return self._sampling.addresses[name]
        if name in ("masks", "failed"):
            return self._masks.address if name == "masks" else self._failed
        place = self.inputs.address(name)
        return self.memory.results[name] if place is None else place

    def step(
        self, sequences: Sequence[Rows], logits: bool, sampling: Sequence[SamplingInputs] = ()
    ) -> tuple[list[int], FloatArray | None]:
        """Run one step over at most `max_tokens` rows.

        Returns the argmax of every output row, or its draw if its sequence has a temperature, and if asked its logits
        [outputs, vocab] (with penalties, if its sequence has any), a view that the next call overwrites.
        """
        counts = self.fill(sequences, sampling=sampling)
        self._run(counts, False, 1)
        outputs = counts["outputs"]
        if outputs and logits:
            given, size = self.memory.results["logits"], 4 * self.limits.vocab * outputs
            self.driver.download(self._logits.ctypes.data, given, size, pinned=False)
        return self._fetch("argmax", outputs, last=True)(), self._logits[:outputs] if logits else None

    def _step_hidden(self, sequences: Sequence[Rows]) -> FloatArray:
        """Run one step up to the output head. Returns the hidden states [outputs, width] of the output rows."""
        counts = self.fill(sequences)
        self.launcher.run_part(counts, False, BEFORE_HEAD, 1)
        return read_hidden(self.driver, self.memory, self.plan["hidden"], counts["outputs"])

    def decode(self, sequences: Sequence[Rows], steps: int, sampling: Sequence[SamplingInputs] = ()) -> list[int]:
        """`steps` tokens for each sequence (one row each), fed back on the GPU, as [steps, sequences], flattened.

        The pages must have room for all of them."""
        counts = self.fill(sequences, steps, sampling)
        each = max(1, min(steps, (self.memory.rows if self.features else MOST_DECODED) // counts["tokens"]))
        tokens: list[int] = []
        while len(tokens) < steps * counts["tokens"]:
            times = min(each, steps - len(tokens) // counts["tokens"])
            if tokens:  # the GPU has updated tokens and positions itself
                if self.features:
                    self.features.move(each * counts["tokens"])
                self.inputs.reset_counter(self._turn)
                if self.ranks:
                    self.ranks.plans.reset_counter(self._turn)
            self._run(counts, True, times)
            last = len(tokens) + times * counts["tokens"] == steps * counts["tokens"]
            tokens += self._fetch("decoded", times * counts["tokens"], last)()
        return tokens

    def start(
        self, sequences: Sequence[Rows], steps: int, sampling: Sequence[SamplingInputs] = ()
    ) -> Callable[[], list[int]]:
        """Queue `decode`, or with one step `step`. Returns a function that waits for its tokens.

        Where a token is negative, -1 - i, a kernel replaces it by output i of what was queued before. If the step has
        masks, they follow from that output: `begin_masks` has them computed.
        """
        assert steps * len(sequences) <= MOST_DECODED  # as all multi-step decodes of an engine are
        several, reports = steps > 1, any(inputs.reports is not None for inputs in sampling)
        behind = not (reports or (self._sampling and self._sampling.reporting))
        counts = self.fill(sequences, steps * several, sampling, behind)
        follows = any(token < 0 for rows in sequences for token in rows.tokens)
        if follows:
            if self.ranks:
                self.ranks.plans.follow(counts)
            self.launcher.launch(self.plan["follow"], counts)
        results = ("decoded", steps * counts["tokens"]) if several else ("argmax", counts["outputs"])
        rest = None
        if follows and counts["masked"]:
            rest = self.launcher.run_in_parts(counts, several, self._send_masks)
        else:
            self._run(counts, several, steps)
        return self._started.add(self._turn, rest, partial(self._fetch, *results, last=True))

    def begin_masks(self) -> None:
        """Begin to write masks that a step of `start` lacks. If no thread computes any, what reads them is queued."""
        self.driver.use()
        if self._started.lacks_masks and not self._masks.begin():
            self._started.send_masks()

    def _run(self, counts: Counts, feed_back: bool, times: int) -> None:
        """Queue `times` steps. Their masks are written while the GPU computes what is before them."""
        self.launcher.run(counts, feed_back, times, self._send_masks if counts["masked"] else None)

    def _send_masks(self) -> None:
        """Write the masks of a step, which its last launches read."""
        self._masks.send()
        if self.ranks:
            self.ranks.plans.masks(self._masks.content())

    def _fetch(self, name: str, count: int, last: bool) -> Callable[[], list[int]]:
        """Queue a copy to the host of a result's first tokens, and if it is the `last` one after `fill`, of the reports
        that its sampling inputs ask for. Returns a function that waits for both, and returns the tokens."""
        if last:
            self.fetch_reports()
        numbers = self._tokens[self._turn]
        numbers.fetch(self.memory.results[name], count)

        def wait() -> list[int]:
            self.driver.use()
            tokens: list[int] = numbers.begin()[:count]
            if self.ranks:
                self.ranks.check()
            if last:
                self.deliver_reports()
            return tokens

        return wait

    def fetch_reports(self) -> None:
        """Queue a copy to the host of the reports that the sampling inputs of the last `fill` ask for."""
        if self._sampling:
            self._sampling.fetch()

    def deliver_reports(self) -> None:
        """Write fetched reports into the sampling inputs, after the copy is done."""
        if self._sampling:
            self._sampling.deliver()

    def connect(self) -> None:
        """Let steps return features, and read those given. Raises ArtifactError if the plan has none."""
        self.features, self.given = allocate_features(self.driver, self.plan, self.memory)

    def return_features(self, on: bool) -> None:
        """Whether steps compute and return features from now on."""
        assert self.features
        self.features.wanted = on

    # ---- other ranks of a divided model --------------------------------------------------------

    def receive_sampling(self, numbers: memoryview, lists: memoryview) -> None:
        """Sample as rank 0 does, which has sent these to its GPU."""
        assert self._sampling is not None
        self._sampling.receive(numbers, lists, self.launcher.forget)

    def receive_masks(self, content: memoryview) -> None:
        """Exclude the tokens that rank 0 excludes."""
        self._masks.receive(content, self.launcher.forget)

    # ---- profile ------------------------------------------------------------------------------

    def profile(self, on: bool) -> None:
        """Start (resetting the counters) or stop timing each launch."""
        self.launcher.time(on)

    def profile_read(self) -> dict[str, tuple[float, int]]:
        """Seconds and number of runs of each launch since `profile(True)`, in the order they run."""
        return dict(self.launcher.profile.times) if self.launcher.profile else {}

    def peak(self, rate: Rate) -> float:
        """A peak of this GPU, from its data sheet."""
        return float(self.plan["peaks"][_PEAKS[rate]])

    def close(self) -> None:
        """Free the GPU's memory; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.ranks:
            self.ranks.close()
        self.driver.use()
        self.launcher.forget()
        self.memory.free()
        for module in self._modules:
            self.driver.unload(module)
        if self._sampling:
            self._sampling.free()
        self._masks.free()
        self.inputs.free()
        for tokens in self._tokens:
            tokens.free()
