"""torch.export of a module for any batch and number of tokens, with errors of one line."""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from qcompile.checkpoints import state
from qcompile.errors import UnsupportedError, UsageError

EXAMPLE_BATCH, EXAMPLE_TOKENS = 2, 7
"""Sizes of the example inputs for tracing; both dimensions stay dynamic."""


class LengthError(UnsupportedError):
    """The model does not take all numbers of sequences and tokens for which it was traced."""


def export(watch: Callable[..., state.Watched], inputs: Sequence[Tensor], name: str, longest: int) -> ExportedProgram:
    """torch.export of what `watch` makes, a module of `*inputs`, all [B, T]; B and T < `longest` stay dynamic.

    Raises UnsupportedError, with one line about the model `name`, if it cannot be traced, or keeps state that matters.
    """
    changed: list[str] = []
    program = _traced(watch(report=changed.append), inputs, name, longest)
    if changed and not state.alike(program, _traced(watch(settle=True), inputs, name, longest)):
        raise UnsupportedError(f"{name} changes its {changed[0]} when it runs, and then computes something else")
    return program


def _traced(module: nn.Module, inputs: Sequence[Tensor], name: str, longest: int) -> ExportedProgram:
    # Tables with as many rows as the longest sequence specialize that length, so the trace excludes it.
    batch, tokens = torch.export.Dim("batch", max=1 << 16), torch.export.Dim("tokens", max=longest - 1)
    try:
        return _exported(module, inputs, batch, tokens)
    except (UnsupportedError, UsageError, MemoryError):
        raise
    except Exception as error:  # torch.export raises whatever the traced code raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if reason.startswith("Constraints violated"):
            if program := _export_by_example(module, inputs, longest):
                return program
            raise LengthError(f"{name} cannot be exported: {_why_not_all_lengths(str(error))}") from error
        if reason.startswith("Could not guard on data-dependent expression"):
            reason = "it branches on the values of its inputs, as rotary embeddings scaled by length do"
        raise UnsupportedError(f"{name} cannot be exported: {reason}") from error


def _why_not_all_lengths(message: str) -> str:
    """The reason in torch's `message` why a trace does not hold for all lengths."""
    if "!= 1" in message and "constant" not in message:  # torch's own bound for a size that it would broadcast
        return (
            "at some length, a part of its tokens, such as x[:, :-1], is a single token, which torch traces in another"
            " way (torch.nn.functional.pad(x, (0, 0, 1, -1)) shifts tokens at any length)"
        )
    return (
        "it does not take any batch and number of tokens (a loop over tokens is traced for one length, unless"
        " it is a range over all of them; torch.ops.qcompile.linear_recurrence takes any number)"
    )


def _exported(module: nn.Module, inputs: Sequence[Tensor], batch: Any, tokens: Any) -> ExportedProgram:
    shapes = tuple({0: batch, 1: tokens} for _ in inputs)
    with torch.no_grad(), hurried(), quiet():
        return torch.export.export(module, tuple(inputs), dynamic_shapes=(shapes,), strict=False)


def _export_by_example(module: nn.Module, inputs: Sequence[Tensor], longest: int) -> ExportedProgram | None:
    """Export with sizes as dynamic as the trace permits; None if it adds a guard that may not hold.

    torch adds guards for comparisons of strides that always hold, such as T * min(N, N * T) == N * T.
    """
    import sympy

    dynamic: Any = torch.export.Dim.DYNAMIC
    try:
        program = _exported(module, inputs, dynamic(max=1 << 16), dynamic(max=longest - 1))
    except MemoryError:
        raise
    except Exception:  # as above; the caller reports the error of the first attempt
        return None
    taken = program.graph_signature.user_inputs
    shapes = [node.meta["val"].shape for node in program.graph.nodes if node.op == "placeholder" and node.name in taken]
    environment = shapes[0][1].node.shape_env
    batch, tokens = sympy.symbols("batch tokens", integer=True, positive=True)
    sizes = {size.node.expr: known for shape in shapes for size, known in zip(shape, (batch, tokens), strict=True)}
    sizes |= {one: sizes[same] for one, same in environment.replacements.items() if same in sizes}
    return program if all(always(guard.expr, sizes) for guard in environment.guards) else None


def always(condition: Any, sizes: Mapping[Any, Any]) -> bool:
    """Whether `condition`, a SymPy expression, holds for all values of its symbols, which `sizes` renames."""
    import sympy
    from torch.utils._sympy.functions import Min

    least = condition.xreplace(dict(sizes)).replace(lambda part: isinstance(part, Min), lambda m: sympy.Min(*m.args))
    if isinstance(least, sympy.Le) and isinstance(least.lhs, sympy.Min):  # which SymPy does not simplify
        return any(sympy.simplify(part <= least.rhs) == sympy.true for part in least.lhs.args)
    return bool(sympy.simplify(least) == sympy.true)


@contextmanager
def hurried() -> Iterator[None]:
    """Disable cyclic garbage collection and source lines of traced operators; saves a third of import and trace time.

    Errors still name the module of a node, which costs nothing.
    """
    config: Any = fx.config
    lines, collecting = getattr(config, "do_not_emit_stack_traces", None), gc.isenabled()
    if lines is not None:  # torch before 2.13 has no such option
        config.do_not_emit_stack_traces = True
    gc.disable()
    try:
        yield
    finally:
        if lines is not None:
            config.do_not_emit_stack_traces = lines
        if collecting:
            gc.enable()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress what torch prints about a failing trace, including the graph so far, unless TORCH_LOGS is set."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    before, said = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)  # torch's loggers have their own handlers
    try:
        with redirect_stderr(said):
            yield
        sys.stderr.write(said.getvalue())
    finally:
        logging.disable(before)
