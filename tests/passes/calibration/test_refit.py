"""Scales that are fitted again to the codes of a weight."""

from __future__ import annotations

import torch

from qcompile.formats.registry import weight_format
from qcompile.passes.calibration import gptq
from qcompile.passes.calibration.refit import refitted
from tests.passes.calibration.test_gptq import layer, moments


def test_fitted_scales_are_the_best_for_the_codes() -> None:
    w, x = layer(n=24, k=200)
    w[3] = 0
    hessian, format = moments(x), weight_format("w4_asym_g128")
    grid = format.fit(w, 1.0)
    values = grid.round(w)
    better, moved = refitted(w, values, hessian, grid)
    assert torch.equal(moved[3], torch.zeros(200)) and torch.equal(better.step[3], grid.step[3])

    def error(q: torch.Tensor) -> float:
        return float(((w - q) @ hessian * (w - q)).sum())

    assert error(moved) < 0.99 * error(values)
    torch.testing.assert_close(moved / better.spread(better.step, 200), values / grid.spread(grid.step, 200))
    for group in (slice(0, 128), slice(128, 200)):
        for factor in (0.998, 1.002):
            other = moved.clone()
            other[:, group] *= factor
            assert error(other) > error(moved)


def test_trellis_scales_stay_bfloat16_and_belong_to_the_parts() -> None:
    w, x = layer(n=70, k=200)
    format = weight_format("w2_trellis_g128")
    options = {"gptq": True, "damping": 0.01, "descent": 1}
    choices = [gptq.choose(w, moments(x), format.rounding(), clip=clip, **options) for clip in (False, True)]
    read = format.dequantize(choices[1].parts, 200)
    lost = float(((read - w) @ x.T).square().sum() / (w @ x.T).square().sum())
    assert abs(lost / choices[1].error - 1) < 1e-2  # what is stored is what was chosen
    assert choices[1].error < 0.99 * choices[0].error and choices[1].parts[1].dtype == torch.bfloat16
