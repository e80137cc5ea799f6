"""Compile Triton source ahead of time, with or without a GPU, and cache the results.

`compile_kernel` returns the cubin that an artifact contains, from the cache ($QCOMPILE_CACHE) if possible. The cache
key covers everything that determines the bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import linecache
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from threading import Event
from types import ModuleType
from typing import Any

from qcompile import user_cache
from qcompile.codegen import children
from qcompile.codegen.gpu import sass
from qcompile.codegen.gpu.kernel import ANY_CAPABILITY, Argument, Kernel
from qcompile.errors import ResourceError, UnsupportedError
from qcompile.system.python_process import module_command, module_environment

_MATRIX = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*")
_CACHE_VERSION = 5


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one architecture. `matrix` lists the matrix (MMA) instructions in its PTX."""

    cubin: bytes
    ptx: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    threads: int
    matrix: tuple[str, ...]


def load(kernel: Kernel, capability: int = 0) -> Any:
    """The kernel as a Triton function, to be launched or compiled; `capability` fills its placeholder, if any."""
    return getattr(_module(kernel.source.replace(ANY_CAPABILITY, f"tl.constexpr({capability})", 1)), kernel.name)


@cache
def _module(source: str) -> ModuleType:
    name = f"qcompile_kernel_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    # Triton gets a kernel's source through linecache, so no file is needed.
    path = f"{name}.py"
    linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
    module = ModuleType(name)
    exec(compile(source, path, "exec"), vars(module))
    return module


def triton_version() -> str:
    """Triton's version. ResourceError if it is not installed."""
    try:
        import triton
    except ImportError as error:
        raise ResourceError("GPU targets need Triton: pip install 'qcompile[gpu]'") from error
    return str(triton.__version__)


def build(kernel: Kernel, capability: int) -> Any:
    """`kernel` compiled by Triton for compute capability `capability`; `build(...)[grid](*arguments)` launches it.

    Needs no GPU. Raises ResourceError if Triton is not installed.
    """
    triton_version()
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {argument.name: argument.type for argument in kernel.arguments}
    # The specialization that Triton's launcher would choose: pointers are aligned to 16 bytes.
    aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arguments) if a.type.startswith("*")}
    function = load(kernel, capability)
    kind: Any = ASTSource
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        kind = GluonASTSource
    source = kind(function, signature, {}, aligned)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages, "launch_pdl": kernel.pdl}
    options["enable_fp_fusion"] = kernel.fusion
    if kernel.most_registers:
        options["maxnreg"] = kernel.most_registers
    # Triton's own cache would grow with every build and needs a writable home directory; this module has its own cache.
    # Line information would contain the folder in which Triton is installed.
    with (
        tempfile.TemporaryDirectory(prefix="qcompile-") as folder,
        knobs.cache.scope(),
        knobs.compilation.scope(),
    ):
        knobs.cache.dir = folder
        knobs.compilation.disable_line_info = True
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_kernel(kernel: Kernel, capability: int) -> Compiled:
    """`kernel` compiled for compute capability `capability` (80, 89, 90, 100), from the cache if possible.

    Raises UnsupportedError if it needs scratch memory, or if registers that wgmma reads are overwritten.
    """
    key = "\0".join((kernel.label, str(capability), triton_version(), str(_CACHE_VERSION)))
    entry = user_cache.cache_dir() / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    if (kept := user_cache.recall(entry)) is not None:
        return _from_json(json.loads(kept))
    compiled = _compile(kernel, capability)
    user_cache.remember(entry, json.dumps(_to_json(compiled)).encode())
    return compiled


def _compile(kernel: Kernel, capability: int) -> Compiled:
    built = build(kernel, capability)
    ptx, cubin, metadata = built.asm["ptx"], built.asm["cubin"], built.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise UnsupportedError(f"kernel {kernel.name} needs scratch memory, which launches do not provide")
    # wgmma reads registers asynchronously, also in loops that Triton pipelines.
    if "wgmma.mma_async" in ptx and (wrong := sass.overwritten(sass.instructions(cubin))):
        raise UnsupportedError(
            f"kernel {kernel.name}: the assembler of triton {triton_version()} lets {' '.join(wrong)} write what the"
            " tensor cores still read: build with another version of triton"
        )
    registers, spilled = _resources(cubin)
    matrix = tuple(sorted(set(_MATRIX.findall(ptx))))
    return Compiled(cubin, ptx, registers, metadata.shared, spilled, 32 * metadata.num_warps, matrix)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory per thread (stack and spills), of the cubin's kernel."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    usage = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", done.stdout)
    if not usage:
        raise ResourceError(f"cuobjdump gives no resource usage: {done.stderr.strip()[:200]}")
    registers, stack, local = map(int, usage.groups())
    return registers, stack + local


def compile_all(
    kernels: Sequence[Kernel], capability: int, processes: int = 1, given_up: Event | None = None
) -> dict[str, Compiled]:
    """All kernels by label, each compiled once, in up to `processes` processes. Raises GivenUpError.

    The processes are new Python interpreters that run this module. Those of multiprocessing would import the caller's
    script again, which would start another build if its main part is not guarded.
    """
    once = {kernel.label: kernel for kernel in kernels}
    count = min(processes, len(once))
    if count < 2:
        return {label: _compile_wanted(kernel, capability, given_up) for label, kernel in once.items()}
    shares = [list(once.values())[i::count] for i in range(count)]
    with ThreadPoolExecutor(count) as threads:
        parts = list(threads.map(_compile_elsewhere, shares, [capability] * count, [given_up] * count))
    compiled = {
        kernel.label: each
        for share, part in zip(shares, parts, strict=True)
        for kernel, each in zip(share, part, strict=True)
    }
    return {label: compiled[label] for label in once}


def _compile_wanted(kernel: Kernel, capability: int, given_up: Event | None) -> Compiled:
    children.check(given_up)
    return compile_kernel(kernel, capability)


def _compile_elsewhere(kernels: Sequence[Kernel], capability: int, given_up: Event | None) -> list[Compiled]:
    """`kernels` compiled one after the other by another process."""
    order = json.dumps({"capability": capability, "kernels": [asdict(kernel) for kernel in kernels]})
    done = children.run(module_command(__name__), order, given_up, env=module_environment())
    if done.returncode:
        raise RuntimeError(f"compiling kernels failed ({done.returncode}): {done.stderr.strip()[-2000:]}")
    answer = json.loads(done.stdout)
    for error in (UnsupportedError, ResourceError):
        if error.__name__ in answer:
            raise error(answer[error.__name__])
    return [_from_json(each) for each in answer["compiled"]]


def _to_json(compiled: Compiled) -> dict[str, Any]:
    return {**vars(compiled), "cubin": base64.b64encode(compiled.cubin).decode()}


def _from_json(kept: Mapping[str, Any]) -> Compiled:
    return Compiled(**{**kept, "cubin": base64.b64decode(kept["cubin"]), "matrix": tuple(kept["matrix"])})


def _main() -> None:
    """Compile what `_compile_elsewhere` of another process asks for."""
    order, answers = json.load(sys.stdin), sys.stdout
    sys.stdout = sys.stderr  # stdout carries only the answer, whatever compilers print
    kernels = [Kernel(**{**k, "arguments": tuple(Argument(*a) for a in k["arguments"])}) for k in order["kernels"]]
    try:
        answer: dict[str, Any] = {"compiled": [_to_json(compile_kernel(k, order["capability"])) for k in kernels]}
    except (UnsupportedError, ResourceError) as error:
        answer = {type(error).__name__: str(error)}
    json.dump(answer, answers)


if __name__ == "__main__":
    _main()
