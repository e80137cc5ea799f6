"""Writing an artifact whole or not at all, and finding every flipped bit of it."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qcompile.artifact import amend as amending
from qcompile.artifact import layout, reader, swap
from qcompile.artifact.amend import amend
from qcompile.artifact.reader import read_manifest, verify
from qcompile.artifact.shards import WeightSpec, plan_shards
from qcompile.artifact.writer import ArtifactWriter
from qcompile.errors import ArtifactError, ResourceError, UsageError


def write_small(path: Path, fill: int = 1) -> list[dict]:
    specs = [WeightSpec("a", 64), WeightSpec("b", 192), WeightSpec("c", 128)]
    with ArtifactWriter(path, shard_bytes=128) as writer:
        writer.add_file("config.json", "{}")
        writer.add_file("kernels/cpu/model.so", b"\x7fELF")
        entries = writer.add_weights(specs, (bytes([fill]) * spec.bytes for spec in specs))
        writer.finish({"runtime": {"weights": entries}})
    return entries


def test_written_files_are_where_the_manifest_says(tmp_path: Path) -> None:
    entries = write_small(tmp_path / "out")
    assert verify(tmp_path / "out") == []
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert read_manifest(tmp_path / "out")["runtime"]["weights"] == entries
    for entry in entries:
        raw = (tmp_path / "out" / entry["file"]).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        begin, end = json.loads(raw[8 : 8 + length])[entry["name"]]["data_offsets"]
        assert (8 + length) % 4096 == 0 and entry["offset"] == 8 + length + begin
        assert end - begin == entry["bytes"]
        assert raw[entry["offset"] : 8 + length + end] == b"\x01" * entry["bytes"]


def test_safetensors_reads_the_weights(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    entries = write_small(tmp_path / "out")
    tensors = safetensors.load_file(tmp_path / "out" / entries[0]["file"])
    assert tensors["a"].shape == (64,) and (tensors["a"] == 1).all()


def test_two_writes_are_identical(tmp_path: Path) -> None:
    write_small(tmp_path / "x")
    write_small(tmp_path / "y")
    names = sorted(p.relative_to(tmp_path / "x") for p in (tmp_path / "x").rglob("*") if p.is_file())
    assert len(names) >= 5
    for name in names:
        assert (tmp_path / "x" / name).read_bytes() == (tmp_path / "y" / name).read_bytes()


def test_shards_are_even_in_number_and_balanced() -> None:
    for count, size, limit in [(200, 64, 640), (33, 6400, 10000), (2, 64, 1 << 20), (7, 64, 1 << 20)]:
        shards = plan_shards([size] * count, limit)
        assert [i for shard in shards for i in shard] == list(range(count))
        assert len(shards) % 2 == 0
        assert max(map(len, shards)) <= min(map(len, shards)) + 1
    assert plan_shards([], 64) == []
    assert plan_shards([64], 64) == [range(0, 1)]
    assert plan_shards([6400, 64, 64, 64], 1 << 20) == [range(0, 1), range(1, 4)]


def test_every_kind_of_damage_is_found(tmp_path: Path) -> None:
    root = tmp_path / "out"
    write_small(root)
    rng = random.Random(1)
    for file in sorted(p for p in root.rglob("*") if p.is_file()):
        clean = file.read_bytes()
        for _ in range(20):
            raw = bytearray(clean)
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            file.write_bytes(raw)
            assert verify(root), f"flip in {file.name} not found"
        for damaged in (clean[:-1], clean + b"\n", b""):
            file.write_bytes(damaged)
            assert verify(root), f"{file.name} cut or extended"
        file.unlink()
        assert verify(root), f"{file.name} missing"
        file.write_bytes(clean)
    (root / "extra").write_text("")
    assert verify(root) == ["extra: not in the manifest"]


def test_manifest_that_names_files_outside_is_refused(tmp_path: Path) -> None:
    write_small(tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    for name in ("../secret", "/etc/passwd", "a/../b"):
        bad = dict(manifest, files={name: {"bytes": 0, "sha256": ""}})
        bad["sha256"] = layout.seal(bad)
        (tmp_path / "out" / "qcompile.json").write_bytes(layout.canonical_json(bad))
        with pytest.raises(ArtifactError, match="leaves the artifact"):
            read_manifest(tmp_path / "out")


def test_other_format_version_is_refused(tmp_path: Path) -> None:
    write_small(tmp_path / "out")
    bad = dict(read_manifest(tmp_path / "out"), format_version=2)
    bad["sha256"] = layout.seal(bad)
    (tmp_path / "out" / "qcompile.json").write_bytes(layout.canonical_json(bad))
    with pytest.raises(ArtifactError, match="artifact format 2"):
        read_manifest(tmp_path / "out")


def test_output_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("file", "folder"):
        with pytest.raises(UsageError, match=name):
            ArtifactWriter(tmp_path / name)
    write_small(tmp_path / "empty")
    assert verify(tmp_path / "empty") == []


def test_the_folder_one_is_in_is_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is renamed away leaves a shell in a folder without a name."""
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UsageError, match="is where you are"):
        ArtifactWriter(".")
    (tmp_path / "empty" / "inner").rmdir()
    (tmp_path / "empty").rmdir()
    with ArtifactWriter(tmp_path / "out"):
        pass


def test_a_path_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for look in (verify, read_manifest, reader.state):
        with pytest.raises(UsageError, match="loop: Too many levels of symbolic links: give another path"):
            look(loop)


def test_a_mount_point_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "out")
    with pytest.raises(UsageError, match="mount point"):
        ArtifactWriter(tmp_path / "out")


def test_older_artifact_is_replaced(tmp_path: Path) -> None:
    write_small(tmp_path / "out", fill=1)
    write_small(tmp_path / "out", fill=2)
    assert verify(tmp_path / "out") == []
    assert b"\x02" * 64 in (tmp_path / "out" / "weights-00000.safetensors").read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError])
def test_failure_leaves_nothing_and_keeps_the_old(tmp_path: Path, error: type[BaseException]) -> None:
    write_small(tmp_path / "out")

    def pieces():
        yield b"\0" * 64
        raise error

    with pytest.raises(error), ArtifactWriter(tmp_path / "out") as writer:
        writer.add_weights([WeightSpec("a", 64), WeightSpec("b", 64)], pieces())
    assert verify(tmp_path / "out") == []
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_full_disk_is_a_resource_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ResourceError, match="no space left"):
        write_small(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_weights_larger_than_the_disk_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="free"), ArtifactWriter(tmp_path / "out") as writer:
        writer.add_weights([WeightSpec("a", 1 << 60)], iter([]))
    assert list(tmp_path.iterdir()) == []


def test_read_only_output_is_a_resource_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*args: object, **kwargs: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(swap.Path, "mkdir", read_only)
    with pytest.raises(ResourceError, match="Read-only"):
        ArtifactWriter(tmp_path / "out")


KILLED = """
import sys, time
sys.path[:0] = {path!r}
from qcompile.artifact.shards import WeightSpec
from qcompile.artifact.writer import ArtifactWriter
specs = [WeightSpec(str(i), 64) for i in range(400)]
def pieces():
    for i, spec in enumerate(specs):
        if i == 3: print("started", flush=True)
        time.sleep(0.0003)
        yield bytes(64)
with ArtifactWriter({out!r}) as writer:
    writer.finish({{"runtime": {{"weights": writer.add_weights(specs, pieces())}}}})
"""


def test_killed_build_leaves_none_or_a_whole_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = KILLED.format(path=sys.path, out=str(out))
    rng = random.Random(2)
    whole = 0
    for _ in range(8):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert child.stdout and child.stdout.readline() == b"started\n"
        time.sleep(rng.uniform(0, 0.3))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        if out.exists():
            whole += 1
            assert verify(out) == []
        else:
            assert all(p.name.startswith(".out.tmp-") for p in tmp_path.iterdir())
    write_small(out)
    assert [p.name for p in tmp_path.iterdir()] == ["out"], f"leftovers stay ({whole} builds came through)"


def test_running_build_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out") as first:
        write_small(tmp_path / "out", fill=2)
        first.add_file("a", b"a")
        first.finish({})
    assert set(read_manifest(tmp_path / "out")["files"]) == {"a"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


BUILDS = """
import sys, time
sys.path[:0] = {path!r}
from qcompile.artifact.reader import verify
from qcompile.artifact.writer import ArtifactWriter
until, built = time.monotonic() + {seconds}, 0
while time.monotonic() < until:
    with ArtifactWriter({out!r}) as writer:
        writer.add_file("a", b"{name}" * 100)
        writer.finish({{}})
    built += 1
    assert verify({out!r}) == [], verify({out!r})
print(built)
"""


@pytest.mark.parametrize("offered", [True, False])
def test_builds_to_one_place_at_once_all_succeed(tmp_path: Path, offered: bool) -> None:
    """And who looks meanwhile finds a whole artifact, of one of them; not so on file systems that exchange nothing."""
    out = tmp_path / "out"
    write_small(out)
    script = BUILDS.format(path=sys.path, seconds=1.5, out=str(out), name="{name}")
    if not offered:
        forget = "from qcompile.artifact import swap\nswap._EXCHANGE = 1 << 10  # no such flag: EINVAL\nuntil"
        script = script.replace("until", forget, 1).replace("    assert", "    # assert")
    builds = [
        subprocess.Popen([sys.executable, "-c", script.replace("{name}", name)], stdout=subprocess.PIPE, text=True)
        for name in "xyz"
    ]
    built = [int(build.communicate()[0] or 0) for build in builds]
    assert all(build.returncode == 0 for build in builds) and all(built)
    assert verify(out) == [] and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_another_build_deletes_meanwhile_is_not_taken_for_a_stranger_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an artifact when it was opened; by now half of it is deleted, and another stands in its place."""
    out = tmp_path / "out"
    write_small(out)
    listed = os.listdir

    def late(folder: int | Path) -> list[str]:
        opened = os.open(f"/proc/self/fd/{folder}" if isinstance(folder, int) else folder, os.O_RDONLY)
        monkeypatch.setattr(os, "listdir", listed)
        os.rename(out, tmp_path / "deleted")
        (tmp_path / "deleted" / layout.MANIFEST).unlink()
        write_small(out, fill=3)
        names = listed(opened)
        os.close(opened)
        return names

    monkeypatch.setattr(os, "listdir", late)
    write_small(out, fill=2)
    assert verify(out) == [] and b"\x02" * 64 in (out / "weights-00000.safetensors").read_bytes()
    monkeypatch.setattr(os, "listdir", listed)
    (out / layout.MANIFEST).unlink()
    with pytest.raises(UsageError, match="holds other files"):
        write_small(out)


def test_no_artifact_is_written_inside_of_another(tmp_path: Path) -> None:
    write_small(tmp_path / "out")
    with pytest.raises(UsageError, match=r"inner/deep is inside of the artifact .*out: choose another"):
        write_small(tmp_path / "out" / "inner" / "deep")
    assert verify(tmp_path / "out") == []


def test_an_exchange_that_fails_half_way_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small(tmp_path / "out")
    renamed, calls = os.rename, []

    def interrupted(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 3:  # the first finds the place taken, the second moves the old aside
            raise KeyboardInterrupt
        renamed(source, target)

    monkeypatch.setattr(swap, "_EXCHANGE", 1 << 10)
    monkeypatch.setattr(swap.os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_small(tmp_path / "out", fill=2)
    assert verify(tmp_path / "out") == [] and [p.name for p in tmp_path.iterdir()] == ["out"]
    assert b"\x01" * 64 in (tmp_path / "out" / "weights-00000.safetensors").read_bytes()


def test_an_artifact_that_is_replaced_while_it_is_amended_stays_as_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_small(out)
    amend(out, tuned={"table": []})
    assert verify(out) == [] and read_manifest(out)["tuned"] == {"table": []}
    sealed = amending.seal

    def slow(manifest: dict) -> str:
        monkeypatch.setattr(amending, "seal", sealed)
        write_small(out, fill=2)
        return sealed(manifest)

    parsed = amending.parse_manifest

    def parsed_then_slow(*arguments: Any) -> dict:
        monkeypatch.setattr(amending, "seal", slow)
        return parsed(*arguments)

    monkeypatch.setattr(amending, "parse_manifest", parsed_then_slow)
    with pytest.raises(ResourceError, match="No such file"):
        amend(out, tuned={"table": [1]})
    assert verify(out) == [] and "tuned" not in read_manifest(out)
    (out / layout.AMENDED).write_text("of one that was killed")
    assert verify(out) == []


def test_problems_of_two_artifacts_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build ends after the manifest was read: the files are not what that one says."""
    out = tmp_path / "out"
    write_small(out)
    problems = reader._problems

    def late(root: Path, files: dict) -> list[str]:
        monkeypatch.setattr(reader, "_problems", problems)
        write_small(out, fill=2)
        result = problems(root, files)
        assert result
        return result

    monkeypatch.setattr(reader, "_problems", late)
    assert verify(out) == []
