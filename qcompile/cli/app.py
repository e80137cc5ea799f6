"""The command line. Results are printed to stdout, everything else to stderr.

Each command imports what it needs when it runs: only `build`, `passes`, `doctor` and `export` wait for torch.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from qcompile import __version__
from qcompile.cli import artifacts, build, chat, generate, measure, serve
from qcompile.cli.exits import guarded

app = typer.Typer(
    help="Compile PyTorch decoder language models to quantized kernels, and run them.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"qcompile {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


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
app.command()(build.doctor)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with the code that errors.py documents."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `qcompile inspect OUT | head` is no error
    sys.exit(guarded(_run, list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: list[str]) -> Any:
    return app(args=arguments, prog_name="qcompile", standalone_mode=False)
