"""Hadamard matrices of many orders, and the fast transform against the plain product."""

from __future__ import annotations

import pytest
import torch

from qcompile.formats import hadamard

ORDERS = [1, 2, 4, 8, 12, 16, 20, 24, 28, 36, 40, 44, 48, 60, 64, 80, 128, 144, 320, 576]


@pytest.mark.parametrize("n", ORDERS)
def test_rows_are_orthogonal_signs(n: int) -> None:
    h = hadamard.hadamard_matrix(n)
    assert h is not None and (h.abs() == 1).all()
    assert torch.equal(h @ h.T, n * torch.eye(n))


@pytest.mark.parametrize("n", [3, 5, 6, 10, 22, 92])
def test_orders_without_a_construction_are_none(n: int) -> None:
    assert hadamard.hadamard_matrix(n) is None
    with pytest.raises(ValueError, match="no Hadamard matrix"):
        hadamard.transform(torch.ones(n))


@pytest.mark.parametrize("n", ORDERS)
def test_fast_transform_is_the_product(n: int) -> None:
    x = torch.randn(3, 5, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    expected = x @ hadamard.hadamard_matrix(n).double() / n**0.5
    assert (hadamard.transform(x) - expected).abs().max() < 1e-12  # float64 rounding over n terms


def test_largest_order_divides() -> None:
    assert hadamard.largest_order(2048) == 2048
    assert hadamard.largest_order(5632) == 5632  # 11 * 512 = 44 * 128
    assert hadamard.largest_order(7 * 8) == 56  # 28 * 2
    assert hadamard.largest_order(13) == 1
