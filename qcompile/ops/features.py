"""Operators that pass features between a model and its draft head: hidden states of rows, outside the graph."""

from __future__ import annotations

from torch import Tensor

from qcompile.ops.registry import define, like


@define(like)
def read_features(features: Tensor) -> Tensor:
    """features [..., F], which a step is given for each of its rows."""
    return features.clone()


@define(like, since="cache")
def write_features(x: Tensor) -> Tensor:
    """x [M, F], which a step returns for each of its rows besides logits."""
    return x.clone()
