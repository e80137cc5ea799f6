"""Operators by which ranks work together. A rank computes a part of a model that is divided over several.

All ranks run graphs with the same operators in the same order (passes/shard.py), each on its own part of the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from qcompile.errors import UsageError
from qcompile.ops.registry import define, like

_rank = threading.local()


class RankGroup:
    """`ranks` threads that run the graphs of all ranks together, for the reference bodies of the operators below."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._parts: list[Tensor | None] = [None] * ranks
        self._barrier = threading.Barrier(ranks)

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """What the functions of all ranks return. An error in one of them ends all, and is raised here."""
        with ThreadPoolExecutor(self.ranks) as pool:
            futures = [pool.submit(self._as_rank, rank, function) for rank, function in enumerate(functions)]
        errors = [error for future in futures if (error := future.exception())]
        for error in errors:  # a broken barrier is what the other ranks see of a rank's error
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]

    def _as_rank(self, rank: int, function: Callable[[], Any]) -> Any:
        _rank.group, _rank.number = self, rank
        try:
            with torch.no_grad():
                return function()
        except BaseException:
            self._barrier.abort()
            raise
        finally:
            del _rank.group, _rank.number

    def all_parts(self, part: Tensor) -> list[Tensor]:
        """Copies of the parts of all ranks, in the order of ranks."""
        self._parts[_rank.number] = part
        self._barrier.wait()
        parts = [given.clone() for given in self._parts if given is not None]
        self._barrier.wait()  # no rank overwrites its part before all have read it
        return parts


def _parts_of_all(x: Tensor, ranks: int) -> list[Tensor]:
    if ranks == 1:
        return [x.clone()]
    group = getattr(_rank, "group", None)
    if group is None or group.ranks != ranks:
        raise UsageError(f"this graph is of one of {ranks} ranks: run the graphs of all of them together")
    parts: list[Tensor] = group.all_parts(x)
    return parts


@define(like)
def all_reduce(x: Tensor, ranks: int) -> Tensor:
    """The sum of x [...] over `ranks` ranks, added in their order, so that all have the same bits.

    Raises UsageError unless a RankGroup of `ranks` ranks runs the graph; one rank needs none.
    """
    total, *others = _parts_of_all(x, ranks)
    for other in others:
        total += other
    return total


def _gathered(x: Tensor, ranks: int, width: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], width)


@define(_gathered)
def all_gather(x: Tensor, ranks: int, width: int) -> Tensor:
    """The first `width` features of x [..., F] of all ranks side by side, in their order: [..., width].

    Raises UsageError unless a RankGroup of `ranks` ranks runs the graph; one rank needs none.
    """
    return torch.cat(_parts_of_all(x, ranks), -1)[..., :width].clone()
