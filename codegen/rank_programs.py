"""The programs of the ranks of a divided model: the same calls on other weights, so that one library serves all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from qcompile.codegen.lower import lower
from qcompile.codegen.packing import WeightTable
from qcompile.codegen.program import Program
from qcompile.errors import UnsupportedError
from qcompile.graph import Graph


def rank_programs(
    first: Program, others: Sequence[Graph], weights: WeightTable, adapt: Callable[[Program], Program]
) -> list[Program]:
    """The programs of all ranks, `first` that of rank 0, with the weights of `others` added to `weights`.

    `adapt` is what the target's code generation changes of a program, and has changed of `first`. Empty if there are no
    others. Raises UnsupportedError if a rank needs other kernels.
    """
    programs = [first] * bool(others)
    for rank, graph in enumerate(others, start=1):
        program = adapt(lower(graph, weights))
        if _calls(program) != _calls(first):
            raise UnsupportedError(
                f"rank {rank} would need other kernels than rank 0: their weights differ in size; take a recipe with "
                "the same bits in all rows, such as w4a8"
            )
        programs.append(program)
    return programs


def _calls(program: Program) -> str:
    """The program with numbers in place of the names of its weights."""
    numbers = {name: str(index) for index, name in enumerate(program.weights)}
    return json.dumps(_numbered(json.loads(program.to_json()), numbers))


def _numbered(value: object, numbers: dict[str, str]) -> object:
    if isinstance(value, dict):
        return {key: _numbered(item, numbers) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbered(item, numbers) for item in value]
    return numbers.get(value, value) if isinstance(value, str) else value
