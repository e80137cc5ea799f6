"""Lower the operators of linears that adapters may change."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from qcompile import ops
from qcompile.artifact.layout import ADAPTER_TABLE, ADAPTER_TABLE_BYTES
from qcompile.codegen.lora_calls import GateRows, LoraExpand, LoraShrink
from qcompile.codegen.lowering_state import Lowering


def lora_shrink(low: Lowering, node: fx.Node) -> LoraShrink:
    """The call of the first half of a change."""
    given = ops.operands(node)
    k = given.x.meta["val"][0].shape[-1]
    table = low.reserved(ADAPTER_TABLE, ADAPTER_TABLE_BYTES)
    return LoraShrink(node.name, low.buffer(given.x), low.buffer(node), given.site, k, table, _factors(given.x))


def lora_expand(low: Lowering, node: fx.Node) -> LoraExpand:
    """The call of the second half."""
    given = ops.operands(node)
    table, factors = low.reserved(ADAPTER_TABLE, ADAPTER_TABLE_BYTES), _factors(ops.operand(given.t, "x"))
    return LoraExpand(node.name, low.buffer(given.t), low.buffer(node), given.site, table, factors)


def gate_rows(low: Lowering, node: fx.Node) -> GateRows:
    """The call of a gate over what a gemm and its adapters computed."""
    given = ops.operands(node)
    return GateRows(node.name, low.buffer(given.x), low.buffer(node), given.kind, ops.operand(given.x, "site"))


def _factors(x: Any) -> str:
    """The type of the factors of adapters in a linear over the activation `x`."""
    return "f32" if x.meta["val"][0].dtype == torch.float32 else "bf16"
