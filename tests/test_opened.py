"""What commands open of inputs that want them to open more: a short form of benchmarks/opened.py."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.opened import ROOT, Opened, parsed, watch
from tests.support.traps import ARTIFACTS, CHECKPOINTS, ran, trapped

TRACE = f"""\
10 execve("{sys.executable}", ["python"], 0x7ff /* 9 vars */) = 0
10 openat(AT_FDCWD</w>, "model/config.json", O_RDONLY|O_CLOEXEC) = 3</w/model/config.json>
10 openat(AT_FDCWD</w>, "missing", O_RDONLY) = -1 ENOENT (No such file or directory)
10 openat(AT_FDCWD</w>, "model", O_RDONLY|O_NONBLOCK|O_CLOEXEC|O_DIRECTORY <unfinished ...>
11 openat(AT_FDCWD</w>, "out/x", O_WRONLY|O_CREAT|O_EXCL|O_CLOEXEC, 0600 <unfinished ...>
10 <... openat resumed>) = 4</w/model>
11 <... openat resumed>) = 5</w/out/x>
11 openat(AT_FDCWD</w>, "/w/model/pytorch_model.bin", O_RDONLY) = 6</w/model/pytorch_model.bin>
11 openat(AT_FDCWD</w>, "/etc/shadow", O_RDONLY) = 6</etc/shadow>
10 connect(7<TCP:[1]>, {{sa_family=AF_INET, sin_port=htons(80), sin_addr=inet_addr("93.184.216.34")}}, 16) = 0
10 connect(7<TCP:[1]>, {{sa_family=AF_INET, sin_port=htons(80), sin_addr=inet_addr("127.0.0.1")}}, 16) = 0
11 execve("/w/model/evil", ["evil"], 0x7ff /* 9 vars */) = 0
"""


def test_a_trace_is_read_and_judged() -> None:
    read, written, run, connected = map(frozenset, parsed(TRACE))
    assert read == {"/w/model/config.json", "/w/model", "/w/model/pytorch_model.bin", "/etc/shadow"}
    assert written == {"/w/out/x"} and len(connected) == 2 and len(run) == 2
    done = Opened(0, read, written, run, connected)
    told = done.strange([Path("/w/model")], [Path("/w/out")])
    assert [line.split()[0] for line in told] == ["connected", "opened", "ran", "read"]
    assert "read /etc/shadow" in told and any("93.184.216.34" in line for line in told)
    assert "wrote /w/out/x" in done.strange([Path("/w/model")], [])


needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


@needs_strace
@pytest.mark.parametrize("name", ["a library that is a link", "a pickle that is added", "weights that are a pipe"])
def test_what_verify_opens_of_an_artifact(name: str, tiny_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    given, home = trapped(tiny_artifact("w4a8"), ARTIFACTS[name], tmp_path, "out"), tmp_path / "home"
    done = watch(["verify", str(given)], home)
    assert done.strange([given], [home]) == [] and done.code == 6, done.said


@needs_strace
@pytest.mark.parametrize("name", ["pickled weights", "weights that are a link", "code for an unknown type"])
def test_what_build_opens_of_a_checkpoint(name: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    given, home = trapped(tiny_checkpoint, CHECKPOINTS[name], tmp_path, "model"), tmp_path / "home"
    done = watch(["build", str(given), "-o", str(home / "out"), "-q"], home)
    assert done.strange([given], [home]) == [] and done.code in (2, 3), done.said
    assert not ran(tmp_path) and os.path.commonpath([ROOT, given]) != str(ROOT)
