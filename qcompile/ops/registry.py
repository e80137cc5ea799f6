"""The registry of operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DEFINED: dict[str, Any] = {}
_REFERENCES: dict[str, Callable[..., Any]] = {}


def define(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register `reference` as qcompile::<its name>; `fake` computes only shapes and dtypes."""

    def register(reference: Callable[..., Any]) -> Any:
        name = reference.__name__.rstrip("_")
        definition = torch.library.custom_op(f"qcompile::{name}", reference, mutates_args=())
        definition.register_fake(fake)
        overload = getattr(torch.ops.qcompile, name).default
        DEFINED[name] = overload
        _REFERENCES[name] = reference
        return overload

    return register


def op(name: str) -> Any:
    """The overload of `qcompile::name`. Raises KeyError if there is none."""
    return DEFINED[name]


def reference(name: str) -> Callable[..., Any]:
    """The reference body of `qcompile::name` as a plain function, which supports autograd."""
    return _REFERENCES[name]


def name_of(target: Any) -> str | None:
    """`rms_norm` for torch.ops.qcompile.rms_norm.default; None for operators that are not ours."""
    namespace = getattr(target, "namespace", None)
    return target._schema.name.split("::")[1] if namespace == "qcompile" else None


def like(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Fake kernel for operators whose result has the shape of their first argument."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
