"""Finds Python state, such as a counter, that a loop over tokens changes: by it, code may treat later tokens otherwise.

A loop runs for a few tokens while it is recorded. The recorder does not see on what decisions of Python code (`if`)
depend. But if all that the code can read is as it was one token earlier, it decides as it did then. So all that the
code of a loop can read is compared between two tokens: the variables of the functions that run the loop, the objects
that these variables hold, the arguments of the functions that are called, and the global variables of their files.
Tensors may differ, because the recorder sees what is done with them. The length of a list may differ if the loop only
appends to the list.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import sysconfig
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from qcompile.checkpoints import loop_syntax
from qcompile.checkpoints.loop_numbers import BlockSize, Unknown, refused
from qcompile.checkpoints.readable import Length, readable

CALLS, FIRST, SECOND = 1, 2, 3
"""Numbers of iterations: at the beginning of the first, calls begin to be watched; at that of the second, state is
noted; at that of the third, it is compared."""
_OWN, _TORCH = (str(Path(file).parent) for file in (__file__, torch.__file__))
_FOREIGN = {"torch", "sympy", "mpmath", "numpy"}
"""Packages that the functions of torch consist of."""
_STANDARD = sysconfig.get_paths()["stdlib"]
_ABSENT, _FILE = object(), ":"
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
Frames = list[FrameType]
Held = weakref.ref["TokenIterator"]


class TokenIterator:
    """The iterator of a loop over tokens, with the values of `steps`.

    `stepping` is a list that holds the iterator which was asked last for a value.
    """

    def __init__(self, steps: Iterator[Any], stepping: list[Held]) -> None:
        self._steps, self._stepping = steps, stepping

    def __iter__(self) -> TokenIterator:
        return self

    def __next__(self) -> Any:
        self._stepping[:] = [weakref.ref(self)]
        return next(self._steps)


_OPAQUE = (Unknown, BlockSize, TokenIterator, logging.Logger)


class Counts:
    """Refuses loops that count their tokens. `outside` is the frame within which all code of the model runs."""

    def __init__(self, outside: FrameType | None) -> None:
        self._outside = outside
        self._before: dict[str, Any] = {}
        self._called: dict[str, Any] = {}
        self._profile: Any = None
        self._watches = False

    def look(self, iteration: int, iterators: Sequence[Held]) -> None:
        """Raise LoopError if the loop counts its tokens. Called when it begins `iteration`; it combines `iterators`."""
        self.close()
        if iteration == CALLS:
            self._watch()
        if iteration not in (FIRST, SECOND):
            return
        frames = self._frames()
        state = self._state(frames)
        if iteration == FIRST:
            self._before = state
            return
        self._require_tokens(frames[0], iterators)
        for path in {**state, **self._before}:
            was, now = self._before.get(path, _ABSENT), state.get(path, _ABSENT)
            if isinstance(was, Length) and isinstance(now, Length):
                if was != now:
                    self._require_appended(path, frames)
            elif type(was) is not type(now) or (was != now and was == was):  # NaN is not itself
                path = path.replace("^", "")
                raise refused(f"changes the number {path} for each token, by which it may treat tokens differently")

    def close(self) -> None:
        """Watch calls no longer."""
        if self._watches:
            sys.setprofile(self._profile)
            self._watches = False

    # ---- what the code can read ----------------------------------------------------------------

    def _watch(self) -> None:
        """Note the arguments of functions that the loop calls, and the global variables of their files."""

        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and not _is_foreign(frame):
                name = frame.f_code.co_qualname
                self._called[frame.f_code.co_filename + _FILE] = frame.f_globals
                self._called |= {f"{name}.{key}": v for key, v in frame.f_locals.items() if not isinstance(v, _PLAIN)}

        self._profile, self._watches = sys.getprofile(), True
        sys.setprofile(note)

    def _frames(self) -> Frames:
        """The frames with code that runs in the loop: its own, and if that is a generator's, those that use it."""
        frames: Frames = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._outside:
            if not frame.f_code.co_filename.startswith((_OWN, _TORCH)):
                frames.append(frame)
                if not frame.f_code.co_flags & inspect.CO_GENERATOR:
                    break
            frame = frame.f_back
        return frames

    def _state(self, frames: Frames) -> dict[str, Any]:
        """Numbers, texts and lengths in all that the code of the loop can read, by path."""
        roots: dict[str, Any] = {}
        for depth, frame in enumerate(frames):
            roots |= {_variable(depth, name): value for name, value in frame.f_locals.items()}
        roots |= {name: value for name, value in self._called.items() if not name.endswith(_FILE)}
        files = [value for name, value in self._called.items() if name.endswith(_FILE)]
        for names in [*(frame.f_globals for frame in frames), *files]:
            roots |= {f"{names.get('__name__')}.{name}": v for name, v in names.items() if not name.startswith("__")}
        return readable(roots, _OPAQUE)

    # ---- lists of results ----------------------------------------------------------------------

    def _require_appended(self, path: str, frames: Frames) -> None:
        """Raise LoopError unless a loop only appends to the list `path`, and nothing else can read it."""
        for depth, frame in enumerate(frames):
            name = next((name for name in frame.f_locals if _variable(depth, name) == path), None)
            if name is None or not isinstance(frame.f_locals[name], list):
                continue
            loops = loop_syntax.running(frame)
            if not loops or not all(loop_syntax.only_appends(loop, name) for loop in loops):
                raise refused(f"does more with the list {name} of its results than to append to it")
            if _references(frame, name) > _references_of_a_variable():
                break
            return
        path = path.replace("^", "")
        raise refused(f"keeps its results in {path}, where other code may count them: append them to a local list")

    def _require_tokens(self, frame: FrameType, iterators: Sequence[Held]) -> None:
        """Raise LoopError if the loop also iterates over something else than tokens, or not over all tokens."""
        loops = loop_syntax.running(frame)
        if loops and all(loop_syntax.goes_through(loop.iter) == len(iterators) for loop in loops):
            return
        for holder in gc.get_referrers(*(held() for held in iterators)):
            if type(holder) is tuple and not all(isinstance(one, (TokenIterator, enumerate)) for one in holder):
                raise refused("iterates over tokens together with something else, which may end first")
            if type(holder).__module__ == "itertools":
                raise refused(f"iterates over tokens by {type(holder).__name__}, which may end before the last")


def _is_foreign(frame: FrameType) -> bool:
    """Whether a function belongs to torch, to Python's library, or to the code that records."""
    file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    standard = file.startswith((_STANDARD, "<frozen")) and "site-packages" not in file
    own = module.startswith(__name__.rpartition(".")[0])  # code that a dataclass makes is in no file
    return standard or own or module.partition(".")[0] in _FOREIGN


def _variable(depth: int, name: str) -> str:
    """The path of a variable of the function that runs the loop, or of one `depth` calls further out."""
    return name + "^" * depth


def _references(frame: FrameType, name: str) -> int:
    return sys.getrefcount(frame.f_locals[name])


def _references_of_a_variable() -> int:
    """References to a list that only a variable holds."""
    held: list[Any] = []
    return _references(sys._getframe(), "held") + len(held)
