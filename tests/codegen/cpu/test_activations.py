"""Quantizing rows: every integer activation type, on every instruction set, is the reference's bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch

from qcompile.formats.activations import INTEGERS, activation_format
from qcompile.formats.blocks import padded_inputs
from tests.support.harness import TRIED, Q8Kind, Q8Rows, aligned

Harness = Callable[[str], ctypes.CDLL]


def quantize(library: ctypes.CDLL, x: np.ndarray, kind: str, group: int) -> list[np.ndarray]:
    """x [rows, K] -> codes [rows, kp], scales and sums as the kernel writes them; `group` 0 sums whole rows."""
    rows, k = x.shape
    kp = padded_inputs(k)
    spec = activation_format(kind)
    padded = aligned(np.pad(x, ((0, 0), (0, kp - k))))
    how = Q8Kind(group or kp, spec.group or kp, *spec.divisors, spec.top if spec.clips else 0)
    scales, groups = (-(-kp // size) for size in (how.scale_group, how.group))
    out = [
        aligned(np.full(shape, 99, dtype))
        for shape, dtype in (((rows, kp), np.int8), ((rows, scales), np.float32), ((rows, groups), np.int32))
    ]
    pointers = [part.ctypes.data for part in out]
    into = Q8Rows(*pointers, how, groups, scales)
    library.harness_quantize(rows, ctypes.c_void_p(padded.ctypes.data), k, ctypes.byref(into))
    return out


@pytest.mark.parametrize("isa", TRIED)
@pytest.mark.parametrize("kind", [format.name for format in INTEGERS])
@pytest.mark.parametrize("group", [0, 32, 128])
def test_quantized_rows_are_those_of_the_reference(harness: Harness, isa: str, kind: str, group: int) -> None:
    if group == 0 and activation_format(kind).group:
        group = 128  # sums never reach over a scale
    library = harness(isa)
    for rows, k in ((1, 40), (3, 128), (17, 330)):
        x = np.random.default_rng([rows, k]).standard_normal((rows, k)).astype(np.float32)
        x[:, -7] *= 40  # an outlier, in the last group
        x[0] = 0
        codes, scale, sums = activation_format(kind).quantize(torch.from_numpy(x), group)
        got = quantize(library, x, kind, group)
        np.testing.assert_array_equal(got[0][:, :k], codes)
        assert not got[0][:, k:].any()
        np.testing.assert_array_equal(got[1], scale.view(rows, -1))
        np.testing.assert_array_equal(got[2], sums)
