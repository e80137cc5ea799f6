"""What a kind of target needs of code generation: packing of weights, kernels, and what compiles them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qcompile.codegen import compiler, cpu, gpu_build
from qcompile.codegen.gpu_compile import triton_version
from qcompile.codegen.gpu_pack import GPU_PACKING
from qcompile.codegen.gpu_plan import GPU_ABI
from qcompile.codegen.lower import CPU_PACKING, Packing
from qcompile.codegen.program import Program
from qcompile.targets import Target

Files = dict[str, str | bytes]


Programs = Mapping[str, Program]
"""The program of each path by name, the target's (`model`) first."""


@dataclass(frozen=True)
class Backend:
    """`library` is the file of kernels/<target> that the runtime opens, by an interface of version `abi`.

    `compiler` names what compiles, or raises ResourceError where it is missing. `adapt` fits a program to the target.
    `prepare` refuses programs without kernels at once, and returns what compiles them into the files of
    kernels/<target>. `speculates` says whether its runtime takes several paths.
    """

    library: str
    abi: int
    packing: Packing
    compiler: Callable[[], str]
    adapt: Callable[[Program], Program]
    prepare: Callable[[Programs, Target], Callable[[], Files]]
    speculates: bool = True


def _prepare_cpu(programs: Programs, target: Target) -> Callable[[], Files]:
    texts = {name: cpu.render(program, target) for name, program in programs.items()}

    def compile() -> Files:
        files: Files = {}
        for name, text in texts.items():
            files |= {f"{name}.so": compiler.compile(text, target), f"{name}.cpp": text}
        return files

    return compile


def _prepare_gpu(programs: Programs, target: Target) -> Callable[[], Files]:
    return gpu_build.prepare(programs["model"], target)


_BACKENDS = {
    "cpu": Backend("model.so", cpu.ABI, CPU_PACKING, compiler.version, lambda program: program, _prepare_cpu),
    "cuda": Backend(
        gpu_build.PLAN,
        GPU_ABI,
        GPU_PACKING,
        lambda: f"triton {triton_version()}",
        gpu_build.adapted,
        _prepare_gpu,
        speculates=False,
    ),
}


def backend_of(target: Target) -> Backend:
    """The backend of a target's kind."""
    return _BACKENDS[target.kind]
