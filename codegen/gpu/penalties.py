"""GPU kernels for biases and penalties, as runtime/sampling/penalties.py defines them.

- `add_bias` adds the biases to logits.
- `keep_recent` stores the tokens of a step's rows that the host has not listed yet. Later steps of the same call, and
  later rows of a verified draft, count them.
- `penalize` changes the logits of listed and stored tokens in place. It runs before the search for the largest logit.
"""

from __future__ import annotations

from collections.abc import Iterator

from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.gpu.launches import Launch, Variant
from qcompile.codegen.gpu.operands import CountRef, Grid, GridSize, InputRef, Operands
from qcompile.codegen.gpu.sampling_options import OPTION_VALUES
from qcompile.targets import has_pdl

BLOCK, CHUNK, PARTS, WARPS = 256, 32, 8, 4
"""Listed and recent tokens that a program takes at once, programs for each row of logits, and warps of each."""
_TYPES = {"logits": "*fp32", "sampling": "*fp64", "M": "i32"}


_KINDS = {
    "add_bias": ("Biases on tokens", "biased"),
    "keep_recent": ("Recent tokens of a step", "penalized"),
    "penalize": ("Penalties on tokens of the text", "penalized"),
}
"""For each kernel its title, and the count of its launch."""


def penalty_kernel(kind: str, vocab: int, capability: int) -> Kernel:
    """A kernel for the step's logits f32 [rows, vocab].

    kind: "add_bias" has a program for each row, "keep_recent" one for BLOCK tokens of the step, and "penalize" PARTS
    programs for each row.
    """
    kept = ("token_ids", "positions", "row_sequence", "sampling", "seen", "M")
    changed = ("logits", "output_rows", "positions", "row_sequence", "sampling", "seen")
    names = kept if kind == "keep_recent" else changed
    arguments, pdl = tuple(Argument(name, _TYPES.get(name, "*i32")) for name in names), has_pdl(capability)
    source = render_template(
        "penalties.py.jinja",
        title=_KINDS[kind][0],
        kind=kind,
        arguments=arguments,
        vocab=vocab,
        **OPTION_VALUES,
        block=BLOCK,
        chunk=CHUNK,
        parts=PARTS,
        pdl=pdl,
    )
    return Kernel(kind, source, arguments, WARPS, 1, pdl, fusion=False)


def penalties(call: str, vocab: int, capability: int) -> Iterator[Launch]:
    """The launches that change the logits of sequences with biases or penalties. They run before the argmax."""
    outputs = GridSize("outputs")
    grids: tuple[Grid, ...] = ((outputs, 1, 1), (GridSize("tokens", BLOCK), 1, 1), (outputs, PARTS, 1))
    for (kind, (_, count)), grid in zip(_KINDS.items(), grids, strict=True):
        kernel = penalty_kernel(kind, vocab, capability)
        args: Operands = {a.name: CountRef("tokens") if a.name == "M" else InputRef(a.name) for a in kernel.arguments}
        yield Launch(f"{call}.{kernel.name}", count, (Variant(kernel, grid, args),))
