"""Checkpoints of quanto: the numbers that the tool itself makes of its files, to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qcompile import pipeline
from qcompile.checkpoints.stored import formats
from qcompile.errors import QCompileError, UnsupportedError, UsageError
from qcompile.formats.registry import weight_format
from tests.support.make_bitsandbytes import FILES, digest
from tests.support.make_quanto import WAYS

STORED = FILES / "quanto.safetensors"
FACTS: dict[str, Any] = json.loads((FILES / "quanto.json").read_text())
Tensors = dict[str, Tensor]
Map = dict[str, Any]


def folder(path: Path, tensors: Tensors, table: Map) -> Path:
    path.mkdir(exist_ok=True)
    if not (path / "config.json").exists():
        (path / "config.json").write_text("{}")
    (path / "quanto_qmap.json").write_text(json.dumps(table))
    save_file(tensors, path / "model.safetensors")
    return path


def test_the_numbers_are_those_of_quanto(tmp_path: Path) -> None:
    """Of a file that it wrote: bytes, floats, and codes of 4 and 2 bits, in groups that the model says are a row."""
    checkpoint = formats.open_checkpoint(folder(tmp_path / "model", load_file(STORED), FACTS["map"]))
    assert set(checkpoint) == set(FACTS["sha256"])
    for name, (_, _, *sides) in WAYS.items():
        checkpoint.require(f"{name}.weight", tuple(sides))
        value = checkpoint.load(f"{name}.weight")
        assert list(value.shape) == sides and checkpoint.in_few_bits(f"{name}.weight")
        assert digest(value) == FACTS["sha256"][f"{name}.weight"], name


def test_modules_that_are_called_otherwise_in_the_map(tmp_path: Path) -> None:
    """As transformers saves GPT-NeoX: its head is `embed_out` in the files, `lm_head` in the model and in the map."""
    table = {("another" if name == "rows" else name): value for name, value in FACTS["map"].items()}
    checkpoint = formats.open_checkpoint(folder(tmp_path / "model", load_file(STORED), table))
    assert digest(checkpoint.load("rows.weight")) == FACTS["sha256"]["rows.weight"]
    table["more"] = table["another"]
    with pytest.raises(UsageError, match=r"tensor another.weight._data._data is missing"):
        formats.open_checkpoint(folder(tmp_path / "two", load_file(STORED), table))


def test_w8a8_keeps_bytes(tmp_path: Path) -> None:
    """quanto's scales put the largest number of a row at 127, which is where w8_sym_channel puts it."""
    checkpoint = formats.open_checkpoint(folder(tmp_path / "model", load_file(STORED), FACTS["map"]))
    value = checkpoint.load("bytes.weight")
    rounding = weight_format("w8_sym_channel")
    assert torch.equal(rounding.dequantize(rounding.quantize(value), value.shape[1]), value)


def change(name: str, made: Callable[[Tensor], Tensor]) -> Callable[[Tensors, Map], object]:
    return lambda tensors, table: tensors.update({name: made(tensors[name]).contiguous()})


def drop(name: str) -> Callable[[Tensors, Map], object]:
    return lambda tensors, table: tensors.pop(name)


def said(module: str, kind: Any) -> Callable[[Tensors, Map], object]:
    return lambda tensors, table: table.update({module: {"weights": kind}})


CODES, SCALE = "odd_groups.weight._data._data", "odd_groups.weight._scale"
REFUSED: dict[str, tuple[Callable[[Tensors, Map], object], type[QCompileError], str]] = {
    "another type": (said("bytes", "qfloat8_e4m3fnuz"), UnsupportedError, "weights of 'bytes' are 'qfloat8_e4m3fnuz'"),
    "a type in a list": (said("bytes", ["qint8"]), UnsupportedError, r"weights of 'bytes' are \['qint8'\]; qint8, "),
    "a name in two lines": (said("a\nb", "qint8"), UsageError, r"names a module 'a\\nb', as no tensor is called"),
    "a long name": (said("a" * 9999, "qint8"), UsageError, r"names a module 'a{1,60}\.\.\.a+', as"),
    "no types": (lambda tensors, table: table.update(bytes=5), UnsupportedError, "are stated by 5; qint8, "),
    "a wrong type": (said("bytes", "qint4"), UsageError, r"bytes.weight._data._data is missing"),
    "no codes": (drop(CODES), UsageError, f"{CODES} is missing"),
    "no scales": (drop("bytes.weight._scale"), UsageError, "bytes.weight._scale is missing"),
    "no shift": (drop("rows.weight._shift"), UsageError, "rows.weight._shift is missing"),
    "a shift of whole numbers": (change("rows.weight._shift", lambda t: t.char()), UsageError, "rows.weight._shift"),
    "too few groups": (change(SCALE, lambda t: t[:2]), UsageError, "codes of 2 groups"),
    "other scales": (change("bytes.weight._scale", lambda t: t[:3]), UsageError, "bytes.weight._scale"),
    "a module that is not said": (lambda tensors, table: table.pop("rows"), UsageError, "belongs to no weight"),
    "no shape that groups make": (lambda tensors, table: None, UsageError, "the model needs .2, 257"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    damage, error, text = REFUSED[case]
    tensors, table = load_file(STORED), json.loads(json.dumps(FACTS["map"]))
    damage(tensors, table)
    with pytest.raises(error, match=text):
        formats.open_checkpoint(folder(tmp_path / "model", tensors, table)).require("odd_groups.weight", (2, 257))


def test_a_model_is_built_twice_from_groups(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The second time from its kept trace, which knows the shapes that groups make."""
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    whole = tensors.pop(name)
    codes = torch.arange(whole.numel()).view(-1, 32) % 16
    half = len(codes) // 2
    tensors[f"{name}._data._data"] = (codes[:half] | codes[half:] << 4).to(torch.uint8)
    tensors |= {
        f"{name}._scale": torch.full((len(codes), 1), 0.01),
        f"{name}._shift": torch.full((len(codes), 1), 0.07),
    }
    folder(model, tensors, {name.removesuffix(".weight"): {"weights": "qint4", "activations": "none"}})
    expected = (codes * torch.tensor(0.01) - torch.tensor(0.07)).view(whole.shape)
    for _ in range(2):
        store = pipeline.plan(model, recipe="f32").graphs[0].weights
        read = next(stored for stored in store.entries if stored.endswith("down_proj.weight"))
        assert torch.equal(store[read], expected)
