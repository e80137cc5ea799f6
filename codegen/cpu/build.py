"""Render and compile the programs of a CPU target: one library for each path."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Event

from qcompile.artifact.abi import CPU_ABI
from qcompile.codegen.backend import Backend, CompileFiles, Files
from qcompile.codegen.cpu import compiler
from qcompile.codegen.cpu.render import render
from qcompile.codegen.packing import CPU_PACKING
from qcompile.codegen.program import Program
from qcompile.targets import Target

SUFFIX = ".so"
"""Suffix of the file with a path's library."""


def prepare(programs: Mapping[str, Program], target: Target, lookup: bool = False) -> CompileFiles:
    """Render the program of each path for `target`, the verifier's (`model`) first.

    The function returned compiles them: a library and its C++ source for each path. n-gram lookup (`lookup`) takes no
    kernels. Raises UnsupportedError naming a call without a kernel.
    """
    texts = {name: render(program, target) for name, program in programs.items()}

    def compile_all(given_up: Event | None) -> Files:
        files: Files = {}
        for name, text in texts.items():
            kept = text if name == "model" else without_common_prefix(texts["model"], text)
            files |= {f"{name}{SUFFIX}": compiler.compile(text, target, given_up), f"{name}.cpp": kept}
        return files

    return compile_all


def without_common_prefix(model: str, text: str) -> str:
    """`text` with the leading lines it shares with `model` (the kernels) replaced by a reference to them."""
    lines, others = text.splitlines(keepends=True), model.splitlines(keepends=True)
    same = next(i for i, (line, other) in enumerate(zip([*lines, ""], [*others, "."], strict=False)) if line != other)
    return "".join([f"// Put the first {same} lines of model.cpp in place of this one.\n", *lines[same:]])


BACKEND = Backend(SUFFIX, CPU_ABI, CPU_PACKING, compiler.version, prepare)
"""Code generation for CPUs."""
