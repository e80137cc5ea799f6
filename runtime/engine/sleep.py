"""Sleep: an engine without requests gives its weights' and its cache's memory back, until it is woken.

The memory keeps its addresses, so nothing that points into it changes: code, threads and buffers stay as they are.
"""

from __future__ import annotations

from typing import Protocol

from qcompile.errors import AsleepError, ResourceError, UnsupportedError, UsageError, shown
from qcompile.runtime.engine.blocks import BlockPool

LEVELS = (1, 2)


class ReleasableMemory(Protocol):
    """The memory of a model's weights and caches."""

    def release(self, level: int) -> None:
        """Give the memory back. The cache is lost; of the weights, level 1 keeps a copy in the host's memory if the
        model runs elsewhere, and level 2 keeps none.

        Raises ResourceError if memory for the copy is short; then nothing is given back.
        """

    def restore(self) -> None:
        """Take the memory again and bring the weights back, each bit as it was.

        Raises ArtifactError if the artifact has changed, ResourceError if memory is short; then the memory stays given
        back.
        """


class Sleep:
    """Whether an engine sleeps. pool: the pages of its cache."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.memory: ReleasableMemory | str = "its memory cannot be given back"
        """What is given back; if the model cannot sleep, the reason."""
        self.asleep = False

    def check_awake(self) -> None:
        """Raise AsleepError if the engine sleeps."""
        if self.asleep:
            raise AsleepError

    def check_possible(self, level: object) -> ReleasableMemory:
        """The memory to give back. Raises UsageError for an unknown level, UnsupportedError if there is none."""
        if type(level) is not int or level not in LEVELS:
            raise UsageError(f"level must be 1 or 2, not {shown(level)}")
        if isinstance(self.memory, str):
            raise UnsupportedError(f"this model cannot sleep: {self.memory}")
        return self.memory

    def begin(self, level: int) -> None:
        """Fall asleep: cached prefixes are forgotten, and the memory is given back. Nothing happens if it sleeps.

        Raises ResourceError, and stays awake, if memory for a copy is short.
        """
        memory = self.check_possible(level)
        if not self.asleep:
            self.asleep = True  # first: if the memory is only partly given back, nothing may run
            self._pool.forget_texts()
            try:
                memory.release(level)
            except ResourceError:
                self.asleep = False
                raise

    def end(self) -> None:
        """Wake up. Nothing happens if it is awake. Raises ArtifactError or ResourceError, and sleeps on."""
        if self.asleep:
            self.check_possible(1).restore()
            self.asleep = False
