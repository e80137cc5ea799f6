"""`python -m qcompile` is the `qcompile` command."""

from qcompile.cli import entry

entry()
