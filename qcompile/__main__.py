"""The `qcompile` command, also as `python -m qcompile`: its subcommands, and how it ends.

Results are printed to stdout, everything else to stderr. Each command imports what it needs when it runs: only
`build`, `passes`, `doctor` and `export` wait for torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import typer


def entry() -> NoReturn:
    """Run the command. An interrupt says so in one line, however early it comes: also while modules are imported."""
    try:
        from qcompile.cli.exits import leave

        leave(main)
    except KeyboardInterrupt:
        print("qcompile: interrupted", file=sys.stderr, flush=True)
        os._exit(130)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a subcommand and exit with the code that errors.py documents."""
    import signal

    from qcompile.cli.exits import guarded

    commands = app()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `qcompile inspect OUT | head` is no error
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(guarded(lambda given: commands(args=given, prog_name="qcompile", standalone_mode=False), given))


def app() -> typer.Typer:
    """The subcommands and their options."""
    from qcompile.cli import artifacts, build, chat, doctor, generate, measure, options, serve

    app = options.root()
    app.command()(build.build)
    app.command()(build.passes)
    app.command()(generate.run)
    app.command()(chat.chat)
    app.command()(serve.serve)
    app.command("eval")(measure.evaluate)
    app.command()(measure.bench)
    app.command()(measure.tune)
    app.command()(artifacts.inspect)
    app.command()(artifacts.verify)
    app.command()(artifacts.export)
    app.command()(doctor.doctor)
    return app


if __name__ == "__main__":
    entry()
