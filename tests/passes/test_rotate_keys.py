"""Rotating queries and keys keeps the function, rounds keys better, and kernels match the references.

Also with centered keys (center_keys): the same operator subtracts their mean.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qcompile import check, pipeline, recipes
from qcompile.calibration import Calibration
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import Pass, apply, run_passes
from qcompile.passes.cache import Cache
from qcompile.passes.center_keys import CenterKeys
from qcompile.passes.fuse import Fuse
from qcompile.passes.merge import Merge
from qcompile.passes.quantize import Quantize
from qcompile.passes.rotate_keys import RotateKeys
from qcompile.passes.schedule import configure
from tests.support.cases import first
from tests.support.graphs import decoder, logits_whatever_the_step, loss_of_keys, sequence_inputs, step_inputs

TEXT = torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(2))


def calibrated(graph: Graph) -> Graph:
    graph.calibration = Calibration(TEXT)
    return graph


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize(
    "shape", [{}, {"bias": True, "window": 3}, {"rotary": False}, {"head_norm": "heads"}, {"head_dim": 48}]
)
def test_the_function_stays(shape: dict[str, bool | int | str], text: bool) -> None:
    before = decoder(**shape)  # type: ignore[arg-type]
    result = apply(RotateKeys(), apply(CenterKeys(), calibrated(before)).graph if text else before)
    assert result.fired == 2 and not result.notes
    turned = result.graph.calls("rotate_heads")
    assert len(turned) == 4 and [node.args[1] is not None for node in turned] == [False, text] * 2
    assert check.equivalent(result.graph, before, sequence_inputs()) < 1e-6  # the mean is stored in float32


def test_small_heads_are_left_and_named() -> None:
    graph = decoder(head_dim=8)
    result = apply(RotateKeys(), graph)
    assert result.fired == 0 and "heads of 8 features" in result.notes[0]
    assert check.equivalent(result.graph, graph, sequence_inputs()) == 0


def test_keys_with_loud_channels_round_with_less_error() -> None:
    graph = calibrated(decoder())
    for name, factor in (("k0", 8.0), ("q0", 1 / 8)):
        loud = graph.weights[name].clone().unflatten(0, (-1, 16))
        loud[:, [3, 11]] *= factor
        graph.weights.add_tensor(name, loud.flatten(0, 1))

    assert loss_of_keys(apply(RotateKeys(), graph).graph, TEXT) < 0.6 * loss_of_keys(graph, TEXT)


def through(graph: Graph, *passes: Pass) -> Graph:
    for rewrite in passes:
        graph = apply(rewrite, graph).graph
    return graph


def test_fuse_takes_the_turn_along() -> None:
    head = (CenterKeys(), RotateKeys(), AssignPrecision(), Merge(), Quantize(), Cache("kv8"))
    before = through(calibrated(decoder()), *head)
    after = through(before, Fuse())
    assert len(after.calls("rope_append")) == 2 and not after.calls("rotate_heads", "kv_append")
    ids, _ = sequence_inputs(9)
    assert torch.equal(after.run(*step_inputs(ids, None, after))[0], before.run(*step_inputs(ids, None, before))[0])
    queries = before.calls("rotate_heads")[0]
    queries.replace_all_uses_with(queries.args[0])  # type: ignore[arg-type]
    after = through(before, Fuse())  # keys rotated but not queries: by operators of their own
    assert len(after.calls("rope_append")) == 2 and after.calls("rope_heads") and not after.calls("rotate_heads")
    assert torch.equal(after.run(*step_inputs(ids, None, after))[0], before.run(*step_inputs(ids, None, before))[0])


OPTIONS = {f"{name}.enabled": "true" for name in ("center_keys", "smooth_attention", "rotate_keys")}


EVERY_SIZE = [(format, head_dim) for format in ("kv32", "kv4", "kv_hier") for head_dim in (16, 32, 48)]


@pytest.mark.parametrize(("format", "head_dim"), first((("kv32", 32), ("kv4", 16), ("kv_hier", 48)), EVERY_SIZE))
def test_kernel_equals_reference_whatever_the_step(format: str, head_dim: int, tmp_path: Path) -> None:
    graph = decoder(head_dim=head_dim)
    options = {**OPTIONS, "cache.format": format}
    pipeline.build(graph, tmp_path / "out", recipe="f32", options=options, calib=TEXT)
    passes = configure(recipes.get_recipe("f32").settings(), options)
    step = run_passes(calibrated(graph), passes[1:])[0][-1]
    ids, positions = sequence_inputs(41, seed=2)  # with seed 1, a value of 16 rounds to the other bf16 neighbor
    reference = step.run(*step_inputs(ids, None, step))[0].view(2, 41, -1)
    logits = logits_whatever_the_step(tmp_path / "out", ids)
    # kv4: a code may round the other way. kv_hier: no group is full yet, but cached values are rounded to bf16, and a
    # value of 48 that rounds the other way moves logits by up to 2^-8 / 48. One or two of 20,000 cached values do;
    # which ones depends on the order of sums of the machine. kv32: float32 sums in another order.
    tolerance = {"kv4": 0.05, "kv_hier": 3 * 2**-8 / 48, "kv32": 2e-5}[format]
    assert check.max_relative_error(logits, reference) < tolerance
    if format == "kv32":
        assert check.max_relative_error(logits, graph.run(ids, positions)) < 1e-5
