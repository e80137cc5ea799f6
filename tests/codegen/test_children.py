"""Compilers as processes: all of the source reaches them, however slowly they read."""

from __future__ import annotations

import sys
from threading import Event, Timer

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
