"""Where a process finds the other ranks of a launcher's run: before it loads a divided model."""

from __future__ import annotations

from qcompile.errors import UsageError
from qcompile.runtime.ranks.crew import assemble
from qcompile.runtime.ranks.launcher import launched
from qcompile.runtime.ranks.member import follow


def meet(built: int, what: object) -> None:
    """Find the other ranks of a launcher's run, if there is one, for a model that was built for `built` processes.

    what: names the model. In a rank above 0, follows rank 0 and raises SystemExit. Raises QCompileError.
    """
    if (own := launched()) is None or built == 1:
        return
    own.check_machine()
    if own.size != built:
        raise UsageError(own.other_size(what, built))
    if own.rank:
        follow(own)
    assemble(own).gather()
