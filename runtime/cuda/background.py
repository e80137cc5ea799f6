"""A thread that runs calls beside the thread that asks for them, of code that does not hold Python's lock meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundCall:
    """Runs at most one call at a time. Its thread begins with the first call."""

    def __init__(self) -> None:
        self._asked, self._begun, self._ended = (threading.Lock() for _ in range(3))  # each is released to tell
        for lock in (self._asked, self._begun, self._ended):
            lock.acquire()
        self._call: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.busy = False
        """Whether a call was begun and not waited for."""
        self._done = False  # tells apart a lock that an interrupted wait has taken

    def begin(self, call: Callable[[], None]) -> None:
        """Begin a call. Returns when the call has given Python's lock away, or has ended: until then the caller would
        keep the lock from it, for up to 5 ms."""
        assert not self.busy
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="qcompile-background", daemon=True)
            self._thread.start()
        self._ended.acquire(blocking=False)  # if an interrupted wait has left it
        self._call, self.busy, self._done = call, True, False
        self._asked.release()
        self._begun.acquire()

    def wait(self) -> None:
        """Wait for the call, if one was begun. Raises what it has raised."""
        if not self.busy:
            return
        while not self._done:
            self._ended.acquire()
        self.busy, self._call = False, None
        error, self._error = self._error, None
        if error:
            raise error

    def close(self) -> None:
        """Wait for the call, and end the thread; idempotent."""
        if self._thread is None:
            return
        while self.busy and not self._done:
            self._ended.acquire()
        self.busy, self._call, self._error = False, None, None
        self._asked.release()
        self._thread.join()
        self._thread = None

    def _run(self) -> None:
        while True:
            self._asked.acquire()
            call = self._call
            if call is None:
                return
            self._begun.release()
            try:
                call()
            except BaseException as error:
                self._error = error
            self._done = True
            self._ended.release()
