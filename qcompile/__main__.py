"""The `qcompile` command, also as `python -m qcompile`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def entry() -> NoReturn:
    """Run the command. An interrupt says so in one line, however early it comes."""
    try:
        from qcompile.cli.app import main
        from qcompile.cli.exits import leave

        leave(main)
    except KeyboardInterrupt:
        print("qcompile: interrupted", file=sys.stderr, flush=True)
        os._exit(130)


if __name__ == "__main__":
    entry()
