"""The graphs of all ranks together compute what the whole graph does; what cannot be divided stays or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qcompile import check, ops
from qcompile.errors import PassError, UnsupportedError, UsageError
from qcompile.formats.mixed import MIX_4_8
from qcompile.formats.registry import STORED_FORMATS
from qcompile.graph import Graph
from qcompile.ops.collective import RankGroup
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import apply, run_passes
from qcompile.passes.merge import Merge
from qcompile.passes.quantize import Quantize
from qcompile.passes.schedule import configure
from qcompile.passes.shard import Shard
from qcompile.recipes import RECIPES, get_recipe
from tests.codegen.cpu.test_experts import decoder as experts
from tests.passes import test_exact
from tests.support.families import COMMON, EXPERTS, LATENT
from tests.support.graphs import decoder, latent, recurrent, sequence_inputs
from tests.support.ranks import divided, run_together

EXACT = 1e-9
"""In float64, sums over ranks differ from sums over all features by rounding alone."""


def merged(graph: Graph) -> Graph:
    for rewrite in (AssignPrecision("f32", "f32"), Merge()):
        graph = apply(rewrite, graph).graph
    return graph


def compared(graph: Graph, ranks: int, inputs: Any = None) -> list[Any]:
    """The results of all ranks, after a check that their logits agree with those of `graph`."""
    inputs = inputs or sequence_inputs()
    results = divided(graph, ranks)
    outcome = run_together([result.graph for result in results], inputs, torch.float64)
    assert check.max_relative_error(outcome, graph.run(*inputs, dtype=torch.float64)) < EXACT
    return results


SCORES: dict[str, Any] = {"sinks": True, "key_bias": True, "softcap": 5.0}
SHAPES: dict[str, tuple[dict[str, Any], int, tuple[int, int, int]]] = {
    "plain": ({}, 2, (4, 14, 8)),
    "fewer keys than ranks": ({}, 4, (4, 14, 8)),
    "biases, norms of heads": ({"bias": True, "head_norm": "heads"}, 2, (4, 14, 8)),
    "scores, late norms": ({"late_norms": True, "act": "xielu", **SCORES}, 4, (4, 14, 8)),
    "one key head": ({"kv_heads": 1, "layers": 1}, 4, (2, 5, 4)),
    "three ranks, odd blocks": ({"heads": 6, "kv_heads": 3, "ffn": 111}, 3, (4, 14, 8)),
    "norms of all heads": ({"head_norm": "whole"}, 2, (2, 6, 4)),
}
"""A model, its ranks, its sums over ranks, and the products that are divided before and after linears are merged."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("before_merge", [True, False])
def test_ranks_together_compute_the_model(shape: str, before_merge: bool) -> None:
    settings, ranks, (sums, linears, products) = SHAPES[shape]
    results = compared(decoder(**settings) if before_merge else merged(decoder(**settings)), ranks)
    for result in results:
        assert len(result.graph.calls("all_reduce")) == sums
        assert result.fired == (linears if before_merge else products)
    whole = shape == "norms of all heads"
    for attention in results[0].graph.calls("attention"):
        heads, keys = (ops.operand(attention, name).meta["val"].shape[-2] for name in ("q", "k"))
        given = settings.get("heads", 4), settings.get("kv_heads", 2)
        assert (heads, keys) == (given if whole else (given[0] // ranks, max(given[1] // ranks, 1)))
    if whole:
        assert any("rms_norm_1: rms_norm works on all features of a row" in note for note in results[0].notes)


def test_operators_inside_heads_keep_heads_whole() -> None:
    """Heads have 16 features, which three ranks do not divide; factors of features are the same in all heads."""
    graph = decoder(heads=6, kv_heads=3, layers=1)
    (attention,) = graph.calls("attention")
    query = ops.operand(attention, "q")
    graph.weights.add_tensor("gains", torch.linspace(0.5, 2.0, 16))
    with graph.fx.inserting_before(attention):
        scaled = graph.call("mul", graph.call("scale", query, 0.5), graph.weight("gains"))
        turned = graph.call("add", scaled, graph.call("unary", graph.call("mean", query), "tanh"))
    ops.set_operands(attention, q=turned)
    result = compared(graph, 3)[0]
    assert result.fired == 7 and result.graph.calls("attention")[0].meta["val"].shape[-2] == 2


def test_a_rank_has_its_part_of_the_weights() -> None:
    """Each of two ranks has half of what is divided, and the embedding and the head, which are not."""
    graph = decoder()
    whole = sum(graph.weights[str(n.target)].numel() for n in graph.nodes if n.op == "get_attr")
    both = sum(graph.weights[name].numel() for name in ("embed", "head", "inv_freq"))
    for result in divided(graph, 2):
        readers = [node for node in result.graph.calls() if not result.graph.is_weight(node)]
        own = {n for node in readers for n in node.all_input_nodes if result.graph.is_weight(n)}
        assert sum(n.meta["val"].numel() for n in own) == (whole - both) // 2 + both


@pytest.mark.parametrize("name", ["recurrent", "latent"])
def test_what_is_not_proved_stays_whole_with_a_note(name: str) -> None:
    graph = recurrent() if name == "recurrent" else latent(heads=4)
    results = compared(graph, 2)
    reason = "linear_recurrence works on" if name == "recurrent" else "gather_features works on"
    assert any(reason in note for note in results[0].notes)
    assert results[0].fired == (8 if name == "recurrent" else 0)  # attention's linears alone


def test_a_value_that_is_read_elsewhere_stays_whole() -> None:
    """A gate that the residual stream reads too would have to be whole."""
    graph = decoder(ffn=48, layers=1)  # as wide as the stream
    (product,) = graph.calls("mul")
    total = graph.calls("add")[-1]
    with graph.fx.inserting_after(total):
        more = graph.call("add", total, product)
    total.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)
    results = compared(graph, 2)
    assert results[0].fired == 4 and len(results[0].graph.calls("all_reduce")) == 1


def test_two_sums_that_are_added_become_one() -> None:
    graph = decoder(layers=1)
    first, second = graph.calls("add")
    norm = ops.operand(graph.calls("linear")[4], "x")
    norm.replace_input_with(first, ops.operand(first, "a"))  # both blocks read the same value
    with graph.fx.inserting_before(second):
        both = graph.call("add", ops.operand(first, "b"), ops.operand(second, "b"))
    ops.set_operands(second, a=ops.operand(first, "a"), b=both)
    graph.erase_dead()
    assert len(compared(graph, 2)[0].graph.calls("all_reduce")) == 1


def test_a_product_of_two_sums_is_not_a_sum_of_products() -> None:
    graph = decoder(layers=1)
    first, second = graph.calls("add")
    with graph.fx.inserting_before(second):
        product = graph.call("mul", ops.operand(first, "b"), ops.operand(second, "b"))
    ops.set_operands(second, b=product)
    ops.set_operands(first, b=ops.operand(first, "a"))  # so that only the product reads either sum
    compared(graph, 2)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_experts_are_divided_by_features(limit: float | None) -> None:
    """Raised, with gates merged, and on quantized weights with padded rows per expert: a rank has 20 of 40."""
    graph = experts(inner=40, hidden=48, limit=limit, clamped=limit is None)
    joined = merged(graph)
    for each in (graph, joined):
        first = compared(each, 2)[0]
        product = next(n for n in first.graph.calls("expert_linear", "gated_experts") if n.meta["val"].shape[-1] == 20)
        assert product.meta["val"].shape[-2] == 3  # slots of a token
        assert any("all ranks need" in note or "softmax works on" in note for note in first.notes)
    rounded = apply(Quantize(), joined).graph
    results = divided(rounded, 2)
    ids = sequence_inputs()
    outcome = run_together([result.graph for result in results], ids, torch.float32)
    assert check.max_relative_error(outcome, rounded.run(*ids, dtype=torch.float32)) < 1e-5  # sums in another order


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "heads": ({"heads": 3, "kv_heads": 3}, 2, "3 heads do not divide over 2 ranks"),
    "keys": ({"heads": 12, "kv_heads": 4}, 3, "4 heads do not divide over 3 ranks"),
    "features": ({"ffn": 71}, 2, "71 features do not divide over 2 ranks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_do_not_divide_are_refused(name: str) -> None:
    settings, ranks, reason = REFUSED[name]
    with pytest.raises(PassError, match=f"shard: node .*{reason}"):
        apply(Shard(ranks, 0), decoder(**settings))


def quantized(recipe: str, **shape: Any) -> Graph:
    passes = configure(get_recipe(recipe).settings(), {})[1:]
    until = next(index for index, rewrite in enumerate(passes) if rewrite.name == "quantize") + 1
    return run_passes(decoder(**({"layers": 1, "head_dim": 64, "ffn": 512} | shape)), passes[:until])[0][-1]


def test_groups_are_not_cut() -> None:
    with pytest.raises(PassError, match="node gemm_3: its 384 inputs in groups of 128 do not divide over 2 ranks"):
        apply(Shard(2, 0), quantized("w4a16", ffn=384))


def test_sequences_of_outputs_are_not_cut() -> None:
    with pytest.raises(PassError, match="its 64 outputs in sequences of 64 do not divide over 2 ranks"):
        apply(Shard(2, 0), quantized("w2t16", heads=8, head_dim=32))


BY_ROW = {"int8": 0.08, "int4": 0.5, "int4_clip": 0.5}
"""Each rank rounds its part of a row by a scale of its own, and both roundings err by up to 1/254 or 1/14 of it."""
COMMON_RECIPES = ("f32", "w8a8", "w4a16", "qserve", "qserve-channel", "mixllm", "mxfp4", "nvfp4", "w4a4", "nested")


@pytest.mark.parametrize(
    "recipe",
    [*COMMON_RECIPES, *(pytest.param(r, marks=pytest.mark.exhaustive) for r in RECIPES if r not in COMMON_RECIPES)],
)
def test_ranks_of_a_quantized_graph(recipe: str) -> None:
    graph = quantized(recipe)
    results = divided(graph, 2)
    rotated = bool(graph.calls("hadamard"))  # a matrix over all features of a row keeps it whole
    assert [result.fired for result in results] == [2 if rotated else 4] * 2
    ids = sequence_inputs()
    outcome = run_together([result.graph for result in results], ids, torch.float32)
    kinds = {ops.operand(node, "kind") for node in graph.calls("quantize_activation")}
    tolerance = max(BY_ROW.get(kind, 1e-5) for kind in kinds)  # 1e-5: float32 sums in another order
    assert check.max_relative_error(outcome, graph.run(*ids, dtype=torch.float32)) < tolerance


@pytest.mark.parametrize("format", STORED_FORMATS)
def test_codes_and_scales_do_not_depend_on_ranks(format: str) -> None:
    kind = STORED_FORMATS[format]
    a, b, c, n = (place * kind.rows_together for place in (1, 2, 4, 5)) if kind.rows_together > 1 else (3, 9, 32, 40)
    weight = torch.randn(n, 384 + 20, generator=torch.Generator().manual_seed(0))
    parts = MIX_4_8.quantize_rows(weight, torch.arange(n) % 3 == 0) if kind is MIX_4_8 else kind.quantize(weight)
    values = kind.dequantize(parts, 404)
    rows = ops.take_parts(parts, format, [a, b, c, n], 0)
    assert torch.equal(kind.dequantize(rows, 404), torch.cat((values[a:b], values[c:n])))
    columns = ops.take_parts(parts, format, [128, 384 + 20], 1)
    assert torch.equal(kind.dequantize(columns, 276), values[:, 128:])


def test_outputs_with_codes_in_common_are_not_divided() -> None:
    kind = STORED_FORMATS["w2_trellis_g128"]
    parts = kind.quantize(torch.randn(128, 128, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(
        UnsupportedError, match="codes of 64 outputs are stored together, and no such sequence begins at 32"
    ):
        ops.take_parts(parts, kind.name, [32, 128], 0)


OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": COMMON | EXPERTS | LATENT | {"n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    "gpt_oss": COMMON | EXPERTS | {"head_dim": 16, "sliding_window": 8},
    "bloom": {"vocab_size": 97, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "falcon": COMMON,
    "cohere2": COMMON | {"sliding_window": 8},
    "olmoe": COMMON | EXPERTS,
    "glm4_moe": COMMON | EXPERTS | {"head_dim": 16, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "llama4_text": COMMON | EXPERTS | {"head_dim": 16, "intermediate_size_mlp": 96},
}
SOME = ("qwen2_moe",)
"""Shared experts beside others: the sums of both are one sum."""


@pytest.mark.parametrize(
    "kind",
    [
        *SOME,
        *(
            pytest.param(kind, marks=pytest.mark.exhaustive)
            for kind in test_exact.FAMILIES | OTHERS
            if kind not in SOME
        ),
    ],
)
def test_families(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_exact, "FAMILIES", test_exact.FAMILIES | OTHERS)
    graph = merged(test_exact.raised(kind))
    for ranks in (2, 4):
        assert compared(graph, ranks, test_exact.inputs())[0].fired >= 4


def with_head(graph: Graph, ranks: int) -> list[Any]:
    """The results of all ranks, which divide the head, too; their logits agree with those of `graph`."""
    inputs = sequence_inputs()
    results = divided(graph, ranks, head=True)
    outcome = run_together([result.graph for result in results], inputs, torch.float64)
    assert check.max_relative_error(outcome, graph.run(*inputs, dtype=torch.float64)) < EXACT
    return results


@pytest.mark.parametrize(("vocab", "ranks", "own"), [(192, 3, 64), (97, 2, 64), (97, 4, 32), (50, 4, 32)])
def test_logits_are_gathered(vocab: int, ranks: int, own: int) -> None:
    graph = merged(decoder(vocab=vocab, layers=1, heads=12, kv_heads=12, ffn=96))
    results = with_head(graph, ranks)
    whole = divided(graph, ranks)
    for result, before in zip(results, whole, strict=True):
        (gather,) = result.graph.calls("all_gather")
        assert ops.operand(gather, "x").meta["val"].shape[-1] == own and gather.meta["val"].shape[-1] == vocab
        assert result.fired == before.fired + 1 and len(result.notes) == len(before.notes) - 1


def test_logits_are_gathered_behind_operators_on_each_alone() -> None:
    graph = merged(decoder(layers=1))
    product = graph.output.args[0]
    with graph.fx.inserting_after(product):
        halved = graph.call("scale", product, 0.5)
    graph.output.replace_input_with(product, halved)
    graph.infer([node.meta["val"] for node in graph.inputs])
    (gather,) = with_head(graph, 2)[1].graph.calls("all_gather")
    assert ops.name_of(ops.operand(gather, "x").target) == "scale"
    with graph.fx.inserting_after(halved):
        squared = graph.call("mul", halved, product)
    graph.output.replace_input_with(halved, squared)
    graph.infer([node.meta["val"] for node in graph.inputs])
    result = with_head(graph, 2)[0]
    assert not result.graph.calls("all_gather")
    assert any(f"node {squared.name}: it does not compute each logit by itself" in note for note in result.notes)


def test_ranks_are_numbered() -> None:
    with pytest.raises(UsageError, match="ranks 0 to 1"):
        Shard(2, 2)
    assert not Shard().wanted and Shard(2, 1).wanted


def test_a_rank_alone_is_refused_and_an_error_ends_all() -> None:
    graph = divided(decoder(layers=1), 2)[0].graph
    with pytest.raises(UsageError, match="one of 2 ranks"):
        graph.run(*sequence_inputs())

    def fails() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        RankGroup(2).run([lambda: graph.run(*sequence_inputs()), fails])
