"""Checkpoints of torchao: the numbers that the tool itself makes of its files, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from qcompile.checkpoints.checkpoint import Checkpoint
from qcompile.checkpoints.stored import formats
from qcompile.errors import QCompileError, UnsupportedError, UsageError
from tests.support.make_bitsandbytes import FILES, digest

STORED = FILES / "torchao.safetensors"
Tensors = dict[str, Tensor]
Texts = dict[str, str]


def folder(path: Path, tensors: Tensors, texts: Texts) -> Path:
    path.mkdir()
    settings = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
    (path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    save_file(tensors, path / "model.safetensors", texts)
    return path


def written() -> tuple[Tensors, Texts]:
    with safe_open(STORED, "pt") as file:
        return load_file(STORED), dict(file.metadata())


def test_the_numbers_are_those_of_torchao(tmp_path: Path) -> None:
    """Of a file that it wrote: 8 bits by row and by group, 4 and 3 bits with zero points, and 8-bit floats."""
    checkpoint = formats.open_checkpoint(folder(tmp_path / "model", *written()))
    expected = json.loads((FILES / "torchao.json").read_text())
    assert set(checkpoint) == {*expected, "norm.weight"}
    for name in expected:
        assert checkpoint.in_few_bits(name)
        assert digest(checkpoint.load(name)) == expected[name], name


def test_shards_have_texts_of_their_own(tmp_path: Path) -> None:
    tensors, texts = written()
    path = folder(tmp_path / "model", *written())
    (path / "model.safetensors").unlink()
    table = {}
    for number, half in enumerate((True, False)):
        part = {name: value for name, value in tensors.items() if name.startswith("int8") == half}
        said = {name: text for name, text in texts.items() if name.startswith("int8") == half}
        table |= dict.fromkeys(part, f"part{number}.safetensors")
        save_file(part, path / f"part{number}.safetensors", said)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    expected = json.loads((FILES / "torchao.json").read_text())
    checkpoint = formats.open_checkpoint(path)
    assert all(digest(checkpoint.load(name)) == expected[name] for name in expected)


def described(kind: str, block: list[int], *parts: str) -> str:
    return json.dumps({"_type": kind, "_data": {"block_size": block}, "_tensor_data_names": list(parts)})


def test_two_codes_a_byte(tmp_path: Path) -> None:
    """By the bits, as torchao needs a GPU to make them: code * scale + zero."""
    torch.manual_seed(0)
    codes, scales, zeros = torch.randint(-8, 8, (6, 64)), torch.rand(2, 6).bfloat16(), torch.randn(2, 6).bfloat16()
    value = torch.empty(6, 64)
    for row in range(6):
        for i in range(64):
            value[row, i] = float(codes[row, i]) * scales[i // 32, row].float() + zeros[i // 32, row].float()
    packed = ((codes[:, ::2] & 15) | (codes[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    tensors = {"up._weight_qdata": packed, "up._weight_scale": scales, "up._weight_zero_point": zeros}
    texts = {"up.weight": described("Int4Tensor", [1, 32], "qdata", "scale", "zero_point"), "tensor_names": "[]"}
    checkpoint = formats.open_checkpoint(folder(tmp_path / "model", tensors, texts))
    assert torch.equal(checkpoint.load("up.weight"), value)


def test_blocks_of_experts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-9, 9, (3, 8, 6)).to(torch.int8)
    scales, zeros = torch.rand(3, 2, 3), torch.randint(-3, 3, (3, 2, 3)).to(torch.int8)
    value = torch.empty(3, 8, 6)
    for e, n, k in torch.cartesian_prod(*map(torch.arange, (3, 8, 6))).tolist():
        place = e, n // 4, k // 2
        value[e, n, k] = (float(codes[e, n, k]) - float(zeros[place])) * scales[place]
    tensors = {"m._experts_qdata": codes, "m._experts_scale": scales, "m._experts_zero_point": zeros}
    texts = {"m.experts": described("Int8Tensor", [1, 4, 2], "qdata", "scale", "zero_point")}
    checkpoint = formats.open_checkpoint(folder(tmp_path / "model", tensors, texts))
    assert torch.equal(checkpoint.load("m.experts"), value)


NAME = "int8.weight"
Change = Callable[[Tensors, Texts], object]


def say(**more: Any) -> Change:
    def change(tensors: Tensors, texts: Texts) -> None:
        texts[NAME] = json.dumps(json.loads(texts[NAME]) | more)

    return change


def drop(end: str) -> Change:
    return lambda tensors, texts: tensors.pop(f"int8._weight_{end}")


REFUSED: dict[str, tuple[Change, type[QCompileError], str]] = {
    "no texts": (lambda tensors, texts: texts.clear(), UsageError, "describe no weight"),
    "no description": (lambda tensors, texts: texts.update({NAME: "{"}), UsageError, "no description"),
    "a list": (lambda tensors, texts: texts.update({NAME: "[1]"}), UsageError, "no description"),
    "an order of a GPU": (say(_type="Int4TilePackedTo4dTensor"), UnsupportedError, "Int4TilePackedTo4dTensor"),
    "a factor on inputs": (say(_tensor_data_names=["qdata", "act_pre_scale"]), UnsupportedError, "act_pre_scale"),
    "a block that does not divide": (say(_data={"block_size": [1, 63]}), UsageError, "block_size"),
    "a block of 0": (say(_data={"block_size": [0, 64]}), UsageError, "block_size"),
    "no block": (say(_data={}), UsageError, "block_size"),
    "no codes": (drop("qdata"), UsageError, "_weight_qdata is missing"),
    "no scale": (drop("scale"), UsageError, "_weight_scale is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    change, error, text = REFUSED[case]
    tensors, texts = written()
    change(tensors, texts)
    with pytest.raises(error, match=text):
        formats.open_checkpoint(folder(tmp_path / "model", tensors, texts))


def test_texts_that_are_no_texts(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"a": 1}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UsageError, match="no texts"):
        Checkpoint(tmp_path).metadata()
