"""Eager runs of a module: before tracing, to fill its caches, and after it, to check the trace on a few tokens.

The check detects what a trace cannot show: branches for a single sequence or token, values that tracing fixed, and
memory that is read before it is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qcompile.errors import UnsupportedError

SIZES = ((1, 1), (1, 5), (3, 1))
"""Sequences and tokens at which a module is compared with its trace of 2 x 7 tokens."""

ALIKE = 1e-3
"""Outputs that differ by less than this, relative to the largest, may be the same but for rounding."""


def warm_up(module: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Run `module`, so that tables that it keeps outside of itself, as in functools.cache, are not filled by the trace.

    The trace would fill them with tensors without values, which the user's own calls would then read. The module's
    weights do not change.
    """
    with torch.no_grad(), suppress(Exception):  # the trace reports what cannot run
        _run(module, inputs)


def _run(module: nn.Module, inputs: Sequence[Tensor]) -> Any:
    kept = {name: value.clone() for name, value in module.named_buffers()}  # a branch might change them
    with _Protected((*module.parameters(), *module.buffers())):
        return torch.func.functional_call(module, kept, tuple(inputs))


def require_same(module: nn.Module, program: ExportedProgram, takes: int, vocabulary: int) -> None:
    """Raise UnsupportedError if `module` computes something else than `program`, or when run again, at SIZES.

    `takes` is the number of the module's inputs, all int64. Sizes at which the module cannot run are not checked.
    """
    draw = torch.Generator().manual_seed(0)
    for batch, tokens in SIZES:
        ids = torch.randint(vocabulary, (batch, tokens), generator=draw)
        places = torch.arange(tokens).expand(batch, tokens)
        _compare(module, program, (ids, places)[:takes])


def _compare(module: nn.Module, program: ExportedProgram, inputs: Sequence[Tensor]) -> None:
    with torch.no_grad():
        try:
            own, traced = _run(module, inputs), _run(program.module(), inputs)
            with _marked_memory():
                again = _run(module, inputs)
        except Exception:  # it cannot run here, or refuses this input: then no error is silent
            return
    name = type(module).__name__
    if not _is_finite(own):
        return
    if not _is_finite(again):
        new = next((f" (node {node})" for node in program.graph.nodes if "empty" in str(node.target)), "")
        raise UnsupportedError(f"{name} reads new memory, as of torch.empty, before it is written{new}")
    if not _agree(own, again):
        raise UnsupportedError(f"{name} computes something else each time it runs: it draws at random or keeps state")
    if not _agree(own, traced):
        batch, tokens = inputs[0].shape
        what = f"{name} computes something else for {batch} x {tokens} tokens than its trace"
        raise UnsupportedError(f"{what}: it may branch on their number or values")


class _Protected(TorchDispatchMode):
    """Raises RuntimeError if an operator would write into one of `tensors`, which may belong to the user."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            names = [argument.name for argument in func._schema.arguments]
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                alias = func._schema.arguments[names.index(name)].alias_info
                if alias is not None and alias.is_write and self._holds(value):
                    raise RuntimeError(f"{func} writes into a weight")
        return func(*args, **kwargs)

    def _holds(self, value: Any) -> bool:
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        return any(tensor.untyped_storage().data_ptr() in self._storages for tensor in tensors)


@contextmanager
def _marked_memory() -> Iterator[None]:
    """New memory holds NaN, or the largest integers, until something is written to it."""
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    filled, deterministic.fill_uninitialized_memory = deterministic.fill_uninitialized_memory, True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        deterministic.fill_uninitialized_memory = filled


def _is_finite(output: Any) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in tree_leaves(output) if isinstance(leaf, Tensor))


def _agree(own: Any, other: Any) -> bool:
    """Whether all tensors of `own` are those of `other`, but for rounding; no output is checked yet for its type."""
    pairs = zip(tree_leaves(own), tree_leaves(other), strict=False)
    return all(_alike(one, another) for one, another in pairs if isinstance(one, Tensor))


def _alike(own: Tensor, other: Any) -> bool:
    if not isinstance(other, Tensor) or own.shape != other.shape or own.dtype != other.dtype:
        return False
    if not own.numel() or not (own.is_floating_point() or own.is_complex()):
        return own.equal(other)
    return bool((own - other).abs().max() <= ALIKE * own.abs().max())
