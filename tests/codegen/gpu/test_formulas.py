"""GPU kernels of formulas that models write out: powers, means, one number for a row, weighted sums of slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qcompile import ops
from qcompile.codegen.gpu.router import CombineSpec
from qcompile.codegen.gpu.rows import RowSpec
from qcompile.targets import TARGETS
from tests.support.compiled import Record
from tests.support.interpreted import interpreted

POWERS = {exponent: RowSpec(88, 88, 88, power=exponent) for exponent in ops.POWERS}
ADD_ROW = RowSpec(88, 88, 88, binary="add_row", other_stride=32)
MEAN, MEANS = RowSpec(88, 88, 32, mean=True), RowSpec(22, 88, 32, blocks=4, mean=True)
HEADS = RowSpec(22, 88, 88, norm="rms", weight=True, eps=1e-6, blocks=4)
MIX = CombineSpec(4, 600, 2400, 1824, 32, results=3)


def interpret_formulas() -> None:
    """Each kernel against torch in float64, at widths that are no powers of two; rows alone have the same bits."""
    from qcompile.codegen.gpu.compile import load

    make = torch.Generator().manual_seed(2)
    x, numbers = torch.randn(3, 88, generator=make).abs() + 0.1, torch.randn(3, 32, generator=make)
    result = torch.zeros(3, 88)
    for exponent, spec in POWERS.items():
        load(spec.kernel(80))[3, 1, 1](x, result)
        torch.testing.assert_close(result.double(), x.double() ** exponent, atol=0, rtol=1e-6)
    load(ADD_ROW.kernel(80))[3, 1, 1](x, result, numbers)
    torch.testing.assert_close(result, x + numbers[:, :1], atol=0, rtol=0)
    for spec in (MEAN, MEANS):
        few, alone = torch.zeros(3, 32), torch.zeros(1, 32)
        load(spec.kernel(80))[3, spec.blocks, 1](x, few)
        load(spec.kernel(80))[1, spec.blocks, 1](x[1:2], alone)
        wanted = x.double().unflatten(-1, (spec.blocks, -1)).mean(-1)
        torch.testing.assert_close(few[:, : spec.blocks].double(), wanted, atol=0, rtol=1e-6)
        assert not few[:, spec.blocks :].any() and torch.equal(few[1:2], alone)
    weight, heads, norms = torch.rand(22, generator=make), [], x.unflatten(-1, (4, -1)).double()
    for spec in (HEADS, replace(HEADS, looped=True)):
        heads.append(torch.zeros(3, 88))
        load(spec.kernel(80))[3, spec.programs, 1](x, heads[-1], weight)
    norms = weight * norms / (norms.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(heads[0].double(), norms.flatten(1), atol=0, rtol=1e-6)
    assert torch.equal(*heads)
    wide, mixed = torch.randn(3, 4, 600, generator=make), torch.zeros(3, 1824)
    weights = numbers[:, :12].reshape(3, 3, 4).double()
    load(MIX.kernel(80))[3, MIX.programs, 1](wide, mixed, numbers)
    torch.testing.assert_close(mixed[:, :1800].double(), (weights @ wide.double()).flatten(1), atol=1e-5, rtol=1e-5)
    assert not mixed[:, 1800:].any()


def test_formulas_interpreted() -> None:
    interpreted(__name__, "interpret_formulas()")


@pytest.mark.parametrize("target", ["a100", "h200"])
def test_formulas_compile(target: str, compiled: Record) -> None:
    capability = TARGETS[target].capability
    for spec in (*POWERS.values(), ADD_ROW, MEAN, MEANS, MIX):
        compiled(spec.kernel(capability), capability)
