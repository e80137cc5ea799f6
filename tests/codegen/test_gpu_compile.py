"""Compiling ahead of time leaves the cubin, the cache, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.codegen.interpreted import needs_triton

SCRIPT = """
import json, sys
from qcompile.codegen.gpu_compile import compile_kernel
from qcompile.codegen.gpu_rows import argmax_kernel
found = compile_kernel(argmax_kernel(5000, 3, True, 80), 80)  # with functions of Triton's own
print(json.dumps([found.ptx, found.cubin.hex()]))
"""


def compiled(work: Path) -> tuple[list[str], dict[str, list[str]]]:
    """PTX and machine code out of a process with an empty cache and no home it may write to, and what that left."""
    needs_triton()
    work.mkdir()
    folders = {name: work / name for name in ("tmp", "cache")}
    for folder in folders.values():
        folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": "/proc/nowhere"}
    environment |= {"TMPDIR": str(folders["tmp"]), "QCOMPILE_CACHE": str(folders["cache"])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), {name: os.listdir(folder) for name, folder in folders.items()}


def test_the_same_kernel_is_the_same_bytes_and_nothing_is_left_behind(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    first, left = compiled(tmp_path / "first")
    again, _ = compiled(tmp_path / "elsewhere")
    assert first == again and str(tmp_path) not in first[0] and str(tmp_path).encode().hex() not in first[1]
    place = str(Path(triton.__file__).parent)
    assert place not in first[0] and place.encode().hex() not in first[1]
    assert left["tmp"] == [] and len(left["cache"]) == 1
