"""The process of a rank but the first: it opens its part of a divided model and runs the steps that rank 0 plans.

Its argument is the file descriptor of the memory that ranks share, and its first line of standard input has the
settings. It prints one line of JSON once it is ready, or that says why it is not; then it answers each further line
(runtime/ranks/sleeping.py). It ends when rank 0 closes the model, when a rank fails, and when its standard input is
closed, as the end of rank 0's process does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from qcompile.artifact.reader import read_same_manifest
from qcompile.artifact.rebuilt import recall_same
from qcompile.errors import QCompileError
from qcompile.runtime.cpu.load import open_rank
from qcompile.runtime.cpu.ranks import RankSettings, SharedMemory, join
from qcompile.runtime.cpu.sleep import CpuMemory
from qcompile.runtime.loader import load_artifact
from qcompile.runtime.lora.table import open_table, read_same_adapters
from qcompile.runtime.ranks.sleeping import FollowerMemory
from qcompile.runtime.ranks.watching import BEAT_SECONDS

_PATIENCE = 3.0
"""Seconds until the process ends in any case, once rank 0's has."""


def main() -> None:
    """Read the settings from standard input, follow rank 0, and exit: 0 if it ended, 1 if this rank could not open."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is rank 0's, which ends the others
    settings = RankSettings(**json.loads(sys.stdin.readline()))
    memory = SharedMemory(settings.sizes, int(sys.argv[1]), settings.numbers)
    opened: list[FollowerMemory] = []
    threading.Thread(target=_watch, args=(memory, opened), daemon=True).start()
    try:
        manifest = read_same_manifest(settings.root, settings.sealed)
        kernels = recall_same(Path(settings.root), manifest, settings.kernels)
        artifact = load_artifact(settings.root, manifest, settings.rank, kernels)
        named = read_same_adapters(artifact.root, manifest, settings.adapters, settings.rank)
        paths = open_rank(artifact, settings)
        table = open_table(artifact, named, memory.numbers)  # must live as long as the model
        own = CpuMemory(artifact, paths[0].caches)
        opened.append(FollowerMemory(own, memory, settings.rank, paths[0].copy_state))
        join(paths, memory, len(manifest["runtime"]["ranks"]), settings.rank)
    except QCompileError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)
    threading.Thread(target=_beat, args=(memory, settings.rank), daemon=True).start()
    print(json.dumps({"ready": True}), flush=True)
    threads = [threading.Thread(target=path.library.qc_follow, args=(path.handle,)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for path in reversed(paths):
        path.close()
    del table


def _beat(memory: SharedMemory, rank: int) -> None:
    """Say again and again that this process runs."""
    while True:
        memory.beat(rank)
        time.sleep(BEAT_SECONDS)


def _watch(memory: SharedMemory, opened: list[FollowerMemory]) -> None:
    """Do what rank 0 asks once the model is opened; at the end of rank 0's process, end this one."""
    for line in sys.stdin:
        print(json.dumps(opened[0].obey(json.loads(line))), flush=True)
    memory.fail()
    time.sleep(_PATIENCE)
    os._exit(1)


if __name__ == "__main__":
    main()
