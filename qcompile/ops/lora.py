"""Operators of linears that adapters of requests may change. Without adapters they change nothing.

Which adapter a row has, and its factors, are known only to the runtime (codegen/cpu/templates/lora.h). So the reference
bodies here are those of rows without adapters, and `change` is the meaning of both operators for rows with one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qcompile.ops.epilogues import gate
from qcompile.ops.registry import define, like


@define(lambda x, site, ranks: x[0].new_empty((*x[0].shape[:-1], ranks), dtype=torch.float32), since="cache")
def lora_shrink(x: list[Tensor], site: int, ranks: int) -> Tensor:
    """A x of each row's adapter in the linear `site`, f32 [..., ranks], for a quantized activation x [..., K]."""
    return torch.zeros((*x[0].shape[:-1], ranks))


@define(like, since="cache")
def lora_expand(y: Tensor, t: Tensor, site: int) -> Tensor:
    """y [..., N] plus B t of each row's adapter in the linear `site`; t is what lora_shrink returned."""
    return y.clone()


@define(lambda x, kind, width: x.new_empty((*x.shape[:-1], width)), since="cache")
def gate_rows(x: Tensor, kind: str, width: int) -> Tensor:
    """x [..., 2N'], gate and up interleaved in blocks of GATE_BLOCK features -> kind(gate) * up, [..., width]."""
    return gate(x, kind, width)


def change(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What an adapter with a [R, K] and b [N, R], its scale included, adds to a linear of x [..., K]: [..., N]."""
    return (x @ a.T) @ b.T
