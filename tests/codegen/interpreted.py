"""Functions of tests in processes where Triton interprets kernels, which is chosen when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from types import FunctionType, SimpleNamespace

import pytest


def needs_triton() -> None:
    """Skips a test where Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'qcompile[gpu]'")


def interpreted(module: str, *calls: str) -> None:
    """Run `calls` of functions of a module of tests, one after the other in a process that has TRITON_INTERPRET set."""
    needs_triton()
    lines = [f"import {__name__} as i; i.hasten(); import {module} as m", *(f"m.{call}" for call in calls)]
    command = [sys.executable, "-c", "; ".join(lines)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def hasten() -> None:
    """Leave out what takes the interpreter half of its time and finds nothing in our kernels."""
    from triton import language
    from triton.runtime import interpreter

    # An integer that overflows wraps, as on a GPU, and shows in what is computed.
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    # The interpreter puts functions of its own into Triton's language at each launch and at each call of a function
    # inside of one. Here they are put there once, and stay.
    seen = {"tl": language, "core": language.core}
    interpreter._patch_lang(FunctionType((lambda: None).__code__, seen))
    kept = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: kept
