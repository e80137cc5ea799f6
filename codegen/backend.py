"""What code generation for a kind of target is: the packing of weights, the kernels, and their compiler.

The backends are codegen/cpu/build.py and codegen/gpu/build.py; pipeline.py chooses one by the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event

from qcompile.artifact.describe import MAX_STEP_TOKENS
from qcompile.codegen.packing import Packing
from qcompile.codegen.program import Program
from qcompile.targets import Target

Files = dict[str, str | bytes]
"""Contents of files by name."""

Programs = Mapping[str, Program]
"""The program of each path by name; the target model's (`model`) comes first."""

CompileFiles = Callable[[Event | None], Files]
"""Compiles kernels to the files of kernels/<target>. Once the event is set, it raises GivenUpError soon."""


def _unchanged(program: Program) -> Program:
    return program


def _accept(programs: Programs, target: Target) -> None:
    """Accept all programs: `prepare` finds what has no kernel just as fast."""


def _calls(program: Program) -> int:
    """The number of calls of a program."""
    return len(program.calls)


@dataclass(frozen=True)
class Backend:
    """Code generation for one kind of target.

    suffix: of the file of kernels/<target> that the runtime opens for a path, after the path's name.
    abi: interface version of that file.
    packing: how weights are packed for the kernels.
    compiler: returns the compiler's name and version, or raises ResourceError if it is missing.
    prepare: plans the kernels of all paths, and is told whether n-gram lookup drafts. Raises UnsupportedError at once
        for programs without kernels; what it returns takes the time.
    adapt: changes a program to the layout that the target's kernels read.
    check: raises UnsupportedError for programs without kernels, and needs no compiler.
    launches: the number of kernels that a step of a program starts.
    most_rows, most_outputs: most rows of a step, and of rows with logits, that kernels take.
    """

    suffix: str
    abi: int
    packing: Packing
    compiler: Callable[[], str]
    prepare: Callable[[Programs, Target, bool], CompileFiles]
    adapt: Callable[[Program], Program] = _unchanged
    check: Callable[[Programs, Target], object] = _accept
    launches: Callable[[Program], int] = _calls
    most_rows: int = MAX_STEP_TOKENS
    most_outputs: int = MAX_STEP_TOKENS
