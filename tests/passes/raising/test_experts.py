"""One expert for each token: torch has no dimension of slots then, and routers may take the best score as they like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qcompile
from qcompile import check, ops, pipeline, recipes
from qcompile.checkpoints import frontend
from qcompile.errors import UnsupportedError
from qcompile.graph import Graph
from qcompile.passes.base import apply, run_passes
from qcompile.passes.raising import Raise
from qcompile.passes.schedule import configure
from tests.codegen.cpu.test_experts import TOLERANCE
from tests.support import modules
from tests.support.cases import first
from tests.support.families import COMMON, EXPERTS, LATENT, save
from tests.support.graphs import sequence_inputs, step_inputs
from tests.support.raising import inputs, raise_module, used

COUNT, WIDTH, INNER = 5, 16, 12

Forward = Callable[[Any, Tensor, Tensor], Tensor]
"""The experts' part of a model: the module, inputs [.., WIDTH] and scores [.., experts] -> [.., WIDTH]."""


class Experts(nn.Module):
    """Logits of an embedding plus what `run_experts` makes of it; its rows are [tokens] if `flat`, or [B, T]."""

    def __init__(self, run_experts: Forward, count: int = COUNT, flat: bool = True, inner: int = INNER) -> None:
        super().__init__()
        self.run_experts, self.flat = run_experts, flat
        self.embed, self.router = nn.Embedding(modules.VOCAB, WIDTH), nn.Linear(WIDTH, count)
        self.up, self.down = (nn.Parameter(torch.zeros(count, *size)) for size in ((inner, WIDTH), (WIDTH, inner)))
        self.gates = nn.Parameter(torch.zeros(count, 2 * inner, WIDTH))
        self.bias = nn.Parameter(torch.zeros(count, inner))
        self.head = nn.Linear(WIDTH, modules.VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        rows = x.flatten(0, 1) if self.flat else x
        y = self.run_experts(self, rows, self.router(rows).softmax(-1))
        return self.head(x + y.view(x.shape))


def mlp(m: Any, x: Tensor, index: Tensor) -> Tensor:
    """Each row of `x` through the two linears of its expert."""
    inside = (m.up[index] @ x.unsqueeze(-1)).squeeze(-1) + m.bias[index]
    return (m.down[index] @ F.silu(inside).unsqueeze(-1)).squeeze(-1)


# ---- one expert in the ways that models write it --------------------------------------------------------


def as_slots(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """As with several experts: pairs, weights of pairs, and a sum over slots."""
    factor, index = scores.topk(1, -1)
    y = mlp(m, x.repeat_interleave(1, 0), index.reshape(-1)) * factor.reshape(-1)[:, None]
    return y.view(-1, 1, WIDTH).sum(1)


def by_best(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    factor, index = scores.max(-1)
    return mlp(m, x, index) * factor.unsqueeze(-1)


def by_place(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    return mlp(m, x, scores.argmax(-1)) * scores.amax(-1, keepdim=True)


def squeezed(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    factor, index = scores.topk(1, -1)
    return mlp(m, x, index.squeeze(-1)) * factor


def selected(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    index = scores.topk(1, -1).indices
    return mlp(m, x, index[..., 0]) * scores.gather(-1, index)


def read_at_the_best(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    index = scores.argmax(-1)
    return mlp(m, x, index) * scores.gather(-1, index.unsqueeze(-1))


def normalized(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    factor, index = scores.topk(1, -1)
    return mlp(m, x, index[:, 0]) * (factor / factor.sum(-1, keepdim=True))


def unweighted(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    return mlp(m, x, scores.argmax(-1))


def weighted_inputs(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    factor, index = scores.topk(1, -1)
    return mlp(m, x * factor, index[:, 0])


def weighted_twice(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    factor, index = scores.topk(1, -1)
    return mlp(m, x, index[:, 0]) * factor * torch.sigmoid(factor) * 0.5


def weighted_after_the_sum(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    factor, index = scores.topk(1, -1)
    return mlp(m, x, index[:, 0]).view(-1, 1, WIDTH).sum(1) * factor


def rows_on_the_left(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """Weights are [experts, inputs, outputs]; gate and up are halves of one matrix."""
    factor, index = scores.max(-1, keepdim=True)
    index = index.reshape(-1)
    both = torch.bmm(x.unsqueeze(1), m.gates.transpose(1, 2).contiguous()[index]).squeeze(1)
    gate, up = both.chunk(2, -1)
    return (m.down[index] @ (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1) * factor


def halves(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    factor, index = scores.topk(1, -1)
    gate, up = (m.gates[index[:, 0]] @ x.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    y = (m.down[index[:, 0]] @ (F.silu(gate.clamp(max=0.5)) * (up + 1)).unsqueeze(-1)).squeeze(-1)
    return y * factor


def interleaved(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    factor, index = scores.topk(1, -1)
    both = (m.gates[index[:, 0]] @ x.unsqueeze(-1)).squeeze(-1)
    y = (m.down[index[:, 0]] @ (F.silu(both[:, ::2]) * both[:, 1::2]).unsqueeze(-1)).squeeze(-1)
    return y * factor


def normed(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """What reads the result is no operator on slots."""
    factor, index = scores.topk(1, -1)
    return F.rms_norm(mlp(m, x, index[:, 0]), (WIDTH,), m.router.weight[0], 1e-3) * factor


def in_turn(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """Experts that read the results of others."""
    factor, index = scores.topk(1, -1)
    return mlp(m, mlp(m, x, index[:, 0]), index[:, 0]) * factor


WRITTEN: tuple[Forward, ...] = (
    *(as_slots, by_best, by_place, squeezed, selected, read_at_the_best, normalized, unweighted, weighted_inputs),
    *(weighted_twice, weighted_after_the_sum, rows_on_the_left, halves, interleaved, normed, in_turn),
)
IN_SEQUENCES: tuple[Forward, ...] = (by_best, by_place, squeezed, selected, read_at_the_best, unweighted)
"""Those that need no flattened rows."""


def right(module: nn.Module, graph: Graph) -> None:
    for batch, tokens in ((1, 1), (2, 9), (3, 48)):
        ids, positions = inputs(batch, tokens)
        with torch.no_grad():
            assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 5e-6


@pytest.mark.parametrize("count", first((COUNT,), [1, 2, COUNT]))
@pytest.mark.parametrize("written", WRITTEN, ids=lambda function: function.__name__)
def test_one_expert(written: Forward, count: int) -> None:
    module = modules.randomized(Experts(written, count))
    graph = raise_module(module)
    counts = used(graph)
    assert counts["top_k"] == 1 and counts["expert_linear"] in (2, 3, 4)
    assert counts["combine"] >= 1 and counts["merge_heads"] == counts["slice_features"] == 0
    assert all(node.meta["val"].shape[2] == 1 for node in graph.calls("expert_linear"))
    right(module, graph)


@pytest.mark.parametrize("written", IN_SEQUENCES, ids=lambda function: function.__name__)
def test_one_expert_of_rows_in_sequences(written: Forward) -> None:
    module = modules.randomized(Experts(written, flat=False))
    graph = raise_module(module)
    assert used(graph)["expert_linear"] == 2
    right(module, graph)


def test_experts_with_one_feature_inside_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"node \w+: matmul multiplies the weights of chosen experts"):
        raise_module(modules.randomized(Experts(as_slots, inner=1)))


def test_weights_are_applied_where_slots_are_summed() -> None:
    """The same operators as with several experts, so that later passes find what they look for."""
    graph = raise_module(modules.randomized(Experts(as_slots)))
    (combine,) = graph.calls("combine")
    down, factor = combine.args
    assert [ops.name_of(node.target) for node in (down, factor)] == ["expert_linear", "pick"]
    assert down.args[0].meta["val"].shape[2:] == (1, INNER)
    assert used(graph)["scale_slots"] == 0


def test_one_token_of_one_sequence_as_the_example() -> None:
    """torch.export treats sizes of 1 as constants, so modules are traced with other sizes."""
    module = modules.randomized(Experts(as_slots))
    graph = frontend.load(module, example_inputs=inputs(1, 1)[:1], max_position=64)
    right(module, apply(Raise(), graph).graph)


# ---- what resembles it ---------------------------------------------------------------------------------


def by_second(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    factor, index = scores.topk(2, -1)
    return mlp(m, x, index[:, 1]) * factor[:, 1:]


def by_first_of_two(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    return mlp(m, x, scores.topk(2, -1).indices[:, 0])


def of_every_other(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    return mlp(m, x, scores[..., : COUNT // 2].argmax(-1) * 2)


def of_a_row_of_slots(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """The index keeps its dimension, so the weights have four."""
    index = scores.topk(1, -1).indices
    return (m.gates[index][..., :WIDTH, :] @ x[:, None, :, None]).flatten(1)


def by_worst(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    return mlp(m, x, scores.topk(1, -1, largest=False).indices[:, 0])


def by_least(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    return mlp(m, x, scores.argmin(-1))


def of_the_next(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    return mlp(m, x, scores[..., : COUNT - 1].argmax(-1) + 1)


def of_the_token_before(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    index = scores.argmax(-1)
    return mlp(m, x, torch.cat((index[:1], index[:-1])))


def by_all_tokens(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    return mlp(m, x, scores.cumsum(0).argmax(-1))


CHOSEN = "selects weights by another index than all chosen experts"
REFUSED: dict[Forward, str] = {
    by_second: CHOSEN,
    by_first_of_two: CHOSEN,
    of_every_other: CHOSEN,
    of_a_row_of_slots: CHOSEN,
    by_worst: "topk has no counterpart",
    by_least: "argmin has no counterpart",
    of_the_next: "add has no counterpart",
    of_the_token_before: "slice has no counterpart",
    by_all_tokens: "cumsum has no counterpart",
}


@pytest.mark.parametrize("written", REFUSED, ids=lambda function: function.__name__)
def test_another_choice_is_refused(written: Forward) -> None:
    with pytest.raises(UnsupportedError, match=rf"node \w+: .*{REFUSED[written]}"):
        raise_module(modules.randomized(Experts(written)))


def biased(m: Any, x: Tensor, index: Tensor, factor: float, outputs: slice, bias: Tensor) -> Tensor:
    y = factor * (m.up[index] @ x.unsqueeze(-1)).squeeze(-1)[:, outputs] + bias[index]
    return F.pad(y, (0, WIDTH - y.shape[-1]))


def other_biased(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    y = (m.up[scores.argmax(-1)] @ x.unsqueeze(-1)).squeeze(-1) + m.bias[(scores + x[:, :COUNT]).argmax(-1)]
    return F.pad(y, (0, WIDTH - INNER))


def floored(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    factor = scores.topk(2, -1).values
    return mlp(m, x, scores.argmax(-1)) * torch.div(factor, factor.sum(-1, keepdim=True), rounding_mode="floor")[:, :1]


NEARLY: dict[str, Forward] = {
    "a normalized score, rounded down": floored,
    "a scaled output and a bias": lambda m, x, s: biased(m, x, s.argmax(-1), 2.0, slice(None), m.bias),
    "half of the outputs and a bias": lambda m, x, s: biased(m, x, s.argmax(-1), 1.0, slice(6), m.bias[:, :6]),
    "the other half and a bias": lambda m, x, s: biased(m, x, s.argmax(-1), 1.0, slice(6, 12), m.bias[:, :6]),
    "a bias of another choice": other_biased,
    "the score of the second": lambda m, x, s: mlp(m, x, s.argmax(-1)) * s.topk(2, -1).values[:, 1:],
    "a score read at the second": lambda m, x, s: mlp(m, x, s.argmax(-1)) * s.gather(-1, s.topk(2, -1).indices[:, 1:]),
    "scores read at both, reversed": lambda m, x, s: (
        mlp(m, x, s.argmax(-1)) * s.gather(-1, s.topk(2, -1).indices.flip(-1))[:, :1]
    ),
    "scores read at both, by number": lambda m, x, s: (
        mlp(m, x, s.argmax(-1)) * s.gather(-1, s.topk(2, -1).indices[:, torch.tensor([1, 0])])[:, :1]
    ),
    "a sum that keeps its dimension": lambda m, x, s: mlp(m, x, s.argmax(-1)).view(-1, 1, WIDTH).sum(1, keepdim=True),
    "a sum over features": lambda m, x, s: x * mlp(m, x, s.argmax(-1)).sum(-1, keepdim=True),
    "a sum over tokens": lambda m, x, s: x + mlp(m, x, s.argmax(-1)).sum(0, keepdim=True),
    "a sum over everything": lambda m, x, s: x + mlp(m, x, s.argmax(-1)).sum(),
    "a softmax over the only expert": lambda m, x, s: mlp(m, x, s.argmax(-1)) * s.topk(1, -1).values.softmax(-1),
    "a weight of other tokens": lambda m, x, s: mlp(m, x, s.argmax(-1)) * s.amax(0, keepdim=True)[:, :1],
    "inputs of other tokens": lambda m, x, s: mlp(m, x.flip(0), s.argmax(-1)),
    "features in another order": lambda m, x, s: mlp(m, x.flip(-1), s.argmax(-1)),
    "features in a numbered order": lambda m, x, s: mlp(m, x[:, torch.arange(WIDTH).roll(3)], s.argmax(-1)),
    "a factor of features": lambda m, x, s: mlp(m, x, s.argmax(-1)) * m.router.weight[0],
    "results of two choices": lambda m, x, s: mlp(m, x, s.argmax(-1)) + mlp(m, x, (s + x[:, :COUNT]).argmax(-1)),
}


@pytest.mark.parametrize(
    "nearly",
    first(
        (
            *("a normalized score, rounded down", "a bias of another choice", "a score read at the second"),
            *("a sum over features", "a softmax over the only expert", "inputs of other tokens"),
            *("features in another order", "results of two choices"),
        ),
        NEARLY,
    ),
)
def test_what_resembles_it_is_right_or_refused(nearly: str) -> None:
    module = modules.randomized(Experts(NEARLY[nearly]))
    try:
        graph = raise_module(module)
    except UnsupportedError as error:
        assert str(error).startswith(("raise: node ", "Experts cannot be exported"))
        return
    right(module, graph)


def pairs(m: Any, x: Tensor, index: Tensor) -> Tensor:
    """The upward linear of two experts of each token."""
    return torch.bmm(m.up[index.reshape(-1)], x.repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1)


def scaled_before_the_bias(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    index = scores.topk(2, -1).indices
    y = 2 * pairs(m, x, index) + m.bias[index.reshape(-1)]
    return F.pad(y.view(-1, 2, INNER).sum(1), (0, WIDTH - INNER))


def doubled(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    y = pairs(m, x, scores[..., : COUNT // 2].topk(2, -1).indices * 2)
    return F.pad(y.view(-1, 2, INNER).sum(1), (0, WIDTH - INNER))


def reversed_scores(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    index = scores.topk(2, -1).indices
    factor = scores.gather(-1, index[:, torch.tensor([1, 0])])
    y = pairs(m, x, index) * factor.reshape(-1)[:, None]
    return F.pad(y.view(-1, 2, INNER).sum(1), (0, WIDTH - INNER))


@pytest.mark.parametrize("written", [scaled_before_the_bias, doubled, reversed_scores])
def test_what_resembles_two_experts_is_refused(written: Forward) -> None:
    with pytest.raises(UnsupportedError, match=r"node \w+: "):
        raise_module(modules.randomized(Experts(written)))


# ---- families of transformers ----------------------------------------------------------------------------

TOP: dict[str, Any] = COMMON | EXPERTS | {"num_experts_per_tok": 1}
SHARED = {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1}
LIMITED = {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", TOP),  # divides each weight by itself
    "mixtral, all experts": ("mixtral", TOP | {"num_experts_per_tok": 6}),
    "mixtral, two experts": ("mixtral", TOP | {"num_local_experts": 2}),
    "mixtral, both of two experts": ("mixtral", TOP | {"num_local_experts": 2, "num_experts_per_tok": 2}),
    "mixtral, one expert": ("mixtral", TOP | {"num_local_experts": 1}),
    "qwen2_moe": ("qwen2_moe", TOP | SHARED),
    "qwen3_moe": ("qwen3_moe", TOP | {"head_dim": 16, "norm_topk_prob": False}),
    "qwen3_moe, normalized": ("qwen3_moe", TOP | {"head_dim": 16, "norm_topk_prob": True}),
    "olmoe": ("olmoe", TOP),
    "gpt_oss": ("gpt_oss", TOP | {"head_dim": 16, "sliding_window": 8}),  # biases, softmax over the chosen
    "ernie4_5_moe": ("ernie4_5_moe", TOP | {"moe_num_experts": 6, "moe_k": 1, "moe_layer_start_index": 1}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", TOP | {"head_dim": 16, "moe_topk": 1}),
    "deepseek_v2": ("deepseek_v2", TOP | LATENT | LIMITED),
    "deepseek_v3": ("deepseek_v3", TOP | LATENT | {"n_group": 3, "topk_group": 2}),
}


# Families with the same experts as another one, chosen in the same way, are left to the tests of several experts.
@pytest.mark.parametrize(
    "family",
    first(
        (
            "mixtral",
            "mixtral, one expert",
            "mixtral, both of two experts",
            "gpt_oss",
            "deepseek_v2",
            "qwen3_moe, normalized",
        ),
        FAMILIES,
    ),
)
def test_families(family: str, tmp_path: Path) -> None:
    module = save(*FAMILIES[family], tmp_path)
    graph = apply(Raise(), frontend.load(tmp_path)).graph
    counts = used(graph)
    assert counts["expert_linear"] == 3 * counts["combine"] >= 3 and counts["scale_slots"] == 0
    for tokens in (1, 31):
        ids = torch.randint(0, 97, (2, tokens), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = module(ids).logits
        assert check.max_relative_error(graph.run(ids, torch.arange(tokens).expand(2, tokens)), expected) < 5e-6


@pytest.mark.parametrize("family", first(("gpt_oss",), ["mixtral", "gpt_oss"]))
def test_one_expert_takes_the_kernels_of_several(family: str, tmp_path: Path) -> None:
    """On GPUs too, which have no kernels for single operators on slots."""
    kind, settings = FAMILIES[family]
    settings |= {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 128}
    for count in (1, 2):
        save(kind, settings | {"num_experts_per_tok": count}, tmp_path / str(count))
    for target in ("cpu-portable", "h100"):
        one, two = (used(pipeline.plan(tmp_path / str(count), target=target).graphs[-1]) for count in (1, 2))
        assert one == two and one["expert_gemm"] == 4 and one["combine"] == 2
        assert not one.keys() & {"unary", "scale_slots"}


@pytest.mark.parametrize(
    ("family", "recipe"),
    first(
        (("mixtral, one expert", "w4a8"),),
        [("mixtral", "f32"), ("gpt_oss", "w8a8"), ("mixtral, one expert", "w4a8")],
    ),
)
def test_artifacts(family: str, recipe: str, tmp_path: Path) -> None:
    module = save(*FAMILIES[family], tmp_path / "model")
    ids = sequence_inputs(40)[0]
    qcompile.build(tmp_path / "model", tmp_path / "out", recipe=recipe)
    graph = apply(Raise(), frontend.load(tmp_path / "model")).graph
    step = run_passes(graph, configure(recipes.get_recipe(recipe).settings(), {})[1:])[0][-1]
    reference = step.run(*step_inputs(ids, None, step))[0].view(2, 40, -1)
    with qcompile.load(tmp_path / "out") as llm, torch.no_grad():
        logits = llm.logits(ids)
        assert check.max_relative_error(logits, reference) < TOLERANCE[recipe]
        assert torch.equal(llm.logits(ids, chunk=1), logits)
        if recipe == "f32":
            assert check.max_relative_error(logits, module(ids).logits) < 5e-6
