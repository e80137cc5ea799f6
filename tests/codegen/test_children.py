"""Compilers as processes: all of the source reaches them, however slowly they read."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from threading import Event, Timer

import pytest

from qcompile.codegen import children

SLOW = "import sys, time; time.sleep(0.5); print(len(sys.stdin.read()))"


def test_a_slow_reader_gets_all_of_a_long_text() -> None:
    given_up = Event()
    late = Timer(20, given_up.set)
    late.start()
    try:
        done = children.run([sys.executable, "-c", SLOW], "x" * 300_000, given_up)
    finally:
        late.cancel()
    assert (done.returncode, done.stdout.strip()) == (0, "300000")


TWO = """import os, signal, subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
def end(*_):
    os.unlink(sys.argv[1])
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
print(inner.pid, file=open(sys.argv[1], "w"), flush=True)
time.sleep(60)
"""


def test_what_a_compiler_has_started_ends_with_it(tmp_path: Path) -> None:
    """As g++ starts cc1plus, and removes temporary files when it is told to end."""
    temporary, given_up, started = tmp_path / "temporary", Event(), []

    def give_up() -> None:
        while not (temporary.exists() and temporary.read_text().endswith("\n")):
            time.sleep(0.01)
        started.append(int(temporary.read_text()))
        given_up.set()

    waiting = Timer(0, give_up)
    waiting.start()
    with pytest.raises(children.GivenUpError):
        children.run([sys.executable, "-c", TWO, str(temporary)], "", given_up)
    waiting.join()
    assert not temporary.exists()
    deadline = time.monotonic() + 10
    while _alive(started[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _alive(started[0])


def _alive(process: int) -> bool:
    """Whether it runs; one that has ended may wait for whoever inherited it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
