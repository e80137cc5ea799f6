"""Calls of kernels for adapters of requests (codegen/cpu/templates/lora.h). `site` is the number of an adapted linear.

`table` is the weight ADAPTER_TABLE, zeros in the artifact: the runtime writes there where the factors of adapters are,
and which adapter each KV page belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qcompile.codegen.calls import Call


def adapted(site: int) -> str:
    """The C++ variable that says whether any row of the step has an adapter in a linear."""
    return f"adapted{site}"


@dataclass(frozen=True)
class LoraShrink(Call):
    """out = A x of each row's adapter, f32 [ranks]; x has k inputs, and A the type `factors`.

    Rows without an adapter are not written.
    """

    kernel: ClassVar[str] = "lora_shrink"
    x: str
    out: str
    site: int
    k: int
    table: str
    factors: str


@dataclass(frozen=True)
class LoraExpand(Call):
    """out += B x of each row's adapter, in place; x is what LoraShrink wrote. Factors are of type `factors`."""

    kernel: ClassVar[str] = "lora_expand"
    read_fields: ClassVar[tuple[str, ...]] = ("x", "out")
    x: str
    out: str
    site: int
    table: str
    factors: str


@dataclass(frozen=True)
class GateRows(Call):
    """out = kind(gate) * up, where gate and up are alternate 16-column blocks of x.

    x comes from a gemm and the LoraExpand of `site`. Where no row has an adapter, the gemm may write `out` itself.
    """

    kernel: ClassVar[str] = "gate_rows"
    x: str
    out: str
    kind: str
    site: int
