"""Calls that run beside the thread that asks for them."""

from __future__ import annotations

import ctypes
import sys
import threading
import time

import pytest

from qcompile.runtime.cuda.background import BackgroundCall

_FREES_THE_LOCK = ctypes.CDLL(None).usleep
"""A function of the C library: ctypes gives Python's lock away while it runs."""


def test_a_call_runs_beside_its_caller() -> None:
    background = BackgroundCall()
    threads = list[int]()
    for _ in range(3):
        began = time.monotonic()
        background.begin(lambda: (threads.append(threading.get_ident()), _FREES_THE_LOCK(200_000))[1])
        assert background.busy and len(set(threads)) == 1
        took = time.monotonic() - began
        assert took < 0.15  # of the 0.2 seconds of the call
        background.wait()
        assert not background.busy and time.monotonic() - began >= 0.2
    background.wait()
    assert len(threads) == 3 and threads[0] != threading.get_ident()
    background.close()


def test_a_call_has_begun_when_its_caller_goes_on() -> None:
    """A caller that does not give Python's lock away again does not delay the call."""
    background = BackgroundCall()
    starts = list[float]()
    background.begin(lambda: None)
    background.wait()
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(10)  # seconds until a thread takes the lock from another
        background.begin(lambda: (starts.append(time.monotonic()), _FREES_THE_LOCK(1000))[1])
        began = time.monotonic()
        while time.monotonic() < began + 0.05:
            pass
        background.wait()
    finally:
        sys.setswitchinterval(before)
    assert starts[0] <= began
    background.close()


def test_errors_are_raised_by_the_wait_for_the_call() -> None:
    background = BackgroundCall()

    def fail() -> None:
        raise ValueError("no mask")

    background.begin(fail)
    with pytest.raises(ValueError, match="no mask"):
        background.wait()
    done = list[int]()
    background.begin(lambda: done.append(1))
    background.wait()
    assert done == [1]
    background.close()


def test_an_end_waits_for_the_call_and_the_thread() -> None:
    background = BackgroundCall()
    background.close()
    done = list[int]()
    background.begin(lambda: (_FREES_THE_LOCK(50_000), done.append(1))[1])
    before = threading.active_count()
    background.close()
    background.close()
    assert done == [1] and threading.active_count() == before - 1
    background.begin(lambda: done.append(2))  # a thread again
    background.wait()
    assert done == [1, 2]
    background.close()
