"""Functions of tests in processes where Triton interprets kernels, which is chosen when Triton is imported."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import traceback
from contextlib import suppress
from functools import cache
from importlib import import_module

import pytest

from tests.support.hastened import hasten


def needs_triton() -> None:
    """Skips a test where Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'qcompile[gpu]'")


def interpreted(module: str, *calls: str) -> None:
    """Run `calls` of functions of a module of tests, one after the other in a process that has TRITON_INTERPRET set."""
    needs_triton()
    server = _server()
    assert server.stdin and server.stdout
    server.stdin.write(json.dumps([module, *calls]) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the process that forks interpreters has ended"
    failure = json.loads(answer)
    assert not failure, failure[-3000:]


@cache
def _server() -> subprocess.Popen[str]:
    """A process that has imported what takes seconds, and forks for each test; it ends when nobody writes to it."""
    command = [sys.executable, "-c", f"import {__name__} as i; i.serve()"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve() -> None:
    """Answer each line of stdin, a module and calls, by the text of what they failed with."""
    import torch

    for name in ("torch._dynamo", "tests.support.gpu_interpreter", "tests.support.gpu_machine"):
        import_module(name)
    torch.set_num_threads(1)  # threads do not survive a fork
    hasten()
    parse_templates()
    gc.freeze()  # no child looks through what all of them have
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print is no answer
    for line in sys.stdin:
        module, *calls = json.loads(line)
        with suppress(Exception):  # which the child then tells
            import_module(module)
        read, write = os.pipe()
        if not (child := os.fork()):
            try:
                for call in calls:
                    eval(call, vars(import_module(module)))
                os._exit(0)
            except BaseException:
                os.write(write, traceback.format_exc()[-4000:].encode())
            finally:
                os._exit(1)
        os.close(write)
        with open(read, encoding="utf-8", errors="replace") as pipe:
            said = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answers.write(json.dumps(said or (f"ended with {status}" if status else "")) + "\n")
        answers.flush()


def parse_templates() -> None:
    """Each child would parse those of its kernels again, in a third of its time."""
    from qcompile.codegen.gpu.kernel import templates

    for name in templates().list_templates():
        templates().get_template(name)
