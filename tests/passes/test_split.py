"""Split: checkpoints that store query, key and value as one matrix compile like those that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qcompile import check, recipes
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import apply, run_passes
from qcompile.passes.merge import Merge
from qcompile.passes.schedule import configure
from qcompile.passes.split import Split
from tests.support.graphs import decoder, sequence_inputs


def picking(like: torch.Tensor) -> torch.Tensor:
    """A weight [N, K] that selects an input for each output, times a power of two: sums are exact in any order.

    The order of BLAS's sums depends on the machine and on the number of outputs.
    """
    generator = torch.Generator().manual_seed(like.numel())
    inputs = torch.randint(0, like.shape[1], (len(like), 1), generator=generator)
    factors = 2.0 ** torch.randint(-3, 3, (len(like), 1), generator=generator)
    return torch.zeros_like(like).scatter_(1, inputs, factors)


def fused(*, bias: bool = False, spare: int = 0, exact: bool = True) -> Graph:
    """A decoder in which linears over one value are one linear with slices, with `spare` unread rows between them.

    `exact`: their weights are from `picking`, so that products are exact.
    """
    graph = decoder(bias=bias)
    for source in graph.calls("rms_norm")[:-1]:
        linears = [user for user in source.users if len(user.args) > 1]
        for name in (str(node.args[1].target) for node in linears if exact):  # type: ignore[union-attr]
            graph.weights.add_tensor(name, picking(graph.weights[name]))
        rows, place, parts = [], 0, []
        for node in linears:
            weights = [graph.weights[str(weight.target)] for weight in node.args[1:]]  # type: ignore[union-attr]
            rows.append([torch.cat((w, w.new_ones(spare, *w.shape[1:]))) for w in weights])
            parts.append((node, place, place + len(weights[0])))
            place += len(rows[-1][0])
        made = []
        for name, columns in zip(("weight", "bias"), zip(*rows, strict=True), strict=False):
            graph.weights.add_tensor(f"{source.name}.{name}", torch.cat(columns))
            made.append(graph.weight(f"{source.name}.{name}"))
        with graph.fx.inserting_after(source):
            joined = graph.call("linear", source, *made)
        for node, start, stop in parts:
            with graph.fx.inserting_before(node):
                graph.replace(node, graph.call("slice_features", joined, start, stop))
    graph.erase_dead()
    return graph


@pytest.mark.parametrize(("bias", "spare"), [(False, 0), (True, 0), (True, 3)])
def test_slices_become_linears(bias: bool, spare: int) -> None:
    before = fused(bias=bias, spare=spare)
    assert len(before.calls("linear")) == 2 * 4 + 1
    result = apply(Split(), before)
    assert (result.fired, result.notes) == (4, ())
    assert not result.graph.calls("slice_features")
    assert len(result.graph.calls("linear")) == 2 * 7 + 1
    assert check.equivalent(result.graph, before, sequence_inputs()) == 0


def test_merge_reads_the_weight_that_was_cut_where_nothing_changed_it() -> None:
    before = fused(bias=True)
    merged = apply(Merge(), apply(AssignPrecision(), apply(Split(), before).graph).graph).graph
    assert not merged.calls("concat_rows")
    assert len([n for n in merged.calls("linear") if n.args[1].op == "get_attr"]) == 2 * 3 + 1  # type: ignore[union-attr]
    assert check.equivalent(merged, before, sequence_inputs()) == 0


def test_merge_does_not_take_a_weight_of_which_rows_are_missing() -> None:
    before = fused(spare=3)
    merged = apply(Merge(), apply(AssignPrecision(), apply(Split(), before).graph).graph).graph
    assert len(merged.calls("concat_rows")) == 2
    assert check.equivalent(merged, before, sequence_inputs()) == 0


@pytest.mark.parametrize("recipe", ["qserve", "w4a4-g128", "w4a16"])
def test_recipes_do_not_see_how_weights_are_stored(recipe: str) -> None:
    """Keys are scaled, values rotated and gates fused as with separate q, k and v, with the same bits as a result."""
    apart, logits = decoder(), []
    passes = configure(recipes.get_recipe(recipe).settings(), {})[1:]
    for graph in (apart, fused(exact=False)):
        made, records = run_passes(graph, passes)
        quantized = [g for g in made if g.stage == "quantize"][-1]
        logits.append(quantized.run(*sequence_inputs()))
        fired = {record.name: record.fired for record in records}
        assert fired.get("smooth_attention", 2) == 2
    assert torch.equal(*logits)


def test_a_linear_that_is_read_whole_stays() -> None:
    before = fused()
    joined: Any = before.calls("linear")[0]
    with before.fx.inserting_after(joined):
        whole = before.call("unary", joined, "silu")
    first = next(iter(user for user in joined.users if user is not whole))
    with before.fx.inserting_before(first.next):
        part = before.call("slice_features", whole, 0, first.meta["val"].shape[-1])
        both = before.call("add", first, part)
    first.replace_all_uses_with(both, delete_user_cb=lambda user: user is not both)
    result = apply(Split(), before)
    assert result.fired == 3
    assert f"node {joined.name}: " in result.notes[0] and "reads it whole" in result.notes[0]
    assert check.equivalent(result.graph, before, sequence_inputs()) == 0


def test_slices_that_overlap_stay() -> None:
    before = fused()
    joined = before.calls("linear")[0]
    first = next(iter(joined.users))
    width = first.meta["val"].shape[-1]
    with before.fx.inserting_before(first.next):
        other = before.call("slice_features", joined, 8, 8 + width)
        both = before.call("add", first, other)
    first.replace_all_uses_with(both, delete_user_cb=lambda user: user is not both)
    result = apply(Split(), before)
    assert result.fired == 3 and "overlap at feature 8" in result.notes[0]
    assert check.equivalent(result.graph, before, sequence_inputs()) == 0
