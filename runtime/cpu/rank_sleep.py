"""What several CPU processes that compute a model do with their memory: each gives its part back, and copies states.

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
    """Tells of the shared memory (ranks.py) whether a rank has finished all steps."""

    def settled(self, rank: int) -> bool: ...


class AskedRanks(Protocol):
    """The processes of the other ranks (ranks.py)."""

    def ask(self, what: dict[str, Any]) -> list[dict[str, Any]]: ...


class DividedMemory:
    """The memory of all ranks, as `runtime.engine.sleep.ReleasableMemory`. own: that of rank 0."""

    def __init__(self, own: ReleasableMemory, others: AskedRanks) -> None:
        self._own, self._others = own, others

    def release(self, level: int) -> None:
        """Have each rank give its pages back; or none. Raises ResourceError if one cannot."""
        self._ask("sleep", otherwise="wake")
        self._own.release(level)

    def restore(self) -> None:
        """Have each rank read and verify its weights; if one cannot, all give their memory back again."""
        self._own.restore()
        try:
            self._ask("wake", otherwise="sleep")
        except QCompileError:
            self._own.release(1)
            raise

    def _ask(self, what: str, otherwise: str) -> None:
        """Ask all other ranks; if one cannot do it, ask all for the other thing."""
        answers = self._others.ask({"memory": what})
        failed = [(rank, answer) for rank, answer in enumerate(answers, 1) if "problem" in answer]
        if failed:
            self._others.ask({"memory": otherwise})
            rank, answer = failed[0]
            raise (ArtifactError if answer["changed"] else ResourceError)(f"rank {rank}: {answer['problem']}")


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
                self._memory.release(1)
            else:
                self._memory.restore()
        except QCompileError as error:
            return {"problem": str(error), "changed": isinstance(error, ArtifactError)}
        return {"done": True}
