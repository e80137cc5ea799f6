"""Embeddings that a step's rows have in place of those of their tokens, on a GPU."""

from __future__ import annotations

from typing import Any

from qcompile.codegen.calls import AllGather, AllReduce, Embed
from qcompile.codegen.gpu.context import PlanContext
from qcompile.codegen.gpu.rows import GIVEN


def given_factor(context: PlanContext, c: Embed) -> float:
    """What multiplies embeddings that a step gives in place of a token's; 0 if it may give none.

    A divided model has none: the memory of the host in which they are belongs to one process.
    """
    divided = any(isinstance(call, AllGather | AllReduce) for call in context.program.calls)
    return 0.0 if divided else c.given


def embeds_of(context: PlanContext) -> dict[str, Any]:
    """What the runtime needs to give embeddings (runtime/cuda/embeds.py); empty if a step may give none.

    Rows have `width` numbers. Token number `first` + i stands for row i of those of a step.
    """
    calls = [call for call in context.program.calls if isinstance(call, Embed)]
    call = next((call for call in calls if given_factor(context, call)), None)
    return {"width": context.buffer(call.out).width, "first": GIVEN} if call else {}
