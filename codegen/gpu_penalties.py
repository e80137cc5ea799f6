"""Penalties on the GPU: on tokens of the text so far, as runtime/penalties.py defines them.

A kernel keeps the tokens of a step's rows that follow those the host has listed, so that the steps of a burst and the
rows of a verified draft see what came before them. Another then changes the logits of listed and recent tokens in
place, before the search for the largest.
"""

from __future__ import annotations

from collections.abc import Iterator

from qcompile.codegen.gpu_compile import Argument, Kernel, render_template
from qcompile.codegen.gpu_launches import Launch, Plan, Variant

OPTIONS = 16
"""Numbers of `sampling` for each sequence."""
BLOCK, CHUNK, PARTS, WARPS = 256, 32, 8, 4
"""Listed and recent tokens that a program takes at once, programs for each row of logits, and warps of each."""
_TYPES = {"logits": "*fp32", "sampling": "*fp64", "M": "i32"}


def penalty_kernel(keep: bool, vocab: int, capability: int) -> Kernel:
    """A kernel that keeps the recent tokens of a step (`keep`), or that changes its logits [rows, vocab], f32.

    The first has a program for BLOCK tokens, the second PARTS programs for each row.
    """
    kept = ("token_ids", "positions", "row_sequence", "sampling", "seen", "M")
    changed = ("logits", "output_rows", "positions", "row_sequence", "sampling", "seen")
    arguments = tuple(Argument(name, _TYPES.get(name, "*i32")) for name in (kept if keep else changed))
    name, pdl = "keep_recent" if keep else "penalize", capability >= 90
    source = render_template(
        "penalties.py.jinja",
        title="Recent tokens of a step" if keep else "Penalties on tokens of the text",
        keep=keep,
        name=name,
        arguments=arguments,
        vocab=vocab,
        options=OPTIONS,
        block=BLOCK,
        chunk=CHUNK,
        parts=PARTS,
        pdl=pdl,
    )
    return Kernel(name, source, arguments, WARPS, 1, pdl, fusion=False)


def penalties(plan: Plan, call: str, vocab: int, capability: int) -> Iterator[Launch]:
    """The launches that change the logits of sequences with penalties; before those of the argmax."""
    for keep in (True, False):
        kernel = penalty_kernel(keep, vocab, capability)
        args = {a.name: ["count", "tokens"] if a.name == "M" else ["input", a.name] for a in kernel.arguments}
        grid = (["tokens", BLOCK], 1, 1) if keep else ("outputs", PARTS, 1)
        yield Launch(f"{call}.{kernel.name}", "penalized", (Variant(plan.add(kernel), grid, args),))
