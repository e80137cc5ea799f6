"""Commands refuse a checkpoint with a pipe in the place of a file at once: opening the pipe would wait for ever."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_app import code_of

FILES = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "adapter_config.json"),
]
SECONDS = 60
"""Far more than a build of the tiny model takes."""


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """A command that waits is ended by a signal, so that the test fails and ends."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"still running after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", ["build", "doctor"])
def test_a_pipe_is_not_waited_for(
    command: str, name: str, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, model)
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    out = ["-o", tmp_path / "out"] if command == "build" else []
    assert code_of(command, model, *out) in (0, 2, 3, 4)
    assert "still running" not in capsys.readouterr().err
