"""What lowering knows of a graph: the buffers of its values, and its weight expressions as packed weights.

Packed weights are computed on demand, when they are written (codegen/packing.py).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.codegen.buffers import Buffer
from qcompile.codegen.calls import (
    Call,
    TableType,
)
from qcompile.codegen.fidelity import Fidelity
from qcompile.codegen.packing import MixedPacking, WeightTable
from qcompile.codegen.sizes import round_up
from qcompile.errors import PassError
from qcompile.formats.blocks import as_blob, pack_vector, packed_vector_bytes
from qcompile.formats.floats import TABLE_TYPES
from qcompile.formats.registry import weight_format
from qcompile.formats.rounding import Parts
from qcompile.graph import Graph

TABLE_ACTIVATION = "int8"
"""Kernels for activations of this type read a weight that is packed as tables of embeddings are."""


@dataclass
class Lowering:
    """State while lowering a graph: buffers by name, calls in order, names of its weights in order.

    `origin` distinguishes the stored weights of models that share one weight table. `fidelity` counts what rounding
    changes, if that is asked for.
    """

    graph: Graph
    table_of_weights: WeightTable
    origin: str = ""
    fidelity: Fidelity | None = None
    buffers: dict[str, Buffer] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    names: dict[str, None] = field(default_factory=dict)
    _digests: dict[fx.Node, str] = field(default_factory=dict)
    _vectors: dict[fx.Node, Tensor] = field(default_factory=dict)

    # ---- values ------------------------------------------------------------------------------

    def column(self, node: Any) -> int:
        """First column of `node` in its buffer."""
        return int(node.meta["storage"]["column"])

    def buffer(self, node: Any, *, whole: bool = True) -> str:
        """Name of the buffer that holds `node`. PassError if `whole` and that holds other columns as well."""
        storage = node.meta["storage"]
        if whole and (storage["column"] or storage["width"] != _width(node)):
            raise PassError("codegen", node.name, "this operator has no kernel that reads a slice of a wider value")
        name = storage["buffer"]
        if name not in self.buffers:
            self.buffers[name] = Buffer(
                name=name,
                dtype=storage["dtype"],
                width=storage["width"],
                group=storage["group"],
                rows=storage["rows"],
                offset=storage["offset"],
                activation=storage["activation"],
            )
        return name

    # ---- weights -----------------------------------------------------------------------------

    def vector(self, node: Any) -> str | None:
        """A weight [N] as f32, padded to whole row blocks; None stays None."""
        if node is None:
            return None

        def blobs() -> Iterator[Tensor]:
            value = self.graph.evaluate(node, self._vectors).float()
            yield pack_vector(value)

        size = packed_vector_bytes(node.meta["val"].shape[0])
        return self._register(node, "vector", (("", size),), blobs)[0]

    def flat(self, node: Any) -> str | None:
        """A weight of any shape as f32, row-major without padding; None stays None."""
        if node is None:
            return None

        def blobs() -> Iterator[Tensor]:
            yield as_blob(self.graph.evaluate(node).float())

        size = -(-node.meta["val"].numel() * 4 // 64) * 64
        return self._register(node, "flat", (("", size),), blobs)[0]

    def transposed(self, node: fx.Node) -> str:
        """A weight [N, K] as f32 [K][N rounded up to 16], row-major, padded with zeros."""
        count, columns = node.meta["val"].shape
        padded = round_up(count, 16)

        def blobs() -> Iterator[Tensor]:
            value = self.graph.evaluate(node).float().t()
            yield as_blob(torch.nn.functional.pad(value, (0, padded - count)).contiguous())

        return self._register(node, "transposed", (("", columns * padded * 4),), blobs)[0]

    def indices(self, node: fx.Node) -> str:
        """A weight of indices as int32."""

        def blobs() -> Iterator[Tensor]:
            yield as_blob(self.graph.evaluate(node).to(torch.int32))

        size = -(-node.meta["val"].numel() * 4 // 64) * 64
        return self._register(node, "indices", (("", size),), blobs)[0]

    def table(self, node: fx.Node) -> tuple[str, TableType]:
        """An embedding table row-major, and its type: the checkpoint's 16 bits if they hold its numbers, else f32."""
        stored = self._stored_type(node)
        kind: TableType = "bf16" if stored == torch.bfloat16 else "f16" if stored == torch.float16 else "f32"
        dtype = TABLE_TYPES[kind]

        def blobs() -> Iterator[Tensor]:
            yield as_blob(self.graph.evaluate(node, self._vectors).to(dtype))

        size = -(-node.meta["val"].numel() * dtype.itemsize // 64) * 64
        name = self._register(node, "table", (("", size),), blobs)[0]
        node.meta["packed"]["dtype"] = kind
        return name, kind

    def rounded_table(self, node: fx.Node) -> tuple[str, Literal["i8"], str]:
        """The codes of a table dequantize(weight, format, k), their type, and the scales of its rows.

        They are packed as a linear's weight is, so that a linear with the same weight shares them.
        """
        weight, format = ops.operand(node, "weight"), str(ops.operand(node, "format"))
        codes, row_scale = self.packed(weight, format, TABLE_ACTIVATION).values()
        return codes, "i8", row_scale

    def _stored_type(self, node: fx.Node) -> torch.dtype | None:
        """The type in which the checkpoint stores the numbers of `node`, rows or columns of one of its weights."""
        while ops.name_of(node.target) == "take_spans":
            node = ops.operand(node, "w")
        return self.graph.weights.entries[str(node.target)].stored if node.op == "get_attr" else None

    def reserved(self, name: str, size: int) -> str:
        """Memory of `size` bytes that is zero in the artifact, for the runtime to write to."""
        blobs = functools.partial(iter, [torch.zeros(size, dtype=torch.uint8)])
        names = self.table_of_weights.add((name, "reserved"), name, name, (("", size),), blobs)
        self.names.update(dict.fromkeys(names))
        return names[0]

    def packing(self, node: fx.Node, format: str, activation: str) -> str:
        """Name of the packing of weight `node` for these activations: one it already has, if kernels can read that."""
        packing = self.table_of_weights.packing
        other = packing.readable(format, activation)
        known = other is not None and (self._digest(node), other) in self.table_of_weights._known
        return other if known and other else packing.name(format, activation)

    def packed(self, node: fx.Node, format: str, activation: str) -> dict[str, str]:
        """Role -> name of the packed parts of quantize_weight(w, format), of a rank's part of it, or of upper nibbles.

        `activation` is the type they are multiplied with, as in formats/activations.py.
        """
        if ops.name_of(node.target) == "upper_nibble":
            nested = ops.operand(node, "weight")
            whole = self.packed(nested, ops.operand(nested, "format"), activation)
            n, k = nested.meta["val"][0].shape
            return {role: whole[role] for role in self.table_of_weights.packing.sizes(n, k, format, activation)}
        w = ops.operand(node, "w") if ops.has_operand(node, "w") else node
        n, k = weight_format(format).shape(node.meta["val"])
        sizes = self.table_of_weights.packing.sizes(n, k, format, activation)

        def blobs() -> Iterator[Tensor]:
            yield from self.table_of_weights.packing.blobs(self._parts(node), format, activation).values()

        parts = tuple((f".{role}", size) for role, size in sizes.items())
        packed_as = self.packing(node, format, activation)
        names = self._register(node, format, parts, blobs, named_for=w, packed_as=packed_as)
        return dict(zip(sizes, names, strict=True))

    def mixed(self, node: fx.Node, format: str, pairs: bool) -> tuple[dict[str, str], MixedPacking]:
        """Role -> name of the packed parts of a weight in `format`, which marks rows, and how it is packed.

        `pairs`: its rows are gate and up pairs. The set of wide rows is evaluated here, as it determines part sizes.
        """
        taken = ops.name_of(node.target) == "take_parts"
        whole = ops.operand(node, "weight") if taken else node
        w, marked = ops.operand(whole, "w"), self.graph.evaluate(ops.operand(whole, "wide"))
        if taken and ops.operand(node, "axis") == 0:
            marked = ops.reference("take_spans")(marked, ops.operand(node, "spans"), 0)
        packing = self.table_of_weights.packing.mixed(marked, pairs, node.meta["val"][0].shape[1])

        def blobs() -> Iterator[Tensor]:
            yield from packing.blobs(self._parts(node)).values()

        parts = tuple((f".{role}", size) for role, size in packing.sizes.items())
        names = self._register(node if taken else w, format, parts, blobs, named_for=w)
        return dict(zip(packing.sizes, names, strict=True)), packing

    def _parts(self, node: fx.Node) -> Parts:
        """The parts of a packed weight, compared with its numbers in the checkpoint where those are of few bits."""
        rounding = None if self.fidelity is None else self.fidelity.rounding(self.graph, node)
        known: dict[fx.Node, Any] = self._vectors
        if self.fidelity is not None and rounding is not None:
            w: fx.Node = ops.operand(rounding, "w")
            known = known | {w: self.graph.evaluate(w, self._vectors)}
            known[rounding] = self.graph.evaluate(rounding, known)
            self.fidelity.compare(self.graph, rounding, known[w], known[rounding])
        parts: Parts = self.graph.evaluate(node, known)
        return parts

    def _register(
        self,
        node: fx.Node,
        kind: str,
        parts: tuple[tuple[str, int], ...],
        produce: Callable[[], Iterator[Tensor]],
        named_for: fx.Node | None = None,
        packed_as: str = "",
    ) -> tuple[str, ...]:
        suffix = f".{kind}" if kind not in ("vector", "table") else ""
        base = self.origin + "+".join(_sources(named_for or node)) + suffix
        key = (self._digest(node), packed_as or kind)
        names = self.table_of_weights.add(key, base, f"{base}.{node.name}", parts, produce)
        self.names.update(dict.fromkeys(names))
        node.meta["packed"] = {"kind": kind, "names": list(names)}
        return names

    def _digest(self, node: fx.Node) -> str:
        """Hash of a weight expression: its operators and the stored weights they read."""

        def spell(item: Any) -> str:
            if isinstance(item, fx.Node):
                return self._digest(item)
            if isinstance(item, (list, tuple)):
                return f"[{','.join(map(spell, item))}]"
            return repr(item)

        if node not in self._digests:
            what = self.origin + str(node.target) if node.op == "get_attr" else f"{node.target}{spell(node.args)}"
            self._digests[node] = hashlib.sha256(f"{node.op} {what}".encode()).hexdigest()
        return self._digests[node]


def _width(node: fx.Node) -> int:
    """Numbers in a row of `node`; of its first result if it has several."""
    value = node.meta["val"]
    shape = (value[0] if isinstance(value, (list, tuple)) else value).shape
    return math.prod(shape[1:])


def _sources(node: fx.Node) -> list[str]:
    """Names of the stored weights an expression reads, in order, without duplicates."""
    if node.op == "get_attr":
        return [str(node.target)]
    return list(dict.fromkeys(name for n in node.all_input_nodes for name in _sources(n)))
