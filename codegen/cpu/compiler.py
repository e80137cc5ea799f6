"""Compile generated C++ to a shared library, with a cache of compiled libraries.

Builds are reproducible: no paths, times, build ids or compiler banners go into a library.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from threading import Event

from qcompile import user_cache
from qcompile.codegen import children
from qcompile.errors import ResourceError
from qcompile.formats import native
from qcompile.targets import Target

find = native.find

_COMMON: tuple[str, ...] = (
    "-std=gnu++17",
    "-O3",
    "-ffp-contract=off",  # a*b+c rounds twice on every ISA; kernels use explicit fma where wanted
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-asynchronous-unwind-tables",
    "-fvisibility=hidden",
    "-fno-ident",
    "-fPIC",
    "-shared",
    "-nostartfiles",  # there are no constructors to run, and the start files contain a compiler banner
    "-pthread",
    "-Wno-psabi",
    "-Wl,--build-id=none",
    "-Wl,--as-needed",
    "-Wl,-s",
)


@cache
def version() -> str:
    """First line of the compiler's --version output. ResourceError if it fails."""
    done = subprocess.run([find(), "--version"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError(f"{find()} --version fails: {done.stderr.strip()[:200]}")
    return done.stdout.splitlines()[0]


def flags(target: Target) -> tuple[str, ...]:
    """Compiler flags for a CPU target."""
    return (*_COMMON, *target.compiler_flags)


def compile(source: str, target: Target, given_up: Event | None = None) -> bytes:
    """The shared library compiled from `source` for `target`, from the cache if present.

    Raises ResourceError if there is no compiler or it fails (with its first error line), and GivenUpError once
    `given_up` is set.
    """
    key = hashlib.sha256("\0".join((source, *flags(target), version())).encode()).hexdigest()
    cached = user_cache.cache_dir() / f"{key}.so"
    if (kept := user_cache.recall(cached)) is not None:
        return kept
    binary = _run(source, target, given_up)
    user_cache.remember(cached, binary)
    return binary


def _run(source: str, target: Target, given_up: Event | None) -> bytes:
    with tempfile.TemporaryDirectory(prefix="qcompile-") as folder:
        out = Path(folder) / "model.so"
        command = [find(), *flags(target), f"-ffile-prefix-map={folder}=.", "-x", "c++", "-", "-o", str(out)]
        done = children.run(command, source, given_up, cwd=folder)
        if done.returncode:
            lines = done.stderr.splitlines()
            reason = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
            raise ResourceError(f"{Path(find()).name} could not compile the kernels for {target.name}: {reason[:300]}")
        return out.read_bytes()
