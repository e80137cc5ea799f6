"""Tries grammars in a process with limits: some take hours and all memory to compile, and no thread can be ended."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

from qcompile.errors import ResourceError
from qcompile.runtime.sampling.structured import StructureError
from qcompile.runtime.sandboxed import EndedError, Worker

_SECONDS = 10.0
"""Longest time of a trial, on a machine that does something else as well; the process limits its processor time."""
_MOST_CALLERS = 16
"""Most callers at once: each may be a thread of a server. A normal grammar takes less than a millisecond."""


class GrammarTrial:
    """Tries grammars. Several threads may use it. Its process starts with the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(_MOST_CALLERS)
        self._worker: Worker | None = None

    def require_small(self, kind: str, grammar: str, limits: Mapping[str, Any]) -> None:
        """Raise StructureError for a grammar of this kind that needs too much, ResourceError for too many at once.

        What else is wrong with it, its compilation says. limits: those of llguidance.
        """
        line = json.dumps({"grammar": grammar, "limits": dict(limits)}).encode() + b"\n"
        if not self._places.acquire(blocking=False):
            raise ResourceError("too many structured outputs wait to be compiled: try again later")
        try:
            with self._lock:
                if self._worker is None or not self._worker.alive:
                    self._worker = Worker()
                self._worker.ask(line, _SECONDS)
        except EndedError:
            raise StructureError(kind, "takes too much time or memory to compile: simplify it") from None
        finally:
            self._places.release()
