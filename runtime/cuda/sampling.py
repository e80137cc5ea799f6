"""The inputs of sampling, biases and penalties on a GPU (codegen/gpu/sample.py, penalties.py): each sequence's options,
random numbers and lists of tokens; and the reports of tokens (codegen/gpu/report.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np

from qcompile.artifact.abi import GpuSamplingOptions
from qcompile.runtime.cuda.driver import Driver
from qcompile.runtime.cuda.memory import MirroredNumbers
from qcompile.runtime.sampling.inputs import GREEDY, SamplingInputs
from qcompile.runtime.sampling.logprobs import DoubleArray, alternatives_of, empty_reports
from qcompile.runtime.sampling.penalties import IntArray

MOST_DRAWS = 1 << 16
"""Most random numbers of a call."""
_OPTIONS = len(GpuSamplingOptions._fields)
_FIRST_ROOM = 1 << 16
"""Numbers for which there is room in the lists of tokens at first."""
_FIRST_REPORTS = 1 << 10
"""Numbers for which there is room in the reports at first."""
_DRAWN = ("temperature", "top_p", "min_logit", "top_k", "first")
"""The options that have the names of fields of SamplingInputs."""
_COUNTS = ("sampled", "top_k", "top_p", "biased", "penalized", "masked", "reported", "kept")
"""Counts of the launches that sample."""
_NO_REPORTS = empty_reports(0, 0)


class DeviceSampling:
    """Arrays on the GPU by which kernels sample.

    Each sequence has GpuSamplingOptions, and a place in three arrays: random numbers (float64), lists of tokens and
    biases (int32), and reports (float64).
    """

    def __init__(self, driver: Driver, sequences: int) -> None:
        self._driver, self._first = driver, _OPTIONS * sequences
        self._numbers = MirroredNumbers(driver, self._first + MOST_DRAWS, 8, "random numbers")
        self._host: Any = (ctypes.c_double * self._numbers.items).from_address(self._numbers.host_address)
        names = [(name, np.float64) for name in GpuSamplingOptions._fields]
        options = memoryview(self._host).cast("B")[: 8 * self._first]
        self._options: Any = np.frombuffer(options, np.dtype(names))
        self._wanted: list[DoubleArray] = []
        self._sent = driver.event()
        self._items = 0, 0
        """Numbers, and numbers in the lists, that the last call has sent."""
        made = [self._numbers]
        try:
            self._lists = self._make_lists(_FIRST_ROOM)
            made.append(self._lists)
            self._reports = self._make_reports(_FIRST_REPORTS)
        except BaseException:
            for pair in made:
                pair.free()
            driver.drop_event(self._sent)
            raise

    def _make_lists(self, items: int) -> MirroredNumbers:
        lists = MirroredNumbers(self._driver, items, 4, "lists of tokens")
        memory: Any = (ctypes.c_int32 * items).from_address(lists.host_address)
        self._tokens = np.ctypeslib.as_array(memory)
        return lists

    def _make_reports(self, items: int) -> MirroredNumbers:
        reports = MirroredNumbers(self._driver, items, 8, "log probabilities")
        memory: Any = (ctypes.c_double * items).from_address(reports.host_address)
        self._reported = np.ctypeslib.as_array(memory)
        return reports

    @property
    def addresses(self) -> dict[str, int]:
        """Address of each array on the GPU; `grow` changes those of the lists and reports."""
        numbers = self._numbers.address
        lists = {"seen": self._lists.address, "reports": self._reports.address}
        return {"sampling": numbers, "uniforms": numbers + 8 * self._first, **lists}

    @property
    def reporting(self) -> bool:
        """Whether reports of the last call are to be delivered."""
        return bool(self._wanted)

    def lacks_room(self, sampling: Sequence[SamplingInputs]) -> bool:
        """Whether the lists or reports of a call need more memory."""
        if _all_greedy(sampling):
            return False
        return _list_items(sampling) > self._lists.items or _report_items(sampling) > self._reports.items

    def grow(self, sampling: Sequence[SamplingInputs]) -> None:
        """Make room for the lists and reports of a call. No launch that knows the old addresses may be running, or run
        later."""
        if (items := _list_items(sampling)) > self._lists.items:
            lists = self._make_lists(1 << (items - 1).bit_length())
            self._lists.free()
            self._lists = lists
        if (items := _report_items(sampling)) > self._reports.items:
            reports = self._make_reports(1 << (items - 1).bit_length())
            self._reports.free()
            self._reports = reports

    def send(self, sampling: Sequence[SamplingInputs], outputs: int) -> dict[str, int]:
        """Queue a copy to the GPU of a call's sampling inputs, one for each sequence. Returns its launches' counts."""
        if _all_greedy(sampling):
            self._wanted, self._items = [], (0, 0)
            return dict.fromkeys(_COUNTS, 0)
        self._wanted = [inputs.reports for inputs in sampling if inputs.reports is not None]
        known, self._items = 0, (0, 0)
        if not all(inputs.plain for inputs in sampling):
            self._driver.wait_for(self._sent)  # what was sent before may be on its way
            ends = GpuSamplingOptions(uniforms_at=self._first)
            if not any(inputs.lists for inputs in sampling):
                ends = self._write_draws(sampling)
            else:
                for index, inputs in enumerate(sampling):
                    ends = self._write_sequence(index, inputs, ends)
            known = int(ends.known_through)
            self._numbers.send(int(ends.uniforms_at))
            if ends.listed_at:
                self._lists.send(int(ends.listed_at))
            self._driver.record(self._sent)
            self._items = int(ends.uniforms_at), int(ends.listed_at)
        return _counts(sampling, outputs, known)

    def content(self) -> tuple[memoryview, memoryview]:
        """The bytes of the numbers and of the lists that the last call has sent."""
        numbers, lists = self._items
        return self._numbers.content(numbers), self._lists.content(lists)

    def receive(self, numbers: memoryview, lists: memoryview, forget: Callable[[], None]) -> None:
        """Send what `send` sent in another process. Calls `forget` before memory moves that launches know."""
        items = len(lists) // 4
        if items > self._lists.items:
            forget()
            grown = self._make_lists(1 << (items - 1).bit_length())
            self._lists.free()
            self._lists = grown
        self._driver.wait_for(self._sent)
        for pair, content, size in ((self._numbers, numbers, 8), (self._lists, lists, 4)):
            if content:
                pair.content(len(content) // size)[:] = content
                pair.send(len(content) // size)
        self._driver.record(self._sent)

    def _write_sequence(self, index: int, inputs: SamplingInputs, ends: GpuSamplingOptions) -> GpuSamplingOptions:
        """Write the options, random numbers and lists of sequence `index`.

        `ends` has the places that the sequences before it leave free, as has the result: `uniforms_at` in the numbers
        (options included), `listed_at` in the lists, `reports_at` in the reports, and `known_through`.
        """
        reports = inputs.reports if inputs.reports is not None else _NO_REPORTS
        options = GpuSamplingOptions(
            inputs.temperature,
            inputs.top_p,
            inputs.min_logit,
            inputs.top_k,
            inputs.first,
            uniforms_at=ends.uniforms_at - self._first,
            uniforms=len(inputs.uniforms),
            alternatives=alternatives_of(reports),
            reports_at=ends.reports_at,
            reported=len(reports),
            known=len(inputs.known),
            known_through=ends.known_through + len(inputs.known),
            masked=inputs.masks is not None,
        )
        listed = int(ends.listed_at)
        if (given := inputs.penalties) is not None:
            amounts = {name: getattr(given, name) for name in ("repetition", "frequency", "presence", "room")}
            options = options._replace(**amounts, listed_at=listed, listed=len(given.tokens))
            recent = self._write(given.tokens, self._write(given.counts, listed))
            self._write(given.ahead, recent)
            listed = recent + given.room
        options = options._replace(known_at=listed)
        listed = self._write(inputs.known, listed)
        if inputs.bias:
            options = options._replace(biases_at=listed, biases=len(inputs.bias.tokens))
            listed = self._write(inputs.bias.values.view(np.int32), self._write(inputs.bias.tokens, listed))
        self._host[_OPTIONS * index : _OPTIONS * (index + 1)] = options
        at = int(ends.uniforms_at)
        self._host[at : at + len(inputs.uniforms)] = inputs.uniforms
        return ends._replace(
            uniforms_at=at + len(inputs.uniforms),
            listed_at=listed,
            reports_at=ends.reports_at + reports.size,
            known_through=options.known_through,
        )

    def _write_draws(self, sampling: Sequence[SamplingInputs]) -> GpuSamplingOptions:
        """`_write_sequence` for all sequences of a call without lists and reports, an option of all at a time: while a
        step with masks runs, the host writes the next one."""
        fields: Any = zip(*sampling, strict=True)
        columns: Any = SamplingInputs(*fields)
        counts = list(map(len, columns.uniforms))
        starts = list(accumulate(counts, initial=0))
        options = self._options[: len(sampling)]
        options.fill(0)
        for name in _DRAWN:
            options[name] = getattr(columns, name)
        options["uniforms_at"], options["uniforms"] = starts[:-1], counts
        options["masked"] = [masks is not None for masks in columns.masks]
        drawn: list[float] = list(chain.from_iterable(columns.uniforms))
        self._host[self._first : self._first + len(drawn)] = drawn
        return GpuSamplingOptions(uniforms_at=self._first + starts[-1])

    def fetch(self) -> None:
        """Queue a copy to the host of the reports that the last call asked for."""
        if self._wanted:
            self._reports.fetch(sum(reports.size for reports in self._wanted))

    def deliver(self) -> None:
        """Write fetched reports into the arrays of the sampling inputs."""
        at = 0
        for reports in self._wanted:
            reports[:] = self._reported[at : at + reports.size].reshape(reports.shape)
            at += reports.size
        self._wanted = []

    def _write(self, numbers: Sequence[int] | IntArray, start: int) -> int:
        """Write numbers into the lists. Returns where they end."""
        end = start + len(numbers)
        self._tokens[start:end] = numbers
        return end

    def free(self) -> None:
        """Free the memory on both sides."""
        self._numbers.free()
        self._lists.free()
        self._reports.free()
        self._driver.drop_event(self._sent)


def _all_greedy(sampling: Sequence[SamplingInputs]) -> bool:
    """Whether all inputs are `GREEDY` itself, as those of most large steps are."""
    return all(inputs is GREEDY for inputs in sampling)


def _counts(sampling: Sequence[SamplingInputs], outputs: int, known: int) -> dict[str, int]:
    """The counts of the launches that sample a step of `outputs` rows of logits, `known` of them of known tokens."""
    reporting = [inputs for inputs in sampling if inputs.reports is not None]
    on = {
        "sampled": any([inputs.temperature for inputs in sampling]),  # noqa: C419 - half a generator's time, as below
        "top_k": any([inputs.top_k for inputs in sampling]),  # noqa: C419
        "top_p": min([inputs.top_p for inputs in sampling]) < 1,
        "biased": any([inputs.bias for inputs in sampling]),  # noqa: C419
        "penalized": any([inputs.penalties for inputs in sampling]),  # noqa: C419
        "masked": any([inputs.masks for inputs in sampling]),  # noqa: C419
        "reported": bool(reporting),
    }
    # A power of two, as the launches that know the memory of kept rows are dropped where it grows.
    changed = any(inputs.bias or inputs.penalties or inputs.masks for inputs in reporting)
    rows = 1 << (outputs - known - 1).bit_length() if changed and outputs > known else 0
    return {**{name: outputs if some else 0 for name, some in on.items()}, "kept": rows}


def _list_items(sampling: Sequence[SamplingInputs]) -> int:
    """Numbers in the lists of a call."""
    penalties = (2 * len(inputs.penalties.tokens) + inputs.penalties.room for inputs in sampling if inputs.penalties)
    return sum(penalties) + sum(
        len(inputs.known) + 2 * len(inputs.bias.tokens if inputs.bias else ()) for inputs in sampling
    )


def _report_items(sampling: Sequence[SamplingInputs]) -> int:
    """Numbers in the reports of a call."""
    return sum(inputs.reports.size for inputs in sampling if inputs.reports is not None)
