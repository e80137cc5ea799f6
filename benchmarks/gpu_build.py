"""Seconds to build a Llama-3-8B-shaped model for a GPU on a machine without one: the kernel cache empty, and again.

    python benchmarks/gpu_build.py [out.json] [--recipes=qserve,nested] [--target=h200]

All but weights: import, every pass, plans, and kernels compiled for the target; each build in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


def build(recipe: str, target: str, folder: Path) -> dict[str, Any]:
    """Build once, here; what it took."""
    from benchmarks.gpu_e2e import empty_checkpoint
    from qcompile import pipeline, targets
    from qcompile.pipeline import backend_of

    empty_checkpoint(folder)
    started = time.perf_counter()
    result = pipeline.plan(folder, target=target, recipe=recipe)
    planned = time.perf_counter()
    machine = targets.get_target(target)
    files = backend_of(machine).prepare(result.programs, machine, result.lookup)(None)
    kernels = sum(name.endswith(".cubin") for name in files)
    return {"plan_seconds": planned - started, "kernel_seconds": time.perf_counter() - planned, "kernels": kernels}


def twice(recipe: str, target: str) -> dict[str, Any]:
    """A build with an empty cache of kernels, and one more."""
    result: dict[str, Any] = {"recipe": recipe, "target": target}
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            command = [sys.executable, __file__, "--once", recipe, target, folder]
            started = time.perf_counter()
            done = subprocess.run(
                command, env={**os.environ, "QCOMPILE_CACHE": cache}, capture_output=True, text=True, check=True
            )
            seconds = time.perf_counter() - started
            result[name] = {"seconds": seconds, **json.loads(done.stdout.splitlines()[-1])}
    print(result, flush=True)
    return result


def main() -> None:
    if "--once" in sys.argv:
        recipe, target, folder = sys.argv[2:5]
        print(json.dumps(build(recipe, target, Path(folder))))
        return
    given = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
    recipes, target = given.get("recipes", "qserve,nested").split(","), given.get("target", "h200")
    import triton

    facts = {"triton": triton.__version__, "cores": len(os.sched_getaffinity(0)), "date": time.strftime("%F")}
    rows = [twice(recipe, target) for recipe in recipes]
    paths = [a for a in sys.argv[1:] if not a.startswith("--")]
    if paths:
        Path(paths[0]).write_text(json.dumps({**facts, "builds": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
