"""Processes of Python that run modules of this package."""

from __future__ import annotations

import os
import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module in a process of its own; it needs `module_environment`.

    Python would take modules from the working directory first (`-m` without `-P`): a checkpoint that somebody stands in
    could bring a `json.py`.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """The environment of such a process: it takes modules from where this process does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
