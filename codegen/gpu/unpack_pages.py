"""The kernel that unpacks the pages of prompts before attention, once for all rows that see them (attention.py).

An unpacked block is what producer warps of attention.py's warp-specialized programs would write to shared memory for
one page and KV head, in this order:

    keys     fp16 [page tokens][dim]: code minus zero point, with 4 bits times 16 in odd planes
    values   bf16 [dim][page tokens]: code minus zero point
    scales   float32 [2][page tokens]: of the keys, then of the values

The block of page i of prompt s and KV head h is number (s * pages + i) * heads + h, where `pages` is the count
"unpacked": the most pages of a prompt of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.codegen.gpu.operands import CountRef, Grid, GridSize, Operands, ScratchRef
from qcompile.codegen.gpu.visible_keys import VisibleKeys

UNPACKED_BYTES = 1 << 28
"""Most bytes of a layer's unpacked blocks: 65,000 positions of 8 KV heads of 128."""
SHARED_BY = 1024
"""Fewest rows of a prompt in a step, in the mean, for which pages are unpacked before attention.

For 512 rows, unpacking takes about as long as it saves attention.
"""


def unpacked_block_bytes(kv: GpuKV) -> int:
    """Bytes of one unpacked (page, KV head)."""
    return 4 * kv.page_tokens * kv.dim + 8 * kv.page_tokens


def unpacked_pages(kv: GpuKV) -> int:
    """Pages of prompts that fit into UNPACKED_BYTES."""
    return UNPACKED_BYTES // (kv.heads * unpacked_block_bytes(kv))


def unpacked_operands(kv: GpuKV) -> Operands:
    """Operands that tell where the unpacked blocks are: one pointer for each type they are read as."""
    memory = ScratchRef("unpacked", kv.heads * unpacked_block_bytes(kv), ("unpacked_room",))
    pointers: Operands = dict.fromkeys(("unpacked_keys", "unpacked_values", "unpacked_scales"), memory)
    return {**pointers, "unpacked": CountRef("unpacked")}


UNPACKED_ARGUMENTS = [
    Argument("unpacked_keys", "*fp16"),
    Argument("unpacked_values", "*bf16"),
    Argument("unpacked_scales", "*fp32"),
]


@dataclass(frozen=True)
class UnpackSpec(VisibleKeys):
    """Unpacks the pages of quantized keys and values that rows of a step's prompts see; a program has one block."""

    kv: GpuKV

    @property
    def grid(self) -> Grid:
        """The grid for a step of prompts."""
        return GridSize("unpacked"), self.kv.heads, GridSize("prompts")

    @property
    def arguments(self) -> list[Argument]:
        """The kernel's arguments in order."""
        arguments = [Argument("kv", "*i16"), Argument("kv_words", "*i32")]
        arguments += [Argument(name, "*i32") for name in ("positions", "query_start", "block_table")]
        return [*arguments, *UNPACKED_ARGUMENTS, Argument("table_stride", "i32"), Argument("unpacked", "i32")]

    def kernel(self) -> Kernel:
        """The kernel, the same for all GPUs."""
        name = f"unpack_{self.kv.format}_pages"
        source = render_template(
            "unpack_pages.py.jinja",
            spec=self,
            name=name,
            arguments=self.arguments,
            block_bytes=unpacked_block_bytes(self.kv),
            planes=range(self.kv.planes),
        )
        return Kernel(name, source, tuple(self.arguments), warps=4, stages=1)
