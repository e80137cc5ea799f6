"""The process of a rank but the first of a model that is divided over GPUs: it repeats the steps that rank 0 plans.

Its arguments are file descriptors: of the memory with the plan, and of an eventfd that rank 0 writes to after each new
record. It answers each line of standard input by a line of JSON: when its weights are loaded, when its memory is
allocated, when it can write to that of the others, and when it has done what rank 0 asks after that
(runtime/ranks/sleeping.py). It ends when rank 0 closes the model, and when its standard
input is closed, as the end of rank 0's process does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qcompile.artifact.reader import read_same_manifest
from qcompile.errors import QCompileError
from qcompile.runtime.cuda.counts import PARTS
from qcompile.runtime.cuda.driver import driver
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.cuda.load import LoadedRank, load_rank
from qcompile.runtime.cuda.plans import PlanKind, Record, SharedPlan
from qcompile.runtime.cuda.ranks import FailWord, GpuRankSettings
from qcompile.runtime.lora.table import read_same_adapters
from qcompile.runtime.ranks.sleeping import CannotSleep, FollowerMemory
from qcompile.runtime.ranks.watching import BEAT_SECONDS

_PATIENCE = 2.0
"""Seconds until the process ends in any case, once rank 0's has."""


def main() -> None:
    """Read the settings from standard input, follow rank 0, and exit: 0 if it ended, 1 if this rank has failed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is rank 0's, which ends the others
    settings = GpuRankSettings(**json.loads(sys.stdin.readline()))
    descriptor, bell = map(int, sys.argv[1:])
    memory = SharedPlan(settings.size, descriptor)
    try:
        gpu = driver(settings.rank)
        failed = FailWord(gpu)
        manifest = read_same_manifest(settings.root, settings.sealed)
        named = read_same_adapters(Path(settings.root), manifest, settings.adapters, settings.rank)
        rank = load_rank(settings.root, manifest, settings.rank, settings.drafts, named)
        _say(free=gpu.memory()[0])
        executors, opened = _joined(rank, settings.rank, failed)
    except QCompileError as error:
        _say(error=str(error))
        sys.exit(1)
    own = rank.memory(Path(settings.root), manifest, executors[0])
    follower = FollowerMemory(CannotSleep(own) if isinstance(own, str) else own, memory, settings.rank)
    threading.Thread(target=_watch, args=(failed, follower), daemon=True).start()
    threading.Thread(target=_beat, args=(memory, settings.rank, failed), daemon=True).start()
    _say(ready=True)
    follow(executors, memory, settings.rank, bell)
    gpu.use()
    gpu.synchronize()
    for address in opened:
        gpu.close_shared(address)
    # The end of the process frees the memory: another rank may have not closed it yet.


def _joined(rank: LoadedRank, number: int, failed: FailWord) -> tuple[list[CudaExecutor], list[int]]:
    """This rank's executors, the model's first, and the addresses of the other ranks' peer memory."""
    executors = rank.open(**json.loads(sys.stdin.readline()))
    _say(handles=[rank.gpu.share(each.memory.peer_memory).hex() for each in executors])
    handles = json.loads(sys.stdin.readline())["handles"]
    opened: list[int] = []
    for path, executor in enumerate(executors):
        peers = [
            executor.memory.peer_memory if place == number else rank.gpu.open_shared(bytes.fromhex(each[path]))
            for place, each in enumerate(handles)
        ]
        opened += peers[:number] + peers[number + 1 :]
        executor.join(number, peers, failed.address)
    return executors, opened


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def follow(executors: Sequence[CudaExecutor], memory: SharedPlan, rank: int, bell: int) -> None:
    """Do what the plan says with the executors of all paths, until it ends or a rank fails."""
    while not memory.failed:
        os.eventfd_read(bell)
        for record in memory.records(rank):
            if record.kind == PlanKind.END:
                return
            _repeat(executors[record.path], record)


def _repeat(executor: CudaExecutor, record: Record) -> None:
    """Do what rank 0 has done, but for what only its host reads."""
    executor.driver.use()
    if record.kind == PlanKind.INPUTS:
        executor.inputs.receive(record.content, record.first)
    elif record.kind == PlanKind.NUMBERS:
        executor.receive_sampling(record.content[: record.first], record.content[record.first :])
    elif record.kind == PlanKind.MASKS:
        executor.receive_masks(record.content)
    elif record.kind == PlanKind.COUNTER:
        executor.inputs.reset_counter(record.first)
    elif record.kind == PlanKind.FOLLOW:
        executor.launcher.launch(executor.plan["follow"], record.counts)
    elif record.kind == PlanKind.STATE:
        executor.slots.copy(record.first, record.second)
    else:
        counts = record.counts | {"reported": 0, "kept": 0}
        part, feed_back = PARTS[record.first // 2], bool(record.first % 2)
        executor.launcher.run_part(counts, feed_back, part, record.second)


def _beat(memory: SharedPlan, rank: int, failed: FailWord) -> None:
    """Say again and again that this process runs, and make its sums end if another one has failed."""
    while True:
        memory.beat(rank)
        if memory.failed:
            failed.set()
        time.sleep(BEAT_SECONDS)


def _watch(failed: FailWord, memory: FollowerMemory) -> None:
    """Do what rank 0 asks; at the end of rank 0's process, end this one."""
    for line in sys.stdin:
        _say(**memory.obey(json.loads(line)))
    failed.set()
    time.sleep(_PATIENCE)
    os._exit(1)


if __name__ == "__main__":
    main()
