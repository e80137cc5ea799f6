"""How a command ends: every failure prints one line, and errors.py has the exit codes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from qcompile.cli import console
from qcompile.cli.environment import DEBUG, PREFIX, is_on
from qcompile.errors import EXIT_BUG, EXIT_SIGNAL, QCompileError, ResourceError, UsageError

at_end: list[Callable[[int], None]] = []
"""What else is told the exit code, just before the process ends."""


def leave(command: Callable[[], NoReturn]) -> NoReturn:
    """Run `command` and leave at once: tearing down torch's modules would take a second."""
    console.open_streams()
    try:
        command()
    except SystemExit as exit:
        code = int(exit.code or 0)
    try:
        sys.stdout.flush()
    except OSError as error:
        if not code:  # else the command has told what went wrong, often the same
            code = _refused_by_system(error) or EXIT_BUG
    with contextlib.suppress(OSError):  # the terminal may be gone
        sys.stderr.flush()
    for tell in at_end:
        tell(code)
    if (number := code - EXIT_SIGNAL) in (
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # the sender sees which signal ended it
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(code)


def guarded(run: Callable[[list[str]], Any], arguments: list[str]) -> int:
    """`run(arguments)`, as an exit code. Every failure prints one line."""
    interrupts, debug = console.interrupts, "--debug" in arguments[:1] or is_on(DEBUG)
    interrupts.clear()

    def interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    def unraisable(raised: Any) -> None:
        if not (interrupts and isinstance(raised.exc_value, KeyboardInterrupt)):  # raised in a destructor
            report(raised)

    report, sys.unraisablehook = sys.unraisablehook, unraisable
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    handled = {number: before for number, before in usual.items() if signal.getsignal(number) == before}
    for number in handled:  # not those that the parent process ignores, as nohup does
        signal.signal(number, interrupt)
    try:
        code: Any = run(arguments)
        if code == EXIT_SIGNAL + signal.SIGINT:  # what some versions of typer make of the exception
            code = _interrupted(interrupts)
    except KeyboardInterrupt:
        code = _interrupted(interrupts)
    except Exception as error:
        # A module that is interrupted while it is imported may swallow the interrupt and fail later.
        code = _interrupted(interrupts) if interrupts else _failed(error, debug)
    finally:
        for number, before in handled.items():
            signal.signal(number, before)
        sys.unraisablehook = report
        interrupts.clear()
    return code if isinstance(code, int) else 0


def _interrupted(signals: Sequence[int]) -> int:
    """Report the first of `signals` in one line; returns the exit code."""
    number = signals[0] if signals else signal.SIGINT
    how = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    console.log(f"qcompile: {how}")
    return EXIT_SIGNAL + number


def _failed(error: Exception, debug: bool) -> int:
    """Report in one line why a command failed; returns the exit code."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, QCompileError):
        console.log("qcompile: " + str(error).replace("\n", "\\n") + _variable_of(error))
        return error.exit_code
    if isinstance(error, MemoryError):
        console.log("qcompile: out of memory: close other programs, or take a smaller model")
        return ResourceError.exit_code
    if isinstance(error, OSError) and (code := _refused_by_system(error)):
        return code
    return _unexpected(error)


def _unexpected(error: Exception) -> int:
    """Typer's own errors (wrong options) are the user's; all others are ours."""
    if hasattr(error, "format_message"):
        message = error.format_message()
        if message.startswith("Usage:"):  # no command was given: the help text
            console.log(message)
        else:
            command = getattr(getattr(error, "ctx", None), "command_path", "qcompile")
            console.log(f"qcompile: {message.rstrip('.')}{_source(error)} (see {command} --help)")
        return UsageError.exit_code
    if type(error).__name__ == "Abort":
        return _interrupted(())
    first = (str(error).splitlines() or [""])[0]
    console.log(f"qcompile: unexpected {type(error).__name__}: {first} (`qcompile --debug ...` shows where)")
    return EXIT_BUG


def _source(error: Any) -> str:
    """The environment variable that holds a wrong value, if it is not from the command line."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or parameter is None or not parameter.envvar:
        return ""
    source = context.get_parameter_source(parameter.name)
    return f" (from {parameter.envvar})" if getattr(source, "name", "") == "ENVIRONMENT" else ""


def _variable_of(error: QCompileError) -> str:
    """The environment variables that hold what a UsageError quotes, unless the command line has it as well."""
    if not isinstance(error, UsageError):
        return ""
    quoted = re.split(r"[\s,;:]+", str(error))
    names = [name for name, value in os.environ.items() if name.startswith(PREFIX) and value in quoted]
    return f" (from {', '.join(sorted(names))})" if names and os.environ[names[0]] not in sys.argv else ""


_SCARCE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_NO_PATH = {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM}


def _refused_by_system(error: OSError) -> int | None:
    """Report a resource that the system lacks, or a bad path; returns the exit code, or None for any other error."""
    name = f" ({os.fsdecode(error.filename)})" if isinstance(error.filename, str | bytes) else ""
    if error.errno in _SCARCE:
        console.log(f"qcompile: {error.strerror}{name}: none is left, free some")
        return ResourceError.exit_code
    if error.errno in _NO_PATH:
        console.log(f"qcompile: {error.strerror}{name}: give another path")
        return UsageError.exit_code
    return None
