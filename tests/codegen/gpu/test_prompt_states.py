"""The GPU kernel of recurrences for prompts: against the reference, the order of its sums, and where plans use it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qcompile.codegen.gpu.compile import build
from qcompile.codegen.gpu.plan import make_plan
from qcompile.codegen.gpu.states import FEW_ROWS, PromptSpec, RecurrenceSpec, log_spec, prompt_spec
from qcompile.formats.states import STATE_FORMATS, RecurrenceState, StateFormat
from qcompile.targets import TARGETS
from tests.codegen.gpu.test_states import (
    CODES,
    LOG_INPUTS,
    SHAPES,
    SLOTS,
    Layer,
    Shape,
    _rows,
    _step_arrays,
    aligned_spec,
    compare_results,
    compare_slots,
    random_states,
    set_base,
)
from tests.support.compiled import Record
from tests.support.gluon_machine import launch
from tests.support.graphs import recurrent
from tests.support.lowering import gpu_program
from tests.support.tiny import Chunk

STAGED: dict[str, Shape] = {
    "delta": (4, 2, 128, 24, False, "heads", True, True),
    "delta by key": (2, 2, 128, 20, True, "", True, True),
    "delta without gain": (2, 1, 128, 16, False, "", False, True),
    "decay by key, rates by key": (2, 1, 128, 40, True, "keys", True, False),
    "rates by key": (2, 1, 64, 32, False, "keys", False, False),
    "state space": (4, 2, 100, 64, False, "heads", True, False),
    "keys of 256": (2, 1, 256, 12, False, "", False, False),
    "delta in bf16": (4, 2, 128, 24, False, "heads", True, True, "bf16"),
    "by key in bf16": (2, 1, 128, 40, True, "keys", True, False, "bf16"),
    "delta in int8": (2, 1, 128, 48, False, "", False, True, "int8"),
    "by key in int8": (2, 1, 256, 24, True, "keys", True, False, "int8"),
}
CHUNKS = [_rows(35, 5, 3, 36), _rows(33, 0, 1), _rows(3, 9, 0, 0), _rows(17, 40, 2, 38)]
"""With drafts after two blocks; two blocks and a row; nothing certain; drafts from the first row on."""
LOGGED = (0, 0, 3, 3)
"""Positions that are at least in the chunks' logs, which have room for them and all rows that are not certain."""


def run(layer: Layer, spec: PromptSpec, operands: dict[str, Tensor], states: Tensor, chunks: list[Chunk]) -> Tensor:
    """The emulated kernel: the rows' results; changes `states`."""
    rows = len(operands["q"])
    given = {
        name: torch.nn.functional.pad(x.reshape(rows, -1), (0, 4), value=float("nan")) for name, x in operands.items()
    }
    names = ("positions", "query_start", "state_slots", "certain")
    given |= dict(zip(names, _step_arrays(chunks, *names), strict=True))
    given |= {"states": states, "out": torch.full((rows, spec.out_stride), float("nan"))}
    given |= {"rates": layer.rates} if layer.rates is not None else {}
    given |= {} if spec.layer.stored == "f32" else {"codes": states.view(CODES[spec.layer.stored])}
    launch(spec.kernel(90), (*spec.programs, len(chunks)), given)
    if not spec.logs_shared:
        log = log_spec(spec)
        given |= dict(zip(LOG_INPUTS, _step_arrays(chunks, *LOG_INPUTS), strict=True))
        launch(log.kernel(80), (rows, log.programs, 1), given)
    return given["out"][:, :-4].reshape(rows, spec.layer.heads, spec.layer.value_dim)


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("name", STAGED)
def test_prompts_against_the_reference(name: str, columns: int) -> None:
    torch.manual_seed(1)
    layer = Layer.of(STAGED[name], gap=4)
    assert layer.spec.staged
    block = layer.spec.layer.block
    spec = PromptSpec(**vars(layer.spec) | {"logs_shared": block == 1}, thread_columns=columns)
    states = random_states(layer, SLOTS)
    for chunk, logged in zip(CHUNKS, LOGGED, strict=True):
        set_base(layer, states[chunk.slot], (chunk.start - logged) // block * block)
    states[1] = float("nan")  # a slot of garbage: its sequence begins
    operands = layer.operands(sum(len(chunk.tokens) for chunk in CHUNKS))
    wanted, after = layer.reference(operands, states, CHUNKS)
    result = run(layer, spec, operands, states, CHUNKS)
    compare_results(layer, result, wanted)
    compare_slots(layer, states, after)


@pytest.mark.parametrize("name", ["delta", "rates by key", "delta in bf16", "by key in int8"])
def test_a_row_does_not_depend_on_where_a_prompt_is_cut(name: str) -> None:
    torch.manual_seed(2)
    layer = Layer.of(STAGED[name], gap=4)
    spec = PromptSpec(**vars(layer.spec) | {"logs_shared": layer.spec.layer.block == 1})
    text = layer.operands(50)
    states = torch.full((SLOTS, layer.spec.slot_numbers), float("nan"))
    whole = run(layer, spec, text, states, [_rows(50, 0, 3)])
    for slot, cuts in enumerate(([1, 17, 50], [16, 49, 50], [5, 47, 50])):
        pieces, start = [], 0
        for end in cuts:
            part = {each: x[start:end] for each, x in text.items()}
            pieces.append(run(layer, spec, part, states, [_rows(end - start, start, slot)]))
            start = end
        assert torch.equal(torch.cat(pieces), whole)


# ---- the order of sums --------------------------------------------------------------------------------


def layouts(text: str) -> dict[str, str]:
    """The layouts of a program in Triton's IR, by their names."""
    return dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>", text, re.M))


def summed(text: str) -> list[str]:
    """The layouts of what it sums."""
    known = layouts(text)
    return [known[each] for each in re.findall(r"\}\) : \(tensor<[\dx]+xf32, (#\w+)>\)", text)]


@pytest.mark.parametrize("stored", STATE_FORMATS)
@pytest.mark.parametrize("delta", [True, False])
def test_prompts_sum_in_the_order_of_few_rows(delta: bool, stored: StateFormat) -> None:
    """A thread has every eighth key of its columns (fewer of a state in fewer bits), and of products of keys and
    queries four adjacent ones."""
    state = RecurrenceState(2, 1, 128, 64, False, stored)
    loaded, lanes = {"f32": (4, 8), "bf16": (8, 16), "int8": (8, 32)}[stored]
    spec = RecurrenceSpec(state, dict.fromkeys(("q", "k", "v", "decay"), 256), 128, 0, state.size, delta)
    few = summed(build(spec.kernel(90), 90).asm["ttgir"])
    tile = f"sizePerThread = [1, {loaded}], threadsPerWarp = [{lanes}, {32 // lanes}]"
    tile += ", warpsPerCTA = [1, 1], order = [1, 0]"
    row = "sizePerThread = [4], threadsPerWarp = [32], warpsPerCTA = [1], order = [0]"
    # int8 also asks for the largest number of each column.
    assert list(dict.fromkeys(few)) == ([tile, row] if delta else [tile])
    assert stored == "int8" or few.count(tile) == 1 + delta
    for columns in (1, 2, 4):
        prompt = PromptSpec(**vars(spec), thread_columns=columns)
        many = summed(build(prompt.kernel(90), 90).asm["ttgir"])
        tile = f"sizePerThread = [{128 // lanes}, {columns}], threadsPerWarp = [{lanes}, {32 // lanes}]"
        tile += ", warpsPerCTA = [1, 4], order = [1, 0]"
        rows = "sizePerThread = [1, 4], threadsPerWarp = [1, 32], warpsPerCTA = [4, 1], order = [1, 0]"
        one = "sizePerThread = [4], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]"
        assert set(many) == ({tile, rows, one} if delta else {tile})
    assert prompt.key_lanes == lanes


@pytest.mark.parametrize(
    "change",
    [
        {"slot_numbers": 1 << 20 | 2},
        {"state": 2},
        {"strides": dict.fromkeys(("q", "k", "v", "decay"), 130)},
        {"layer": RecurrenceState(2, 1, 64, 64, False)},
        {"layer": RecurrenceState(2, 1, 100, 64, False)},
        {"layer": RecurrenceState(2, 1, 128, 62, False)},
        {"layer": RecurrenceState(64, 1, 128, 1, False)},
        {"tile": 1024},
    ],
)
def test_where_the_order_would_be_another_few_rows_are_all(change: dict[str, object]) -> None:
    state = RecurrenceState(2, 1, 128, 64, False)
    spec = RecurrenceSpec(state, dict.fromkeys(("q", "k", "v", "decay"), 256), 128, 0, 1 << 20, True)
    assert spec.staged and prompt_spec(spec, 132)
    changed = replace(spec, **change)  # type: ignore[arg-type]
    assert not changed.staged and prompt_spec(changed, 132) is None


# ---- plans --------------------------------------------------------------------------------------------


def test_programs_nearly_fill_a_gpu() -> None:
    def columns(heads: int, values: int) -> int:
        state = RecurrenceState(heads, heads, 128, values, False)
        spec = RecurrenceSpec(state, dict.fromkeys(("q", "k", "v", "decay"), 1 << 12), 1 << 12, 0, state.size, True)
        prompt = prompt_spec(spec, 132)
        assert prompt
        return prompt.thread_columns

    assert [columns(32, 128), columns(128, 64), columns(8, 128), columns(64, 128)] == [2, 4, 1, 4]


def test_long_prompts_have_a_kernel_of_their_own() -> None:
    _, program, _ = gpu_program(recurrent(hidden=64, layers=1, key_dim=128, value_dim=64), "bf16", {})
    [launch] = [each for each in make_plan(program, TARGETS["h200"]).launches if "recurrence" in each.name]
    assert launch.by == "queries" and [variant.most for variant in launch.variants] == [FEW_ROWS, 0]
    few, many = (variant.kernel for variant in launch.variants)
    assert few.startswith("recurrence_step") and many.startswith("recurrence_prompt")


@pytest.mark.parametrize("target", ["a100", "l40s", "h200", "b200"])
@pytest.mark.parametrize("name", [name for name in SHAPES if "scan" not in name and "256" not in name])
def test_prompts_compile_without_spills(name: str, target: str, compiled: Record) -> None:
    prompt = prompt_spec(aligned_spec(name), TARGETS[target].multiprocessors)
    assert prompt
    assert compiled(prompt.kernel(TARGETS[target].capability), TARGETS[target].capability).spill_bytes == 0
