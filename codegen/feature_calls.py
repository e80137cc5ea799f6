"""Calls that pass features between a model and its draft head, in memory that the runtime gives (qc_connect)."""

from __future__ import annotations

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
