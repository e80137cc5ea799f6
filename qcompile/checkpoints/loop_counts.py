"""Numbers that Python code changes from token to token of a loop, and that may decide what it does for later tokens."""

from __future__ import annotations

from types import FrameType

from qcompile.checkpoints import state
from qcompile.checkpoints.loop_numbers import BlockSize, Unknown, refused


class Counts:
    """Refuses numbers that the function that runs a loop changes for each token.

    They are its variables, global ones of its file, and what these hold, such as attributes of self.
    """

    def __init__(self) -> None:
        self._before: state.State = {}

    def look(self, frame: FrameType, iteration: int) -> None:
        """Raise LoopError if a number has changed; `frame` runs the loop, and begins its iteration `iteration`."""
        if iteration not in (2, 3):  # by then variables that the body sets have a value
            return
        held = {name: value for name, value in frame.f_globals.items() if type(value) in (bool, int, float)}
        held |= {name: value for name, value in frame.f_locals.items() if not isinstance(value, (Unknown, BlockSize))}
        found = state.numbers(held)
        if iteration == 3 and (changed := state.changed_number(self._before, found)):
            raise refused(f"changes the number {changed} for each token, by which it may treat tokens differently")
        self._before = found
