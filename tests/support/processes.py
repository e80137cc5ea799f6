"""What the processes of a server take: memory, file descriptors, threads, processor time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Usage:
    """Of all processes together. memory: resident bytes. files: file descriptors. seconds: of processor time."""

    processes: int
    memory: int
    files: int
    threads: int
    seconds: float


def family(process: int) -> Iterator[int]:
    """A process and all that it has started, which have started others."""
    yield process
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in file.read_text(encoding="ascii").split():
                yield from family(int(child))


def usage(process: int) -> Usage:
    """What a process takes, with all that it has started."""
    page, tick = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    processes = memory = files = threads = ticks = 0
    for each in family(process):
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{each}")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            files += len(os.listdir(folder / "fd"))
            processes += 1
            memory += int(fields[21]) * page
            threads += int(fields[17])
            ticks += int(fields[11]) + int(fields[12])
    return Usage(processes, memory, files, threads, ticks / tick)
