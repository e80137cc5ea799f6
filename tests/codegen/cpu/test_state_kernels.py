"""Kernels of recurrent states against the operators in float64, and bitwise for any division of rows."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from qcompile import ops
from qcompile.formats.states import (
    BLOCK_TOKENS,
    LOG_TOKENS,
    ROUND_TOKENS,
    STATE_FORMATS,
    ConvState,
    LayerState,
    RecurrenceState,
    StateFormat,
)
from qcompile.targets import cpu_flags
from tests.conftest import MadeOnce
from tests.support.harness import ISAS, compile_harness

TOKENS, SLOTS, OFFSET = 60, 3, 32
"""Rows of a text, slots, and where the layer's part of a slot begins."""


@dataclass(frozen=True)
class Recurrence:
    """Sizes of a recurrence, as in RecurrenceState. rates: "", "heads" or "keys"; stored: how its state is kept."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    by_key: bool = False
    rates: str = "heads"
    gain: bool = True
    delta: bool = True
    stored: StateFormat = "f32"

    @property
    def layer(self) -> RecurrenceState:
        sizes = self.heads, self.key_heads, self.key_dim, self.value_dim
        return RecurrenceState(*sizes, self.by_key, self.stored)


@dataclass(frozen=True)
class Conv:
    """Sizes of a convolution."""

    features: int
    width: int
    bias: bool = True

    @property
    def layer(self) -> ConvState:
        return ConvState(self.features, self.width)


CASES: dict[str, Recurrence | Conv] = {
    "conv": Conv(48, 4),
    "odd conv": Conv(37, 3, False),
    "wide conv": Conv(5, 9),
    "one tap": Conv(16, 1),
    "delta": Recurrence(4, 2, 16, 32),
    "tiles": Recurrence(2, 1, 24, 144, rates="keys"),
    "by key": Recurrence(3, 3, 20, 16, by_key=True, rates=""),
    "by key, with rates": Recurrence(2, 2, 18, 48, by_key=True, rates="keys"),
    "odd": Recurrence(3, 3, 5, 7, gain=False),
    "wide and odd": Recurrence(2, 1, 9, 83),
    "state space": Recurrence(6, 2, 16, 64, delta=False),
    "lightning": Recurrence(2, 2, 32, 32, rates="", gain=False, delta=False),
    "selective scan": Recurrence(40, 1, 16, 1, rates="keys", delta=False),
    "scan with delta": Recurrence(20, 5, 3, 1, by_key=True, rates="keys"),
    "gated units": Recurrence(24, 24, 1, 1, delta=False),
    "bf16": Recurrence(4, 2, 16, 32, stored="bf16"),
    "bf16 tiles by key": Recurrence(2, 1, 24, 144, by_key=True, rates="keys", stored="bf16"),
    "odd bf16": Recurrence(3, 3, 5, 7, gain=False, delta=False, stored="bf16"),
    "wide and odd bf16": Recurrence(2, 1, 9, 83, stored="bf16"),
    "int8": Recurrence(4, 2, 16, 32, stored="int8"),
    "int8 tiles by key": Recurrence(2, 1, 24, 144, by_key=True, rates="keys", stored="int8"),
    "odd int8": Recurrence(3, 3, 5, 7, gain=False, delta=False, stored="int8"),
    "wide and odd int8": Recurrence(2, 1, 9, 83, stored="int8"),
}


@pytest.fixture(scope="session")
def library(made_once: MadeOnce) -> Callable[[str], ctypes.CDLL]:
    """Compiles the harness for an instruction set; skips the test if the compiler is missing or the CPU lacks it."""

    @cache
    def build(isa: str) -> ctypes.CDLL:
        if shutil.which("g++") is None or not ISAS[isa][1] <= cpu_flags():
            pytest.skip(f"no compiler, or this CPU lacks {sorted(ISAS[isa][1] - cpu_flags())}")
        source = "state_harness.cpp"
        return ctypes.CDLL(str(made_once(f"state-{isa}.so", lambda path: compile_harness(isa, path, source))))

    return build


class Batch(ctypes.Structure):
    _fields_ = [
        ("sequences", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("positions", "query_start", "slots", "certain", "states")),
        ("slot_numbers", ctypes.c_int64),
    ]


class Part(NamedTuple):
    """Rows start .. end of the text `text`, in slot `slot`; `wrong` ones are drafts that will be taken back."""

    text: int
    start: int
    end: int
    certain: int = 1 << 30
    wrong: bool = False


@dataclass
class Machine:
    """Texts of random inputs, and the slots after the parts that have run."""

    library: ctypes.CDLL
    case: Recurrence | Conv
    threads: int = 1
    states: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        numbers = OFFSET + self.case.layer.size
        raw = np.full(SLOTS * numbers + 16, np.nan, np.float32)
        start = -raw.ctypes.data % 64 // 4
        self.states = raw[start : start + SLOTS * numbers].reshape(SLOTS, numbers)

    def inputs(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The rows of each input, with columns before and after that the kernel must not read."""
        return [
            np.concatenate(
                [inputs_of(self.case, part.text + 10 * part.wrong)[i][part.start : part.end] for part in parts]
            )
            for i in range(len(inputs_of(self.case, 0)))
        ]

    def run(self, *parts: Part) -> np.ndarray:
        """The results of a step."""
        lengths = [part.end - part.start for part in parts]
        arrays = {
            "positions": np.concatenate([np.arange(part.start, part.end) for part in parts]),
            "query_start": np.cumsum([0, *lengths]),
            "slots": np.array([SLOTS - 1 - part.text for part in parts]),
            "certain": np.array([part.certain for part in parts]),
        }
        arrays = {name: array.astype(np.int32) for name, array in arrays.items()}
        pointers = [array.ctypes.data for array in arrays.values()]
        batch = Batch(len(parts), *pointers, self.states.ctypes.data, self.states.shape[1])
        run = run_conv if isinstance(self.case, Conv) else run_recurrence
        out = run(self, batch, self.inputs(parts))
        width = self.case.features if isinstance(self.case, Conv) else self.case.heads * self.case.value_dim
        assert not out[:, width:].any()
        return out[:, :width]


def run_conv(machine: Machine, batch: Batch, inputs: list[np.ndarray]) -> np.ndarray:
    case, (x,) = machine.case, inputs
    assert isinstance(case, Conv)
    weight, bias = weights_of(case)
    padded = np.ascontiguousarray(np.pad(weight.T, ((0, 0), (0, -case.features % 16))))
    out = np.full((len(x), -(-case.features // 32) * 32), np.nan, np.float32)
    machine.library.harness_conv(
        *(ctypes.byref(batch), pointer(x, 3), x.shape[1], pointer(out), case.features, case.width, pointer(padded)),
        *(pointer(bias) if case.bias else None, ctypes.c_int64(OFFSET), machine.threads),
    )
    return out


def run_recurrence(machine: Machine, batch: Batch, inputs: list[np.ndarray]) -> np.ndarray:
    case = machine.case
    assert isinstance(case, Recurrence)
    given = [pointer(each, 3) for each in inputs]
    if not case.gain:
        given[4] = ctypes.c_void_p(None)
    rates = weights_of(case)[0]
    if case.rates == "keys" and case.value_dim == 1:
        rates = np.pad(rates.T, ((0, 0), (0, -case.heads % 16)))
    rates = np.ascontiguousarray(rates, np.float32)
    out = np.full((len(inputs[0]), -(-case.heads * case.value_dim // 32) * 32), np.nan, np.float32)
    machine.library.harness_recurrence(
        *(ctypes.byref(batch), (ctypes.c_void_p * 5)(*given), (ctypes.c_int * 5)(*(x.shape[1] for x in inputs))),
        *(pointer(out), case.heads, case.key_heads, case.key_dim, case.value_dim, int(case.by_key), int(case.delta)),
        *(pointer(rates) if case.rates else None, int(case.rates == "keys"), ctypes.c_int64(OFFSET)),
        *(STATE_FORMATS[case.stored], machine.threads),
    )
    return out


def pointer(array: np.ndarray, column: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data + 4 * column)


@cache
def inputs_of(case: Recurrence | Conv, text: int) -> list[np.ndarray]:
    """Inputs [TOKENS, 3 + features + 1] of a text; the columns around the features are NaN."""
    drawn = np.random.default_rng(text)
    if isinstance(case, Conv):
        values = [drawn.normal(size=(TOKENS, case.features))]
    else:
        keys = case.key_heads * case.key_dim
        q, k = (drawn.normal(size=(TOKENS, keys)) / case.key_dim**0.5 for _ in range(2))
        sign = 1 if case.rates else -1  # times negative rates: states fade
        decay = sign * drawn.random((TOKENS, case.layer.decays))
        values = [
            q,
            k,
            drawn.normal(size=(TOKENS, case.heads * case.value_dim)),
            decay,
            drawn.random((TOKENS, case.heads)),
        ]
    return [np.pad(value, ((0, 0), (3, 1)), constant_values=np.nan).astype(np.float32) for value in values]


@cache
def weights_of(case: Recurrence | Conv) -> list[np.ndarray]:
    """Weight and bias of a convolution, or rates."""
    drawn = np.random.default_rng(99)
    if isinstance(case, Conv):
        return [drawn.normal(size=size).astype(np.float32) for size in ((case.features, case.width), (case.features,))]
    shape = (case.heads, case.key_dim) if case.rates == "keys" else (case.heads,)
    return [-drawn.random(shape).astype(np.float32)]


def reference(case: Recurrence | Conv, text: int) -> np.ndarray:
    """The operator over a whole text in float64."""
    if isinstance(case, Recurrence) and case.stored != "f32":
        return stepped(case, torch.zeros(SLOTS, OFFSET + case.layer.size), 0, TOKENS, TOKENS, text)[0].numpy()
    values = [torch.from_numpy(x[:, 3:-1]).double()[None] for x in inputs_of(case, text)]
    weights = [torch.from_numpy(w).double() for w in weights_of(case)]
    if isinstance(case, Conv):
        y: Any = ops.causal_conv(*values, weights[0], weights[1] if case.bias else None)
    else:
        q, k, v, decay, gain = values
        q, k, v = (x.unflatten(-1, (n, -1)) for x, n in ((q, case.key_heads), (k, case.key_heads), (v, case.heads)))
        decay = decay.unflatten(-1, (case.heads, -1)) if case.by_key else decay
        rates = weights[0] if case.rates else None
        y = ops.linear_recurrence(q, k, v, decay, rates, gain if case.gain else None, case.delta).flatten(2)
    result: np.ndarray = y[0].numpy()
    return result


@pytest.fixture(params=["portable", "avx2", "avx512"])
def machine(library: Callable[[str], ctypes.CDLL], request: pytest.FixtureRequest) -> Callable[..., Machine]:
    """Makes machines of one instruction set."""
    return lambda case, threads=1: Machine(library(request.param), CASES[case], threads)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_operator(machine: Callable[..., Machine], case: str) -> None:
    result, wanted = machine(case).run(Part(0, 0, TOKENS)), reference(CASES[case], 0)
    # float32: sums of up to 144 products of size 1, fed back for 60 tokens, and e^x to 1.2e-7
    rounding = 2e-5
    # A number of a state near the middle of two codes may get the other code: float32 is off by about 1e-7 of it, and
    # codes of bf16 lie 4e-3 of it apart. With 24 key features, rounded 7 times, that is a column in 200.
    codes = {"f32": 0.0, "bf16": 2**-8, "int8": 1 / 127}[getattr(CASES[case], "stored", "f32")]
    assert (np.abs(result - wanted) < rounding).mean() > (0.97 if codes else 0.9999)
    np.testing.assert_allclose(result, wanted, atol=rounding + codes)


@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_the_division_into_steps(machine: Callable[..., Machine], case: str) -> None:
    whole = machine(case).run(Part(0, 0, TOKENS))
    for cuts in ([1, 2, 3, 50, 51, TOKENS], [*range(1, TOKENS + 1)]):
        steps = machine(case)
        parts = [steps.run(Part(0, a, b)) for a, b in zip([0, *cuts], cuts, strict=False)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("case", CASES)
def test_random_batches(machine: Callable[..., Machine], case: str) -> None:
    """Parts of texts that start again and again, beside others and on any number of threads."""
    whole = [machine(case).run(Part(text, 0, TOKENS)) for text in range(SLOTS)]
    drawn, at = np.random.default_rng(2), [0] * SLOTS
    running = machine(case)
    for _ in range(60):
        parts, wanted = [], []
        running.threads = int(drawn.integers(1, 5))
        for text in drawn.permutation(SLOTS)[: drawn.integers(1, SLOTS + 1)].tolist():
            if at[text] >= TOKENS or drawn.random() < 0.05:
                at[text] = 0
            end = min(TOKENS, at[text] + int(drawn.integers(1, 20)))
            parts.append(Part(text, at[text], end))
            wanted.append(whole[text][at[text] : end])
            at[text] = end
        np.testing.assert_array_equal(running.run(*parts), np.concatenate(wanted))


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_certain_can_be_taken_back(machine: Callable[..., Machine], case: str) -> None:
    """Rounds: drafts that leave the base alone, then a step with wrong drafts; then the text goes on."""
    whole = machine(case).run(Part(0, 0, TOKENS))
    drawn, running, at = np.random.default_rng(1), machine(case, 2), 4
    running.run(Part(0, 0, at))
    most = LOG_TOKENS // 2
    while at < TOKENS - most:
        drafts = int(drawn.integers(0, most))
        kept = min(int(drawn.integers(0, most)), drafts)
        for place in range(at, at + drafts):
            running.run(Part(0, place, place + 1, 0, True))
        # The rows that are kept and those that are not are one step for the engine. Here they come from two texts, and
        # the base moves with the first.
        result = running.run(Part(0, at, at + kept + 1, at + 1))
        np.testing.assert_array_equal(result, whole[at : at + kept + 1])
        if drafts > kept:
            running.run(Part(0, at + kept + 1, at + drafts + 1, at + 1, True))
        at += kept + 1
    np.testing.assert_array_equal(running.run(Part(0, at, TOKENS)), whole[at:])


@pytest.mark.parametrize("case", ["delta", "tiles", "bf16 tiles by key", "odd int8", "int8 tiles by key"])
def test_a_log_holds_all_that_may_be_taken_back(machine: Callable[..., Machine], case: str) -> None:
    """Two rounds of drafts that are right, wherever in a block they begin; later steps replay them."""
    whole = machine(case).run(Part(0, 0, TOKENS))
    for start in range(1, 1 + BLOCK_TOKENS):
        running, ends = machine(case), [start + ROUND_TOKENS, start + 2 * ROUND_TOKENS]
        running.run(Part(0, 0, start))
        parts = [(start, ends[0], start + 1), (*ends, ends[0] + 1), (ends[1], ends[1] + 1, TOKENS)]
        for begin, end, certain in (*parts, (ends[1] + 1, TOKENS, TOKENS)):
            np.testing.assert_array_equal(running.run(Part(0, begin, end, certain)), whole[begin:end])
        again = machine(case)  # all that may be taken back at once
        again.run(Part(0, 0, start))
        np.testing.assert_array_equal(again.run(Part(0, start, ends[1], start)), whole[start : ends[1]])
        np.testing.assert_array_equal(again.run(Part(0, ends[1], TOKENS)), whole[ends[1] :])


@pytest.mark.parametrize("case", CASES)
def test_long_parts_that_begin_within_a_block(machine: Callable[..., Machine], case: str) -> None:
    """Rows at the end of a part may have the entries of a log that its beginning replays."""
    whole = machine(case).run(Part(0, 0, TOKENS))
    for start in range(1, 8):
        for end in range(start + ROUND_TOKENS, TOKENS, 3):
            running, parts = machine(case, 2), []
            for begin, until in ((0, start), (start, end), (end, TOKENS)):
                parts.append(running.run(Part(0, begin, until)))
            np.testing.assert_array_equal(np.concatenate(parts), whole)


HELD = ["odd conv", "delta", "by key, with rates", "wide and odd", "scan with delta", "odd bf16", "wide and odd int8"]


@pytest.mark.parametrize("case", HELD)
def test_slots_hold_what_the_operator_of_a_step_holds(machine: Callable[..., Machine], case: str) -> None:
    """The layout is that of formats/states.py, also where rows are logged."""
    running, layer = machine(case), CASES[case].layer
    running.run(Part(1, 0, 12), Part(2, 0, 3))
    running.run(Part(1, 12, 20, 15))
    slots = torch.zeros(SLOTS, running.states.shape[1])
    for start, end, certain in ((0, 12, 12), (12, 20, 15)):
        slots = stepped(CASES[case], slots, start, end, certain)[1]
    held = torch.from_numpy(running.states[SLOTS - 2, OFFSET:]).double()
    wanted = slots[SLOTS - 2, OFFSET:].double()
    if isinstance(layer, RecurrenceState) and layer.stored != "f32":
        compare_codes(
            layer, *(slot[OFFSET:] for slot in (torch.from_numpy(running.states[SLOTS - 2]), slots[SLOTS - 2]))
        )
        held[: layer.places[2]] = wanted[: layer.places[2]] = 1.0
    written = wanted != 0
    assert int(written.sum()) > layer_numbers(layer) and bool((held.isnan() | written | (held == 0)).all())
    torch.testing.assert_close(held[written], wanted[written], atol=2e-5, rtol=1e-4)  # as test_equals_the_operator


def compare_codes(layer: RecurrenceState, held: torch.Tensor, wanted: torch.Tensor) -> None:
    """Base, scales and state of a part of a slot, with a state in fewer bits: a code may be the next one."""
    _, state, keys, *_ = layer.places
    torch.testing.assert_close(held[:state].nan_to_num(), wanted[:state], atol=2e-5, rtol=1e-5)
    count = layer.heads * layer.value_dim * layer.key_dim
    kind = torch.int16 if layer.stored == "bf16" else torch.int8
    codes, others = (part[state:keys].view(kind)[:count].int() for part in (held, wanted))
    assert codes.any() and (codes - others).abs().max() <= 1 and (codes == others).float().mean() > 0.99


def layer_numbers(layer: LayerState) -> int:
    """Numbers that a text of 20 tokens must at least have written."""
    if isinstance(layer, ConvState):
        return 19 * layer.features
    return layer.heads * layer.value_dim * layer.key_dim


def stepped(
    case: Recurrence | Conv, slots: torch.Tensor, start: int, end: int, certain: int, text: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of rows start .. end of a text, and the slots after them, by the operator of a step in float64."""
    values = [torch.from_numpy(x[start:end, 3:-1]).double() for x in inputs_of(case, text)]
    weights = [torch.from_numpy(w).double() for w in weights_of(case)]
    positions, sequence = torch.arange(start, end), torch.zeros(end - start, dtype=torch.int64)
    place = torch.tensor([SLOTS - 2])
    if isinstance(case, Conv):
        bias = weights[1] if case.bias else None
        y, after = ops.conv_step(values[0], weights[0], bias, positions, sequence, place, slots, OFFSET)
    else:
        q, k, v, decay, gain = values
        q, k, v = (x.unflatten(-1, (n, -1)) for x, n in ((q, case.key_heads), (k, case.key_heads), (v, case.heads)))
        decay = decay.unflatten(-1, (case.heads, -1)) if case.by_key else decay
        final = torch.tensor([certain])
        y, after = ops.recurrence_step(
            *(q, k, v, decay, weights[0] if case.rates else None, gain if case.gain else None),
            *(positions, sequence, place, final, slots, case.delta, OFFSET, case.stored),
        )
    return y.flatten(1), after
