"""Lower the operators of recurrent states."""

from __future__ import annotations

from typing import Any

from torch import fx

from qcompile import ops
from qcompile.codegen.lowering_state import Lowering
from qcompile.codegen.state_calls import ConvStep, RecurrenceStep
from qcompile.errors import UnsupportedError
from qcompile.formats.states import RecurrenceState
from qcompile.ops.recurrent_step import layer_state


def conv_step(low: Lowering, node: fx.Node) -> ConvStep:
    """The call of a convolution."""
    given = ops.operands(node)
    features, width = given.weight.meta["val"].shape
    return ConvStep(
        node.name,
        x=low.buffer(given.x, whole=False),
        x_offset=low.column(given.x),
        out=low.buffer(node),
        features=features,
        width=width,
        weight=low.transposed(given.weight),
        state=given.offset,
        bias=low.vector(given.bias),
    )


def recurrence_step(low: Lowering, node: fx.Node) -> RecurrenceStep:
    """The call of a linear recurrence."""
    given = ops.operands(node)
    places: dict[str, Any] = {}
    for name in ("q", "k", "v", "decay", "gain"):
        if (x := getattr(given, name)) is not None:
            places |= {name: low.buffer(x, whole=False), f"{name}_offset": low.column(x)}
    layout, rates = layer_state(node), given.rates
    assert isinstance(layout, RecurrenceState)
    if layout.stored != "f32" and layout.value_dim == 1:
        raise UnsupportedError(f"{node.name}: states of one value feature a head have no kernel for {layout.stored}")
    rates_by_key = rates is not None and rates.meta["val"].dim() == 2
    put = low.transposed if rates_by_key and layout.value_dim == 1 else low.flat
    return RecurrenceStep(
        node.name,
        **places,
        out=low.buffer(node),
        heads=layout.heads,
        key_heads=layout.key_heads,
        key_dim=layout.key_dim,
        value_dim=layout.value_dim,
        by_key=layout.by_key,
        delta=given.delta,
        state=given.offset,
        rates=put(rates) if rates is not None else None,
        rates_by_key=rates_by_key,
        stored=layout.stored,
    )
