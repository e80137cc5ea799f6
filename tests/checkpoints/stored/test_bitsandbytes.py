"""Checkpoints of bitsandbytes: the numbers that the tool itself makes of its files, to the bit."""

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
from qcompile.checkpoints.stored import bitsandbytes, formats
from qcompile.cli import doctor
from qcompile.errors import QCompileError, UnsupportedError, UsageError
from qcompile.formats.registry import weight_format
from tests.checkpoints.stored.test_formats import Tensors, rewritten, saved
from tests.support.make_bitsandbytes import FILES, digest

SETTINGS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
STATE = ".quant_state.bitsandbytes__"
STORED = FILES / "bitsandbytes.safetensors"


def folder(path: Path, tensors: Tensors, **settings: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"quantization_config": SETTINGS | settings}))
    save_file(tensors, path / "model.safetensors")
    return path


def test_the_numbers_are_those_of_bitsandbytes(tmp_path: Path) -> None:
    """Of a file that it wrote: nf4 and fp4 with and without double quantization, and LLM.int8()."""
    checkpoint = formats.open_checkpoint(folder(tmp_path / "model", load_file(STORED)))
    expected = json.loads((FILES / "bitsandbytes.json").read_text())
    assert {name for name in checkpoint if name.endswith(".weight")} == set(expected)
    for name in expected:
        assert digest(checkpoint.load(name)) == expected[name], name


def test_bytes_may_be_stored_as_another_type(tmp_path: Path) -> None:
    tensors = load_file(STORED)
    tensors["nf4.weight"] = tensors["nf4.weight"].flatten().view(torch.bfloat16)[:, None]
    path = folder(tmp_path / "model", tensors, bnb_4bit_quant_storage="bfloat16")
    assert (
        digest(formats.open_checkpoint(path).load("nf4.weight"))
        == json.loads((FILES / "bitsandbytes.json").read_text())["nf4.weight"]
    )


# ---- models ----------------------------------------------------------------------------------------


def four_bits(value: Tensor, block: int = 100) -> tuple[Tensors, Tensor]:
    """Random codes of the shape of `value` as nf4, in blocks that span rows, and their numbers."""
    values = load_file(STORED)["nf4.weight.quant_map"]
    codes = torch.randint(0, 16, (value.numel(),), dtype=torch.uint8)
    largest = torch.rand(-(-len(codes) // block)) / 10
    numbers = torch.tensor([values[code] * largest[i // block] for i, code in enumerate(codes.tolist())])
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(value.shape)}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    packed = (codes[::2] << 4 | codes[1::2])[:, None]
    return {"": packed, ".absmax": largest, ".quant_map": values, f"{STATE}nf4": text}, numbers.view(value.shape)


def eight_bits(value: Tensor) -> tuple[Tensors, Tensor]:
    """Random codes of the shape of `value` in 8 bits, and their numbers."""
    codes = torch.randint(-127, 128, value.shape).to(torch.int8)
    codes[:, 0] = 127
    largest = torch.rand(len(value)) / 10
    return {"": codes, "/SCB": largest}, codes.float() * largest[:, None] * bitsandbytes.OF_127


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensors]]:
    """By the bits: a checkpoint, and its projections as numbers."""
    path = tmp_path_factory.mktemp("models")
    tensors = saved("llama", path / "source")
    torch.manual_seed(1)
    made = {}
    for kind, parts in (("nf4", four_bits), ("int8", eight_bits)):
        stored, plain = dict(tensors), {}
        for name in [name for name in tensors if "proj" in name]:
            del stored[name]
            pieces, plain[name] = parts(tensors[name])
            named = {end: name.removesuffix("weight") + end[1:] if end[:1] == "/" else name + end for end in pieces}
            stored |= {named[end]: piece for end, piece in pieces.items()}
        settings = SETTINGS | {"load_in_4bit": kind == "nf4", "load_in_8bit": kind == "int8"}
        made[kind] = rewritten(path / "source", path / kind, stored, settings), plain
    return made


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_models(models: dict[str, tuple[Path, Tensors]], kind: str) -> None:
    """Blocks span rows, and the last one is short."""
    path, plain = models[kind]
    checkpoint = formats.open_checkpoint(path)
    assert len(plain) == 7
    assert all(torch.equal(checkpoint.load(name), plain[name]) for name in plain)
    assert not [name for name in checkpoint if name.endswith(bitsandbytes.REST) or STATE in name]


def test_eight_bits_are_kept_but_for_the_last_bits_of_scales(models: dict[str, tuple[Path, Tensors]]) -> None:
    graph = pipeline.plan(models["int8"][0], recipe="w8a8").graphs[-1]
    kept = list(graph.calls("quantize_weight"))[:-1]  # all but the head, which is stored in floats
    assert len(kept) >= 4
    for node in kept:
        w = graph.evaluate(node.all_input_nodes[0])
        value = weight_format("w8_sym_channel").dequantize(graph.evaluate(node), w.shape[1])
        assert ((value - w).abs() <= 3e-7 * w.abs()).all()


def test_doctor_needs_no_weights(models: dict[str, tuple[Path, Tensors]], tmp_path: Path) -> None:
    shutil.copytree(models["nf4"][0], tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert doctor.examine(str(tmp_path / "model"), "cpu-avx2", "w8a8", {}, None).exportable


# ---- what is refused -------------------------------------------------------------------------------

Change = Callable[[Tensors], object]


def put(name: str, value: Tensor) -> Change:
    return lambda tensors: tensors.update({name: value})


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def say(**more: Any) -> Change:
    """Change what is said of nf4_double."""

    def change(tensors: Tensors) -> None:
        name = f"nf4_double.weight{STATE}nf4"
        state = json.loads(bytes(tensors[name].tolist())) | more
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


def words(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


NF4 = f"nf4.weight{STATE}nf4"
REFUSED: dict[str, tuple[Change, type[QCompileError], str]] = {
    "no state": (drop(NF4), UsageError, r"nf4.weight.absmax belongs to no weight"),
    "codes alone": (put("more.weight", torch.zeros(4, 1).byte()), UsageError, r"more.weight is torch.uint8, and no"),
    "no largest values": (drop("nf4.weight.absmax"), UsageError, "nf4.weight.absmax is missing"),
    "no values": (drop("nf4.weight.quant_map"), UsageError, "nf4.weight.quant_map is missing"),
    "no codes": (drop("nf4.weight"), UsageError, r"tensor nf4.weight is missing; .* \[16, 64\]"),
    "few codes": (put("nf4.weight", torch.zeros(8, 1).byte()), UsageError, "tensor nf4.weight is 8 bytes; .*two codes"),
    "no nested values": (drop("nf4_double.weight.nested_quant_map"), UsageError, "nested_quant_map is missing"),
    "few nested": (
        put("nf4_double.weight.nested_absmax", torch.ones(1)),
        UsageError,
        r"nested_absmax is .*\[1\]; .*\[2\]",
    ),
    "another kind": (put(f"a.weight{STATE}int4", words("{}")), UnsupportedError, "quant_type int4 are not read"),
    "no JSON": (put(NF4, words("{")), UsageError, f"tensor {NF4} is no description of a weight: JSONDecodeError"),
    "a list": (put(NF4, words("[]")), UsageError, "is no description of a weight: TypeError"),
    "a state in floats": (put(NF4, torch.ones(4)), UsageError, "JSON in bytes belongs there"),
    "a long state": (put(NF4, torch.zeros(5000).byte()), UsageError, "JSON in bytes belongs there"),
    "three sides": (say(shape=[2, 2, 2]), UnsupportedError, r"says shape \[2, 2, 2\]; matrices are read"),
    "a side below 0": (say(shape=[-260, -64]), UsageError, r"says shape \[-260, -64\]"),
    "blocks of nothing": (say(blocksize=0), UsageError, "blocksize 0"),
    "blocks of text": (say(blocksize="64"), UsageError, "blocksize 64"),
    "an offset of none": (say(nested_offset=float("nan")), UsageError, "nf4_double.weight holds NaN"),
    "int8 in tiles": (put("int8.weight_format", torch.tensor(2).byte()), UnsupportedError, "order of a GPU's tiles"),
    "int8 without scales": (drop("int8.SCB"), UsageError, "int8.weight_format belongs to no weight"),
    "int8 of another height": (put("int8.SCB", torch.ones(3)), UsageError, r"int8.SCB is .*\[3\]; .*\[16\]"),
    "int8 in floats": (put("int8.weight", torch.ones(16, 64)), UsageError, "a matrix of torch.int8 belongs there"),
    "int8 of none": (put("int8.SCB", torch.full((16,), float("inf"))), UsageError, "int8.weight holds NaN or inf"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    change, error, message = REFUSED[case]
    tensors = load_file(STORED)
    change(tensors)
    with pytest.raises(error, match=message) as caught:
        checkpoint = formats.open_checkpoint(folder(tmp_path / "model", tensors))
        for name in checkpoint:
            checkpoint.load(name)
    assert "\n" not in str(caught.value)


def test_an_unknown_type_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedError, match="bnb_4bit_quant_type int4 are not read, only nf4 or fp4"):
        formats.reader(SETTINGS | {"bnb_4bit_quant_type": "int4"})
