"""Ranks that torchrun or srun has started: their tokens beside those of ranks that qcompile starts, and how all end.

    python benchmarks/launched_ranks.py OUT [--prompt TEXT] [--out FILE]

OUT was built with --tensor-parallel-size N, for CPUs or GPUs. `same_tokens`: whether both give the same 256 tokens.
`seconds_to_end`: from the kill (signal 9) of a rank, or of the process that computes its part, while the model decodes,
until no process of the run is left; `said`: the last line of a rank that was not killed. These ranks are started with
the variables of srun. With GPUs, `gpu_processes` counts the processes that hold GPU memory at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import RESULTS, machine
from qcompile.artifact.reader import read_manifest

PROGRAM = """
import sys, qcompile
with qcompile.load(sys.argv[1]) as llm:
    print(*llm.executor.ranks.pids, flush=True)
    while True:
        llm.generate(sys.argv[2], temperature=0, max_tokens=256, ignore_eos=True)
"""
PATIENCE = 60.0


def tokens(out: Path, prompt: str, launcher: list[str]) -> list[int]:
    """The tokens of a command, which `launcher` starts."""
    command = ["qcompile", "run", str(out), "--prompt", prompt, "--max-tokens", "256", "--json"]
    done = subprocess.run([sys.executable, *launcher, "-m", *command], stdout=subprocess.PIPE, check=True)
    result: list[int] = json.loads(done.stdout)["token_ids"]
    return result


def ranks_of_srun(out: Path, prompt: str, ranks: int) -> list[subprocess.Popen[str]]:
    """The ranks of a step, started as srun does."""
    step = {"SLURM_JOB_ID": os.getpid(), "SLURM_STEP_ID": time.monotonic_ns(), "SLURM_STEP_NUM_TASKS": ranks}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = []
    for rank in range(ranks):
        environment = os.environ | {name: str(value) for name, value in (step | {"SLURM_PROCID": rank}).items()}
        started.append(subprocess.Popen([sys.executable, "-c", PROGRAM, str(out), prompt], env=environment, **pipes))
    return started


def end(out: Path, prompt: str, ranks: int, victim: str) -> dict[str, Any]:
    """Kill one process of a run that decodes, and see how the others end."""
    started = ranks_of_srun(out, prompt, ranks)
    assert started[0].stdout
    followers = [int(pid) for pid in started[0].stdout.readline().split()]
    time.sleep(2)
    last = ranks - 1
    killed = {"rank 0": started[0].pid, f"rank {last}": started[last].pid}.get(victim, followers[-1])
    begin = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    said = [process.communicate(timeout=PATIENCE)[1].strip().splitlines() for process in started]
    while any(map(runs, followers)) and time.monotonic() - begin < PATIENCE:
        time.sleep(0.02)
    told = said[0] if killed != started[0].pid else said[last]
    return {
        "killed": f"{victim} (process {killed})",
        "seconds_to_end": round(time.monotonic() - begin, 2),
        "left": sum(map(runs, followers)),
        "said": told[-1] if told else "",
        "exit_codes": [process.returncode for process in started],
    }


def runs(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def gpu_processes() -> int:
    """Processes that hold memory of a GPU."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return len(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def main() -> None:
    """Run all, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, metavar="OUT")
    parser.add_argument("--prompt", default="def main(")
    parser.add_argument("--out", type=Path, default=RESULTS / "launched_ranks.json")
    given = parser.parse_args()
    manifest = read_manifest(given.artifact)
    ranks, target = len(manifest["runtime"]["ranks"]), manifest["target"]
    result: dict[str, Any] = machine() | {"target": target["name"], "ranks": ranks}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    own, launched = (tokens(given.artifact, given.prompt, launcher) for launcher in ([], torchrun))
    result["same_tokens"] = own == launched and len(own) == 256
    victims = "rank 0", f"rank {ranks - 1}", f"the process of rank {ranks - 1}"
    result["ends"] = [end(given.artifact, given.prompt, ranks, victim) for victim in victims]
    if target.get("kind", "cpu") == "cuda":
        from benchmarks.gpu_common import facts

        result |= {"gpu_processes": gpu_processes()} | facts()
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
