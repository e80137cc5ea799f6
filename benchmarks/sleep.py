"""Measure the memory of a process with a model that runs, sleeps and has woken, and how long it falls asleep and wakes.

python benchmarks/sleep.py [--model samples/pycode-26m] [--recipe w4a8] [--target cpu] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from qcompile import LLM

_PROMPTS = ["def main(", "import os\n", "class Reader:\n", "for i in range(10):\n"]


def main() -> None:
    """Build, measure in a process that has built nothing, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=Path("samples/pycode-26m"))
    parser.add_argument("--recipe", default="w4a8")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sleep.json")
    parser.add_argument("--artifact", type=Path, help="print what was measured with this one, and write nothing")
    given = parser.parse_args()
    if given.artifact:
        print(json.dumps(measured(given.artifact, given.rounds)))
        return
    from benchmarks.common import build, write_result  # with torch, which takes memory

    with tempfile.TemporaryDirectory() as folder:
        artifact = build(given.model, [given.recipe], Path(folder), given.target)[given.recipe]
        command = [sys.executable, __file__, "--artifact", str(artifact), "--rounds", str(given.rounds)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    of = {"model": given.model.name, "recipe": given.recipe, "target": given.target, "rounds": given.rounds}
    write_result(given.out, of | json.loads(said))


def measured(artifact: Path, count: int) -> dict[str, Any]:
    """Medians of `count` rounds, and what loading took."""
    empty = resident()
    start = time.perf_counter()
    with qcompile.load(artifact) as llm:
        loading = time.perf_counter() - start
        rounds = [one_round(llm, 1 + number % 2) for number in range(count)]
        weights = sum(entry["bytes"] for entry in llm.manifest["runtime"]["weights"]) / 2**20
    loaded = {"weights_mib": round(weights, 1), "before_load_mib": empty, "load_seconds": round(loading, 3)}
    return loaded | {name: round(statistics.median(one[name] for one in rounds), 5) for name in rounds[0]}


def one_round(llm: LLM, level: int) -> dict[str, Any]:
    """Let the model run, sleep, wake and run again."""
    tokens, running = generated(llm), resident()
    to_sleep = seconds(lambda: llm.sleep(level))
    asleep = resident()
    to_wake = seconds(llm.wake_up)
    again = generated(llm)
    different = sum(a != b for one, other in zip(tokens, again, strict=True) for a, b in zip(one, other, strict=True))
    return {
        "running_mib": running,
        "asleep_mib": asleep,
        "woken_mib": resident(),
        "sleep_seconds": to_sleep,
        "wake_seconds": to_wake,
        "tokens": sum(map(len, again)),
        "different_tokens": different,
    }


def generated(llm: LLM) -> list[list[int]]:
    """The most probable tokens after each prompt."""
    outputs = llm.generate(_PROMPTS, temperature=0, max_tokens=64, ignore_eos=True)
    return [output.outputs[0].token_ids for output in outputs]


def resident() -> float:
    """Memory of this process in MiB, without that of a GPU."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = re.search(r"VmRSS:\s+(\d+) kB", status)
    return round(int(line[1]) / 1024, 1) if line else 0.0


def seconds(act: Callable[[], None]) -> float:
    """How long an action takes."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
