"""Where the final hidden states of a step are on a GPU: the input of the output head."""

from __future__ import annotations

from typing import Any

from qcompile.codegen.calls import Gemm
from qcompile.codegen.gpu.context import PlanContext


def hidden_of(context: PlanContext) -> dict[str, Any]:
    """What the runtime needs to read them (runtime/cuda/hidden.py); empty if passes have changed them.

    `before` is the launch that reads them. Rows of `width` numbers take `stride` elements at `x`: bf16, or int8 codes
    with `scales` scales a row at `scale`, each for `group` elements (0: for all).
    """
    program = context.program
    head = next((call for call in program.calls if isinstance(call, Gemm) and call.name == program.head), None)
    if head is None:
        return {}
    x = context.buffer(head.x)
    facts = {"before": head.name, "width": head.k, "stride": x.stride, "group": x.kind.group}
    facts |= {"scales": x.scales, "x": context.ref(head.x).to_json()}
    return facts | ({"scale": context.ref(head.x, "scale").to_json()} if x.dtype == "q8" else {})
