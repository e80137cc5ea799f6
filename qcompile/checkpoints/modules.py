"""An nn.Module as an ExportedProgram, and checks that a program takes the inputs that a model takes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from qcompile.checkpoints import eager, state
from qcompile.checkpoints.programs import CPU, is_check, vocabulary
from qcompile.checkpoints.token_loops import TokenLoops, recorded
from qcompile.checkpoints.tracing import EXAMPLE_BATCH, EXAMPLE_TOKENS, export
from qcompile.errors import UnsupportedError, UsageError


class _Looped(state.Watched):
    """A module that is traced with its loops over tokens written as recurrences."""

    def run(self, *inputs: Tensor) -> Any:
        with TokenLoops(inputs[0]):
            return self.module(*inputs)


def export_module(module: nn.Module, example_inputs: Sequence[Tensor], longest: int) -> ExportedProgram:
    """Export `module` in evaluation mode, in float32 on the CPU; tensors of other types or devices are copied."""
    tensors = [value for value in example_inputs if isinstance(value, Tensor)]
    fit = all(value.dtype == torch.int64 and value.dim() == 2 for value in tensors)
    if not (fit and 1 <= len(tensors) <= 2 and len(tensors) == len(example_inputs)):
        raise UsageError("example_inputs must be int64 [batch, tokens]: token ids, and positions if it takes them")
    ids = [torch.zeros(EXAMPLE_BATCH, EXAMPLE_TOKENS, dtype=torch.int64) for _ in tensors]
    shadow = _Shadow(module)
    eager.warm_up(shadow.make(), ids)
    with recorded(module):
        program = export(lambda **how: _Looped(shadow.make(), **how), ids, type(module).__name__, longest)
    require_positions(program, example_inputs)
    eager.require_same(shadow.make(), program, len(ids), vocabulary(program))
    return program


def require_range(program: ExportedProgram, max_position: int) -> None:
    """Refuse a program that was traced for part of the sizes that occur: others may take another branch."""
    import sympy

    node = next(node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
    shape = node.meta["val"].shape
    if len(shape) != 2 or any(isinstance(size, int) for size in shape):
        return  # raising refuses it
    for size, what in zip(shape, ("sequences", "tokens"), strict=True):
        known = program.range_constraints.get(size.node.expr)
        if known is None and not size.node.expr.is_Symbol:
            raise UnsupportedError(f"the exported program takes no number of {what} but {size.node.expr}")
        if known is not None and known.lower > 2:  # from 2 on is how torch.export writes any size
            raise UnsupportedError(
                f"the exported program takes at least {known.lower} {what}; export it for any number"
            )
        if known is not None and what == "tokens" and known.upper < max_position - 1:
            limit = f"give a max_position of at most {int(known.upper) + 1}"
            raise UnsupportedError(f"the exported program takes at most {known.upper} tokens; {limit}")
    batch, tokens = (size.node.expr for size in shape)
    lengths = sorted({*range(2, 513), *(2**p + d for p in range(9, 31) for d in (-1, 0, 1)), max_position - 1})
    for guard in shape[1].node.shape_env.guards:
        for length in lengths[: lengths.index(max_position - 1) + 1]:
            if guard.expr.xreplace({batch: sympy.Integer(2), tokens: sympy.Integer(length)}) == sympy.false:
                raise UnsupportedError(f"the exported program does not take {length} tokens: it needs {guard.expr}")


def require_positions(program: ExportedProgram, examples: Any) -> None:
    """Refuse a second input that is not the positions of the tokens, such as a mask of what is padding."""
    given = [value for value in tree_leaves(examples) if isinstance(value, Tensor)]
    taken = [node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    if not len(given) == len(taken) == 2 or given[1].dim() != 2 or given[1].is_meta:
        return
    if all(is_check(user) or "sym_size" in str(user.target) for user in taken[1].users):
        return  # its values are not read
    second = given[1].cpu()
    if second.dtype == torch.bool or (second != torch.arange(second.shape[1])).any():
        raise UsageError(
            "the second of example_inputs must be the positions 0, 1, 2, ... of the tokens: no mask is taken, nor"
            " another input"
        )


def _moved(tensor: Tensor) -> Tensor:
    return tensor.detach().to(CPU, torch.float32 if tensor.is_floating_point() else tensor.dtype)


class _Shadow:
    """Makes copies of a module in evaluation mode, with tensors on the CPU, in float32 if floating-point.

    They share parameters and buffers that need no conversion with the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._memo: dict[int, Any] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            moved = _moved(tensor)
            shown = nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved
            self._memo[id(tensor)] = shown
        kept = [value for value in state.collect(module).values() if isinstance(value, Tensor)]
        self._kept = [value for value in kept if id(value) not in self._memo]

    def make(self) -> nn.Module:
        """A copy in the state of the module. Raises UnsupportedError if it holds something that cannot be copied."""
        own = {id(value): _moved(value).clone() for value in self._kept}  # because a run may write to them
        try:
            return copy.deepcopy(self._module, self._memo | own).eval()
        except MemoryError:
            raise
        except Exception as error:  # attributes may raise anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UnsupportedError(f"{type(self._module).__name__} cannot be copied: {reason}") from error
