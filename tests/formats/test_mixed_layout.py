"""Packed mix_4_8 weights are read back to the bit."""

from __future__ import annotations

import pytest
import torch

from qcompile.formats import mixed_layout
from qcompile.formats.mixed import MIX_4_8


@pytest.mark.parametrize(("n", "k", "pairs"), [(37, 96, False), (64, 200, True), (16, 128, False), (32, 161, True)])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_packed_weight_is_read_back(n: int, k: int, pairs: bool, share: float) -> None:
    make = torch.Generator().manual_seed(n + k)
    wide = torch.rand(n, generator=make) < share
    parts = MIX_4_8.quantize_rows(torch.randn(n, k, generator=make), wide)
    blobs = mixed_layout.pack(parts, mixed_layout.row_layout(wide, pairs))
    assert tuple(blobs) == mixed_layout.ROLES
    for one, other in zip(mixed_layout.unpack(blobs, n, k, pairs), parts, strict=True):
        assert torch.equal(one, other)
