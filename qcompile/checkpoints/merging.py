"""Adapters merged into a model's weights: the graph stays, and its weights load as the sums.

A weight is changed only where that provably means what PEFT means: the graph reads it once, as the weight of the one
module that the adapter names. A weight that two modules share (a tied embedding) would change for both, and is refused.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.checkpoints.adapters import Adapter, LowRank, read_adapter
from qcompile.errors import UnsupportedError, UsageError
from qcompile.graph import Graph, Weight, WeightStore

OUTPUTS_FIRST = ("linear", "expert_linear", "aten.linear.default")
"""Operators that read a weight as [outputs, inputs]."""
INPUTS_FIRST = ("aten.addmm.default", "aten.mm.default")
"""Operators that read a weight as [inputs, outputs]."""


@dataclass(frozen=True)
class Addend:
    """An adapter to merge, times `weight`."""

    adapter: Adapter
    weight: float = 1.0


def addends(lora: str | Path | Sequence[str | Path]) -> tuple[Addend, ...]:
    """Adapters as `build` takes them: folders, as text with a weight, DIR=0.5. Raises QCompileError."""
    listed = (lora,) if isinstance(lora, str | Path) else tuple(lora)
    given = tuple(_share(one) for one in listed)
    if len({addend.adapter.name for addend in given}) < len(given):
        raise UsageError("two adapters to merge have the same name: rename the folder of one")
    return given


def _share(given: str | Path) -> Addend:
    folder, equals, number = str(given).rpartition("=")
    if isinstance(given, Path) or not equals or Path(given).is_dir():
        return Addend(read_adapter(Path(given)))
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UsageError(f"--lora {given}: {number!r} is no weight; write a folder, or a folder and a number, DIR=0.5")
    return Addend(read_adapter(Path(folder)), weight)


def merge(graph: Graph, lora: Sequence[Addend]) -> Graph:
    """`graph`, at stage `import` or `raise`, with the weights of its model after the adapters are merged.

    Sums are computed in float64, in the order of `lora`, when a weight is loaded. Raises UsageError or UnsupportedError
    if the weight of a module cannot be changed; the error names the adapter and the module.
    """
    if not lora:
        return graph
    info = replace(graph.info, adapters={addend.adapter.name: addend.weight for addend in lora})
    graph = Graph(graph.fx, WeightStore(dict(graph.weights.entries)), info, graph.stage)
    readers = _readers(graph)
    for addend in lora:
        for parameter, value in addend.adapter.replaced.items():
            _replace(graph, readers, addend, parameter, value)
        for module, change in addend.adapter.low_rank.items():
            _add(graph, readers, addend, f"{module}.weight", change)
        for parameter, value in addend.adapter.added.items():
            _change(graph, readers, addend, parameter, value.shape, functools.partial(torch.add, value * addend.weight))
    return graph


def _readers(graph: Graph) -> Mapping[str, list[fx.Node]]:
    """The operators that read each weight, by its name."""
    readers: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            readers.setdefault(str(node.target), []).extend(node.users)
    return readers


def _add(graph: Graph, readers: Mapping[str, list[fx.Node]], addend: Addend, parameter: str, change: LowRank) -> None:
    """Add a change of low rank to the weight `parameter`."""
    swapped = (change.a.shape[1], change.b.shape[0])
    shape = swapped if change.table else swapped[::-1]
    entry = graph.weights.entries.get(parameter)
    transposed = False
    if entry is not None and not change.table and entry.shape in (shape, swapped):
        transposed = _inputs_first(readers.get(parameter, []), entry, shape, addend, parameter)
        shape = swapped if transposed else shape
    if change.magnitude is not None and addend.weight != 1:
        raise UnsupportedError(f"adapter {addend.adapter.name}: an adapter with magnitudes (DoRA) merges with weight 1")

    def merged(weight: Tensor) -> Tensor:
        total = (weight.T if transposed else weight) + change.product(addend.weight)
        if change.magnitude is not None:
            total *= (change.magnitude.double() / total.norm(dim=1))[:, None]
        return total.T if transposed else total

    _change(graph, readers, addend, parameter, shape, merged)


def _inputs_first(users: list[fx.Node], entry: Weight, shape: tuple[int, ...], addend: Addend, parameter: str) -> bool:
    """Whether the weight is stored as [inputs, outputs]: by its shape, or if it is square by what reads it."""
    if shape[0] != shape[1]:
        return entry.shape != shape
    kinds = {ops.name_of(user.target) or str(user.target) for user in users}
    for order, inputs_first in ((OUTPUTS_FIRST, False), (INPUTS_FIRST, True)):
        if kinds and kinds <= set(order):
            return inputs_first
    raise UnsupportedError(
        f"adapter {addend.adapter.name}: {parameter} is square and read by {', '.join(sorted(kinds)) or 'nothing'}, so "
        "it is not known which of its sides are outputs"
    )


def _replace(graph: Graph, readers: Mapping[str, list[fx.Node]], addend: Addend, parameter: str, value: Tensor) -> None:
    """Give `parameter` the adapter's own values."""
    if addend.weight != 1:
        raise UnsupportedError(
            f"adapter {addend.adapter.name} replaces {parameter}, so it merges with weight 1, not {addend.weight}"
        )
    _change(graph, readers, addend, parameter, value.shape, lambda _: value.double())


def _instead(graph: Graph, readers: Mapping[str, list[fx.Node]], parameter: str, shape: Sequence[int]) -> str:
    """What is said of a weight that is not read by the name `parameter`: a shared one of its shape, or the nearest."""
    for other, users in readers.items():
        if len(users) > 1 and graph.weights.entries[other].shape == tuple(shape):
            return f"; {other} is as large, and several operators share it (a tied embedding): it would change for all"
    near = difflib.get_close_matches(parameter, readers, 1)
    return f"; the nearest is {near[0]}" if near else ""


def _change(
    graph: Graph,
    readers: Mapping[str, list[fx.Node]],
    addend: Addend,
    parameter: str,
    shape: Sequence[int],
    change: Callable[[Tensor], Tensor],
) -> None:
    """Make `parameter` load as `change` of its values, float64 -> float64, both of `shape`."""
    name, entry = addend.adapter.name, graph.weights.entries.get(parameter)
    users = readers.get(parameter, [])
    if entry is None or not users:
        hint = _instead(graph, readers, parameter, shape)
        raise UsageError(f"adapter {name} changes {parameter}, which the model does not read by this name{hint}")
    if len(users) > 1:
        places = ", ".join(str(ops.name_of(user.target) or user.target) for user in users)
        raise UnsupportedError(
            f"adapter {name} changes {parameter}, which several operators share ({places}): it would change for all"
        )
    if tuple(shape) != entry.shape:
        raise UsageError(
            f"adapter {name} changes {parameter} as {list(shape)}, and the model has {list(entry.shape)}: it was "
            "trained for another model"
        )
    before = entry.load

    def load() -> Tensor:
        return change(before().double()).to(torch.float32).contiguous()

    graph.weights.entries[parameter] = Weight(entry.shape, entry.dtype, load)
