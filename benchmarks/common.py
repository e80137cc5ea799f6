"""What every result file says about where its numbers come from, and which bytes a decoded token streams."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import qcompile
from qcompile.cli import console

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """CPU, cores, versions, commit and date."""
    return {
        "device": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "qcompile": qcompile.__version__,
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "compiler": _output("g++", "--version").partition("\n")[0],
        "date": time.strftime("%F"),
    }


def processor() -> str:
    """The CPU's name as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except OSError:
        return ""


@functools.cache
def _distance_library() -> ctypes.CDLL:
    source = Path(__file__).with_name("core_distance.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "core_distance.so"
        options = ("-std=c++17", "-O2", "-shared", "-fPIC", "-pthread")
        subprocess.run(["g++", *options, str(source), "-o", str(library)], check=True)
        result = ctypes.CDLL(str(library))
    result.core_distance.restype = ctypes.c_double
    return result


def core_distance() -> float:
    """Nanoseconds that a line written by one of this process's first two cores takes to the other; 0 with one core.

    A virtual machine's cores may be moved while it runs: what two threads do together is fast or slow by this.
    """
    cores = sorted(os.sched_getaffinity(0))
    return float(_distance_library().core_distance(*cores[:2])) if len(cores) > 1 else 0.0


def write_result(path: Path, document: dict[str, Any]) -> None:
    """Write a result file: `document` after the facts of `machine()`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**machine(), **document}, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")


def streamed_bytes(artifact: Path) -> int:
    """Bytes of weights one decoded token reads: all but the embedding table, of which it reads a row."""
    manifest = json.loads((artifact / "qcompile.json").read_text(encoding="utf-8"))
    program = json.loads((artifact / "graphs" / "program.json").read_text(encoding="utf-8"))
    tables = {call["table"] for call in program["calls"] if call["kernel"] == "embed"}
    used = {name for call in program["calls"] if call["kernel"] == "gemm" for name in call["weights"].values()}
    return sum(
        entry["bytes"]
        for entry in manifest["runtime"]["weights"]
        if entry["name"] in used or entry["name"] not in tables
    )


def build(model: Path, recipes: list[str], folder: Path, target: str = "cpu") -> dict[str, Path]:
    """An artifact for each recipe."""
    artifacts = {}
    for recipe in recipes:
        artifacts[recipe] = folder / f"{model.name}-{recipe}{target.removeprefix('cpu')}"
        console.log(f"building {artifacts[recipe]}")
        qcompile.build(str(model), artifacts[recipe], recipe=recipe, target=target)
    return artifacts
