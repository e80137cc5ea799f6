"""Code generation by kind of target: weight packing, kernels, and their compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event

from qcompile.artifact.abi import CPU_ABI, GPU_ABI
from qcompile.codegen.cpu import compiler, render
from qcompile.codegen.gpu import build
from qcompile.codegen.gpu.compile import triton_version
from qcompile.codegen.gpu.gemm.pack import GPU_PACKING
from qcompile.codegen.packing import CPU_PACKING, Packing
from qcompile.codegen.program import Program
from qcompile.targets import Target

Files = dict[str, str | bytes]


Programs = Mapping[str, Program]
"""The program of each path by name; the target model's (`model`) comes first."""


@dataclass(frozen=True)
class Backend:
    """Code generation for one kind of target.

    The runtime opens one file of kernels/<target> per path, named by path and `suffix`, with interface version `abi`.
    `compiler` returns the compiler's name and version, or raises ResourceError if it is missing. `adapt` adapts a
    program to the target. `prepare` (also told whether prompt lookup drafts) raises at once for programs without
    kernels. It returns a function that compiles them to the files of kernels/<target>; once the event passed to it (or
    None) is set, that raises GivenUpError soon. `check` only raises.
    """

    suffix: str
    abi: int
    packing: Packing
    compiler: Callable[[], str]
    adapt: Callable[[Program], Program]
    prepare: Callable[[Programs, Target, bool], Callable[[Event | None], Files]]
    check: Callable[[Programs, Target], object] = lambda programs, target: None


def _prepare_cpu(programs: Programs, target: Target, lookup: bool) -> Callable[[Event | None], Files]:
    texts = {name: render.render(program, target) for name, program in programs.items()}

    def compile(given_up: Event | None) -> Files:
        files: Files = {}
        for name, text in texts.items():
            kept = text if name == "model" else _without_common_prefix(texts["model"], text)
            files |= {f"{name}.so": compiler.compile(text, target, given_up), f"{name}.cpp": kept}
        return files

    return compile


def _without_common_prefix(model: str, text: str) -> str:
    """`text` with the leading lines it shares with `model` (the kernels) replaced by a reference to them."""
    lines, others = text.splitlines(keepends=True), model.splitlines(keepends=True)
    same = next(i for i, (line, other) in enumerate(zip([*lines, ""], [*others, "."], strict=False)) if line != other)
    return "".join([f"// Put the first {same} lines of model.cpp in place of this one.\n", *lines[same:]])


_BACKENDS = {
    "cpu": Backend(".so", CPU_ABI, CPU_PACKING, compiler.version, lambda program: program, _prepare_cpu),
    "cuda": Backend(
        build.SUFFIX,
        GPU_ABI,
        GPU_PACKING,
        lambda: f"triton {triton_version()}",
        build.adapted,
        build.prepare,
        build.plan,
    ),
}


def backend_of(target: Target) -> Backend:
    """The backend of a target's kind."""
    return _BACKENDS[target.kind]
