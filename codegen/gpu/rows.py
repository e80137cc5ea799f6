"""GPU kernels that treat rows independently: embeddings, norms, elementwise maps, quantization, Hadamard, argmax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.errors import UnsupportedError
from qcompile.formats.gpu import BLOCK_ROWS
from qcompile.formats.rounding import groups_of
from qcompile.formats.symmetric import GPU_BYTES
from qcompile.ops import CURVES, GATE_BLOCK
from qcompile.targets import has_pdl

MAX_WIDTH = 1 << 16
ARGMAX_PART = 4096
"""Logits per program in the search for the largest."""
MIN_BLOCK = 32
GIVEN = 1 << 30
"""Rows of an `index` from here on are not those of the table: they are given with the step (RowSpec.given)."""
PDL_EARLY_ROWS = 8
"""Most rows for which a row kernel triggers the next kernel's launch before it waits for the previous one (PDL)."""
_TYPES = {"f32": "*fp32", "bf16": "*bf16", "f16": "*fp16", "q8": "*i8", "i8": "*i8"}


class RowSource(Protocol):
    """How a row kernel gets its rows, if not from memory of its GPU alone (codegen/gpu/exchange.py)."""

    @property
    def way(self) -> str:
        """What tells its kernels apart."""
        ...

    @property
    def arguments(self) -> list[Argument]:
        """The arguments of the row kernel behind its own."""
        ...

    def facts(self, capability: int, block: int) -> dict[str, Any]:
        """Values for the template."""
        ...

    def warps(self, block: int) -> int:
        """Warps of a program with `block` elements; 0: as many as without it."""
        ...


@dataclass(frozen=True)
class RowSpec:
    """out[row] = write(norm(map(load(x, row)))) for rows of `width` elements. Strides are in elements.

    - load: reads the row; with `indexed` the row `index[row]`, limited to `last` if that is not 0. Rows in i8 are those
      of a weight packed as w8_sym_channel, of `x_stride` inputs with their padding, times their `row_scale`.
      With `given` a row GIVEN + i of `index` is row i of the f32 rows at the address `embeds`, times that number. With
      `gated`, the name of an activation, it computes act(gate) * up of 2 `width` bf16 columns, in alternating blocks.
    - map: applies `unary` (of ops.UNARY, or of ops.CURVES with the parameters `curve`), raises to `power` (of
      ops.POWERS; 0: not), clamps to `low` and `high`, adds `offset`, applies `binary`, and multiplies by `factor`.
      `binary` is add or mul with the vector `weight` or the buffer `other`, or add_row or mul_row with the single
      column of `other`.
    - norm: rms or layer, with `weight` and `bias`.
    - write: f32, bf16 or q8. q8 are int8 codes within +-`top` with one scale per row, and with `sums` the sum of the
      codes. With `group` there is a scale for each `group` columns, and the codes of the last group are within
      +-`last_top`. With a `reach` below 1, codes reach that share of the largest magnitude, and are clipped. The
      scales of rows are `row_scales` apart, if a row has room for more than it needs.

    With `mean` the row is reduced to its mean, one f32 for each block.

    With `blocks` > 1 a row consists of that many blocks of `width` elements (whole groups, if there are groups), and
    each has a program. With `looped` a row has one program, which computes them one after the other: a step of many
    rows would take long to begin a program for each block. With `amax_parts` all blocks share one scale, from that many
    maxima of magnitudes that earlier kernels stored for the row. With `plain_stride` the row is also stored as f32
    (`plain`), before quantization.
    """

    width: int
    x_stride: int
    out_stride: int
    x: Literal["f32", "bf16", "f16", "i8"] = "f32"
    out: str = "f32"
    indexed: bool = False
    last: int = 0
    given: float = 0.0
    gated: str = ""
    unary: str = ""
    power: float = 0.0
    binary: str = ""
    other_stride: int = 0
    factor: float = 1.0
    low: float | None = None
    high: float | None = None
    offset: float = 0.0
    norm: str = ""
    weight: bool = False
    bias: bool = False
    eps: float = 0.0
    sums: bool = False
    top: int = 127
    group: int = 0
    last_top: int = 127
    reach: float = 1.0
    row_scales: int = 0
    blocks: int = 1
    amax_parts: int = 0
    plain_stride: int = 0
    mean: bool = False
    looped: bool = False

    def __post_init__(self) -> None:
        if self.width > MAX_WIDTH:
            raise UnsupportedError(f"rows of {self.width} elements: GPU kernels take at most {MAX_WIDTH}")

    @property
    def programs(self) -> int:
        """Programs per row."""
        return 1 if self.looped else self.blocks

    @property
    def title(self) -> str:
        """Title of the generated source."""
        parts = ["take" if self.indexed else "", self.gated and f"{self.gated} gate", self.unary, self.binary]
        parts += [f"to the power {self.power}" if self.power else "", "mean" if self.mean else ""]
        parts += ["clamp" if self.clamped else "", "shift" if self.offset else ""]
        parts += ["scale" if self.factor != 1.0 else "", self.norm and f"{self.norm} norm"]
        done = ", ".join(part for part in parts if part) or "copy"
        return f"Rows of {self.width}: {done}, written as {self.out}"

    @property
    def curve(self) -> tuple[str, ...]:
        """The parameters of `unary`."""
        return CURVES.get(self.unary, ())

    @property
    def clamped(self) -> bool:
        """Whether values are clamped."""
        return self.low is not None or self.high is not None

    @property
    def deferred_norm(self) -> bool:
        """Whether the norm's factor is folded into the scales: one factor for the whole row does not change codes."""
        return self.norm == "rms" and self.out == "q8" and not self.bias

    @property
    def scales(self) -> int:
        """Scales per row."""
        return groups_of(self.width, self.group)

    def kernel(self, capability: int, exchange: RowSource | None = None) -> Kernel:
        """The kernel for a compute capability. With an `exchange`, rows are sums over GPUs."""
        block = max(1 << (self.width - 1).bit_length(), self.group)
        arguments = self._arguments() + (exchange.arguments if exchange else [])
        summed = ("sum", exchange.way) if exchange else ()
        name = "_".join(
            ("rows", *summed, *(p for p in (self.gated, self.unary, self.binary, self.norm) if p), self.out)
        )
        pdl = has_pdl(capability)
        shared = exchange.facts(capability, block) if exchange else {"pdl": pdl}
        source = render_template(
            "rows.py.jinja",
            spec=self,
            exchange=exchange,
            name=name,
            arguments=arguments,
            block=block,
            amax_block=1 << (self.amax_parts - 1).bit_length() if self.amax_parts else 0,
            pdl_early_rows=PDL_EARLY_ROWS,
            gate_block=GATE_BLOCK,
            first_given=GIVEN,
            packing=GPU_BYTES,
            block_rows=BLOCK_ROWS,
            **shared,
        )
        warps = min(max(block // 512, 8 if self.amax_parts else 1), 16)
        warps = (exchange and exchange.warps(block)) or warps
        return Kernel(name, source, tuple(arguments), warps, 1, pdl)

    def _arguments(self) -> list[Argument]:
        """The kernel's arguments but those of an exchange."""
        arguments = [Argument("x", _TYPES[self.x]), Argument("out", _TYPES[self.out])]
        arguments += [Argument("index", "*i32")] * self.indexed + [Argument("embeds", "*i32")] * bool(self.given)
        arguments += [Argument("row_scale", "*fp32")] * (self.x == "i8")
        arguments += [Argument("curve", "*fp32")] * bool(self.curve)
        arguments += [Argument("weight", "*fp32")] * self.weight + [Argument("bias", "*fp32")] * self.bias
        arguments += [Argument("other", "*fp32")] * (bool(self.binary) and not self.weight)
        arguments += [Argument("amax", "*fp32")] * bool(self.amax_parts)
        arguments += [Argument("plain", "*fp32")] * bool(self.plain_stride)
        if self.out == "q8":
            arguments += [Argument("out_scale", "*fp32")] + [Argument("out_sum", "*i32")] * self.sums
        return arguments


def in_blocks(width: int, most: int = 0) -> dict[str, Any]:
    """RowSpec fields for an elementwise map that divide rows of more than `most` elements into blocks.

    Rows that do not divide into blocks of at least MIN_BLOCK elements stay whole.
    """
    part = math.gcd(width, ARGMAX_PART)
    return {"width": part, "blocks": width // part} if width > most and part >= MIN_BLOCK else {"width": width}


@dataclass(frozen=True)
class HadamardSpec:
    """out[row] = x[row] with each `block` columns times a Hadamard matrix / sqrt(block), f32, one program per row.

    x is f32, or with `gated` act(gate) * up of bf16 columns as in RowSpec. `core` is the order of the matrix that gives
    the Hadamard matrix by repeated doubling; if not 1, it is an argument (f32, row-major). See formats/hadamard.py.
    """

    width: int
    x_stride: int
    block: int
    core: int
    gated: str = ""

    def __post_init__(self) -> None:
        if self.width > MAX_WIDTH:
            raise UnsupportedError(f"rows of {self.width} elements: GPU kernels take at most {MAX_WIDTH}")

    @property
    def title(self) -> str:
        """Title of the generated source."""
        return f"Rows of {self.width}: {self.gated and f'{self.gated} gate, '}turned in blocks of {self.block}"

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        least = 16 if self.core > 1 else 1  # the smallest side of tl.dot
        rows, columns = (max(1 << (side - 1).bit_length(), least) for side in (self.width // self.core, self.core))
        arguments = [Argument("x", "*bf16" if self.gated else "*fp32"), Argument("out", "*fp32")]
        arguments += [Argument("core", "*fp32")] * (self.core > 1)
        name, pdl = f"hadamard_{self.gated}".rstrip("_"), has_pdl(capability)
        source = render_template(
            "hadamard.py.jinja",
            spec=self,
            name=name,
            arguments=arguments,
            rows=rows,
            columns=columns,
            stages=(self.block // self.core).bit_length() - 1,
            pdl=pdl,
            gate_block=GATE_BLOCK,
        )
        return Kernel(name, source, tuple(arguments), min(max(rows * columns // 512, 1), 16), 1, pdl)


class Columns(NamedTuple):
    """A source of columns, with rows `stride` elements apart."""

    width: int
    stride: int


@dataclass(frozen=True)
class GatherSpec:
    """out[row, i] = column index[i] (int32) of the concatenated sources, or 0 if index[i] is negative; f32."""

    width: int
    out_stride: int
    sources: tuple[Columns, ...]

    PART = 1024

    @property
    def title(self) -> str:
        """Title of the generated source."""
        return f"{self.width} columns out of {', '.join(str(source.width) for source in self.sources)}"

    @property
    def programs(self) -> int:
        """Programs per row."""
        return -(-self.width // self.PART)

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        named = [f"x{number}" for number in range(len(self.sources))]
        arguments = (*(Argument(n, "*fp32") for n in (*named, "out")), Argument("index", "*i32"))
        name, pdl = f"gather_{len(self.sources)}", has_pdl(capability)
        values = {"name": name, "arguments": arguments, "pdl": pdl}
        return Kernel(name, render_template("gather.py.jinja", spec=self, **values), arguments, 4, 1, pdl)


def argmax_kernel(vocab: int, parts: int, final: bool, capability: int) -> Kernel:
    """argmax of each row of logits [rows, vocab]: first that of each of `parts` parts, then (`final`) of those."""
    names = ["argmax"] if final else ["logits"]
    arguments = [Argument(n, "*i32" if n == "argmax" else "*fp32") for n in names]
    arguments += [Argument("part_value", "*fp32"), Argument("part_index", "*i32")]
    name, pdl = "argmax_final" if final else "argmax_parts", has_pdl(capability)
    source = render_template(
        "argmax.py.jinja",
        name=name,
        arguments=arguments,
        vocab=vocab,
        part=ARGMAX_PART,
        parts=parts,
        parts_block=1 << (parts - 1).bit_length(),
        final=final,
        pdl=pdl,
    )
    return Kernel(name, source, tuple(arguments), 1 if final else 4, 1, pdl)
