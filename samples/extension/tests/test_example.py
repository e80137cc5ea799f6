"""The pass, the recipe and the format, tested as users of qcompile test them: without its repository."""

from __future__ import annotations

import torch
from qcompile_example.symmetric import W4_SYM_G128
from qcompile_example.widen_narrow import WidenNarrow

from qcompile import pipeline
from qcompile.passes.base import apply
from qcompile.testing import decoder, equivalent, sequence_inputs


def test_narrow_linears_are_widened() -> None:
    before = decoder(kv_heads=1)  # keys and values have 16 features, all others more
    result = apply(WidenNarrow(enabled=True, features=16), before)
    decided = [node for node in result.graph.calls("linear") if "precision" in node.meta]
    assert result.fired == len(decided) == 4
    assert equivalent(result.graph, before, sequence_inputs()) == 0


def test_no_linear_is_narrow() -> None:
    assert apply(WidenNarrow(enabled=True, features=8), decoder()).fired == 0


def test_codes_are_symmetric() -> None:
    w = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    codes, scale, zero = parts = W4_SYM_G128.quantize(w)
    assert codes.min() >= 1 and codes.max() <= 15 and (zero == 8).all() and scale.shape == (5, 2)
    error = (W4_SYM_G128.dequantize(parts, 200) - w).abs()
    assert (error <= scale.repeat_interleave(128, 1)[:, :200] / 2 + 1e-6).all()
    assert torch.equal(W4_SYM_G128.quantize(-w)[0], 16 - codes)


def test_a_model_is_planned_with_all_three() -> None:
    options = {"widen_narrow.features": 16}
    planned = pipeline.plan(decoder(kv_heads=1), recipe="wide-ends", passes=["widen_narrow"], options=options)
    records = {record.name: record for record in planned.passes}
    assert records["rules"].fired == 7 and records["widen_narrow"].fired == 4
    formats = {call.format for call in planned.program.calls if call.kernel == "gemm"}
    assert {"w4_sym_g128", "w8_sym_channel", "mxfp4", "qoq_g128", "bf16"} <= formats
