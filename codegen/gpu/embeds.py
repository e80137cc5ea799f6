"""Embeddings that a step's rows have in place of those of their tokens, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qcompile.codegen.calls import AllGather, AllReduce, Embed
from qcompile.codegen.gpu.rows import GIVEN
from qcompile.codegen.program import Program


def for_one_gpu(program: Program) -> Program:
    """`program`, in which no row may have an embedding of its own if several GPUs compute it together.

    The host's memory in which embeddings are belongs to one process, and each GPU has its own.
    """
    if not any(isinstance(call, AllGather | AllReduce) for call in program.calls):
        return program
    calls = tuple(replace(call, given=0.0) if isinstance(call, Embed) else call for call in program.calls)
    return replace(program, calls=calls)


def embeds_of(program: Program) -> dict[str, Any]:
    """What the runtime needs to give embeddings (runtime/cuda/embeds.py); empty if a step may give none.

    Rows have `width` numbers. Token number `first` + i stands for row i of those of a step.
    """
    call = next((call for call in program.calls if isinstance(call, Embed) and call.given), None)
    return {"width": program.buffer(call.out).width, "first": GIVEN} if call else {}
