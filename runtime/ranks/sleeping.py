"""What several processes that compute a model do with their memory: each gives its part back, and copies states.

Rank 0 asks the others by lines of JSON on their standard input, and each answers by a line. They run no step meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from qcompile.errors import ArtifactError, QCompileError, ResourceError
from qcompile.runtime.engine.sleep import ReleasableMemory

_STEP_SECONDS = 5.0
"""How long the end of the last step may take, of which rank 0 has its part already: far longer than a step."""


class StepCounts(Protocol):
    """Tells of the memory that ranks share whether a rank has finished all steps."""

    def settled(self, rank: int) -> bool: ...


class AskedRanks(Protocol):
    """The processes of the other ranks."""

    def ask(self, what: dict[str, Any]) -> list[dict[str, Any]]: ...


class DividedMemory:
    """The memory of all ranks, as `runtime.engine.sleep.ReleasableMemory`. own: that of rank 0."""

    def __init__(self, own: ReleasableMemory, others: AskedRanks) -> None:
        self._own, self._others, self._level = own, others, 1

    def release(self, level: int) -> None:
        """Have each rank give its pages back; or none. Raises ResourceError if one cannot."""
        self._level = level
        self._ask("sleep", otherwise="wake")
        try:
            self._own.release(level)
        except QCompileError:
            self._tell("wake")
            raise

    def restore(self) -> None:
        """Have each rank read and verify its weights; if one cannot, all give their memory back again."""
        self._own.restore()
        try:
            self._ask("wake", otherwise="sleep")
        except QCompileError:
            self._own.release(self._level)
            raise

    def _ask(self, what: str, otherwise: str) -> None:
        """Ask all other ranks; if one cannot do it, ask all for the other thing."""
        answers = self._tell(what)
        failed = [(rank, answer) for rank, answer in enumerate(answers, 1) if "problem" in answer]
        if failed:
            self._tell(otherwise)
            rank, answer = failed[0]
            raise (ArtifactError if answer["changed"] else ResourceError)(f"rank {rank}: {answer['problem']}")

    def _tell(self, what: str) -> list[dict[str, Any]]:
        """The answers of all other ranks."""
        return self._others.ask({"memory": what, "level": self._level})


class CannotSleep:
    """Memory that a rank cannot give back, for a reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def release(self, level: int) -> None:
        """Raise ResourceError."""
        raise ResourceError(self._reason)

    def restore(self) -> None:
        """Do nothing: it is there."""


class FollowerMemory:
    """The memory of another rank in its own process.

    counts: tells when the last step of the rank is finished. copy: copies a slot of recurrent states to another.
    """

    def __init__(
        self, memory: ReleasableMemory, counts: StepCounts, rank: int, copy: Callable[[int, int], None] | None = None
    ) -> None:
        self._memory, self._counts, self._rank, self._copy = memory, counts, rank, copy

    def obey(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do what rank 0 asks. Returns the answer: empty but for a `problem`, and whether files have changed."""
        end = time.monotonic() + _STEP_SECONDS
        while not self._counts.settled(self._rank):
            if time.monotonic() > end:
                return {"problem": "its last step does not end", "changed": False}
            time.sleep(0.0005)  # a fraction of what falling asleep takes
        if self._copy and "copy" in asked:
            self._copy(*asked["copy"])
            return {"done": True}
        try:
            if asked["memory"] == "sleep":
                self._memory.release(asked["level"])
            else:
                self._memory.restore()
        except QCompileError as error:
            return {"problem": str(error), "changed": isinstance(error, ArtifactError)}
        return {"done": True}
