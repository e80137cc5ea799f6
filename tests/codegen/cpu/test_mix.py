"""mix_4_8: row order, packing, and the kernels' epilogues on weights packed by formats/mixed_layout.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import Tensor

from qcompile.formats import mixed, mixed_layout
from qcompile.formats.mixed import MIX_4_8
from qcompile.formats.registry import weight_format
from tests.codegen.cpu.test_gemm import ADD, GATED, STORE, Activation, Weight, random_activation, run
from tests.support.harness import TRIED

FORMAT = "mix_4_8_x128"
TYPES = {"scale": np.float32, "columns": np.int32, "starts": np.int32}


def marked(n: int, fraction: float = 0.3) -> Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(n)) < fraction


def packed(w: Tensor, wide: Tensor, pairs: bool) -> Weight:
    """`w` in the kernels' format."""
    parts = MIX_4_8.quantize_rows(w, wide)
    order = mixed_layout.row_layout(wide, pairs)
    blobs = mixed_layout.pack(parts, order)
    assert {role: blob.numel() for role, blob in blobs.items()} == mixed_layout.packed_bytes(order, w.shape[1])
    buffers = {role: blob.numpy().view(TYPES.get(role, np.uint8)) for role, blob in blobs.items()}
    buffers["columns"] = buffers["columns"].reshape(-1, 16)[: len(order.rows)]
    return Weight(buffers, weight_format("mix_4_8").dequantize(parts, w.shape[1]).double().numpy())


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 1.0])
def test_every_row_has_its_place_in_a_block_of_its_width(pairs: bool, fraction: float) -> None:
    wide = marked(320, fraction)
    order = mixed_layout.row_layout(wide, pairs)
    rows, real = order.rows, order.rows >= 0
    assert sorted(rows[real].tolist()) == list(range(320))
    assert (wide[rows.clamp(min=0)] == order.wide[:, None])[real].all()
    assert (real[:, :-1] | ~real[:, 1:]).all() and real[:, 0].all()  # padding is at the end
    if pairs:
        assert (order.rows[1::2] - order.rows[::2])[real[::2]].eq(16).all()
        features = rows // 32 * 16 + rows % 16
        assert torch.equal(order.columns[real], features[real])
    else:
        assert torch.equal(order.columns, rows)
    packed(torch.randn(320, 40), wide, pairs)  # also works if a width has no blocks
    # Blocks are sorted by kind. Without gate/up pairs, a pair with one block of each kind belongs to the later run.
    kinds = order.wide.unflatten(0, (-1, 2 if pairs else 1)).int()
    values = (kinds * torch.tensor([2, 1])[: kinds.shape[1]]).sum(1)
    assert torch.equal(values, values.sort().values)
    ends = [int((values <= value).sum()) for value in values.unique()[:-1]]
    assert list(accumulate(order.runs)) == [end if pairs else end // 2 for end in ends]


def test_rounding_is_that_of_each_width() -> None:
    w = torch.randn(40, 200, generator=torch.Generator().manual_seed(0))
    wide = mixed.worst_rows(w, 0.25)
    assert wide.sum() == 10
    back = weight_format("mix_4_8").dequantize(MIX_4_8.quantize_rows(w, wide), 200)
    four = weight_format("w4_asym_g128").dequantize(weight_format("w4_asym_g128").quantize(w), 200)
    assert torch.equal(back[~wide], four[~wide])
    assert ((back - w)[wide].abs().amax(1) <= w[wide].abs().amax(1) * 0.5001 / 127).all()
    error = (four - w).square().sum(1)
    assert error[wide].min() >= error[~wide].max()


@pytest.mark.parametrize("isa", TRIED)
@pytest.mark.parametrize("m", [1, 5, 61])
def test_epilogues_write_to_the_rows_own_columns(harness: Callable[[str], ctypes.CDLL], isa: str, m: int) -> None:
    library, n, k = harness(isa), 72, 200
    rng = np.random.default_rng(m)
    act = random_activation(FORMAT, m, 224, k, rng)
    assert act.q8 is not None
    act = Activation(None, (act.q8[0], act.q8[1] * np.float32(1e-2), act.q8[2]), act.value * 1e-2)
    w = torch.from_numpy(rng.standard_normal((96, k)).astype(np.float32)) * 0.1
    bias = rng.standard_normal(96).astype(np.float32)
    weight = packed(w[:n], marked(n), False)
    y = (act.value[:, :k] @ weight.value.T + bias[:n]).astype(np.float32)
    # A few additions, each with relative error 2^-24, on sums of magnitudes of some tens together.
    close = {"rtol": 1e-5, "atol": 3e-5}
    for threads in (1, 3):
        got = run(library, FORMAT, weight, act, n, k, STORE, bias=bias, threads=threads)
        np.testing.assert_allclose(got, y, **close)
    residual = rng.standard_normal((m, n + 5)).astype(np.float32)
    got = run(library, FORMAT, weight, act, n, k, ADD, bias=bias, residual=residual)
    np.testing.assert_allclose(got, residual[:, :n] + y, **close)
    weight = packed(w, marked(96), True)
    full = (act.value[:, :k] @ weight.value.T + bias).reshape(m, 3, 2, 16)
    gate, up = full[:, :, 0].reshape(m, 48), full[:, :, 1].reshape(m, 48)
    got = run(library, FORMAT, weight, act, 96, k, GATED, bias=bias, threads=2)
    np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)
