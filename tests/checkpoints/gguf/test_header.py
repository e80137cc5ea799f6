"""Headers of GGUF files: what is read, and that a damaged or hostile one gets one line and takes no memory."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest

from qcompile.checkpoints.gguf.header import read_header
from qcompile.errors import QCompileError, UnsupportedError, UsageError
from tests.checkpoints.gguf.writing import File, Tensor, floats, text

ARCH = {"general.architecture": "llama"}
HUGE = (1 << 63) - 1


def test_what_is_read(tmp_path: Path) -> None:
    metadata = ARCH | {"a": 7, "b": 0.5, "c": True, "d": ["x", "", "é"], "e": [1, 2], "f": "\n"}
    tensors = {"one": floats([[1, 2, 3], [4, 5, 6]]), "two": Tensor((2, 64), bytes(2 * 68), kind=8)}
    for version in (2, 3):
        header = read_header(File(metadata, tensors, version=version).write(tmp_path / "m.gguf"))
        assert header.metadata == metadata and header.architecture == "llama"
        one, two = (header.tensors[name] for name in tensors)
        assert (one.shape, one.kind.name, one.end - one.begin) == ((2, 3), "F32", 24)
        assert (two.shape, two.kind.name, two.begin % 32, two.end) == ((2, 64), "Q8_0", 0, header.path.stat().st_size)


def test_another_alignment(tmp_path: Path) -> None:
    tensors = {"one": floats([1.0]), "two": floats([2.0])}
    header = read_header(File(ARCH | {"general.alignment": 64}, tensors, alignment=64).write(tmp_path / "m.gguf"))
    assert header.tensors["two"].begin - header.tensors["one"].begin == 64


def entry(key: str, kind: int, rest: bytes) -> bytes:
    """A metadata entry as bytes."""
    return text(key) + struct.pack("<I", kind) + rest


ONE = {"one": floats([1.0])}
BAD, NO = UsageError, UnsupportedError
HOSTILE: dict[str, tuple[File, type[QCompileError], str]] = {
    "another file": (File(magic=b"PK\3\4"), BAD, r"is no GGUF file: it begins with b'PK"),
    "version 1": (File(version=1), NO, "of version 1; versions 2 and 3 are read"),
    "big-endian": (File(version=3 << 24), NO, "in the byte order of another machine"),
    "many tensors": (File(count=HUGE), BAD, f"claims {HUGE} tensors"),
    "many entries": (File(entries=HUGE), BAD, f"claims {HUGE} metadata entries"),
    "more tensors than bytes": (File(ARCH, count=100_000), BAD, "a tensor's name is empty"),
    "more entries than bytes": (File(ARCH, entries=2), BAD, "a metadata key (is empty|needs 8 bytes)"),
    "a long key": (File(entries=1, more=struct.pack("<Q", HUGE)), BAD, "a metadata key of"),
    "a long text": (File(entries=1, more=entry("a", 8, struct.pack("<Q", HUGE))), BAD, f"'a' needs {HUGE} bytes"),
    "a long list": (File(entries=1, more=entry("a", 9, struct.pack("<IQ", 4, HUGE))), BAD, f"'a' claims {HUGE} items"),
    "a list past the end": (
        File(entries=1, more=entry("a", 9, struct.pack("<IQ", 12, 1 << 20))),
        BAD,
        "'a' needs 8388608 bytes",
    ),
    "a list of lists": (File(entries=1, more=entry("a", 9, struct.pack("<IQ", 9, 1))), NO, "an array of type 9"),
    "a list of nothing known": (File(entries=1, more=entry("a", 9, struct.pack("<IQ", 77, 1))), NO, "of type 77"),
    "an unknown type": (File(entries=1, more=entry("a", 13, b"")), BAD, "'a' has type 13, which does not exist"),
    "a key that is no text": (File(entries=1, more=text(b"\xff") + bytes(8)), BAD, "a metadata key is not UTF-8"),
    "a key twice": (File(ARCH, entries=2, more=entry("general.architecture", 7, b"\1")), BAD, "occurs twice"),
    "an odd alignment": (File(ARCH | {"general.alignment": 24}), BAD, "general.alignment is 24"),
    "no alignment": (File(ARCH | {"general.alignment": 0}), BAD, "general.alignment is 0"),
    "an alignment in words": (File(ARCH | {"general.alignment": "32"}), BAD, "general.alignment is '32'"),
    "no dimension": (File(ARCH, {"one": Tensor((), b"")}), BAD, "'one' has 0 dimensions"),
    "five dimensions": (File(ARCH, {"one": Tensor((1,) * 5, b"")}), BAD, "'one' has 5 dimensions"),
    "a side of 0": (File(ARCH, {"one": Tensor((0, 4), b"")}), BAD, r"has shape \[0, 4\]"),
    "a huge side": (File(ARCH, {"one": Tensor((HUGE,), b"")}), BAD, "of type F32 has shape"),
    "a huge product": (File(ARCH, {"one": Tensor((1 << 39,) * 4, b"")}), BAD, "is truncated: tensor 'one' ends at"),
    "a broken block": (File(ARCH, {"one": Tensor((2, 48), bytes(99), 8)}), BAD, "of type Q8_0 has shape"),
    "an unknown kind": (File(ARCH, {"one": Tensor((4,), bytes(16), 4)}), NO, "'one' is of type 4, which is not read"),
    "a tensor outside": (File(ARCH, {"one": Tensor((4,), b"", offset=1 << 40)}), BAD, "is truncated: tensor 'one'"),
    "a tensor half outside": (File(ARCH, {"one": Tensor((4,), bytes(8))}), BAD, "is truncated: tensor 'one' ends"),
    "a tensor off the grid": (File(ARCH, {"one": Tensor((4,), bytes(64), offset=4)}), BAD, "which is not aligned"),
    "tensors over each other": (
        File(ARCH, {"one": Tensor((16,), bytes(64)), "two": Tensor((8,), bytes(64), offset=32)}),
        BAD,
        "tensor 'two' overlaps another",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile(tmp_path: Path, case: str) -> None:
    file, error, message = HOSTILE[case]
    path = file.write(tmp_path / "m.gguf")
    tracemalloc.start()
    with pytest.raises(error, match=message) as caught:
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_every_truncation(tmp_path: Path) -> None:
    """At every byte: one error, no other."""
    path = File(ARCH | {"a": ["x", "y"], "b": 1.0}, ONE).write(tmp_path / "m.gguf")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError):
            read_header(path)


def test_every_byte_changed(tmp_path: Path) -> None:
    """No change of a byte leads to anything but a header or an error of this program."""
    path = File(ARCH | {"a": ["x", "y"], "b": 1.0}, ONE).write(tmp_path / "m.gguf")
    whole = path.read_bytes()
    for place in range(len(whole)):
        for byte in (0, 1, 0x7F, 0xFF):
            path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            try:
                read_header(path)
            except QCompileError as error:
                assert "\n" not in str(error)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no plain file"):
        read_header(tmp_path)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_header(tmp_path / "m.gguf")
