"""Front end: turns a checkpoint, an nn.Module or an ExportedProgram into a Graph of ATen operators (stage `import`).

Weights are not read here: the graph names them, and its store knows how to load them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from qcompile.checkpoints import huggingface
from qcompile.checkpoints.loaders import module_loaders, program_loaders
from qcompile.checkpoints.modules import export_module, require_positions, require_range
from qcompile.checkpoints.programs import WRAPPER, count_parameters, import_program, vocabulary
from qcompile.checkpoints.tracing import EXAMPLE_TOKENS, hurried
from qcompile.errors import UsageError, suggestion
from qcompile.graph import Graph, ModelInfo


def load(
    model: str | Path | nn.Module | ExportedProgram,
    *,
    example_inputs: Sequence[Tensor] | None = None,
    max_position: int | None = None,
    name: str | None = None,
    allow_remote: bool = False,
    weights: bool = True,
    layers: int | None = None,
) -> Graph:
    """Read `model`, a Hugging Face checkpoint (directory or hub name), an nn.Module, or an ExportedProgram.

    A module takes token ids int64 [B, T], and positions int64 [B, T] if two `example_inputs` are given, and returns
    logits [B, T, V]; `max_position` is its context length. `allow_remote` permits a checkpoint's own Python code to
    run. Without `weights`, a configuration suffices, and the model may be truncated to `layers` layers. Raises
    UsageError or UnsupportedError with a message of one line.
    """
    if isinstance(model, (str, Path)):
        if example_inputs is not None or max_position is not None:
            raise UsageError("example_inputs and max_position are for modules: a checkpoint's configuration has both")
        with hurried():
            return huggingface.load(model, name=name, allow_remote=allow_remote, weights=weights, layers=layers)
    given: object = model
    if not isinstance(given, nn.Module | ExportedProgram):
        kind = given.__name__ if isinstance(given, type) else f"of type {type(given).__name__}"
        raise UsageError(f"the model must be a path, a name, an nn.Module or an ExportedProgram, and is {kind}")
    if max_position is None:
        raise UsageError("a module needs max_position, the longest sequence it can hold, beside example_inputs")
    least = 2 if isinstance(model, ExportedProgram) else EXAMPLE_TOKENS + 1
    if type(max_position) is not int or max_position < least:
        raise UsageError(f"max_position must be a whole number of at least {least}, not {max_position!r}")
    if isinstance(model, ExportedProgram):
        program, name = model, name or "exported"
        require_range(program, max_position)
        require_positions(program, program.example_inputs)
        loaders, wrapper = program_loaders(program), ""
    else:
        if example_inputs is None:
            raise UsageError("example_inputs is needed with an nn.Module: (token_ids,) or (token_ids, positions)")
        name = name or type(model).__name__
        program = export_module(model, example_inputs, max_position)
        loaders, wrapper = module_loaders(model), WRAPPER
    info = ModelInfo(name, vocabulary(program), max_position, None, (), count_parameters(program))
    return import_program(program, loaders, info, wrapper)


_ARGUMENTS = inspect.signature(load).parameters


def check_arguments(caller: Callable[..., Any], source: Mapping[str, Any]) -> None:
    """Raise TypeError if `load` does not take one of `source`, further arguments of `caller`; it suggests another."""
    for name in source:
        if name not in _ARGUMENTS:
            known = [*inspect.signature(caller).parameters, *_ARGUMENTS]
            hint = suggestion(name, known)
            raise TypeError(f"{caller.__name__}() got an unexpected keyword argument {name!r}{hint}")
