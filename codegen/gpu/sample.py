"""GPU kernels for sampling with temperature, top-k, top-p and min-p, as runtime/sampling/sampling.py defines them.

1. A search finds the limits of top-k and top-p. A limit is a logit, mapped to a 32-bit integer in the order of logits.
   Each pass counts the tokens (or adds up the weights) above 16 equidistant limits, and the next pass searches between
   two of them.
2. For each part of the vocabulary, a kernel adds up the weights of the tokens within the limits.
3. The last kernel chooses the token at which the cumulative weight exceeds the random number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.gpu.launches import Launch, Variant
from qcompile.codegen.gpu.masks import masking
from qcompile.codegen.gpu.operands import CountRef, GridSize, InputRef, NumberRef, Operands, ScratchRef, Size
from qcompile.codegen.gpu.penalties import penalties
from qcompile.codegen.gpu.report import keeping, reporting
from qcompile.codegen.gpu.rows import ARGMAX_PART, argmax_kernel
from qcompile.codegen.gpu.sampling_options import OPTION_VALUES, parts_values
from qcompile.codegen.sizes import power_of_two
from qcompile.targets import has_pdl

PART, WARPS = 1024, 4
"""Logits per program, and its warps."""
PASSES = 8
"""Passes of a search, each for 4 of 32 bits."""
_BINS, _FIELDS = 16, 3
_TYPES = {
    "logits": "*fp32",
    "part_value": "*fp32",
    "part_ties": "*i32",
    "alive": "*i32",
    "done": "i32",
    "K": "i32",
    "P": "i32",
}
_TYPES |= dict.fromkeys(("output_rows", "row_sequence", "positions", "argmax"), "*i32")
_TYPES |= dict.fromkeys(("limits", *(f"{kind}{of}" for kind in ("", "k_", "p_") for of in ("state", "totals"))), "*i64")
_ROW = ("logits", "part_value", "output_rows", "row_sequence", "sampling")


def sample_kernel(kind: str, by: str, vocab: int, capability: int) -> Kernel:
    """A kernel of sampling from logits f32 [rows, vocab].

    kind: "narrow" is one pass of the search for the limit of `by` (top_k or top_p), with a program for each row and
    part. "mass" adds up each part's weights above the limit of top-p, with as many programs. "pick" chooses the token,
    with a program for each row.
    """
    names = list(_ROW)
    names += ["k_state", "k_totals", "K"] * (kind != "pick" and by != "top_k")
    parts_of = ["limits", "part_all", "part_mass", "part_ties"]
    names += {
        "narrow": ["state", "totals", "alive", "done"],
        "mass": ["p_state", "p_totals", "P", *parts_of],
        "pick": [*parts_of, "positions", "uniforms", "argmax", "k_totals", "K", "p_totals", "P"],
    }[kind]
    arguments = tuple(Argument(name, _TYPES.get(name, "*fp64")) for name in names)
    titles = {"narrow": f"A pass of the search for the limit of {by}", "mass": "The weights of each part of the logits"}
    name, pdl = f"sample_{kind}{'_' + by if by else ''}", has_pdl(capability)
    largest = -(-vocab // ARGMAX_PART)
    source = render_template(
        "sample.py.jinja",
        title=titles.get(kind, "Draw a token"),
        kind=kind,
        by=by,
        name=name,
        arguments=arguments,
        **OPTION_VALUES,
        **parts_values(vocab, PART),
        largest=largest,
        largest_block=power_of_two(largest),
        bins=_BINS,
        passes=PASSES,
        fields=_FIELDS,
        unit=float(1 << (62 - vocab.bit_length())),
        pdl=pdl,
    )
    return Kernel(name, source, arguments, WARPS, 1, pdl)


def choosing(call: str, vocab: int, capability: int) -> Iterator[Launch]:
    """The launches that choose the token of each row of logits and report its log probability.

    They apply biases, penalties and masks, find the largest logit, and sample in rows with a temperature.
    """
    yield from keeping(call, vocab, capability)
    yield from penalties(call, vocab, capability)
    yield from masking(call, vocab)
    parts = -(-vocab // ARGMAX_PART)
    args: Operands = {name: _largest(vocab, name) for name in ("part_value", "part_index")}
    args |= {name: InputRef(name) for name in ("logits", "argmax")}
    for name, count in (("largest", parts), ("argmax", 1)):
        kernel = argmax_kernel(vocab, parts, name == "argmax", capability)
        yield Launch(f"{call}.{name}", "outputs", (Variant(kernel, (GridSize("outputs"), count, 1), args),))
    yield from sampling(call, vocab, capability)
    yield from reporting(call, vocab, capability)


def _largest(vocab: int, name: str) -> ScratchRef:
    """Scratch memory for the largest logit, or its index, of each part of the vocabulary."""
    return ScratchRef(name, 4 * -(-vocab // ARGMAX_PART), ("outputs",))


def sampling(call: str, vocab: int, capability: int) -> Iterator[Launch]:
    """The launches that sample in rows with a temperature. They run after the argmax, which they overwrite."""
    parts = -(-vocab // PART)
    refs: Operands = {name: InputRef(name) for name in (*_ROW, "positions", "uniforms", "argmax")}
    refs |= {"part_value": _largest(vocab, "part_value"), "K": CountRef("top_k"), "P": CountRef("top_p")}
    sizes = {
        "alive": 4 * parts,
        "limits": 8 * _FIELDS,
        "part_all": 8 * parts,
        "part_mass": 8 * parts,
        "part_ties": 4 * parts,
    }
    refs |= {name: ScratchRef(name, size, ("outputs",)) for name, size in sizes.items()}
    for letter in "kp":
        refs[f"{letter}_state"] = ScratchRef(f"{letter}_state", 8 * PASSES * _FIELDS, ("outputs",))
        refs[f"{letter}_totals"] = ScratchRef(f"{letter}_totals", 8 * PASSES * _BINS, ("outputs",))

    def launch(count: str, kernel: Kernel, programs: Size, more: dict[str, Any]) -> Launch:
        given = refs | more
        args = {argument.name: given[argument.name] for argument in kernel.arguments}
        return Launch(f"{call}.{kernel.name}", count, (Variant(kernel, (GridSize("outputs"), programs, 1), args),))

    for by in ("top_k", "top_p"):
        kernel, letter = sample_kernel("narrow", by, vocab, capability), by[-1]
        for done in range(PASSES):
            more = {"state": refs[f"{letter}_state"], "totals": refs[f"{letter}_totals"], "done": NumberRef(done)}
            yield launch(by, kernel, parts, more)
    yield launch("sampled", sample_kernel("mass", "", vocab, capability), parts, {})
    yield launch("sampled", sample_kernel("pick", "", vocab, capability), 1, {})
