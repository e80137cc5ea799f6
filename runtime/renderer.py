"""Renders chat templates in a process of their own, with limits of time, memory and output."""

from __future__ import annotations

import json
import threading
from typing import Any

from qcompile.errors import ResourceError, UsageError
from qcompile.runtime.sandboxed import SECONDS, EndedError, Worker

_CHARACTERS, _COPIES = 1 << 20, 4
"""Most characters of its text: the first number, and as many as the second copies of the conversation have."""
_START_SECONDS = 30.0
"""Longest time in which the process must start: a loaded machine may take seconds."""
_MOST_CALLERS = 16
"""Most callers at once: each may be a thread of a server. A normal template takes less than a millisecond."""
_MESSAGE = 300
"""Most characters of an error that are shown: a template may raise a text of any length."""


class TemplateError(UsageError):
    """A template is malformed, exceeds a limit, or does not take what it is given."""


class Renderer:
    """The templates of a model by name. Several threads may use it. Its process starts with the first use."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(_MOST_CALLERS)
        self._worker: Worker | None = None

    def reads(self) -> frozenset[str]:
        """The names of the variables that the templates read. Raises TemplateError, ResourceError."""
        return frozenset(self._ask({"reads": True})["names"])

    def render(self, name: str, values: dict[str, Any]) -> str:
        """The text of the template of this name. Raises TemplateError, ResourceError."""
        try:
            given = json.dumps(values)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"its variables cannot be written as JSON: {error}") from error
        most = _CHARACTERS + _COPIES * len(given)
        text: str = self._ask({"render": name, "most": most}, given)["text"]
        return text

    def _ask(self, request: dict[str, Any], values: str = "null") -> dict[str, Any]:
        line = f'{json.dumps(request)[:-1]}, "values": {values}}}\n'.encode()
        if not self._places.acquire(blocking=False):
            raise ResourceError("too many conversations wait for the chat template: try again later")
        try:
            with self._lock:
                answer = self._running().ask(line, SECONDS)
        except EndedError as error:
            raise TemplateError(str(error)) from None
        finally:
            self._places.release()
        if "error" in answer:
            raise TemplateError(" ".join(answer["error"].split())[:_MESSAGE])
        return answer

    def _running(self) -> Worker:
        """The process that renders; a new one if the last has ended, or belongs to the parent of this process."""
        if self._worker is None or not self._worker.alive:
            self._worker = Worker()
            try:
                self._worker.ask(json.dumps({"templates": self._sources}).encode() + b"\n", _START_SECONDS)
            except EndedError as error:
                raise ResourceError(f"the process for chat templates does not start: {error}") from None
        return self._worker
