"""Safetensors reading: what is well formed is mapped exactly, what is not is refused in one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qcompile.checkpoints.checkpoint import INDEX, SINGLE, Checkpoint, read_header
from qcompile.errors import QCompileError, UnsupportedError, UsageError


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file of `header` (JSON, or bytes as they are), with any stated length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "half": torch.randn(2, 2).half(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }
    save_file(tensors, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint) == set(tensors)
    for name, value in tensors.items():
        assert torch.equal(checkpoint.raw(name), value)
        assert checkpoint.load(name).dtype == torch.float32
        assert torch.equal(checkpoint.load(name), value.float())


def test_loads_keep_nothing(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.load("a").zero_()
    assert torch.equal(checkpoint.load("a"), torch.ones(4))


DAMAGE = {
    "holds no header": (b"\x01\x02", "truncated"),
    "header longer than the file": (struct.pack("<Q", 1000) + b"{}", "claims 1000 bytes"),
    "huge header length": (struct.pack("<Q", 2**63) + b"{}", "claims 9223372036854775808 bytes"),
    "header is not JSON": (struct.pack("<Q", 4) + b"{abc", "damaged header"),
    "header is not UTF-8": (struct.pack("<Q", 4) + b"\xff\xfe{}", "damaged header"),
    "header is a list": (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
    "header nests too deeply": (struct.pack("<Q", 200_000) + b"[" * 200_000, "damaged header"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_header(tmp_path: Path, case: str) -> None:
    data, message = DAMAGE[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=message):
        read_header(path)


HEADERS = {
    "ends beyond the file": ({"a": entry(0, 400)}, "truncated: tensor a ends"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, "tensor b overlaps"),
    "same bytes twice": ({"a": entry(0, 12), "b": entry(0, 12)}, "tensor b overlaps"),
    "hole": ({"a": entry(0, 4), "b": entry(8, 12)}, "tensor b leaves a hole"),
    "hole at the start": ({"a": entry(4, 12)}, "tensor a leaves a hole"),
    "bytes of nobody": ({"a": entry(0, 8)}, "4 bytes belong to no tensor"),
    "shape and bytes differ": ({"a": entry(0, 12, [4])}, "needs 16 bytes, its data_offsets give 12"),
    "ends before it begins": ({"a": entry(12, 0, [3])}, "needs 12 bytes, its data_offsets give -12"),
    "negative offset": ({"a": entry(-4, 8, [3])}, "no valid shape and data_offsets"),
    "negative size": ({"a": entry(0, 12, [-3])}, "no valid shape and data_offsets"),
    "fractional size": ({"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 12]}}, "no valid shape"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [3]}}, "no valid shape and data_offsets"),
    "not an entry": ({"a": 3}, "no valid shape and data_offsets"),
    "overflowing shape": ({"a": entry(0, 12, [2**62, 4])}, "its data_offsets give 12"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_header_that_contradicts_its_file(tmp_path: Path, case: str) -> None:
    header, message = HEADERS[case]
    with pytest.raises(UsageError, match=message):
        read_header(write(tmp_path / "x.safetensors", header, bytes(12)))


def test_name_twice(tmp_path: Path) -> None:
    header = b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}, "a": {}}'
    with pytest.raises(UsageError, match="a name appears twice"):
        read_header(write(tmp_path / "x.safetensors", header, bytes(12)))


@pytest.mark.parametrize("dtype", ["F4", ["F32"], {"F32": 1}, None, 7])
def test_unknown_dtype(dtype: Any, tmp_path: Path) -> None:
    header = {"a": entry(0, 12) | {"dtype": dtype}}
    with pytest.raises(UnsupportedError, match=r"tensor a has dtype .*, which is not read"):
        read_header(write(tmp_path / "x.safetensors", header, bytes(12)))


def sharded(tmp_path: Path, table: dict[str, str]) -> Path:
    save_file({"a": torch.ones(3)}, tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": table}))
    return tmp_path


SHARDS: dict[str, tuple[str, type[QCompileError], str]] = {
    "missing": ("model-00002-of-00002.safetensors", UsageError, "model-00002-of-00002.safetensors is missing"),
    "parent": ("../outside.safetensors", UsageError, "not a plain path inside"),
    "hidden parent": ("sub/../../outside.safetensors", UsageError, "not a plain path inside"),
    "absolute": ("/etc/passwd", UsageError, "not a plain path inside"),
    "backslash": ("..\\outside.safetensors", UsageError, "not a plain path inside"),
    "drive": ("C:outside.safetensors", UsageError, "not a plain path inside"),
    "empty": ("", UsageError, "not a plain path inside"),
    "pickle": ("pytorch_model.bin", UnsupportedError, "only .safetensors shards are read"),
}


@pytest.mark.parametrize("case", SHARDS)
def test_shard_names(tmp_path: Path, case: str) -> None:
    name, error, message = SHARDS[case]
    sharded(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": name})
    with pytest.raises(error, match=message):
        Checkpoint(tmp_path)


def test_tensor_missing_from_its_shard(tmp_path: Path) -> None:
    sharded(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"})
    with pytest.raises(UsageError, match="tensor b is missing"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_damaged_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(UsageError, match=INDEX):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_loaded(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not even looked at")
    with pytest.raises(UnsupportedError, match="pickled weights"):
        Checkpoint(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no model\.safetensors"):
        Checkpoint(tmp_path)


def test_truncated_after_opening(tmp_path: Path) -> None:
    save_file({"a": torch.ones(5000)}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:100])
    with pytest.raises(UsageError, match="truncated while it was read, at tensor a"):
        checkpoint.load("a")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_must_be_finite(tmp_path: Path, value: float) -> None:
    data = torch.ones(64, 3)
    data[17, 1] = value
    save_file({"layer.weight": data}, tmp_path / SINGLE)
    with pytest.raises(UsageError, match=r"weight layer\.weight holds NaN or infinite"):
        Checkpoint(tmp_path).load("layer.weight")


def test_a_sum_that_overflows_is_not_a_damaged_weight(tmp_path: Path) -> None:
    save_file({"a": torch.full((8,), 3e38)}, tmp_path / SINGLE)
    assert Checkpoint(tmp_path).load("a")[0] == torch.tensor(3e38)


def test_require(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3), "n": torch.ones(2, dtype=torch.int32)}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.require("a", (2, 3))
    with pytest.raises(UsageError, match=r"tensor a has shape \[2, 3\], the model needs \[3, 2\]"):
        checkpoint.require("a", (3, 2))
    with pytest.raises(UsageError, match="tensor b is missing"):
        checkpoint.require("b", (1,))
    with pytest.raises(UnsupportedError, match="tensor n is of integer type"):
        checkpoint.require("n", (2,))
