"""What Python code can read from its variables."""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from qcompile.checkpoints.readable import readable


class Slotted:
    """An attribute without a dictionary, and one of the class."""

    __slots__ = ("count",)
    total = 3

    def __init__(self) -> None:
        self.count = 5

    def method(self) -> None:
        """Reads the object."""


def closure() -> Callable[[], int]:
    count = 7
    return lambda: count


def generated() -> Iterator[int]:
    count = 9
    yield count


def started() -> Iterator[int]:
    made = generated()
    next(made)
    return made


CASES: dict[str, tuple[Any, str, Any]] = {
    "nested": ({"a": [(1, {"b": 2})]}, "x['a'][0][1]['b']", 2),
    "length": ([[], [torch.ones(1)]], "x[1]", 1),
    "set": ({1, 2}, "x{}", "['1', '2']"),
    "slots": (Slotted(), "x.count", 5),
    "class": (Slotted, "x.total", 3),
    "method": (Slotted().method, "x.__self__.count", 5),
    "partial": (partial(max, 4), "x.args[0]", 4),
    "closure": (closure(), "x.count", 7),
    "default": (lambda held=[6]: held, "x.__defaults__[0][0]", 6),
    "generator": (started(), "x.count", 9),
    "count": (itertools.count(8), "x (an iterator)", "count(8)"),
    "list iterator": (iter([1, 2]), "x (an iterator)", 2),
    "bytes": (bytearray(b"ab"), "x", b"ab"),
    "array": (array.array("b", [1]), "x", b"\x01"),
    "numpy": (np.array([2], np.int8), "x", "(1,) int8 b'\\x02'"),
    "module": (nn.Sequential(nn.Dropout(0.25)), "x._modules['0'].p", 0.25),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_found(case: str) -> None:
    value, path, wanted = CASES[case]
    assert readable({"x": value}, ())[path] == wanted


def test_what_is_left_out() -> None:
    held: list[Any] = [torch.ones(2), torch.Generator(), Slotted(), itertools]
    held.append(held)
    assert set(readable({"x": held}, (Slotted,))) == {"x"}
