"""A GPU kernel that leaves out tokens that a grammar excludes: a mask of bits for each row (runtime/cuda/masks.py).

It runs after biases and penalties, and before the search for the largest logit.
"""

from __future__ import annotations

from collections.abc import Iterator

from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.gpu.launches import Launch, Variant
from qcompile.codegen.gpu.operands import Grid, GridSize, InputRef, Operands

PART, WARPS = 4096, 8
"""Logits per program, and its warps."""


def mask_kernel(vocab: int) -> Kernel:
    """The kernel for logits f32 [rows, vocab], with a program for each row and part. It changes them in place."""
    arguments = (Argument("logits", "*fp32"), Argument("masks", "*i32"))
    source = render_template("masks.py.jinja", arguments=arguments, vocab=vocab, part=PART)
    return Kernel("mask_logits", source, arguments, WARPS, 1)


def masking(call: str, vocab: int) -> Iterator[Launch]:
    """The launch that applies the masks of a step. The runtime writes them while what is before it runs."""
    kernel = mask_kernel(vocab)
    grid: Grid = (GridSize("outputs"), -(-vocab // PART), 1)
    args: Operands = {name: InputRef(name) for name in ("logits", "masks")}
    yield Launch(f"{call}.{kernel.name}", "masked", (Variant(kernel, grid, args),))
