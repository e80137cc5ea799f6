"""Queries and keys multiplied after their rotation: by weights per feature, queries also by functions of position."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qcompile
from qcompile import check
from qcompile.artifact import export
from qcompile.errors import UnsupportedError
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import apply
from qcompile.passes.cache import Cache
from qcompile.passes.fuse import Fuse
from qcompile.passes.merge import Merge
from qcompile.passes.quantize import Quantize
from tests.support import modules
from tests.support.cases import first
from tests.support.graphs import step_inputs
from tests.support.raising import inputs, raise_module, used

HEADS, SIZE, HIDDEN = 3, 20, 64
Factor = Callable[[Tensor, Tensor], Tensor]


def logarithm(place: Tensor, ids: Tensor, every: int = 5) -> Tensor:
    return 1 + 0.3 * torch.log(1 + torch.floor(place / every))


class Scaled(nn.Module):
    """Attention of 3 heads with one KV head: rotated, normalized, scaled per feature, times `factor` of positions."""

    def __init__(
        self,
        factor: Factor | None = logarithm,
        norm: bool = True,
        weights: str = "qk",
        shape: int = 1,
        size: int = SIZE,
    ) -> None:
        super().__init__()
        self.factor, self.norm, self.weights, self.size = factor, norm, weights, size
        self.embed, self.head = nn.Embedding(modules.VOCAB, HIDDEN), nn.Linear(HIDDEN, modules.VOCAB)
        self.qkv, self.out = nn.Linear(HIDDEN, 5 * size), nn.Linear(HEADS * size, HIDDEN)
        self.q, self.k = (nn.Parameter(torch.ones(shape, size) if shape > 1 else torch.ones(size)) for _ in "qk")

    def forward(self, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1], device=ids.device)
        angle = place[:, None] * 50.0 ** -(torch.arange(0, self.size, 2, device=ids.device) / self.size)
        x = self.embed(ids)
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (5, self.size)).split((HEADS, 1, 1), 2))
        q, k = (self.rotated(t, angle, name) for t, name in ((q, "q"), (k, "k")))
        if self.factor is not None:
            factor = self.factor(place, ids)
            q = q * (factor.view(1, 1, ids.shape[1], 1) if factor.dim() == 1 else factor)
        k, v = (t.expand(-1, HEADS, -1, -1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))

    def rotated(self, x: Tensor, angle: Tensor, name: str) -> Tensor:
        a, b = x.chunk(2, -1)
        x = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) if self.norm else x
        weight: Tensor = getattr(self, name)
        return x * (weight if weight.dim() == 1 else weight[:, None]) if name in self.weights else x


def scaled(**options: object) -> nn.Module:
    return modules.randomized(Scaled(**options))  # type: ignore[arg-type]


def exact(graph: Graph, module: nn.Module) -> bool:
    ids, positions = inputs(tokens=33)
    with torch.no_grad():
        return check.max_relative_error(graph.run(ids, positions), module(ids)) < 3e-6


def stepped(graph: Graph) -> Graph:
    for rewrite in (AssignPrecision(), Merge(), Quantize(), Cache("kv32")):
        graph = apply(rewrite, graph).graph
    return graph


def step_logits(graph: Graph, tokens: int = 33) -> Tensor:
    return graph.run(*step_inputs(inputs(tokens=tokens)[0], None, graph))[0]


# ---- weights per feature -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "norm"), first((("k", True), ("q", False)), [("qk", True), ("k", True), ("q", False), ("qk", False)])
)
def test_weights_behind_the_rotation_are_those_of_queries(weights: str, norm: bool) -> None:
    module = scaled(factor=None, norm=norm, weights=weights)
    with torch.no_grad():
        module.k[3] = 0.0  # type: ignore[index]
    graph = raise_module(module)
    attention = graph.calls("attention")[0]
    assert used(graph)["mul"] == 1 and attention.args[0] is graph.calls("mul")[0]
    assert attention.args[1] in graph.calls("rope")
    assert exact(graph, module)


def test_weights_that_differ_by_head() -> None:
    module = scaled(factor=None, weights="q", shape=HEADS)
    graph = raise_module(module)
    assert used(graph)["mul"] == 1 and exact(graph, module)


# ---- functions of the position ------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
def test_functions_of_the_position_are_tables(norm: bool) -> None:
    module = scaled(norm=norm, weights="qk" if norm else "")
    graph = raise_module(module)
    assert used(graph)["embedding"] == 2 and exact(graph, module)
    ids, positions = inputs(tokens=33)
    later = graph.run(ids, positions + 20)  # positions count, not indices
    assert check.max_relative_error(later, graph.run(ids, positions)) > 1e-3


@pytest.mark.parametrize("factor", [lambda p, ids: logarithm(p, ids, 64), lambda p, ids: 2 + 0 * (1 + p).log()])
def test_what_is_the_same_at_all_positions_costs_nothing(factor: Factor) -> None:
    module = scaled(factor=factor, norm=False, weights="")
    graph = raise_module(module)
    assert not used(graph)["mul"] and used(graph)["embedding"] == 1 and exact(graph, module)


SCALE, SHIFT = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.0, 0.3, -0.2])
EACH = torch.linspace(0.5, 2.0, SIZE)
BY_HEAD: dict[str, Factor] = {
    "heads first": lambda p, ids: (SCALE[:, None] * (p + 1.0).log() + SHIFT[:, None])[None, :, :, None],
    "heads last": lambda p, ids: ((p + 1.0).log()[:, None] * SCALE + SHIFT).t()[None, :, :, None],
    "no shift": lambda p, ids: (SCALE[None, :, None] * (p + 1.0).log()[None, None]).unsqueeze(-1),
}


@pytest.mark.parametrize(("case", "norm"), [(case, case == "no shift") for case in BY_HEAD])
def test_heads_with_factors_of_their_own(case: str, norm: bool) -> None:
    module = scaled(factor=BY_HEAD[case], norm=norm, weights="")
    graph = raise_module(module)
    assert used(graph)["rope"] == 2 and used(graph)["embedding"] == 2 and exact(graph, module)
    ids, positions = inputs(tokens=33)
    moved = graph.run(ids, positions + 20)
    assert check.max_relative_error(moved, graph.run(ids, positions)) > 1e-3


@pytest.mark.parametrize(
    "factor",
    [
        lambda p, ids: ((p + 1.0).log()[:, None] * EACH)[None, None],
        lambda p, ids: EACH * (ids.float().log1p())[:, None, :, None],
    ],
)
def test_features_with_factors_of_their_own_are_refused(factor: Factor) -> None:
    with pytest.raises(UnsupportedError):
        raise_module(scaled(factor=factor, norm=False, weights=""))


OTHERS: dict[str, Factor] = {
    "number of tokens": lambda p, ids: (p / ids.shape[1]).exp(),
    "token ids": lambda p, ids: ids[0].float().log1p(),
    "places before": lambda p, ids: p.sqrt().cumsum(0),
    "the other way round": lambda p, ids: p.sqrt().flip(0),
    "features too": lambda p, ids: (p[:, None] * torch.arange(1, SIZE + 1, device=p.device)).sqrt(),
}


@pytest.mark.parametrize("case", first(("token ids", "places before", "features too"), OTHERS))
def test_what_is_no_function_of_the_position_is_refused(case: str) -> None:
    with pytest.raises(UnsupportedError):
        raise_module(scaled(factor=OTHERS[case]))


# ---- one kernel ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "weights", "factor"), [(True, "qk", logarithm), (False, "", logarithm), (True, "k", None)]
)
def test_what_queries_are_multiplied_with_is_fused(norm: bool, weights: str, factor: Factor | None) -> None:
    graph = raise_module(scaled(norm=norm, weights=weights, factor=factor))
    before = stepped(graph)
    fused = apply(Fuse(), before).graph
    assert used(fused)["rope_append"] == 1 and not used(fused)["mul"] and used(fused)["embedding"] == 1
    assert not used(fused)["gather_features"]
    table, weight = fused.calls("rope_append")[0].args[-2:]
    assert (table is None, weight is None) == (factor is None, not weights)
    assert check.max_relative_error(step_logits(fused), step_logits(before)) < 3e-6


def test_a_factor_ahead_of_a_norm_stays_there() -> None:
    graph = stepped(raise_module(scaled(norm=False, weights="")))
    rope = graph.calls("rope")[0]
    with graph.fx.inserting_before(rope):
        rope.update_arg(0, graph.call("rms_norm", rope.args[0], None, 1e-6))
    fused = apply(Fuse(), graph).graph
    assert used(fused)["mul"] == used(fused)["rope_append"] == 1
    assert check.max_relative_error(step_logits(fused), step_logits(graph)) < 3e-6


def test_kernels(tmp_path: Path) -> None:
    module = scaled()
    qcompile.build(module, tmp_path / "out", recipe="f32", max_position=64, example_inputs=inputs()[:1])
    exported = export.Sequence(tmp_path / "out")
    with qcompile.load(tmp_path / "out") as llm, torch.no_grad():
        for tokens in (1, 9, 48):
            ids = inputs(tokens=tokens)[0]
            expected = module(ids)
            for logits in (llm.logits(ids), llm.logits(ids, chunk=5), torch.stack([exported(row) for row in ids])):
                assert check.max_relative_error(logits, expected) < 1e-5
