"""Calls that pass features between a model and its draft head, in memory that the runtime gives (qc_connect)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qcompile.codegen.calls import Call


@dataclass(frozen=True)
class ReadFeatures(Call):
    """out[t] = the features that the runtime gives for row t; f32 [tokens, width]."""

    kernel: ClassVar[str] = "read_features"
    read_fields: ClassVar[tuple[str, ...]] = ()
    out: str


@dataclass(frozen=True)
class WriteFeatures(Call):
    """Writes x, f32 [tokens, width], to the runtime's memory, without padding; nothing if it has given none."""

    kernel: ClassVar[str] = "write_features"
    write_fields: ClassVar[tuple[str, ...]] = ()
    x: str


def only_for_features(calls: Sequence[Call]) -> frozenset[int]:
    """The calls of which a step needs the results only to return features, by their numbers."""
    numbers: set[int] = set()
    wanted: set[str] = set()
    others: set[str] = set()
    for index, call in reversed(list(enumerate(calls))):
        writes = set(call.writes)
        if isinstance(call, WriteFeatures) or (writes & wanted and not writes & others):
            numbers.add(index)
            wanted.update(call.reads)
        else:
            others.update(call.reads)
    return frozenset(numbers)
