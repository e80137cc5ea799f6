"""The command line when it is interrupted or told to end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qcompile.cli import console
from qcompile.errors import UsageError
from tests.cli.test_app import Capture, code_of, refusal


def test_an_interrupt_that_an_import_swallowed_is_one(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(path: Path) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except BaseException:
            raise AttributeError("module 'numpy' has no attribute 'minimum'") from None

    monkeypatch.setattr("qcompile.cli.inspect.summary", careless)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run side by side it is ignored
    try:
        assert refusal(capsys, 130, "inspect", "x") == "qcompile: interrupted\n"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_an_import_swallowed_ends_what_follows(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(*arguments: Any, **more: Any) -> dict[str, Any]:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        arguments[-1]("tests", 0, 1)  # the progress
        return {}

    monkeypatch.setattr("qcompile.cli.tune.tune", careless)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert refusal(capsys, 130, "tune", "x", "--json") == "qcompile: interrupted\n"
        console.Progress()("another", 0, 1)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_an_object_ends_is_told_in_one_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ending:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    def careless(*arguments: Any, **more: Any) -> dict[str, Any]:
        Ending()
        arguments[-1]("tests", 0, 1)  # the progress
        return {}

    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    monkeypatch.setattr("qcompile.cli.tune.tune", careless)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert refusal(capsys, 130, "tune", "x", "--json") == "qcompile: interrupted\n"
        assert not told and sys.unraisablehook == told.append
    finally:
        signal.signal(signal.SIGINT, before)


def test_doctor_heeds_an_interrupt_that_its_imports_swallowed(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    class Careless:
        """Finds modules as others do, and catches whatever comes meanwhile."""

        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "qcompile.pipeline":
                with contextlib.suppress(KeyboardInterrupt):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(5)

    import qcompile.pipeline

    monkeypatch.delitem(sys.modules, "qcompile.pipeline")
    monkeypatch.delattr(qcompile, "pipeline")
    monkeypatch.setattr(sys, "meta_path", [Careless, *sys.meta_path])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert refusal(capsys, 130, "doctor", tiny_checkpoint) == "qcompile: interrupted\n"
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_told_however_early_it_comes() -> None:
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    early = "import sys, signal, os; sys.meta_path.insert(0, type('F', (), {'find_spec': staticmethod("
    early += "lambda name, *_: os.kill(os.getpid(), signal.SIGINT) if name == 'typer' else None)}));"
    early += "from qcompile.__main__ import entry; entry()"
    done = subprocess.run([sys.executable, "-c", early], capture_output=True, text=True, preexec_fn=heed)
    assert (done.returncode, done.stderr) == (130, "qcompile: interrupted\n")


def test_ctrl_c_exits_130(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qcompile.cli.inspect.summary", interrupted)
    assert "interrupted" in refusal(capsys, 130, "inspect", "x")


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, -signal.SIGTERM, "ended by SIGTERM"),  # as `timeout` and batch systems send it
        pytest.param(  # as a terminal does that closes
            signal.SIGHUP, -signal.SIGHUP, "ended by SIGHUP", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_build_that_is_ended_leaves_nothing(
    number: signal.Signals, code: int, said: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "qcompile", "build", str(tiny_checkpoint), "-o", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # A shell's background job ignores interrupts, and its children would too.
    heed = partial(signal.signal, number, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=heed)
    while not list(tmp_path.iterdir()) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == code and error.splitlines()[-1] == f"qcompile: {said}"
    assert not list(tmp_path.iterdir())


def test_signals_that_were_ignored_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def hung_up(path: Path) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        raise UsageError("still here")

    monkeypatch.setattr("qcompile.cli.inspect.summary", hung_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert code_of("inspect", "x") == 2
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
