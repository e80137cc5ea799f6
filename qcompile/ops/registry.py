"""The registry of operators: for each its overload, its reference body, and the stages in which it may appear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

STAGES = ("raise", "quantize", "cache")
"""Stages of a graph of qcompile's operators, in order. A graph at stage `import` holds ATen operators instead."""

Trait = Literal["elementwise", "permutes", "rotates"]
"""What passes may rely on: `elementwise`: an element of the result depends on the elements at its place in the operands
alone. `permutes`: the result numbers its features like the operands, so that the operator commutes with a permutation.
`rotates`: it commutes with an orthogonal change of basis of all its operands."""

DEFINED: dict[str, Any] = {}
_REFERENCES: dict[str, Callable[..., Any]] = {}
_STAGES: dict[str, tuple[str, ...]] = {}
_TRAITS: dict[str, tuple[Trait, ...]] = {}


def define(
    fake: Callable[..., Any], *, since: str = "raise", until: str = "cache", traits: tuple[Trait, ...] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Register `reference` as qcompile::<its name>; `fake` computes only shapes and dtypes.

    The operator may appear in graphs from stage `since` to stage `until`, both included. `traits` are facts about its
    result that passes rely on.
    """
    stages = STAGES[STAGES.index(since) : STAGES.index(until) + 1]

    def register(reference: Callable[..., Any]) -> Any:
        name = reference.__name__.rstrip("_")
        definition = torch.library.custom_op(f"qcompile::{name}", reference, mutates_args=())
        definition.register_fake(fake)
        overload = getattr(torch.ops.qcompile, name).default
        DEFINED[name] = overload
        _REFERENCES[name] = reference
        _STAGES[name], _TRAITS[name] = stages, traits
        return overload

    return register


def op(name: str) -> Any:
    """The overload of `qcompile::name`. Raises KeyError if there is none."""
    if name not in DEFINED:
        raise KeyError(f"there is no operator qcompile::{name}")
    return DEFINED[name]


def reference(name: str) -> Callable[..., Any]:
    """The reference body of `qcompile::name` as a plain function, which supports autograd."""
    return _REFERENCES[name]


def allowed(stage: str) -> frozenset[str]:
    """The operators that a graph at `stage` may contain."""
    return frozenset(name for name, stages in _STAGES.items() if stage in stages)


def with_trait(trait: Trait) -> frozenset[str]:
    """The operators that have a trait."""
    return frozenset(name for name, traits in _TRAITS.items() if trait in traits)


def name_of(target: Any) -> str | None:
    """`rms_norm` for torch.ops.qcompile.rms_norm.default; None for operators that are not qcompile's."""
    namespace = getattr(target, "namespace", None)
    return target._schema.name.split("::")[1] if namespace == "qcompile" else None


def like(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Fake kernel of operators that return a tensor of the shape of their first argument."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
