"""What an exported checkpoint holds: tensors that stay rounded, tensors that become floats, and its configuration."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qcompile.errors import UnsupportedError
from qcompile.exports.compressed import COMPRESSED
from qcompile.exports.grouped import AWQ, GPTQ
from qcompile.exports.layout import StoredLayout
from qcompile.exports.parameters import Parameters
from qcompile.exports.tensors import Tensors
from qcompile.formats.activations import BF16, F32
from qcompile.formats.weight import WeightFormat

FLOATS = "hf"
LAYOUTS: dict[str, Mapping[WeightFormat, StoredLayout]] = {
    "compressed-tensors": COMPRESSED,
    "gptq": GPTQ,
    "awq": AWQ,
    FLOATS: {},
}
"""How each format of checkpoints stores weights of our formats. In FLOATS all weights are floating-point numbers."""
MOST_ROWS = 8
"""Rows that an error lists."""
ELSE = f"--format {FLOATS} writes it as floating-point numbers"


@dataclass(frozen=True)
class Exported:
    """What was written: bytes of the weights, numbers of rounded and other tensors, and what the reader should know."""

    bytes: int
    rounded: int
    floats: int
    notes: list[str]


@dataclass(frozen=True)
class ExportPlan:
    """The tensors of a checkpoint: those in `rounded` are stored by `layout`, those in `floats` as numbers.

    `ignored` are the linears among these, and `head` is the output head. `untied` is its tensor, if it was tied to the
    embedding's and now differs.
    """

    tensors: Tensors
    layout: StoredLayout | None
    rounded: list[str]
    floats: list[str]
    ignored: list[str]
    head: str | None
    untied: str | None
    notes: list[str]

    def configured(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of the checkpoint, from that of the model."""
        made = copy.deepcopy(dict(config))
        for part in (made, made.get("text_config")):
            if isinstance(part, dict):  # what the model was stored as before
                part.pop("quantization_config", None)
                part.pop("compression_config", None)
        if self.layout is not None:
            made["quantization_config"] = self.layout.config(self.ignored, self.head)
        if self.untied:
            for part in (made, *(part for part in made.values() if isinstance(part, dict))):
                if part is made or "tie_word_embeddings" in part:
                    part["tie_word_embeddings"] = False
        return made

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the checkpoint's file, one weight of the artifact after the other."""
        rounded, floats = set(self.rounded), set(self.floats)
        for name in self.tensors.rows:
            if name in rounded:
                assert self.layout is not None
                stem = name.removesuffix(".weight")
                for suffix, tensor in self.layout.tensors(self.tensors.parts(name)).items():
                    yield f"{stem}.{suffix}", tensor
            elif name in floats:
                yield name, _smallest(self.tensors.floats(name))
        for name, number in self.tensors.neutral.items():
            yield name, torch.full(self.tensors.shapes[name], number, dtype=torch.bfloat16)


def make_plan(format: str, tensors: Tensors, parameters: Parameters) -> ExportPlan:
    """The checkpoint in `format`. Raises UnsupportedError for what that cannot hold."""
    layouts, formats = LAYOUTS[format], {name: tensors.formats(name) for name in tensors.rows}
    rounded = [] if format == FLOATS else [name for name in tensors.rows if formats[name] and name != parameters.head]
    for name in rounded:
        _check(format, layouts, name, tensors, parameters)
    kinds = {kind for name in rounded for kind in formats[name]}
    if len(kinds) > 1:
        raise UnsupportedError(f"export: {format} holds weights of one format, and there are {_names(kinds)}; {ELSE}")
    if not kinds and format != FLOATS:
        raise UnsupportedError(f"export: no linear of this artifact is rounded; {ELSE}")
    layout = layouts[kinds.pop()] if kinds else None
    tied = tied_names(tensors, parameters)
    floats = [name for name in tensors.rows if name not in rounded and name not in tied]
    ignored = [name.removesuffix(".weight") for name in floats if name in parameters.linears]
    untied = next((name for name in floats if len(set(parameters.alike(name)) & set(floats)) > 1), None)
    notes = list(_notes(tensors, parameters, layout, rounded))
    head = parameters.head.removesuffix(".weight") if parameters.head else None
    return ExportPlan(tensors, layout, rounded, floats, ignored, head, untied and parameters.head, notes)


def _check(
    format: str,
    layouts: Mapping[WeightFormat, StoredLayout],
    name: str,
    tensors: Tensors,
    parameters: Parameters,
) -> None:
    """Raise UnsupportedError unless `format` can hold the tensor."""
    kinds = tensors.formats(name)
    held = ", ".join(kind.name for kind in layouts)
    mixed = [kind for kind in kinds if kind.marks_rows]
    if mixed:
        raise UnsupportedError(f"export: {name}: {rows_of(tensors, name)}; {format} holds one format a linear; {ELSE}")
    if not kinds <= set(layouts):
        raise UnsupportedError(f"export: {name} is in {_names(kinds)}, and {format} holds {held}; {ELSE}")
    if name not in parameters.linears:
        raise UnsupportedError(f"export: {name} is no weight of a linear, and {format} holds only those; {ELSE}")
    (kind,) = kinds
    shape, multiples = parameters.shapes[name], (layouts[kind].outputs, layouts[kind].inputs)
    for size, multiple, what in zip(shape, multiples, ("outputs", "inputs"), strict=True):
        if size % multiple:
            raise UnsupportedError(
                f"export: {name} has {size} {what}, and {format} holds multiples of {multiple}; {ELSE}"
            )


def rows_of(tensors: Tensors, name: str) -> str:
    """Which rows of a tensor have 8 bits and which 4."""
    wide = tensors.parts(name)["wide"].nonzero().flatten().tolist()
    shown = ", ".join(map(str, wide[:MOST_ROWS])) + (", ..." if len(wide) > MOST_ROWS else "")
    return f"{len(wide)} of its {tensors.shapes[name][0]} rows have 8 bits ({shown}), the others 4"


def _names(kinds: set[WeightFormat]) -> str:
    return " and ".join(sorted(kind.name for kind in kinds))


def tied_names(tensors: Tensors, parameters: Parameters) -> set[str]:
    """Names of tied tensors with the same numbers as the first one, in the model's order, of those tied together."""
    tied: set[str] = set()
    for name in tensors.rows:
        first, *others = [other for other in parameters.alike(name) if other in tensors.rows]
        if name in others and torch.equal(tensors.floats(first), tensors.floats(name)):
            tied.add(name)
    return tied


def _notes(tensors: Tensors, parameters: Parameters, layout: StoredLayout | None, rounded: list[str]) -> Iterator[str]:
    """What a reader of the checkpoint should know, in a line each."""
    head = parameters.head
    if head is not None and head in tensors.rows and (kinds := tensors.formats(head)):
        yield f"{head}: {_names(kinds)} in the artifact, floating-point numbers of the same values in the checkpoint"
    used = {kind for name in tensors.rows for kind in tensors.activations(name)}
    asked = layout.activation if layout else ""
    if left := sorted(used - {asked, F32.name, BF16.name}):
        choice = "the choice of the engine that reads the checkpoint"
        read = f"{asked} in the checkpoint's configuration" if asked else choice
        yield f"activations: {', '.join(left)} in the artifact, {read}"


def _smallest(value: Tensor) -> Tensor:
    """float32 numbers in bfloat16 if that holds them exactly."""
    short = value.to(torch.bfloat16)
    return short if torch.equal(short.float(), value) else value
