"""GPU kernels for adapters of requests: y += B (A x), where each row has the adapter of its sequence, or none.

The runtime writes where the factors are into the weight ADAPTER_TABLE (runtime/lora/factors.py has their layout). A
row's bits depend on its own x and its adapter alone: a program adds up whole dot products, and every output in the
order of ranks, whatever rows share the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.targets import has_pdl

LANES = 16
"""Outputs of a block of B."""
_FACTORS = {"f32": "float32", "bf16": "bfloat16"}
_TYPES = {"f32": "*fp32", "bf16": "*bf16", "q8": "*i8"}
_ADAPTER_OF_ROW = (Argument("table", "*i64"), Argument("adapters", "*i32"), Argument("row_sequence", "*i32"))
"""What tells the adapter of a row."""


@dataclass(frozen=True)
class ShrinkSpec:
    """out[row, :] = A x[row] for the linear `site`, of x of type `x` with k inputs. Strides are in elements.

    q8 has `scales` scales a row, each for `group` inputs (0: for all). A has the type `factors`, and rows of `a_stride`
    elements. Rows without an adapter are not written.
    """

    site: int
    k: int
    x: str
    x_stride: int
    out_stride: int
    factors: str
    scales: int = 0
    group: int = 0

    RANKS, PART = 4, 2048
    """Ranks of a program, and inputs that it multiplies at once."""

    @property
    def a_stride(self) -> int:
        """Elements of a row of A."""
        return -(-self.k // 32) * 32

    @property
    def part(self) -> int:
        """Inputs multiplied at once, a power of two."""
        return min(self.PART, 1 << (self.k - 1).bit_length())

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        arguments = [Argument("x", _TYPES[self.x])] + [Argument("x_scale", "*fp32")] * (self.x == "q8")
        arguments += [*_ADAPTER_OF_ROW, Argument("out", "*fp32")]
        warps = max(1, self.part // 256)  # each thread has 8 inputs: 16 bytes of a row of A
        return _kernel("lora_shrink", self, arguments, self.factors, capability, warps)


@dataclass(frozen=True)
class ExpandSpec:
    """out[row, :] += B x[row] for the linear `site`, of `width` outputs; x is what a kernel of ShrinkSpec wrote.

    A program computes `rows` rows of COLUMNS outputs, and loads what it needs for `ranks` ranks at a time; neither
    changes the result. Only rows with an adapter that changes one of these outputs are written.
    """

    site: int
    width: int
    x_stride: int
    out_stride: int
    factors: str
    rows: int
    ranks: int

    COLUMNS, LANES = 128, LANES

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        arguments = [Argument("x", "*fp32"), *_ADAPTER_OF_ROW, Argument("M", "i32"), Argument("out", "*fp32")]
        return _kernel("lora_expand", self, arguments, self.factors, capability, 4)


def _kernel(
    name: str, spec: ShrinkSpec | ExpandSpec, arguments: Sequence[Argument], factors: str, capability: int, warps: int
) -> Kernel:
    pdl = has_pdl(capability)
    values = {"spec": spec, "name": name, "arguments": arguments, "pdl": pdl, "factors": _FACTORS[factors]}
    return Kernel(name, render_template(f"{name}.py.jinja", **values), tuple(arguments), warps, 1, pdl)
