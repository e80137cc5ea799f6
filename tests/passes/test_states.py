"""Operators with states become operators of a step: any division of a text into steps gives the same values."""

from __future__ import annotations

import json

import pytest
import torch

from qcompile import check
from qcompile.codegen.lower import lower
from qcompile.codegen.packing import WeightTable
from qcompile.codegen.state_calls import ConvStep, RecurrenceStep
from qcompile.errors import PassError, UsageError
from qcompile.formats.states import (
    ALIGNMENT,
    BLOCK_TOKENS,
    LOG_TOKENS,
    STATE_FORMATS,
    ConvState,
    RecurrenceState,
    StateFormat,
    StateLayout,
)
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import apply
from qcompile.passes.cache import Cache
from qcompile.passes.fuse import Fuse
from qcompile.passes.merge import Merge
from qcompile.passes.plan_memory import PlanMemory
from qcompile.passes.quantize import Quantize
from tests.support.graphs import decoder, recurrent, sequence_inputs, step_inputs

EXACT = 1e-6
"""The step does the same as the whole text, but for the float32 rounding of what its linears and its cache hold."""

SHAPES = {
    "delta": {},
    "by key": {"by_key": True, "rates": ""},
    "selective scan": {"heads": 6, "key_heads": 1, "value_dim": 1, "rates": "keys", "delta": False},
    "odd": {"heads": 3, "key_heads": 3, "key_dim": 5, "value_dim": 7, "width": 2, "gain": False, "bias": False},
    "no attention": {"attention": False, "layers": 1},
}


def quantized(graph: Graph) -> Graph:
    for rewrite in (AssignPrecision("f32", "f32"), Merge(), Quantize()):
        graph = apply(rewrite, graph).graph
    return graph


def cached(graph: Graph, states: str = "f32") -> Graph:
    return apply(Cache("kv32", states), quantized(graph)).graph


def run_in_steps(graph: Graph, ids: torch.Tensor, cuts: list[int], certain: list[int] | None = None) -> torch.Tensor:
    """Logits of ids [B, T] in steps that end at `cuts`; step i takes the first certain[i] positions as final."""
    logits, cache, states = [], None, None
    for index, (start, end) in enumerate(zip([0, *cuts], cuts, strict=False)):
        final = None if certain is None else certain[index]
        inputs = step_inputs(ids[:, start:end], cache, graph, start, states, final)
        if cache is None:
            inputs = [t.double() if t.is_floating_point() else t for t in inputs]
        new, cache, states = graph.run(*inputs, dtype=torch.float64)
        logits.append(new.view(len(ids), end - start, -1))
    return torch.cat(logits, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_any_division_into_steps_gives_the_logits_of_the_whole_text(shape: str) -> None:
    graph = recurrent(**SHAPES[shape])
    ids, positions = sequence_inputs(11)
    wanted = quantized(graph).run(ids, positions, dtype=torch.float64)
    stepped = cached(graph)
    for cuts in ([11], [1, 2, 3, 4, 11], [5, 6, 11]):
        result = run_in_steps(stepped, ids, cuts)
        assert check.max_relative_error(result, wanted) < EXACT, cuts


@pytest.mark.parametrize("shape", SHAPES)
def test_positions_that_are_not_certain_can_be_computed_again(shape: str) -> None:
    graph = recurrent(**SHAPES[shape])
    stepped = cached(graph)
    ids, positions = sequence_inputs(11)
    wanted = quantized(graph).run(ids, positions, dtype=torch.float64)
    wrong = ids.clone()
    wrong[:, 5:] = (ids[:, 5:] + 1) % 50
    inputs = step_inputs(ids[:, :4], None, stepped)
    inputs = [t.double() if t.is_floating_point() else t for t in inputs]
    _, cache, states = stepped.run(*inputs, dtype=torch.float64)
    # Token 4 and rejected drafts; then token 5 with a draft of another kind, that leaves the base alone; then the rest.
    steps = [(wrong, 4, 9, 5), (wrong, 5, 6, 0), (ids, 5, 7, 6), (ids, 7, 11, 11)]
    for text, start, end, certain in steps:
        new, cache, states = stepped.run(
            *step_inputs(text[:, start:end], cache, stepped, start, states, certain), dtype=torch.float64
        )
        if text is ids:
            result = new.view(2, end - start, -1)
            assert check.max_relative_error(result, wanted[:, start:end]) < EXACT, (start, end)


@pytest.mark.parametrize("states", ["bf16", "int8"])
@pytest.mark.parametrize("shape", ["delta", "by key"])
def test_states_in_fewer_bits_do_not_depend_on_steps(shape: str, states: str) -> None:
    """Nor on what is not certain: the text is rounded after position 7, wherever steps end."""
    graph = recurrent(**SHAPES[shape])
    ids, positions = sequence_inputs(11)
    exact = quantized(graph).run(ids, positions, dtype=torch.float64)
    stepped = cached(graph, states)
    wanted = run_in_steps(stepped, ids, [11])
    assert (
        check.max_relative_error(wanted[:, :8], exact[:, :8]) < EXACT < check.max_relative_error(wanted, exact) < 0.05
    )
    for cuts, certain in (([1, 2, 3, 4, 11], None), ([5, 8, 9, 11], None), ([4, 9, 11], [0, 4, 9])):
        assert check.max_relative_error(run_in_steps(stepped, ids, cuts, certain), wanted) < EXACT, cuts


def test_states_that_would_gain_nothing_in_fewer_bits_are_refused() -> None:
    refused = (
        (recurrent(**SHAPES["selective scan"]), "node linear_recurrence: states of bf16: a state of one value feature"),
        (recurrent(key_dim=1), "states of bf16: a step would read and write 1,369 bytes, in f32 512"),
        (decoder(), "states of bf16: the model has no recurrence"),
    )
    for graph, reason in refused:
        with pytest.raises(PassError, match=reason):
            cached(graph, "bf16")
    with pytest.raises(UsageError, match=r"cache.states=fp8 is unknown; there are f32, bf16, int8"):
        Cache(states="fp8")
    assert Cache("kv_hier", "bf16").for_draft() == Cache("kv_hier4", "bf16")


def test_a_sequence_at_position_0_ignores_its_slot() -> None:
    graph = cached(recurrent())
    ids, _ = sequence_inputs(6)
    inputs = [t.double() if t.is_floating_point() else t for t in step_inputs(ids, None, graph)]
    assert inputs[-1].isnan().all()
    assert graph.run(*inputs, dtype=torch.float64)[0].isfinite().all()


def test_a_model_without_states_keeps_its_inputs() -> None:
    assert [str(node.target) for node in cached(decoder()).inputs][-1] == "step_cache"


def test_a_model_without_attention_has_a_cache_of_no_layers() -> None:
    graph = cached(recurrent(attention=False))
    shapes = {str(node.target): tuple(node.meta["val"].shape) for node in graph.inputs}
    assert shapes["step_cache"][0] == 0


def test_a_model_with_neither_is_refused() -> None:
    graph = decoder(layers=0)
    with pytest.raises(PassError, match="no attention and no state"):
        cached(graph)


def test_parts_of_a_slot_do_not_overlap() -> None:
    recurrence = RecurrenceState(heads=3, key_heads=1, key_dim=5, value_dim=7, by_key=True)
    base, state, keys, updates, decay, end = recurrence.places
    assert state - base >= 21 and keys - state >= 105 and updates - keys >= 5 * LOG_TOKENS
    assert decay - updates >= 21 * LOG_TOKENS and end - decay >= 15 * LOG_TOKENS
    layout = StateLayout((ConvState(6, 4), recurrence, ConvState(3, 2)))
    assert layout.offsets == (0, layout.layers[0].size, layout.layers[0].size + end)
    assert not any(place % ALIGNMENT for place in (*recurrence.places, *layout.offsets, layout.slot_numbers))
    assert layout.layers[0].size >= 6 * (3 + LOG_TOKENS)


@pytest.mark.parametrize("stored", ["bf16", "int8"])
def test_parts_of_a_slot_with_a_state_in_fewer_bits(stored: StateFormat) -> None:
    recurrence = RecurrenceState(heads=3, key_heads=1, key_dim=5, value_dim=7, by_key=True, stored=stored)
    base, state, keys, updates, decay, end = recurrence.places
    scales = recurrence.scales or state
    assert scales - base >= 21 and state - scales >= 21 * (stored == "int8") and 4 * (keys - state) >= 105
    assert 4 * (keys - state) < 105 * STATE_FORMATS[stored] + 4 * ALIGNMENT
    entries = LOG_TOKENS + BLOCK_TOKENS
    assert updates - keys >= 5 * entries and decay - updates >= 21 * entries and end - decay >= 15 * entries
    assert not any(place % ALIGNMENT for place in (*recurrence.places, scales))
    with pytest.raises(ValueError, match="stored in several formats"):
        StateLayout((recurrence, RecurrenceState(3, 1, 5, 7, True)))


@pytest.mark.parametrize("shape", SHAPES)
def test_lowering_places_every_layer_in_the_slot(shape: str) -> None:
    graph = cached(recurrent(**SHAPES[shape]))
    for rewrite in (Fuse(), PlanMemory()):
        graph = apply(rewrite, graph).graph
    program = lower(graph, WeightTable())
    calls = [call for call in program.calls if isinstance(call, ConvStep | RecurrenceStep)]
    assert [call.state for call in calls] == list(program.states.offsets)
    assert [call.layer for call in calls] == list(program.states.layers)
    assert json.loads(program.to_json())["states"]["slot_bytes"] == 4 * program.states.slot_numbers
