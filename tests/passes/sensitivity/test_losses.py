"""Losses of units: forked runs agree with runs of changed graphs, and unchanged ones lose nothing."""

from __future__ import annotations

import pytest
import torch

from qcompile.errors import UsageError
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import run_passes
from qcompile.passes.merge import Merge
from qcompile.passes.quantize import Quantize
from qcompile.passes.sensitivity.losses import LossMeter
from qcompile.passes.sensitivity.study import formats_for
from qcompile.passes.sensitivity.units import FormatPair, GemmUnit, units
from qcompile.recipe_files.resolved import resolve
from tests.codegen.cpu.test_experts import decoder as mixture
from tests.passes.test_rules import parallel
from tests.support.cases import first
from tests.support.graphs import decoder

EXACT, FOUR, EIGHT = (
    FormatPair("f32", "f32"),
    FormatPair("w4_asym_g128", "int8"),
    FormatPair("w8_sym_channel", "int8"),
)


def prepared(source: Graph) -> tuple[LossMeter, list[GemmUnit]]:
    graphs, _ = run_passes(source, (AssignPrecision(), Merge(), Quantize()))
    tokens = torch.randint(0, source.info.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    return LossMeter(graphs[-1], tokens), units(graphs[-1], graphs[0])[0]


@pytest.mark.parametrize(
    "source", first((parallel, mixture), [decoder, parallel, mixture]), ids=lambda source: source.__name__
)
def test_a_unit_alone_loses_what_its_changed_graph_loses(source: type[Graph]) -> None:
    meter, result = prepared(source())
    told: list[tuple[int, int]] = []
    losses = meter.each(result, [FOUR, EXACT, EIGHT], lambda stage, done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] and len(losses) == 3 * len(result)
    for (unit, pair), loss in losses.items():
        alone = meter.mixed({unit: pair})
        assert loss.kl == pytest.approx(alone.kl, rel=1e-3, abs=1e-7), unit
        assert loss.perplexity == pytest.approx(alone.perplexity, rel=1e-5)
        assert pair != EXACT or loss == meter.exact
    assert meter.exact.kl == 0
    assert sum(losses[unit, FOUR].kl for unit in result) > 4 * sum(losses[unit, EIGHT].kl for unit in result) > 0


def test_units_are_what_one_kernel_multiplies() -> None:
    _, result = prepared(mixture())
    names = [unit.name for unit in result if unit.layer == 0]
    assert names[:2] == ["layer0_query_key_value", "layer0_output"] and "layer0_expert_down" in names
    experts = next(unit for unit in result if unit.experts)
    assert experts.share < 1 and not experts.takes(FormatPair("mix_4_8", "int8_g128"))
    assert result[-1].roles == ("head",) and result[-1].share == 1 and "router" not in str(result)


def test_formats_to_compare() -> None:
    recipe = resolve("w4a16")
    assert formats_for(["w4_asym_g128", "mxfp4:int8_g128", "w4_asym_g128:int8"], recipe, "cpu") == [
        FormatPair("w4_asym_g128", "bf16"),
        FormatPair("mxfp4", "int8_g128"),
        FOUR,
    ]
    assert formats_for(["mxfp4"], resolve("w4a8"), "cpu") == [FormatPair("mxfp4", "int8")]
    assert {pair.weight for pair in formats_for([], recipe, "cpu")} > {"w4_asym_g32", "bf16"}
    assert "w4_asym_g32" not in {pair.weight for pair in formats_for([], recipe, "h100")}
    for text, message in (
        ("w4_asym_g32", "target h100 has no kernels for it"),
        ("bf16:int8", "bf16 has kernels for activations in bf16"),
        ("mix_4_8", "its rows differ in bits"),
        ("w9", "weight format w9 is unknown"),
    ):
        with pytest.raises(UsageError, match=message):
            formats_for([text], recipe, "h100")
