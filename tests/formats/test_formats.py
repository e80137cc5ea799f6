"""Formats: rounding, ranges, packing and sizes, against plain definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qcompile.errors import UnsupportedError, UsageError
from qcompile.formats.activations import INTEGERS, activation_format, dequantize_activation
from qcompile.formats.blocks import NIBBLES
from qcompile.formats.elements import E2M1, e2m1_codes, e2m1_values
from qcompile.formats.kv import kv_format
from qcompile.formats.mixed import MIX_4_8
from qcompile.formats.nested import NESTED_8_4
from qcompile.formats.registry import STORED_FORMATS, weight_format
from qcompile.formats.weight import Per, WeightFormat

FORMATS = sorted(set(STORED_FORMATS) - {"mix_4_8"})


def random_weight(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(16, 128), (40, 200), (1, 32), (17, 96)])
def test_parts_have_the_shapes_and_types_promised(format: str, shape: tuple[int, int]) -> None:
    parts = weight_format(format).quantize(random_weight(*shape))
    assert [(tuple(p.shape), p.dtype) for p in parts] == weight_format(format).layout(shape)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(16, 128), (40, 200), (17, 96)])
def test_packing_round_trips_and_has_the_size_promised(format: str, shape: tuple[int, int]) -> None:
    parts = weight_format(format).quantize(random_weight(*shape))
    blobs = weight_format(format).pack(parts)
    assert {role: blob.numel() for role, blob in blobs.items()} == weight_format(format).packed_bytes(*shape)
    assert torch.equal(weight_format(format).codes.unpack(blobs["codes"], *shape), parts[0])


def test_four_bit_bytes_hold_inputs_four_apart() -> None:
    codes = torch.arange(32, dtype=torch.uint8).remainder(16).repeat(16, 1)
    packed = weight_format("w4_asym_g128").pack([codes, torch.ones(16), torch.zeros(16, 1, dtype=torch.uint8)])["codes"]
    first = packed[:4].tolist()  # row 0, inputs 0..7
    assert first == [0 | 4 << 4, 1 | 5 << 4, 2 | 6 << 4, 3 | 7 << 4]


# Half a step of the range each format spans, relative to the largest weight: the most rounding can be off.
WORST = {
    "f32": 0.0,
    "bf16": 2**-8,
    "w8_sym_channel": 0.5 / 127,
    "w4_asym_g128": 1 / 15 + 1e-6,
    "qoq_channel": 1 / 15 + 1e-6,
}


@pytest.mark.parametrize("format", WORST)
def test_rounding_is_off_by_half_a_step_at_most(format: str) -> None:
    w = random_weight(24, 256)
    error = (weight_format(format).dequantize(weight_format(format).quantize(w), 256) - w).abs().amax(1)
    assert (error <= w.abs().amax(1) * WORST[format] * 1.001).all()


@pytest.mark.parametrize("format", FORMATS)
def test_zero_weights_stay_zero(format: str) -> None:
    w = random_weight(16, 160)
    w[3] = 0
    w[:, 7] = 0
    back = weight_format(format).dequantize(weight_format(format).quantize(w), 160)
    assert (back[3] == 0).all() and (back[:, 7] == 0).all()


def test_nested_upper_nibbles_are_the_4_bit_model_and_8_bits_halve_its_step_eight_times() -> None:
    w = random_weight(24, 300)
    parts = weight_format("nested_8_4").quantize(w)
    for part, alone in zip(parts, weight_format("w4_asym_g128").quantize(w), strict=False):
        assert torch.equal(part, alone)
    blobs = weight_format("nested_8_4").pack(parts)
    assert torch.equal(weight_format("nested_8_4").codes.unpack(blobs["low"], 24, 300), parts[3])
    error = (weight_format("nested_8_4").dequantize(parts, 300) - w).abs()
    step = parts[1].repeat_interleave(128, 1)[:, :300]
    assert (error <= step / 16 * 1.001).all()
    # An upper nibble one code off, as error compensation leaves it, is brought back by the lower.
    moved = (parts[0].int() + 1).clamp(max=15).to(torch.uint8)
    near = (weight_format("w4_asym_g128").dequantize([moved, *parts[1:3]], 300) - w).abs() <= step
    again = [moved, *parts[1:3], NESTED_8_4.lower_nibbles(w, moved, *parts[1:3])]
    error = (weight_format("nested_8_4").dequantize(again, 300) - w).abs()
    assert near.float().mean() > 0.4 and (error[near] <= (step / 16 * 1.001)[near]).all()


def test_qoq_levels_stay_in_int8() -> None:
    """QServe 3.1: with the first level within ±119, (code - zero) * group scale fits int8."""
    w = torch.cat([random_weight(200, 128, seed=s) ** 3 for s in range(10)])
    codes, step, zero, _ = weight_format("qoq_g128").quantize(w)
    level = (codes.int() - zero.int()) * step.int()
    assert level.min() >= -128 and level.max() <= 127


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, 0.0),
        (0.26, 0.5),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
        (5.1, 6.0),
        (9.0, 6.0),
    ],
)
def test_e2m1_rounds_to_nearest_ties_to_even(value: float, expected: float) -> None:
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1))
    codes = e2m1_codes(torch.tensor([value, -value]))
    assert table[codes.long()].tolist() == e2m1_values(codes).tolist() == [expected, -expected]


def test_mxfp4_scale_is_the_power_of_two_that_brings_the_largest_near_six() -> None:
    w = torch.zeros(1, 96)
    w[0, 0], w[0, 40], w[0, 70] = 6.0, 0.10, -7.0
    codes, exponent = weight_format("mxfp4").quantize(w)
    assert exponent.tolist() == [[127, 127 - 6, 128]]  # 6 of 1, 6.4 of 2^-6, 3.5 of 2
    assert codes[0, [0, 40, 70]].tolist() == [7, 7, 14]  # 6, 6 and -4


@given(
    st.integers(1, 300),
    st.sampled_from([0, 32, 128]),
    st.sampled_from([format.name for format in INTEGERS]),
    st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_activations_are_off_by_half_a_step_and_sums_are_of_the_codes(k: int, group: int, kind: str, seed: int) -> None:
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(seed))
    spec = activation_format(kind)
    codes, scale, sums = activation_format(kind).quantize(x, group)
    assert [(tuple(p.shape), p.dtype) for p in (codes, scale, sums)] == activation_format(kind).layout((3, k), group)
    assert codes.abs().max() <= max(spec.top, spec.last_top)
    assert torch.equal(sums.sum(-1), codes.sum(-1, dtype=torch.int32))
    error = (dequantize_activation([codes, scale, sums]) - x).abs()
    size = spec.group or k
    for start in range(0, k, size):
        part = slice(start, start + size)
        top = spec.last_top if start + size >= k else spec.top
        most = x[:, part].abs().amax(-1, keepdim=True) * spec.reach
        beyond = (x[:, part].abs() - most).clamp(min=0)  # is clipped
        assert (error[:, part] <= most / top * 0.5001 + beyond * 1.001).all()  # half a step, and its rounding


@pytest.mark.parametrize(("format", "step"), [("kv32", 0.0), ("kv16", 2**-8), ("kv8", 1 / 255), ("kv4", 1 / 15)])
def test_kv_formats_are_off_by_a_step_of_the_range_at_most(format: str, step: float) -> None:
    x = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(0))
    error = (kv_format(format).round_trip(x) - x).abs().amax(-1)
    spread = x.amax(-1).clamp_min(0) - x.amin(-1).clamp_max(0)
    assert (error <= spread * step).all()
    assert (kv_format(format).round_trip(torch.zeros(1, 1, 8)) == 0).all()


@pytest.mark.parametrize("name", ["", "mxfp5", "w8", "kv16", "int8"])
def test_unknown_formats_are_refused(name: str) -> None:
    for find in (weight_format, activation_format, kv_format):
        known = {"kv16": kv_format, "int8": activation_format}.get(name)
        if find is not known:
            with pytest.raises(UsageError, match=f"format {name} is unknown"):
                find(name)


def test_a_format_defines_how_it_reads_back_and_encodes() -> None:
    """No format falls through to another one's reading or encoding."""
    with pytest.raises(TypeError, match="abstract"):
        WeightFormat(name="new", bits=4, parts=(), codes=NIBBLES, activations=())  # type: ignore[abstract]
    w = random_weight(16, 128)
    for format in STORED_FORMATS.values():
        if not format.calibrated:
            for refused in (lambda f=format: f.rounding(), lambda f=format: f.fit(w, 1.0)):
                with pytest.raises(UnsupportedError, match=f"{format.name} leave calibration no choice"):
                    refused()
    for method in (MIX_4_8.quantize, MIX_4_8.pack):
        with pytest.raises(UnsupportedError, match="mix_4_8"):
            method(w)  # type: ignore[operator]


def test_roles_say_what_they_are_for() -> None:
    for format in STORED_FORMATS.values():
        assert format.parts[0].role == "codes" and format.parts[0].per is Per.WEIGHT
        assert len(set(format.roles)) == len(format.roles)
        assert any(part.per is Per.GROUP for part in format.parts) == (format.group > 0)
