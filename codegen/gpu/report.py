"""GPU kernels for log probabilities of chosen and of known tokens; runtime/sampling/logprobs.py reads their reports.

1. `report_keep` copies the logits of rows that have a report, and biases, penalties or a mask, which change logits in
   place.
2. After the tokens are chosen, `report_parts` finds for each part of a row its largest logits, the sum of its weights,
   and the number of logits above that of the chosen token.
3. `report_row` combines the parts into the report of the row.
"""

from __future__ import annotations

from collections.abc import Iterator

from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.gpu.launches import Launch, Variant
from qcompile.codegen.gpu.operands import Grid, GridSize, InputRef, Operands, ScratchRef
from qcompile.codegen.gpu.sampling_options import OPTION_VALUES, parts_values
from qcompile.codegen.sizes import power_of_two
from qcompile.targets import has_pdl

PART, WARPS = 4096, 8
"""Logits per program, and its warps."""
MOST = 20
"""Most alternatives of a report."""
_TYPES = {"logits": "*fp32", "plain": "*fp32", "part_peak": "*fp32", "part_above": "*i32", "part_keys": "*i64"}
_TYPES |= dict.fromkeys(("output_rows", "row_sequence", "positions", "argmax", "seen"), "*i32")
_ROW = ("logits", "plain", "output_rows", "row_sequence", "positions", "sampling")
_PARTS = ("part_peak", "part_sum", "part_above", "part_keys")


def report_kernel(kind: str, vocab: int, capability: int) -> Kernel:
    """A kernel for reports on logits f32 [rows, vocab].

    kind: "keep" and "parts" have a program for each row and part, "row" has one for each row.
    """
    names = _ROW if kind == "keep" else (*_ROW, "argmax", "seen", *_PARTS)
    names = (*names, "reports") if kind == "row" else names
    arguments = tuple(Argument(name, _TYPES.get(name, "*fp64")) for name in names)
    titles = {"keep": "Logits before biases, penalties and masks", "parts": "Reports of parts of the logits"}
    name, pdl = f"report_{kind}", has_pdl(capability)
    source = render_template(
        "report.py.jinja",
        title=titles.get(kind, "Reports of chosen tokens"),
        kind=kind,
        name=name,
        arguments=arguments,
        **OPTION_VALUES,
        **parts_values(vocab, PART),
        most=MOST,
        most_block=power_of_two(MOST),
        pdl=pdl,
    )
    return Kernel(name, source, arguments, WARPS, 1, pdl)


def keeping(call: str, vocab: int, capability: int) -> Iterator[Launch]:
    """The launch that copies rows of logits for reports. It runs before these are changed."""
    yield _launch(call, "keep", vocab, capability)


def reporting(call: str, vocab: int, capability: int) -> Iterator[Launch]:
    """The launches that write the reports of a step. They run after its tokens are chosen."""
    for kind in ("parts", "row"):
        yield _launch(call, kind, vocab, capability)


def _launch(call: str, kind: str, vocab: int, capability: int) -> Launch:
    parts, kernel = -(-vocab // PART), report_kernel(kind, vocab, capability)
    sizes = {"part_peak": 4, "part_sum": 8, "part_above": 4, "part_keys": 8 * MOST}
    refs: Operands = {name: ScratchRef(name, size * parts, ("outputs",)) for name, size in sizes.items()}
    refs["plain"] = ScratchRef("plain", 4 * vocab, ("kept",))
    args = {a.name: refs.get(a.name, InputRef(a.name)) for a in kernel.arguments}
    grid: Grid = (GridSize("outputs"), 1 if kind == "row" else parts, 1)
    count = "kept" if kind == "keep" else "reported"
    return Launch(f"{call}.{kernel.name}", count, (Variant(kernel, grid, args),))
