"""The `qcompile` command, also as `python -m qcompile`: its subcommands, and how it ends.

Results are printed to stdout, everything else to stderr. Each command imports what it needs when it runs: only
`build`, `passes`, `recipes`, `sensitivity`, `doctor`, `train-draft` and `export` wait for torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import typer


COMMANDS: dict[str, str | dict[str, str]] = {
    "build": "build.build",
    "passes": "build.passes",
    "recipes": "recipes.recipes",
    "run": "generate.run",
    "chat": "chat.chat",
    "serve": "serve.serve",
    "run-batch": "run_batch.run_batch",
    "eval": "measure.evaluate",
    "bench": "measure.bench",
    "tune": "measure.tune",
    "sensitivity": "sensitivity.sensitivity",
    "train-draft": "train_draft.train_draft",
    "inspect": "artifacts.inspect",
    "verify": "artifacts.verify",
    "sign": "sign.sign",
    "export": "artifacts.export",
    "doctor": "doctor.doctor",
    "cache": {"list": "cache.list_", "remove": "cache.remove", "path": "cache.path"},
    "completion": "completion.completion",
}
"""The function of each command, as module and name, in the order of the help text; a group has commands of its own."""
ABOUT_GROUPS = {"cache": "Show and prune what commands have built from models."}


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

    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = app(next((word for word in given if not word.startswith("-")), None))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `qcompile inspect OUT | head` is no error
    sys.exit(guarded(lambda given: commands(args=given, prog_name="qcompile", standalone_mode=False), given))


def app(only: str | None = None) -> typer.Typer:
    """The subcommands and their options; just the one named `only`, if there is such, without importing the others."""
    from qcompile.cli import options

    app = options.root()
    for name, places in {only: COMMANDS[only]}.items() if only in COMMANDS else COMMANDS.items():
        if isinstance(places, str):
            app.command(name)(_function(places))
            continue
        group = options.group(ABOUT_GROUPS[name])
        for inner, place in places.items():
            group.command(inner)(_function(place))
        app.add_typer(group, name=name)
    return app


def _function(place: str) -> Callable[..., None]:
    """The function of a command, by its module in the command line's package and its name."""
    module, _, function = place.partition(".")
    command: Callable[..., None] = getattr(import_module(f"qcompile.cli.{module}"), function)
    return command


if __name__ == "__main__":
    entry()
