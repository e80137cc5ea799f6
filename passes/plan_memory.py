"""Plan memory: assign every value of a step a place in the activation arena."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from qcompile import ops
from qcompile.formats.activations import activation_format
from qcompile.formats.blocks import padded_inputs
from qcompile.formats.rounding import groups_of
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult

ALIGNMENT = 64
VIEWS = ("slice_features", "split_heads", "merge_heads")
_BEHIND_SUMS = ("add", "norm_quantize", "rms_norm", "layer_norm")
"""Operators that the kernel of a sum over ranks may compute with it."""
OUTSIDE = ("kv_append", "write_features")
"""Operators with results outside the arena."""


@dataclass
class _Value:
    """A buffer shared by one or more nodes, live from step `first` to step `last`."""

    name: str
    dtype: str
    width: int
    group: int
    rows: str
    first: int
    last: int
    activation: str = "f32"
    offset: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: elements padded to a multiple of K_BLOCK; for q8 also scales and sums."""
        stride = padded_inputs(self.width)
        if self.dtype == "q8":
            scales = groups_of(stride, activation_format(self.activation).group)
            return stride + 4 * scales + 4 * groups_of(stride, self.group)
        return stride * {"bf16": 2, "f32": 4}[self.dtype]


@dataclass(frozen=True)
class PlanMemory(Pass):
    """Writes node.meta["storage"]: buffer, dtype, width, group, activation, rows, offset (bytes per row), column.

    Views share their source's buffer at a column offset. Operators on heads and of adapters work in place; a gemm with
    residual add does if nothing reads the old value later. Buffers with disjoint lifetimes share bytes (first fit,
    largest first). Some results have a place earlier than needed, from an operator before them on, so that its kernel
    may write them itself: the result of a gate, a value rounded to bf16, a gate's result that is quantized, and the
    result of an addition to a sum over ranks and of its norm.
    """

    name: ClassVar[str] = "plan_memory"
    requires: ClassVar[tuple[str, ...]] = ("cache",)

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        place = {node: index for index, node in enumerate(graph.nodes)}
        values: dict[fx.Node, tuple[_Value, int]] = {}
        for node in graph.nodes:
            _place(graph, node, place, values)
        for node in behind_take_rows(graph):
            if node in values:
                values[node][0].rows = "outputs"
        buffers = list({id(value): value for value, _ in values.values()}.values())
        for rows in ("tokens", "outputs"):
            _fit([b for b in buffers if b.rows == rows])
        for node, (value, column) in values.items():
            node.meta["storage"] = {
                "buffer": value.name,
                "dtype": value.dtype,
                "width": value.width,
                "group": value.group,
                "activation": value.activation,
                "rows": value.rows,
                "offset": value.offset,
                "column": column,
            }
        return PassResult(graph, len(buffers))


def _last_use(node: fx.Node, place: dict[fx.Node, int]) -> int:
    return max((place[user] for user in node.users), default=place[node])


def _place(graph: Graph, node: fx.Node, place: dict[fx.Node, int], values: dict[fx.Node, tuple[_Value, int]]) -> None:
    """Give `node` a new buffer, or a place in the buffer of the value that it views or overwrites."""
    kind = "getitem" if node.target is operator.getitem else ops.name_of(node.target)
    if node.op != "call_function" or kind is None or graph.is_weight(node) or kind in OUTSIDE:
        return
    shared = _shared(node, kind, place, values)
    if shared is not None:
        value, column = shared
        value.last = max(value.last, _last_use(node, place))
    elif kind == "getitem" or _feeds_output(graph, node):
        return
    else:
        value, column = _new_value(graph, node, kind, place), 0
    values[node] = value, column


def _feeds_output(graph: Graph, node: fx.Node) -> bool:
    """Whether `node`, a final gemm or all_gather, writes logits to the caller's memory; other results are copied."""
    results, kind = graph.output.args[0], ops.name_of(node.target)
    if not isinstance(results, (tuple, list)) or results[0] is not node:
        return False
    if kind != "gemm":
        return kind == "all_gather"
    return ops.operand(node, "residual") is None and ops.operand(node, "epilogue") == "store"


def _shared(
    node: fx.Node, kind: str, place: dict[fx.Node, int], values: dict[fx.Node, tuple[_Value, int]]
) -> tuple[_Value, int] | None:
    source: Any = node.args[0]
    if kind == "getitem":
        return values[source] if node.args[1] == 0 else None
    given = ops.operands(node)
    if kind in VIEWS:
        value, column = values[source]
        return value, column + (given.start if kind == "slice_features" else 0)
    if kind in ("rope_append", "rope_heads", "norm_heads", "lora_expand") or (
        kind == "quantize_activation" and given.kind == "f32"
    ):
        return values[source]
    if kind == "gemm" and given.residual is not None:
        value, column = values[given.residual]
        if value.last <= place[node] and column == 0 and value.width == given.width:
            return value, 0
    return None


def _new_value(graph: Graph, node: fx.Node, kind: str, place: dict[fx.Node, int]) -> _Value:
    meta = node.meta["val"]
    shape = (meta[0] if isinstance(meta, (list, tuple)) else meta).shape
    width = 1
    for size in shape[1:]:
        width *= int(size)
    dtype, group, activation = "f32", 0, "f32"
    if kind in ("quantize_activation", "norm_quantize", "hadamard_quantize"):
        given = ops.operands(node)
        activation = given.kind if kind == "quantize_activation" else given.dtype
        dtype = "q8" if activation_format(activation).top else activation
        group = padded_inputs(given.group) if dtype == "q8" else 0
    writing = ("gate_rows", *(("gemm", "kv_attention") if dtype == "bf16" else ()))
    computed = _source(node, writing) if kind == "quantize_activation" else node
    if kind == "gate_rows":
        computed = _gated(node)
    if kind in _BEHIND_SUMS:
        computed = _summed(node)
    lives = place[computed], _last_use(node, place)
    return _Value(node.name, dtype, width, group, "tokens", *lives, activation)


def _gated(node: fx.Node) -> fx.Node:
    """The gemm that makes the operand of `node`, a gate; where no row has an adapter, its kernel applies the gate."""
    gemm: fx.Node = ops.operand(ops.operand(node, "x"), "y")
    return gemm


def _summed(node: fx.Node) -> fx.Node:
    """The sum over ranks to which `node` adds, or of which it is the norm; `node` itself if it does neither."""
    for source in node.all_input_nodes:
        kind = ops.name_of(source.target)
        if kind == "all_reduce":
            return source
        if kind == "add" and ops.name_of(node.target) != "add" and (total := _summed(source)) is not source:
            return total
    return node


def _source(node: fx.Node, kinds: tuple[str, ...]) -> fx.Node:
    """The operator that makes the operand of `node`, perhaps viewed in another shape, if of `kinds`; else `node`."""
    source: Any = ops.operand(node, "x")
    while ops.name_of(source.target) in VIEWS:
        source = ops.operand(source, "x")
    return source if ops.name_of(source.target) in kinds else node


def behind_take_rows(graph: Graph) -> set[fx.Node]:
    """The values that exist only for the rows with requested logits."""
    behind: set[fx.Node] = set()
    for node in graph.fx.nodes:
        if ops.name_of(node.target) == "take_rows" or any(source in behind for source in node.all_input_nodes):
            behind.add(node)
    return behind


def _fit(buffers: list[_Value]) -> None:
    """First fit by offset, largest buffers first. Buffers with overlapping lifetimes never overlap in memory."""
    placed: list[_Value] = []
    for value in sorted(buffers, key=lambda b: (-b.row_bytes, b.first)):
        size = -(-value.row_bytes // ALIGNMENT) * ALIGNMENT
        neighbours = sorted(
            (b.offset, b.offset + -(-b.row_bytes // ALIGNMENT) * ALIGNMENT)
            for b in placed
            if b.first <= value.last and value.first <= b.last
        )
        offset = 0
        for low, high in neighbours:
            if offset + size <= low:
                break
            offset = max(offset, high)
        value.offset = offset
        placed.append(value)
