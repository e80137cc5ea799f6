"""Hadamard matrices: entries ±1, orthogonal rows. Divided by sqrt(n), they are rotations that spread outliers.

Orders that are powers of two come from Sylvester's doubling. Others come from doubling a Paley matrix (J. Math. Phys.
12, 1933), which exists for q + 1 (q prime, q = 3 mod 4) and 2 (q + 1) (q prime, q = 1 mod 4): 12, 20, 28, 36, 44,
60, ... All matrices are constructed here; none is a hard-coded table.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def hadamard_matrix(n: int) -> Tensor | None:
    """An n x n Hadamard matrix, float32 ±1; None if these constructions yield none."""
    if n == 1:
        return torch.ones(1, 1)
    if n % 2 == 0:
        half = hadamard_matrix(n // 2)
        if half is not None:
            return torch.cat((torch.cat((half, half), 1), torch.cat((half, -half), 1)))
    return _paley(n) if n % 4 == 0 else None


def _paley(n: int) -> Tensor | None:
    """Paley's first construction for n = q + 1, his second for n = 2 (q + 1); None if neither applies."""
    q = n - 1
    if q % 4 == 3 and _is_prime(q):
        skew = torch.zeros(n, n)
        skew[0, 1:], skew[1:, 0] = 1, -1
        skew[1:, 1:] = _residues(q)
        return skew + torch.eye(n)
    q = n // 2 - 1
    if q % 4 == 1 and _is_prime(q):
        conference = torch.zeros(q + 1, q + 1)
        conference[0, 1:] = conference[1:, 0] = 1
        conference[1:, 1:] = _residues(q)
        plus, minus = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
        return torch.kron(conference, plus) + torch.kron(torch.eye(q + 1), minus)
    return None


def _is_prime(q: int) -> bool:
    return q > 1 and all(q % d for d in range(2, int(q**0.5) + 1))


def _residues(q: int) -> Tensor:
    """Jacobsthal's matrix [q, q]: 1 where j - i is a square modulo q, -1 where it is not, 0 on the diagonal."""
    squares = {x * x % q for x in range(1, q)}
    sign = torch.tensor([0.0] + [1.0 if x in squares else -1.0 for x in range(1, q)])
    index = (torch.arange(q)[None, :] - torch.arange(q)[:, None]) % q
    return sign[index]


def largest_order(n: int, core: int | None = None) -> int:
    """The largest divisor of n (at least 1) that is a known Hadamard order with a core_order of at most `core`."""
    orders = (d for d in range(n, 0, -1) if n % d == 0 and _has_order(d))
    return next(d for d in orders if core is None or core_order(d) <= core)


@cache
def _has_order(n: int) -> bool:
    """Whether hadamard_matrix(n) exists, without building it."""
    if n in (1, 2):
        return True
    if n % 4:
        return False
    first, second = n - 1, n // 2 - 1
    paley = (first % 4 == 3 and _is_prime(first)) or (second % 4 == 1 and _is_prime(second))
    return paley or _has_order(n // 2)


def core_order(n: int) -> int:
    """The order left after removing the doublings of hadamard_matrix(n): 1, or that of a Paley matrix."""
    while n % 2 == 0 and _has_order(n // 2):
        n //= 2
    return n


def core_matrix(n: int) -> Tensor:
    """hadamard_matrix(n). Raises ValueError if no matrix of order n is known."""
    matrix = hadamard_matrix(n)
    if matrix is None:
        raise ValueError(f"no Hadamard matrix of order {n} is known here")
    return matrix


def transform(x: Tensor, core: Tensor | None = None) -> Tensor:
    """x [..., n] times hadamard_matrix(n) / sqrt(n), with n log n additions for the power-of-two part.

    `core` may pass core_matrix(core_order(n)) if it is available. Raises ValueError if no matrix of order n is known.
    """
    n = x.shape[-1]
    matrix = core_matrix(core_order(n)) if core is None else core
    size = matrix.shape[0]
    shape = x.shape
    y = x.reshape(-1, n // size, size) @ matrix.to(x.dtype)
    stride = 1
    while stride < n // size:
        y = y.reshape(-1, n // size // (2 * stride), 2, stride, size)
        y = torch.stack((y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]), 2)
        stride *= 2
    return (y.reshape(shape) / n**0.5).contiguous()
