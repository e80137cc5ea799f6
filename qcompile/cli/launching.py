"""A command that torchrun or srun has started several times: rank 0 runs it, and the others follow."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from qcompile.cli import exits
from qcompile.errors import QCompileError, UsageError

if TYPE_CHECKING:
    from qcompile.runtime.ranks.launcher import LaunchedRank


def take_part(ranks: int | None) -> int | None:
    """The number of processes that run the model together, where the command's option gives `ranks`.

    In a rank above 0, follows rank 0 and raises SystemExit. With `ranks` 1, every rank runs the command by itself.
    Raises UsageError for another number of ranks than were started, UnsupportedError if they are on several machines.
    """
    if ranks == 1 or (own := _launched()) is None:
        return ranks
    try:
        own.check_machine()
    except QCompileError as error:
        if own.rank:  # rank 0 says it
            sys.exit(error.exit_code)
        raise
    if own.rank:
        from qcompile.runtime.ranks.member import follow

        follow(own)
    _lead(own)
    if ranks not in (None, own.size):
        raise UsageError(f"--tensor-parallel-size {ranks}: {own.text}; leave it out, or start {ranks}")
    return own.size


def check_alone(option: str, ranks: int | None) -> None:
    """Raise UsageError for an option that starts processes of its own, in a command that several ranks take part in."""
    if ranks != 1 and (own := _launched()) is not None:
        raise UsageError(f"{option} starts processes of its own, and {own.text} of the command: start it once")


def _launched() -> LaunchedRank | None:
    """This process among those that a launcher has started. Imported here: help and refusals need none of it."""
    from qcompile.runtime.ranks.launcher import launched

    return launched()


def _lead(own: LaunchedRank) -> None:
    """Listen for the other ranks, and tell them at the end how the command ends."""
    from qcompile.runtime.ranks.crew import assemble

    exits.at_end.append(assemble(own).finish)
