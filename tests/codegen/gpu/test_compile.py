"""Compiling ahead of time leaves the cubin, the cache, and nothing else, and needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qcompile import pipeline
from qcompile.artifact.reader import read_manifest, verify
from qcompile.codegen.gpu.compile import Compiled, compile_all
from qcompile.codegen.gpu.kernel import Kernel
from tests.codegen.gpu.test_step import SHAPE
from tests.support.cases import first
from tests.support.graphs import decoder
from tests.support.interpreted import needs_triton

SCRIPT = """
import json, sys
from qcompile.codegen.gpu.compile import compile_kernel
from qcompile.codegen.gpu.rows import argmax_kernel
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


@pytest.mark.parametrize("count", first((3,), (3, 1000)))
def test_an_artifact_for_a_gpu_is_built_without_one(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `count` kernels that are compiled: in place of the others stands one of these."""
    needs_triton()

    def compile_some(kernels: list[Kernel], *rest: Any) -> dict[str, Compiled]:
        done = compile_all(kernels[:count], *rest)
        return {kernel.label: done.get(kernel.label, done[kernels[0].label]) for kernel in kernels}

    monkeypatch.setattr("qcompile.codegen.gpu.build.compile_all", compile_some)
    graph = decoder(**{**SHAPE, "layers": 1})
    report = pipeline.build(graph, tmp_path / "a", target="a100", recipe="qserve-channel")
    assert verify(report.path) == []
    manifest = read_manifest(report.path)
    assert manifest["target"]["kind"] == "cuda" and manifest["versions"]["compiler"].startswith("triton")
    folder = report.path / "kernels" / "a100"
    kernels = json.loads((folder / "report.json").read_text())
    assert {"registers", "shared_bytes", "spill_bytes", "matrix_instructions"} <= set(kernels[0])
    for each in kernels:
        assert all((folder / f"{each['kernel']}.{kind}").is_file() for kind in ("cubin", "ptx", "py"))
    plan = json.loads((folder / "model.plan.json").read_text())
    launches = plan["launches"] + plan["feedback"] + plan["follow"]
    used = {v["kernel"] for launch in launches for v in launch["variants"]}
    assert used == {each["kernel"] for each in kernels} == set(plan["kernels"])
