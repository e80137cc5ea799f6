"""Sleep and waking of a loaded model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from qcompile.runtime.engine.sleep import Sleep


class SleepingEngine(Protocol):
    """What sleep needs of an engine (engine/engine.py)."""

    sleep: Sleep

    def fall_asleep(self, level: int) -> None: ...


class Exclusive(Protocol):
    """Lends the engine to one thread (sharing.py)."""

    def exclusive(self) -> AbstractContextManager[None]: ...


class SleepingModel(Protocol):
    """What sleep needs of a model (llm.py)."""

    @property
    def engine(self) -> SleepingEngine: ...
    @property
    def _shared(self) -> Exclusive: ...


class CanSleep:
    """The part of `LLM` that gives the model's memory back and takes it again."""

    @property
    def is_sleeping(self: SleepingModel) -> bool:
        """Whether the model sleeps."""
        return self.engine.sleep.asleep

    def sleep(self: SleepingModel, level: int = 1) -> None:
        """Give the memory of weights and cache back to the system until `wake_up`; all other use is refused until then.

        level: on a GPU, 1 keeps a copy of the weights in the host's memory, 2 keeps none; on a CPU both read the
        artifact again. Cached prefixes are forgotten. Does nothing if the model sleeps. Raises UsageError while
        requests are unfinished, UnsupportedError if the model cannot sleep, ResourceError if the host has no memory for
        the copy; the model then stays awake.
        """
        with self._shared.exclusive():
            self.engine.fall_asleep(level)

    def wake_up(self: SleepingModel) -> None:
        """Take the memory and the weights again; outputs are those of before, bit for bit.

        Does nothing if the model is awake. Raises ArtifactError if the artifact has changed since it was loaded,
        ResourceError if memory is short; the model then sleeps on.
        """
        with self._shared.exclusive():
            self.engine.sleep.end()
