"""Draft paths: what changes, what is shared, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qcompile import ops, pipeline, recipes
from qcompile.calibration import Calibration
from qcompile.codegen.lower import lower
from qcompile.codegen.packing import WeightTable
from qcompile.errors import PassError, UsageError
from qcompile.graph import Graph
from qcompile.passes.base import PassRecord, apply, run_passes
from qcompile.passes.gemm_precision import head_gemms
from qcompile.passes.schedule import PASSES, configure
from qcompile.passes.speculate import Speculate
from qcompile.passes.streams import local_blocks
from qcompile.testing import Begun
from tests.codegen.cpu.test_experts import decoder as mixture
from tests.support.graphs import decoder, sequence_inputs


def graphs(recipe: str, source: Graph, draft: Speculate | None = None) -> list[Graph]:
    """The graph after each pass of the recipe, or of its draft path `draft`."""
    passes = configure(recipes.get_recipe(recipe).settings(), {})
    result = run_passes(source, passes[1:])[0]
    if draft is None:
        return result
    quantized = next(graph for graph in result if graph.stage == "quantize")
    return run_passes(quantized, (draft, *passes[PASSES.index(Speculate) + 1 :]))[0]


@pytest.mark.parametrize(
    ("target", "draft", "alone"),
    [
        ("w4a16", Speculate(True, activation="int8"), "w4a8"),
        ("bf16", Speculate(True, "mxfp4", "int8_g128", "w8_sym_channel", "int8"), "mxfp4"),
        ("quantspec-w8", Speculate(True, "w4_asym_g128"), "w4a8"),
    ],
)
def test_a_draft_computes_what_its_formats_alone_would(target: str, draft: Speculate, alone: str) -> None:
    source, inputs = decoder(), sequence_inputs(9)
    verify = next(graph for graph in graphs(target, source) if graph.stage == "quantize")
    before = verify.run(*inputs)
    result = apply(draft, verify)
    wanted = next(graph for graph in graphs(alone, source) if graph.stage == "quantize")
    assert result.fired == 9 - (draft.head == "same")  # two layers of four linears, and the head
    assert torch.equal(result.graph.run(*inputs), wanted.run(*inputs))
    assert torch.equal(verify.run(*inputs), before) and not torch.equal(result.graph.run(*inputs), before)


@pytest.mark.parametrize(
    ("target", "draft", "alone"),
    [
        ("w4a16", Speculate(True, activation="int8"), "w4a8"),
        ("bf16", Speculate(True, "mxfp4", "int8_g128", "w8_sym_channel", "int8"), "mxfp4"),
        ("quantspec-w8", Speculate(True, "qoq_g128"), "qserve"),
    ],
)
def test_experts_draft_and_routers_choose_as_the_target_does(target: str, draft: Speculate, alone: str) -> None:
    source, inputs = mixture(), sequence_inputs(9)
    plain = {f"{name}.enabled": "false" for name in ("fold_norms", "rotate", "smooth_attention")}
    verify = next(graph for graph in graphs(target, source) if graph.stage == "quantize")
    result = apply(draft, verify)
    passes = configure(recipes.get_recipe(alone).settings(), plain)[1:]
    wanted = next(graph for graph in run_passes(source, passes)[0] if graph.stage == "quantize")
    assert len(result.graph.calls("expert_gemm")) == 4
    assert torch.equal(result.graph.run(*inputs), wanted.run(*inputs))


def test_the_same_formats_change_nothing() -> None:
    quantized = next(graph for graph in graphs("w4a8", decoder()) if graph.stage == "quantize")
    assert apply(Speculate(True), quantized).fired == 0
    assert apply(Speculate(True, "w4_asym_g128", "int8"), quantized).fired == 0


def test_what_has_no_kernel_is_refused_by_name() -> None:
    quantized = next(graph for graph in graphs("bf16", decoder()) if graph.stage == "quantize")
    with pytest.raises(PassError, match=r"speculate: node gemm.*mxfp4 have no kernel for activations in bf16"):
        apply(Speculate(True, "mxfp4"), quantized)
    for format in ("w3", "mix_4_8"):
        with pytest.raises(UsageError, match=f"no draft has weight format {format}; there are same, f32"):
            Speculate(True, format)
    with pytest.raises(UsageError, match="activation type int2 is unknown"):
        Speculate(True, activation="int2")


def test_shared_weights_are_stored_once() -> None:
    """Bytes of both paths: a draft in the same formats adds none, one in others only what differs."""
    source = decoder(hidden=64)

    def size(table: WeightTable) -> int:
        return sum(size for weight in table.weights for _, size in weight.blobs)

    def together(recipe: str, draft: Speculate) -> tuple[int, int, set[str], set[str]]:
        table = WeightTable()
        first = lower(graphs(recipe, source)[-1], table)
        alone = size(table)
        second = lower(graphs(recipe, source, draft)[-1], table)
        return alone, size(table), set(first.weights), set(second.weights)

    alone, both, target, draft = together("w4a16", Speculate(True, activation="int8"))
    assert both == alone and draft == target
    alone, both, target, draft = together("nested", Speculate(True, "nested_4"))
    assert both == alone and draft == target
    alone, both, target, draft = together("bf16", Speculate(True, "mxfp4", "int8_g128"))
    added = draft - target
    assert added and all(".mxfp4." in name for name in added)  # norms, tables and the head are shared
    assert draft & target
    table = WeightTable()
    for origin in ("", "other."):
        lower(graphs("w4a16", source)[-1], table, origin)
    assert size(table) == 2 * together("w4a16", Speculate(True, activation="int8"))[0]  # other models share nothing


def coarsen(graph: Graph, name: str) -> None:
    """Give a linear weights that 4 bits represent badly: a few large ones in every group."""
    node = next(node for node in graph.calls("gemm") if node.name == name).all_input_nodes[1]
    while node.op != "get_attr":
        node = node.all_input_nodes[0]
    values = graph.weights[str(node.target)].clone()
    values[:, ::31] *= 40
    graph.weights.add_tensor(str(node.target), values)


@pytest.mark.parametrize(
    ("recipe", "draft", "format"),
    [
        ("nested", Speculate(True, "nested_4", sensitive=2), "nested_8_4"),
        (
            "bf16",
            Speculate(
                *(True, "w4_asym_g128", "int8", "w8_sym_channel", "int8"),
                sensitive=2,
                sensitive_weight="w8_sym_channel",
                sensitive_activation="int8",
            ),
            "w8_sym_channel",
        ),
    ],
)
def test_the_most_sensitive_linears_keep_more_bits(recipe: str, draft: Speculate, format: str) -> None:
    inputs = sequence_inputs(9)
    for index in range(2):
        verify = next(graph for graph in graphs(recipe, decoder(hidden=64)) if graph.stage == "quantize")
        linears = [node.name for node in verify.calls("gemm")][:-1]
        coarsen(verify, linears[index])
        result = apply(draft, verify)
        formats = {node.name: node.args[4] for node in result.graph.calls("gemm")}
        assert formats[linears[index]] == format and len(result.notes) == 2
        assert any(note.startswith(f"{linears[index]} ") for note in result.notes)
        assert sum(formats[linear] == format for linear in linears) == 2
        plain = apply(replace(draft, sensitive=0), verify)
        assert plain.notes == () and format not in [plain_format(plain.graph, linear) for linear in linears]
        wanted = verify.run(*inputs)
        errors = [(graph.run(*inputs) - wanted).square().mean() for graph in (result.graph, plain.graph)]
        assert errors[0] < errors[1]


def plain_format(graph: Graph, name: str) -> object:
    """The format of a gemm."""
    return next(node.args[4] for node in graph.calls("gemm") if node.name == name)


def test_sensitive_linears_are_stored_once() -> None:
    """In two planes, they are the target's own; otherwise they are stored in 8 bits and not also in 4."""
    source = decoder(hidden=64)

    def drafted(recipe: str, draft: Speculate) -> tuple[int, int, list[str]]:
        table = WeightTable()
        first = lower(graphs(recipe, source)[-1], table)
        alone = sum(size for weight in table.weights for _, size in weight.blobs)
        second = lower(graphs(recipe, source, draft)[-1], table)
        added = [name for name in second.weights if name not in first.weights]
        return alone, sum(size for weight in table.weights for _, size in weight.blobs), added

    alone, both, _ = drafted("nested", Speculate(True, "nested_4", sensitive=3))
    assert both == alone
    eight = {"sensitive_weight": "w8_sym_channel", "sensitive_activation": "int8"}
    added = drafted("bf16", Speculate(True, "w4_asym_g128", "int8", sensitive=3, **eight))[2]  # type: ignore[arg-type]
    wide = {name.partition(".w8_sym_channel.")[0] for name in added if ".w8_sym_channel." in name}
    narrow = {name.partition(".w4_asym_g128.")[0] for name in added if ".w4_asym_g128." in name}
    assert len(wide) == 3 and len(narrow) == 5 and not wide & narrow
    with pytest.raises(UsageError, match="write how many linears"):
        Speculate(True, sensitive=-1)


def blocks_of(recipe: str, source: Graph) -> tuple[Graph, list[str]]:
    """The quantized graph, and the sums that add blocks without attention to the stream."""
    verify = next(graph for graph in graphs(recipe, source) if graph.stage == "quantize")
    return verify, [node.name for node, _ in local_blocks(verify, "test")]


def quieten(graph: Graph, sum_name: str) -> None:
    """The weights of a block are made small before the draft is made: of the first block, then of the second."""
    node = next(node for node in graph.nodes if node.name == sum_name)
    linear = next(n for n in node.all_input_nodes if ops.name_of(n.target) == "gemm")
    weight = linear.all_input_nodes[1]
    while weight.op != "get_attr":
        weight = weight.all_input_nodes[0]
    graph.weights.add_tensor(str(weight.target), graph.weights[str(weight.target)] * 1e-3)


def test_a_draft_leaves_out_the_blocks_that_matter_least() -> None:
    """Weights are changed before the draft is made, so that another block is the quiet one each time."""
    inputs = sequence_inputs(9)
    for index in range(2):
        verify, blocks = blocks_of("bf16", decoder(hidden=64))
        assert len(blocks) == 2  # the MLP of each layer
        quieten(verify, blocks[index])
        result = apply(Speculate(True, skip=1), verify)
        assert result.fired == 1 and result.notes == (f"{blocks[index]} is left out of the draft, with what it adds",)
        assert len(result.graph.calls("gemm")) < len(verify.calls("gemm"))
        assert len(result.graph.calls("attention")) == len(verify.calls("attention"))
        wanted = verify.run(*inputs)
        error = (result.graph.run(*inputs) - wanted).square().mean()
        other = verify.clone()
        for node, stream in local_blocks(other, "test"):
            if node.name == blocks[1 - index]:
                other.replace(node, stream)
        assert 0 < error < (other.run(*inputs) - wanted).square().mean() / 100
        assert torch.equal(verify.run(*inputs), wanted)


def test_all_blocks_without_attention_may_be_left_out_and_no_more() -> None:
    verify, blocks = blocks_of("bf16", decoder(hidden=64))
    result = apply(Speculate(True, skip=len(blocks)), verify)
    left = {node.name for node in result.graph.nodes}
    assert result.fired == 2 and not left & set(blocks)
    with pytest.raises(
        PassError, match=r"speculate: node .*speculate\.skip=3: the model has 2 blocks that mix no positions"
    ):
        apply(Speculate(True, skip=3), verify)
    with pytest.raises(UsageError, match=r"speculate\.skip=-1: write how many blocks"):
        Speculate(True, skip=-1)


def test_a_draft_with_fewer_blocks_has_the_cache_of_the_target() -> None:
    source, table = decoder(hidden=64), WeightTable()
    target = lower(graphs("nested", source)[-1], table)
    draft = lower(graphs("nested", source, Speculate(True, "nested_4", skip=2))[-1], table)
    assert draft.cache_facts == target.cache_facts
    assert set(draft.weights) < set(target.weights)


def test_blocks_of_a_stream_that_is_no_chain_of_sums_are_not_left_out() -> None:
    """A block beside attention adds to the stream what it has read before attention."""
    begun = Begun(50)
    graph, weight = begun.graph, begun.weight
    x = graph.call("embedding", begun.ids, weight("embed", 50, 32))
    y = graph.call("rms_norm", x, None, 1e-6)
    heads = [graph.call("split_heads", graph.call("linear", y, weight(name, 32, 32)), 2) for name in "qkv"]
    mixed = graph.call("merge_heads", graph.call("attention", *heads, 0.25))
    both = graph.call("add", x, graph.call("linear", mixed, weight("o", 32, 32)))
    both = graph.call("add", both, graph.call("linear", y, weight("mlp", 32, 32)))
    graph.fx.output(graph.call("linear", both, weight("head", 50, 32)))
    verify = next(each for each in graphs("bf16", graph) if each.stage == "quantize")
    with pytest.raises(PassError, match=r"speculate: node .*: the residual stream is not a chain of sums"):
        apply(Speculate(True, skip=1), verify)


def test_options_of_a_draft_that_a_recipe_does_not_make_are_refused() -> None:
    with pytest.raises(UsageError, match=r"speculate\.sensitive: recipe w4a8 derives no draft from the model"):
        pipeline.plan(decoder(), recipe="w4a8", options={"speculate.sensitive": "1"})
    pipeline.plan(decoder(), recipe="nested", options={"speculate.sensitive": "0"})


def drafted(recipe: str, calibration: Calibration | None) -> tuple[list[Graph], list[PassRecord], Graph]:
    """The graphs and records of a recipe's draft, and the target's quantized graph, of a decoder with that text."""
    source, result = decoder(hidden=64, ffn=96), recipes.get_recipe(recipe)
    source.calibration = calibration
    settings = result.settings()
    target = run_passes(source, configure(settings, {})[1:])[0]
    quantized = [graph for graph in target if graph.stage == "quantize"][-1]
    passes = configure(settings | result.drafts[0].settings(result.head), {})
    return *run_passes(quantized, passes[PASSES.index(Speculate) :]), quantized


@pytest.mark.parametrize("recipe", ["ml-specqd", "quantspec"])
def test_weights_of_a_draft_alone_are_chosen_by_calibration_text(recipe: str) -> None:
    tokens = torch.randint(0, 50, (32, 24), generator=torch.Generator().manual_seed(5))
    inputs = sequence_inputs(16, 4)
    errors = []
    for text in (None, Calibration(tokens)):
        graphs, records, target = drafted(recipe, text)
        assert [record.name for record in records[:2]] == ["speculate", "calibrate"]
        assert records[1].fired == (9 if text else 0)  # two layers of four linears, and the head
        expected = target.run(*inputs)
        errors.append(float((graphs[1].run(*inputs) - expected).norm() / expected.norm()))
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("recipe", ["nested", "qspec"])
def test_weights_that_a_draft_shares_are_not_chosen_again(recipe: str) -> None:
    tokens = torch.randint(0, 50, (8, 24), generator=torch.Generator().manual_seed(5))
    _, records, target = drafted(recipe, Calibration(tokens))
    assert records[1].name == "calibrate" and records[1].fired == 0
    assert all("calibrated" in node.meta for node in target.calls("quantize_weight"))


def test_the_draft_of_nested_weights_shares_any_head() -> None:
    recipe = recipes.get_recipe("nested")
    for head, format in (("nested", "w4_asym_g128"), ("bf16", "bf16"), ("int8", "w8_sym_channel")):
        source = decoder(hidden=64)
        settings = recipe.settings(head)
        target = run_passes(source, configure(settings, {})[1:])[0]
        quantized = [graph for graph in target if graph.stage == "quantize"][-1]
        passes = configure(settings | recipe.drafts[0].settings(head), {})
        draft = run_passes(quantized, passes[PASSES.index(Speculate) :])[0]
        assert head_gemms(draft[0]).pop().args[4] == format
        table = WeightTable()
        first = set(lower(target[-1], table).weights)
        assert set(lower(draft[-1], table).weights) <= first
