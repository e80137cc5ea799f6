"""What is no file in an artifact: nothing waits for it, and nothing outside of the folder is read."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import qcompile
from qcompile.artifact.plain_files import NotPlainError, open_plain, read_plain
from qcompile.artifact.reader import verify
from qcompile.errors import ArtifactError


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))


def outside(path: Path) -> None:
    """A link to an equal file elsewhere."""
    copy = path.parent.parent / f"copy of {path.name}"
    path.symlink_to(copy)


Build = Callable[[str], Path]
PLACES: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (os.mkfifo, "no plain file"),
    "folder": (os.mkdir, "no plain file"),
    "device": (device, "outside of"),
    "socket": (listening, "No such device or address"),
    "link": (outside, "outside of"),
}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", ["qcompile.json", "tokenizer.json", "weights-00000.safetensors"])
def test_what_is_no_file_is_refused(
    kind: str, name: str, tiny_artifact: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # addresses of sockets are short
    out = shutil.copytree(tiny_artifact("w4a8"), tmp_path / "out")
    shutil.move(out / name, tmp_path / f"copy of {name}")
    make, message = PLACES[kind]
    make(out / name)
    problems = verify(out)
    assert len(problems) == 1 and message in problems[0] and name in problems[0]
    with pytest.raises(ArtifactError, match=message):
        qcompile.load(out)


def test_a_link_within_the_folder_is_followed(tiny_artifact: Build, tmp_path: Path) -> None:
    out = shutil.copytree(tiny_artifact("w4a8"), tmp_path / "out")
    shutil.move(out / "tokenizer.json", out / "qcompile.json.tmp")
    (out / "tokenizer.json").symlink_to("qcompile.json.tmp")
    (tmp_path / "link").symlink_to(out)
    assert "tokenizer.json" not in " ".join(verify(tmp_path / "link"))


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert read_plain(tmp_path / "a") == read_plain(tmp_path / "a", within=tmp_path) == b"abc"
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(NotPlainError):
            open_plain(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
