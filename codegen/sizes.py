"""Sizes rounded up, as layouts and kernels need them."""

from __future__ import annotations


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`, and at least 1."""
    return 1 << (max(value, 1) - 1).bit_length()
