"""What rank 0 knows of the failure of another rank, and who is told of it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class RankFailure:
    """The first failure of a rank before the model is closed. problem: a message; empty while there is none."""

    def __init__(self) -> None:
        self.problem = ""
        self._closed, self._lock = False, threading.Lock()
        self._listener: Callable[[str], None] = lambda problem: None

    def note(self, problem: str) -> bool:
        """Note a failure. Returns whether it is the first one. The listener is told in this thread."""
        with self._lock:
            if self._closed or self.problem:
                return False
            self.problem = problem
            listener = self._listener
        listener(problem)
        return True

    def listen(self, listener: Callable[[str], None]) -> None:
        """Have `listener` told of the failure, at once if there was one."""
        with self._lock:
            self._listener, problem = listener, self.problem
        if problem:
            listener(problem)

    def close(self) -> None:
        """Ignore ends of processes from now on: the model is being closed."""
        with self._lock:
            self._closed = True
