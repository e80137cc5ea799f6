"""Functions in C++ of which torch has no fast form: compiled for this machine on first use, and kept in the cache."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from qcompile import targets, user_cache
from qcompile.errors import ResourceError

COMPILERS = ("g++", "clang++")

_FLAGS = (
    "-std=gnu++17",
    "-O3",
    "-ffp-contract=off",  # a*b+c rounds twice, as in torch
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-ident",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wno-psabi",
    "-Wl,--build-id=none",
)


@cache
def find() -> str:
    """Path of the C++ compiler: g++, else clang++. ResourceError when neither is on the PATH."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    raise ResourceError("no C++ compiler found: put g++ or clang++ on the PATH (Debian: apt install g++)")


def library(source: Path) -> ctypes.CDLL:
    """The functions of a C++ file, compiled for this machine. ResourceError without a compiler, or if it fails."""
    text = source.read_text(encoding="utf-8")
    command = [find(), *_FLAGS, *targets.get_target("cpu").compiler_flags, "-x", "c++", "-"]
    key = hashlib.sha256("\0".join((text, *command)).encode()).hexdigest()
    kept = user_cache.cache_dir() / f"{key}.so"
    binary = user_cache.recall(kept)
    with tempfile.TemporaryDirectory(prefix="qcompile-") as folder:
        out = Path(folder) / "native.so"
        if binary is None:
            _compile(source.name, text, [*command, "-o", str(out)])
            user_cache.remember(kept, out.read_bytes())
        else:
            out.write_bytes(binary)
        return ctypes.CDLL(str(out))


def _compile(name: str, text: str, command: list[str]) -> None:
    """Compile the text of the file `name`. ResourceError with the compiler's first error if it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.splitlines() or ["no message"]
        reason = next((line for line in lines if "error" in line), lines[0])
        raise ResourceError(f"{Path(find()).name} could not compile {name}: {reason[:300]}")
