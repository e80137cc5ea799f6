"""What the processes of a server take: memory, file descriptors, threads, processor time."""

from __future__ import annotations

import contextlib
import os
import time
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


def running(process: int, module: str) -> int:
    """The process that runs a module, among those that a process has started."""
    [one] = [each for each in family(process) if module in Path(f"/proc/{each}/cmdline").read_text().split("\0")]
    return one


def gone(process: int, seconds: float = 5.0) -> bool:
    """Whether a process ends within a time; it has ended also if its parent has not noticed (a zombie)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (OSError, IndexError):
            return True
        time.sleep(0.02)
    return False
