"""Code generation by kind of target: the packing of weights, the kernels, and their compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event

from qcompile.artifact.abi import CPU_ABI, GPU_ABI
from qcompile.codegen.cpu import build as cpu_build
from qcompile.codegen.cpu import compiler
from qcompile.codegen.gpu import build as gpu_build
from qcompile.codegen.gpu.compile import triton_version
from qcompile.codegen.gpu.gemm.pack import GPU_PACKING
from qcompile.codegen.packing import CPU_PACKING, Packing
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
    """

    suffix: str
    abi: int
    packing: Packing
    compiler: Callable[[], str]
    prepare: Callable[[Programs, Target, bool], CompileFiles]
    adapt: Callable[[Program], Program] = _unchanged
    check: Callable[[Programs, Target], object] = _accept


def _triton() -> str:
    return f"triton {triton_version()}"


_BACKENDS = {
    "cpu": Backend(cpu_build.SUFFIX, CPU_ABI, CPU_PACKING, compiler.version, cpu_build.prepare),
    "cuda": Backend(
        gpu_build.SUFFIX,
        GPU_ABI,
        GPU_PACKING,
        _triton,
        gpu_build.prepare,
        adapt=gpu_build.adapted,
        check=gpu_build.plan,
    ),
}


def backend_of(target: Target) -> Backend:
    """The backend of a target's kind."""
    return _BACKENDS[target.kind]
