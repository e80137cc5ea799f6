"""Checkpoints of HQQ: the numbers that the tool itself makes of its files, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qcompile.checkpoints.stored import formats
from qcompile.errors import QCompileError, UnsupportedError, UsageError
from tests.support.make_bitsandbytes import FILES, digest

STORED = FILES / "hqq.safetensors"
Tensors = dict[str, Tensor]


def folder(path: Path, tensors: Tensors) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "hqq"}}))
    save_file(tensors, path / "model.safetensors")
    return path


def test_the_numbers_are_those_of_hqq(tmp_path: Path) -> None:
    """Of a file that it wrote: all numbers of bits, groups along both axes, and bytes that are viewed as floats."""
    checkpoint = formats.open_checkpoint(folder(tmp_path / "model", load_file(STORED)))
    expected = json.loads((FILES / "hqq.json").read_text())
    assert set(checkpoint) == set(expected) and len(expected) == 7
    for name in expected:
        assert checkpoint.in_few_bits(name)
        assert digest(checkpoint.load(name)) == expected[name], name


def test_a_configuration_that_says_nothing(tmp_path: Path) -> None:
    """As hqq's own functions save a model: the tensors say how they are stored."""
    path = folder(tmp_path / "model", load_file(STORED))
    (path / "config.json").write_text("{}")
    checkpoint = formats.open_checkpoint(path)
    assert digest(checkpoint.load("four.weight")) == json.loads((FILES / "hqq.json").read_text())["four.weight"]


def put(end: str, *numbers: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"four.{end}": torch.tensor(numbers, dtype=torch.int32)})


def drop(end: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"four.{end}")


REFUSED: dict[str, tuple[Callable[[Tensors], object], type[QCompileError], str]] = {
    "five bits": (put("nbits", 5), UnsupportedError, "5 bits"),
    "another shape": (put("shape", 8, 32), UsageError, "W_q has 256 bytes"),
    "three sides": (put("shape", 2, 4, 64), UnsupportedError, "shape"),
    "an axis that is none": (put("axis", 2), UsageError, "axis 2"),
    "a group that does not divide": (put("group_size", 63), UsageError, "group_size 63"),
    "a group of none": (put("group_size", 0), UsageError, "group_size 0"),
    "another group": (put("group_size", 64), UsageError, "four.scale"),
    "rounded scales": (put("quant_scale", 1), UnsupportedError, "quant_scale"),
    "two axes": (put("axis", 1, 1), UsageError, "holds 2 numbers"),
    "no bits": (drop("nbits"), UsageError, "four.nbits is missing"),
    "no zeros": (drop("zero"), UsageError, "four.zero"),
    "no codes": (drop("W_q"), UsageError, "belongs to no weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    change, error, text = REFUSED[case]
    tensors = load_file(STORED)
    change(tensors)
    with pytest.raises(error, match=text):
        formats.open_checkpoint(folder(tmp_path / "model", tensors))
