"""What the manifest says of tables of embeddings that are rounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qcompile.codegen.calls import Embed, Gemm
from qcompile.codegen.fidelity import Fidelity
from qcompile.codegen.program import Program


def table_facts(program: Program, fidelity: Fidelity) -> Mapping[str, Any] | None:
    """None if no table is rounded; otherwise its `bits`, `error` (Fidelity.table_error), and `shared`.

    `shared` says whether a linear multiplies by the same stored weight, as a tied output head does.
    """
    if fidelity.table_error is None:
        return None
    tables = {call.table for call in program.calls if isinstance(call, Embed) and call.row_scale}
    read = {name for call in program.calls if isinstance(call, Gemm) for name in call.weights.values()}
    return {"bits": 8, "error": fidelity.table_error, "shared": tables <= read}
