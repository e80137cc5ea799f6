"""Loaders of weights: functions that return a weight's values when a stage asks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from qcompile.checkpoints.checkpoint import Checkpoint, require_finite
from qcompile.errors import UsageError

Loader = Callable[[], Tensor]


@dataclass(frozen=True)
class StoredLoader:
    """Loads the tensor `name` of `checkpoint`."""

    checkpoint: Checkpoint
    name: str

    def __call__(self) -> Tensor:
        return self.checkpoint.load(self.name)

    @property
    def few_bits(self) -> bool:
        """Whether it is stored in few bits."""
        return self.checkpoint.in_few_bits(self.name)

    @property
    def stored(self) -> torch.dtype | None:
        """The type of floats that it is stored in; None if its values are computed."""
        return self.checkpoint.stored_type(self.name)


@dataclass(frozen=True)
class TurnedLoader:
    """Loads the matrix `name` of `checkpoint`, [outputs, inputs] in few bits, as [inputs, outputs]."""

    checkpoint: Checkpoint
    name: str
    few_bits = True

    def __call__(self) -> Tensor:
        return self.checkpoint.load(self.name).T.contiguous()


@dataclass(frozen=True)
class TensorLoader:
    """Loads `value` on the CPU; floating-point values are converted to float32 and must be finite."""

    name: str
    value: Tensor

    @property
    def stored(self) -> torch.dtype:
        """The type of its values."""
        return self.value.dtype

    def require(self, traced: Tensor) -> None:
        """Raise UsageError unless `value` can stand where the trace had `traced`: it may have been replaced since."""
        if self.value.is_meta or self.value.layout != torch.strided:
            raise UsageError(f"weight {self.name} is sparse or has no values; give a dense tensor")
        if self.value.shape != traced.shape:
            shapes = f"has shape {list(self.value.shape)}, the model needs {list(traced.shape)}"
            raise UsageError(f"weight {self.name} {shapes}")
        if self.value.is_floating_point() != traced.is_floating_point():
            raise UsageError(f"weight {self.name} is of type {self.value.dtype}, the model needs {traced.dtype}")

    def __call__(self) -> Tensor:
        value = self._value()
        if value.is_floating_point():
            require_finite(self.name, value)
        return value

    def mask(self) -> Tensor:
        """The value as a mask, which may be infinite where nothing is visible."""
        value = self._value()
        if value.is_floating_point():
            require_finite(self.name, value.masked_fill(value.isinf(), 0.0))
        return value

    def _value(self) -> Tensor:
        value = self.value.detach().cpu()
        return value.float() if value.is_floating_point() else value


def module_loaders(module: nn.Module) -> dict[str, Loader]:
    """Loaders of all parameters and buffers of an exported `module`, by their names in the program."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: TensorLoader(name, value) for name, value in named}


def program_loaders(program: ExportedProgram) -> dict[str, Loader]:
    """Loaders of all parameters and buffers of `program`, by name."""
    try:
        named = {**dict(program.named_parameters()), **dict(program.named_buffers())}
    except KeyError as error:
        raise UsageError(f"the exported program's state_dict has no {error.args[0]}, which its graph reads") from None
    if wrong := [name for name, value in named.items() if not isinstance(value, Tensor)]:
        raise UsageError(
            f"weight {wrong[0]} of the exported program is no tensor, but {type(named[wrong[0]]).__name__}"
        )
    return {name: TensorLoader(name, value) for name, value in named.items()}
