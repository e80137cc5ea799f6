"""Clipping and GPTQ: they lower the output error in every format, and never leave the format's grid."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qcompile.formats.mixed import MIX_4_8
from qcompile.formats.registry import STORED_FORMATS, weight_format
from qcompile.formats.rounding import Parts
from qcompile.formats.weight import Rounding
from qcompile.passes.calibration import gptq
from tests.support.cases import first

ROWS = 48
FORMATS = [format.name for format in STORED_FORMATS.values() if format.calibrated]


def rounder(format: str, n: int = ROWS) -> Rounding:
    return weight_format(format).rounding(torch.arange(n) % 5 == 0)


def layer(n: int = 48, k: int = 200, tokens: int = 512, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, and inputs with channels that are correlated and differ in size, as a model's are."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=generator) / k**0.5 + torch.eye(k)
    sizes = torch.exp(torch.randn(k, generator=generator))
    x = (torch.randn(tokens, k, generator=generator) * sizes) @ mixing
    heavy = torch.randn(n, k, generator=generator) * torch.exp(0.5 * torch.randn(n, k, generator=generator))
    return heavy / k**0.5, x


def moments(x: Tensor) -> Tensor:
    return x.T @ x / len(x)


def lost(w: Tensor, parts: Parts, format: str, x: Tensor) -> float:
    """Output error through the format's own reading back, independent of the grid; of nested formats' upper nibble."""
    if format == "nested_8_4":
        parts, format = parts[:3], "w4_asym_g128"
    read = weight_format(format).dequantize(parts, w.shape[1])
    return float(((read - w) @ x.T).pow(2).sum() / (w @ x.T).pow(2).sum())


def nearest_parts(w: Tensor, format: str) -> Parts:
    if format == "mix_4_8":
        return MIX_4_8.quantize_rows(w, torch.arange(len(w)) % 5 == 0)
    return weight_format(format).quantize(w)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("k", [128, 200, 20])
def test_an_unclipped_grid_rounds_as_the_format_does(format: str, k: int) -> None:
    w, _ = layer(k=k)
    grid = rounder(format).fit(w, 1.0)
    parts = grid.parts(grid.round(w), w)
    for ours, (shape, dtype) in zip(parts, weight_format(format).layout(tuple(w.shape)), strict=True):
        assert tuple(ours.shape) == shape and ours.dtype == dtype
    read, expected = (weight_format(format).dequantize(p, k) for p in (parts, nearest_parts(w, format)))
    if format == "qoq_g128":  # the format's own rounding goes through int8 first, ours does not: a step apart at most
        step = parts[1].float().repeat_interleave(128, 1)[:, :k] * parts[3][:, None]
        assert bool(((read - expected).abs() <= step * 1.001).all())
    else:
        torch.testing.assert_close(read, expected, rtol=0, atol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_each_step_lowers_the_output_error(format: str) -> None:
    w, x = layer()
    nearest = lost(w, nearest_parts(w, format), format, x)
    errors = {}
    for clip, use_gptq in ((True, False), (False, True), (True, True)):
        choice = gptq.choose(w, moments(x), rounder(format, len(w)), clip=clip, gptq=use_gptq, damping=0.01)
        errors[clip, use_gptq] = lost(w, choice.parts, format, x)
        assert choice.error == pytest.approx(errors[clip, use_gptq], rel=1e-2)
    if weight_format(format).bits == 8 and weight_format(format).group:
        assert errors[True, False] <= nearest  # clipping betters no small group: it has steps to spare
    else:
        little = format in ("w8_sym_channel", "mxfp4") or rounder(format).refit
        assert errors[True, False] < nearest * (1.0 if little else 0.95)
    assert errors[False, True] < 0.8 * nearest
    assert errors[True, True] < errors[True, False]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("k", first((128 + 17,), [200, 128 + 17]))
def test_coordinate_descent_lowers_the_error_that_gptq_leaves(format: str, k: int) -> None:
    w, x = layer(k=k)
    w[3] = 0
    errors = []
    for sweeps in (0, 1, 4):
        choice = gptq.choose(w, moments(x), rounder(format), clip=True, gptq=True, damping=0.01, descent=sweeps)
        errors.append(lost(w, choice.parts, format, x))
        assert choice.error == pytest.approx(errors[-1], rel=1e-2)  # what is stored is what was chosen
    assert errors[1] < 0.985 * errors[0] and errors[2] < 0.98 * errors[0] and errors[2] <= errors[1]


def test_coordinate_descent_keeps_what_cannot_be_bettered_alone() -> None:
    w, _ = layer()
    grid = rounder("w4_asym_g128").fit(w, 1.0)
    nearest = grid.round(w)
    assert torch.equal(gptq.descended(w, nearest, torch.eye(200), grid, 0.01, 3), nearest)
    assert torch.equal(gptq.descended(w, nearest, torch.zeros(200, 200), grid, 0.01, 3), nearest)


@pytest.mark.parametrize("k", first((128, 129, 257), [128, 129, 257, 1100]))
def test_short_last_groups(k: int) -> None:
    w, x = layer(n=16, k=k)
    for format in FORMATS:
        choice = gptq.choose(w, moments(x), rounder(format, len(w)), clip=True, gptq=True, damping=0.01)
        assert choice.error < choice.error_nearest
        assert lost(w, choice.parts, format, x) == pytest.approx(choice.error, rel=1e-2)


def test_nested_weights_keep_eight_bits() -> None:
    w, x = layer()
    parts = gptq.choose(w, moments(x), weight_format("nested_8_4").rounding(), clip=True, gptq=True, damping=0.01).parts
    read = weight_format("nested_8_4").dequantize(parts, w.shape[1])
    eight = float(((read - w) @ x.T).pow(2).sum() / (w @ x.T).pow(2).sum())
    assert eight < 0.1 * lost(w, parts, "nested_8_4", x)


def test_codes_stay_inside_the_protective_range() -> None:
    w, x = layer(n=64)
    codes, step, zero, _ = gptq.choose(
        w, moments(x), weight_format("qoq_g128").rounding(), clip=True, gptq=True, damping=0.01
    ).parts
    spread = [part.int().repeat_interleave(128, 1)[:, : w.shape[1]] for part in (step, zero)]
    assert int(((codes.int() - spread[1]) * spread[0]).abs().max()) <= 127
    assert int(codes.max()) <= 15


def test_a_rows_codes_do_not_depend_on_its_neighbours() -> None:
    w, x = layer()
    whole = gptq.choose(
        w, moments(x), weight_format("w4_asym_g128").rounding(), clip=True, gptq=True, damping=0.01
    ).parts
    for row in (0, 17):
        alone = gptq.choose(
            w[row : row + 1], moments(x), weight_format("w4_asym_g128").rounding(), clip=True, gptq=True, damping=0.01
        ).parts
        changed = int((alone[0][0] != whole[0][row]).sum())
        assert changed <= 2  # another matrix product may tip a code that lies between two


def test_a_singular_hessian_is_damped_with_a_note() -> None:
    w, x = layer(k=64)
    x[:, :3] = 0
    choice = gptq.choose(w, moments(x), weight_format("w4_asym_g128").rounding(), clip=True, gptq=True, damping=0.01)
    assert "3 of 64 inputs are always zero" in choice.notes[0] and choice.error < choice.error_nearest
    x[:, :3] = x[:, 5:8]  # inputs that always agree
    choice = gptq.choose(w, moments(x), weight_format("w4_asym_g128").rounding(), clip=True, gptq=True, damping=0.01)
    assert "singular, damped by 0.01" in choice.notes[0] and choice.error < choice.error_nearest
    assert not gptq.choose(
        w, moments(layer(k=64)[1]), weight_format("w4_asym_g128").rounding(), clip=True, gptq=True, damping=0.01
    ).notes
    nothing = gptq.choose(
        w, torch.zeros(64, 64), weight_format("w4_asym_g128").rounding(), clip=True, gptq=True, damping=0.01
    )
    for ours, plain in zip(nothing.parts, weight_format("w4_asym_g128").quantize(w), strict=True):
        assert torch.equal(ours, plain)


def test_of_few_tokens_little_is_believed() -> None:
    w, x = layer()[0], torch.randn(2048, 200, generator=torch.Generator().manual_seed(0))  # a hundred show nothing
    seen, other = x[:100], x[1024:]
    nearest = lost(w, nearest_parts(w, "w4_asym_g128"), "w4_asym_g128", other)
    result = {}
    for tokens in (None, len(seen)):
        choice = gptq.choose(
            w,
            moments(seen),
            weight_format("w4_asym_g128").rounding(),
            clip=True,
            gptq=True,
            damping=0.01,
            tokens=tokens,
        )
        result[tokens] = lost(w, choice.parts, "w4_asym_g128", other)
    assert result[len(seen)] < nearest < 0.5 * result[None]
    assert choice.notes == ("100 tokens are few for 200 inputs, so their moments are evened out: give more text",)
    torch.testing.assert_close(gptq.trusted(moments(x), 10**9), moments(x))
    white = gptq.trusted(moments(x), 0)  # nothing seen: rounding to nearest
    torch.testing.assert_close(white, torch.eye(200) * moments(x).diagonal().mean())


def test_moments_that_are_not_finite_are_refused() -> None:
    w, x = layer(k=64)
    x[0, 0] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        gptq.choose(w, moments(x), weight_format("w4_asym_g128").rounding(), clip=False, gptq=True, damping=0.01)
