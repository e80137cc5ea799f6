"""Rules of recipes: roles and layers follow from dataflow, each rule decides what it selects, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx

from qcompile.errors import PassError, UsageError
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import apply, run_passes
from qcompile.passes.latent import Latent
from qcompile.passes.roles import sites
from qcompile.passes.rules import Rules
from qcompile.recipe_files.rules import Rule, rule_of
from qcompile.testing import Begun, decoder
from tests.codegen.cpu.test_experts import decoder as mixture
from tests.passes.test_decisions import Decide
from tests.support.graphs import latent, recurrent

FOUR = AssignPrecision("w4_asym_g128", "int8", "w8_sym_channel", "int8")
EIGHT = "w8_sym_channel"


def parallel(layers: int = 2, gated: bool = False) -> Graph:
    """A decoder of blocks that compute attention and a feed-forward of one input, side by side."""
    begun = Begun(50)
    graph, weight = begun.graph, begun.weight

    def linear(x: fx.Node, name: str, n: int) -> fx.Node:
        return graph.call("linear", x, weight(name, n, x.meta["val"].shape[-1]))

    x = graph.call("embedding", begun.ids, weight("embed", 50, 32))
    for layer in range(layers):
        y = graph.call("rms_norm", x, None, 1e-6)
        q, k, v = (graph.call("split_heads", linear(y, f"{name}{layer}", 32), 2) for name in "qkv")
        mixed = linear(graph.call("merge_heads", graph.call("attention", q, k, v, 0.25)), f"o{layer}", 32)
        inner = graph.call("unary", linear(y, f"up{layer}", 48), "gelu")
        x = graph.call("add", x, graph.call("add", mixed, linear(inner, f"down{layer}", 32)))
    graph.fx.output(linear(graph.call("rms_norm", x, None, 1e-6), "head", 50))
    return graph


def places(graph: Graph) -> dict[str, tuple[int, str]]:
    """The layer and roles of each linear by the names of its weights."""
    return {"+".join(site.names): (site.layer, "+".join(site.roles)) for site in sites(graph)[0]}


def test_roles_and_layers_of_a_plain_decoder() -> None:
    roles = {"q": "query", "k": "key", "v": "value", "o": "output", "gate": "gate", "up": "up", "down": "down"}
    expected = {f"{name}{layer}": (layer, role) for layer in range(2) for name, role in roles.items()}
    for options in ({}, {"late_norms": True, "head_norm": "heads"}, {"act": "xielu", "bias": True}):
        assert places(decoder(**options)) == expected | {"head": (1, "head")}  # type: ignore[arg-type]


def test_blocks_beside_each_other_are_of_one_layer() -> None:
    roles = {"q": "query", "k": "key", "v": "value", "o": "output", "up": "up", "down": "down"}
    expected = {f"{name}{layer}": (layer, role) for layer in range(2) for name, role in roles.items()}
    assert places(parallel()) == expected | {"head": (1, "head")}


def test_roles_of_experts_leave_out_the_router() -> None:
    result = places(mixture())
    assert [result[name][1] for name in ("gate", "up", "down")] == ["expert_gate", "expert_up", "expert_down"]
    assert "router" not in result and result["shared"] == (0, "other")


def test_recurrences_and_attention_are_layers() -> None:
    result = places(recurrent(layers=1))
    assert result["qkv0"] == result["decay0"] == (0, "state") and result["o0"] == (0, "output")
    assert result["aq1"] == (1, "query") and result["o1"] == (1, "output")


def test_sums_within_a_block_are_no_residual_stream() -> None:
    graph = recurrent(layers=1, attention=False)
    mixed = graph.calls("merge_heads")[0]
    value = graph.calls("slice_features")[2]
    with graph.fx.inserting_after(mixed):
        skipped = graph.call("add", mixed, value)
    mixed.replace_all_uses_with(skipped, delete_user_cb=lambda user: user is not skipped)
    assert places(graph) == places(recurrent(layers=1, attention=False))


def test_names_are_those_of_the_checkpoint() -> None:
    graph = decoder()
    node = next(node for node in graph.nodes if node.target == "down0")
    graph.weights.add_tensor("down0.T.rows3", graph.weights["down0"])
    node.target = "down0.T.rows3"
    assert places(graph)["down0"] == (0, "down")


def test_roles_around_a_latent() -> None:
    graph = latent(heads=8)
    result = places(graph)
    assert result["qa"] == result["kva"] == (0, "attention_inner") and result["kr"] == (0, "key")
    cached = places(apply(Latent(), graph).graph)
    assert cached["v"] == (0, "value") and cached["o"] == (0, "output") and cached["kva"] == (0, "key+value")


def chosen(graph: Graph, *rules: Rule) -> dict[str, str]:
    """The weight formats of the linears of `graph` by name where they are not those of FOUR."""
    after, records = run_passes(graph, (Rules(rules), FOUR))
    result = {"+".join(site.names): site.node.meta["precision"] for site in sites(after[-1])[0]}
    assert records[0].fired == len([note for note in records[1].notes if "keeps" in note])
    usual = {"weight": "w4_asym_g128", "activation": "int8"}
    return {name: formats["weight"] for name, formats in result.items() if formats != usual and name != "head"}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"role": "down"}, "down0 down1 down2"),
        ({"role": "down", "layers": "first 1, last 1"}, "down0 down2"),
        ({"role": ["key", "value"], "layers": 1}, "k1 v1"),
        ({"role": "mlp", "layers": [0, -1]}, "gate0 up0 down0 gate2 up2 down2"),
        ({"layers": "1-2", "role": "attention"}, "q1 k1 v1 o1 q2 k2 v2 o2"),
        ({"names": "[qk]?"}, "q0 k0 q1 k1 q2 k2"),
        ({"names": ["up*", "o1"], "layers": "0-1"}, "up0 o1 up1"),
    ],
)
def test_a_rule_selects_by_role_layer_and_name(table: dict[str, Any], expected: str) -> None:
    result = chosen(decoder(layers=3), rule_of("mine", table | {"weight": EIGHT}))
    assert result == dict.fromkeys(expected.split(), EIGHT)


def test_rules_may_choose_parts_and_agree() -> None:
    rules = (
        rule_of("one", {"role": "down", "weight": "bf16"}),
        rule_of("two", {"names": "down*", "activation": "bf16"}),
        rule_of("three", {"role": "mlp", "layers": 1, "activation": "bf16", "weight": "bf16"}),
    )
    assert set(chosen(decoder(), *rules)) == {"down0", "down1", "gate1", "up1"}


def test_rules_that_disagree_are_refused() -> None:
    rules = (rule_of("one", {"role": "down", "weight": EIGHT}), rule_of("two", {"names": "down1", "weight": "bf16"}))
    with pytest.raises(UsageError, match=r"rules one and two choose w8_sym_channel and bf16 for the weight of node .*"):
        Rules(rules).run(decoder())


def test_a_rule_against_an_earlier_pass_is_refused() -> None:
    rules = Rules((rule_of("mine", {"role": "down", "weight": "bf16", "activation": "bf16"}),))
    with pytest.raises(PassError, match="rules: node linear_6: rule mine chooses weight bf16, but an earlier pass dec"):
        run_passes(decoder(), (Decide(), rules))
    run_passes(decoder(), (Decide(number=0), rules))  # of another linear


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"role": "experts"}, "rule mine selects no linear: the model has 2 layers and the roles query, key, value"),
        ({"names": "donw0"}, r"no weight of a linear is called donw0 \(did you mean down0\?\)"),
        ({"names": "down0", "layers": 1}, "rule mine selects no linear: the model has 2 layers"),
        ({"role": "down", "layers": 2}, "rule mine: layers 2 do not all exist: the model has 2 layers"),
        ({"role": "down", "layers": "first 3"}, "do not all exist"),
        ({"role": "down", "layers": -3}, "do not all exist"),
    ],
)
def test_a_rule_that_selects_nothing_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Rules((rule_of("mine", table | {"weight": EIGHT}),)).run(decoder())


def test_formats_that_there_are_not_are_refused() -> None:
    with pytest.raises(UsageError, match=r"rule mine: weight format w8_sym_chanel is unknown; .*mean w8_sym_channel"):
        Rules((rule_of("mine", {"role": "down", "weight": "w8_sym_chanel"}),))
    with pytest.raises(UsageError, match=r"rule mine: activation .*int9 is unknown"):
        Rules((rule_of("mine", {"role": "down", "activation": "int9"}),))
    with pytest.raises(PassError, match="weights in bf16 have no kernel for activations in int8"):
        chosen(decoder(), rule_of("mine", {"role": "down", "weight": "bf16"}))


def test_experts_follow_rules_and_routers_do_not() -> None:
    rules = (rule_of("mine", {"names": "*", "weight": EIGHT}),)
    result = apply(Rules(rules), mixture())
    assert [node.meta["precision"] for node in result.graph.calls("expert_linear")] == [{"weight": EIGHT}] * 4
    assert len(result.notes) == 2 and "rule mine matches router, but routers of experts stay in f32" in result.notes[0]
