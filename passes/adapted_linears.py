"""Which weights of the checkpoint a gemm multiplies by, and how passes have changed them on the way.

Passes write what they do to a weight as operators on it. Those listed here are linear in the weight, and change either
its inputs or its outputs. So they change a product B A that an adapter adds to the weight just the same, as long as one
applies those of the inputs to A, and those of the outputs to B. The numbers that passes choose from a weight's values,
such as scales, stay as they were chosen: the function is the same for any choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from qcompile import ops
from qcompile.errors import PassError
from qcompile.graph import Graph

CHOICES = frozenset(
    ("column_max", "row_size", "column_order", "head_order", "smooth_factor", "key_scale", "max_heads", "worst_rows")
)
"""Operators that choose numbers from weights. What reads these numbers does not read the weights in this sense."""

ROUNDED = ("quantize_weight", "quantize_mixed", "upper_nibble")


@dataclass(frozen=True)
class WeightStep:
    """One change of a weight: an operator with its numbers, and its vector (a weight expression), if it has one.

    `place` puts rows at `start` of `total`; `interleave` is interleave_rows with zeros in place of the other operand,
    which comes first unless `first`; `take_spans` keeps what a rank of a divided model has.
    """

    op: str
    numbers: tuple[tuple[str, int | bool | tuple[int, ...]], ...]
    vector: fx.Node | None = None

    @property
    def rows(self) -> tuple[int, int] | None:
        """The rows that `slice_rows` keeps; None for other operators."""
        numbers: dict[str, Any] = dict(self.numbers)
        return (numbers["start"], numbers["stop"]) if self.op == "slice_rows" else None


@dataclass(frozen=True)
class WeightTerm:
    """A weight [N, K] of the checkpoint in a gemm's: the changes of its inputs, and those of its outputs, in order."""

    weight: str
    inputs: tuple[WeightStep, ...] = ()
    outputs: tuple[WeightStep, ...] = ()

    def then(self, *, inputs: WeightStep | None = None, outputs: WeightStep | None = None) -> WeightTerm:
        """The term after one more change."""
        return WeightTerm(
            self.weight,
            self.inputs + ((inputs,) if inputs else ()),
            self.outputs + ((outputs,) if outputs else ()),
        )


def terms_of(gemm: fx.Node) -> list[WeightTerm]:
    """The weights of which the weight of `gemm` is the sum. Raises PassError for an operator that is not known."""
    node: Any = ops.operand(gemm, "weight")
    parts: list[fx.Node] = []
    while (kind := ops.name_of(node.target)) in (*ROUNDED, "take_parts"):
        parts += [node] * (kind == "take_parts")
        node = ops.operand(node, "weight" if kind in ("upper_nibble", "take_parts") else "w")
    terms = list(_terms(node))
    for part in reversed(parts):
        terms = [_taken(term, part) for term in terms]
    return terms


def _taken(term: WeightTerm, part: fx.Node) -> WeightTerm:
    """`term` after `part`, which takes runs of its outputs or of its inputs for a rank of a divided model."""
    axis = int(ops.operand(part, "axis")) % 2
    step = WeightStep("take_spans", (("axis", axis), ("spans", tuple(ops.operand(part, "spans")))))
    return term.then(**{("outputs", "inputs")[axis]: step})


def _terms(node: fx.Node) -> Iterator[WeightTerm]:
    if node.op == "get_attr":
        yield WeightTerm(str(node.target))
        return
    kind, given = ops.name_of(node.target), ops.operands(node)
    if kind in ("scale_axis", "rotate", "center", "take_axis"):
        step, axis = _along_axis(node), given.axis % 2
        yield from (term.then(**{("outputs", "inputs")[axis]: step}) for term in _terms(given.w))
    elif kind == "mul" and given.b.meta["val"].dim() == 1:
        step = WeightStep("scale_axis", (("axis", 1), ("inverse", False)), given.b)
        yield from (term.then(inputs=step) for term in _terms(given.a))
    elif kind == "slice_rows":
        step = WeightStep("slice_rows", (("start", given.start), ("stop", given.stop)))
        yield from (term.then(outputs=step) for term in _terms(given.w))
    elif kind == "concat_rows":
        start, total = 0, node.meta["val"].shape[0]
        for part in given.weights:
            step = WeightStep("place", (("start", start), ("total", total)))
            yield from (term.then(outputs=step) for term in _terms(part))
            start += part.meta["val"].shape[0]
    elif kind == "interleave_rows":
        for first, part in ((True, given.a), (False, given.b)):
            step = WeightStep("interleave", (("first", first), ("block", given.block)))
            yield from (term.then(outputs=step) for term in _terms(part))
    else:
        raise PassError("lora", node.name, f"weights that go through {kind} are not known to the adapter's factors")


def _along_axis(node: fx.Node) -> WeightStep:
    """The change by an operator with an operand `axis`."""
    given = ops.named(node)
    vectors = [given[name] for name in ("factor", "signs", "order") if name in given]
    numbers = [("axis", given["axis"] % 2)] + ([("inverse", given["inverse"])] if "inverse" in given else [])
    return WeightStep(str(ops.name_of(node.target)), tuple(numbers), vectors[0] if vectors else None)


def weights_read(graph: Graph, node: fx.Node, *, but: str = "") -> set[str]:
    """Names of the weights that the operands of `node` other than `but` are computed from, choices apart."""
    names: set[str] = set()
    kept = {operand for name, operand in ops.named(node).items() if name == but} if ops.name_of(node.target) else set()
    left = [source for source in node.all_input_nodes if graph.is_weight(source) and source not in kept]
    seen = set(left)
    while left:
        source = left.pop()
        if source.op == "get_attr":
            names.add(str(source.target))
        elif ops.name_of(source.target) not in CHOICES:
            left += (fresh := [each for each in source.all_input_nodes if each not in seen])
            seen.update(fresh)
    return names
