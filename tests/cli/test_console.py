"""What the commands print of names and texts from elsewhere: nothing that a terminal would obey."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from qcompile.cli import console
from qcompile.errors import escaped
from qcompile.report import ir, page

RED = "\x1b[31m"
Capture = pytest.CaptureFixture[str]


def test_control_characters_are_escaped() -> None:
    assert escaped(f"a\tb\r\n{RED}\x07\x7f\x9b31m\0é") == "a\tb\r\n\\x1b[31m\\x07\\x7f\\x9b31m\\x00é"


def test_a_stream_escapes_what_is_written() -> None:
    file = io.BytesIO()
    stream = console.EscapingStream(file, "utf-8", write_through=True)
    print(f"{RED}é", file=stream)
    stream.write_sequences(RED)
    assert file.getvalue() == f"\\x1b[31mé\n{RED}".encode()


def test_texts_of_models_are_escaped_for_terminals_only(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    console.show_generated(RED)
    assert capsys.readouterr().out == RED
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    console.show_generated(RED)
    console.show(RED)
    assert capsys.readouterr().out == "\\x1b[31m\\x1b[31m\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_message_cannot_control_a_terminal(terminal: bool, tmp_path: Path) -> None:
    read, stderr = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, "-m", "qcompile", "verify", str(tmp_path / f"x{RED}y")]
    process = subprocess.run(command, stderr=stderr, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    told = os.read(read, 4096)
    for file in (read, stderr):
        os.close(file)
    assert process.returncode == 2 and b"x\\x1b[31my" in told and b"\x1b" not in told


def test_reports_have_no_control_characters() -> None:
    assert ir._text(f"a{RED}<") == "a\\x1b[31m&lt;"
    assert page._printable({RED: [RED, 1, None, {"a": RED}]}) == {
        "\\x1b[31m": ["\\x1b[31m", 1, None, {"a": "\\x1b[31m"}]
    }
