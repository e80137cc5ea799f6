"""Errors for users, each with the exit code of the command line.

A message is one line that names what is wrong and says what to do about it.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

EXIT_OK = 0
EXIT_BUG = 1
EXIT_SIGNAL = 128
"""Exit status after a signal, plus its number, as in shells: 130 is an interrupt."""


class QCompileError(Exception):
    """Base class of all errors that are not bugs. `exit_code` is the process's exit status."""

    exit_code = EXIT_BUG


class UsageError(QCompileError):
    """The request is malformed: unknown recipe, empty prompt, missing file."""

    exit_code = 2


class LongPromptError(UsageError):
    """A prompt has more tokens than the context. Clients of the server look for this one, to send less."""


class UnsupportedError(QCompileError):
    """The input is well formed, but contains something that qcompile does not support (named in the message)."""

    exit_code = 3


class OwnAttention(UnsupportedError):
    """The model does not let its attention be replaced."""


class OverflowedError(UnsupportedError):
    """The logits of a request are not finite, so it has no next token."""

    def __init__(self, where: str = "") -> None:
        super().__init__(f"{where}the model's logits are not finite: its weights or activations overflow their formats")


class QualityError(QCompileError):
    """A quality requirement cannot be met."""

    exit_code = 4


class ResourceError(QCompileError):
    """Memory, disk, a compiler, a device or an optional package is missing."""

    exit_code = 5


class BusyError(ResourceError):
    """Too many requests wait already. The caller should try again later."""


class AsleepError(ResourceError):
    """The model sleeps."""

    def __init__(self, state: str = "is asleep") -> None:
        super().__init__(f"the model {state}: wake it first (wake_up in Python, POST /wake_up over HTTP)")


class ArtifactError(QCompileError):
    """An artifact is damaged, of another format version, or built for another machine."""

    exit_code = 6


class PassError(UnsupportedError):
    """A pass refuses a graph. `node` is the name of the node, `reason` the reason.

    The message reads `rotate: node add_3: two writers of the stream are not linear`.
    """

    def __init__(self, pass_name: str, node: str, reason: str) -> None:
        super().__init__(f"{pass_name}: node {node}: {reason}")
        self.pass_name, self.node, self.reason = pass_name, node, reason


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}
"""Characters that terminals obey, such as the one that begins escape sequences, as text."""


def escaped(text: str) -> str:
    """A text without characters that control a terminal, but for tabs and line ends."""
    return text.translate(_CONTROLS)


def shown(value: object) -> str:
    """A value for a message: as Python writes it but abbreviated, since it may be a list of a million texts."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python does not convert integers of more than 4,300 digits
        return "a number of thousands of digits"


def suggestion(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` with the known name that is most like a wrong `name`; empty if none is like it."""
    others = {other.lower(): other for other in known if other != name}
    near = difflib.get_close_matches(name.lower(), others, 1)
    return f" (did you mean {others[near[0]]}?)" if near else ""


class RustFailure(Exception):
    """Code in Rust has failed: in tokenizers, for example, at a pattern that a text can be tried with in many ways."""


@contextmanager
def told_in_rust() -> Iterator[None]:
    """Raise RustFailure where a package fails in Rust. What it raises is no Exception, and has a name alone in common:
    a server would answer 500, and a command would call it a bug."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RustFailure(str(error)) from None
