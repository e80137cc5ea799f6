"""Checkpoints of AutoRound: tensors of other tools, under a configuration of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qcompile.checkpoints.stored import formats
from qcompile.errors import QCompileError, UnsupportedError, UsageError
from tests.checkpoints.stored.test_formats import Tensors, rewritten
from tests.checkpoints.stored.test_groups import Written, awq, compressed, gptq, mxfp8, nvfp4

GPTQ, AWQ, COMPRESSED = "auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:llm_compressor"


def said(packing: str, **more: Any) -> dict[str, Any]:
    """A quantization_config as AutoRound writes it."""
    usual = {"bits": 4, "group_size": 32, "sym": False, "data_type": "int", "iters": 200, "block_name_to_quantize": "a"}
    return {"quant_method": "auto-round", "packing_format": packing, **usual, **more}


def weights() -> Tensors:
    names = [f"model.layers.{layer}.{name}_proj.weight" for layer in (1, 11) for name in ("up", "down", "o")]
    return {name: torch.randn(32, 64) for name in names} | {"lm_head.weight": torch.randn(8, 64)}


def by_module(tensors: Tensors) -> Written:
    """Down projections of 3 bits by a pattern, but one of 8 by its name; output projections as they are."""
    down = {name: value for name, value in tensors.items() if "11.down" in name}
    one = {name: value for name, value in tensors.items() if "1.down" in name and name not in down}
    others = {name: value for name, value in tensors.items() if "up_proj" in name}
    stored, plain = dict(tensors), dict(tensors)
    ways = ((down, {"size": 16, "bits": 3, "symmetric": True}), (one, {"size": 64, "bits": 8}), (others, {}))
    for part, settings in ways:
        written, numbers, _ = gptq(part, index=False, **settings)
        stored = {name: value for name, value in stored.items() if name not in part} | written
        plain |= numbers
    return stored, plain, {}


MODULES = {
    r".*down_proj.*": {"bits": 3, "group_size": 16, "sym": True, "act_bits": 16},
    "model.layers.1.down_proj": {"bits": 8, "group_size": 64, "data_type": "int"},
    r"layers\.\d+\.o_proj": {"bits": 16, "data_type": "float"},
    "lm_head": {"bits": 16, "data_type": "float"},
}
WAYS = {
    "gptq": (lambda t: gptq(t, index=False), said(GPTQ)),
    "gptq, symmetric": (lambda t: gptq(t, index=False, symmetric=True), said(GPTQ, sym=True)),
    "zeros as they are": (lambda t: gptq(t, index=False, v2=True), said("auto_round")),
    "the same by another name": (lambda t: gptq(t, index=False, v2=True), said("auto_round:gptqmodel")),
    "awq": (awq, said(AWQ)),
    "awq, symmetric": (lambda t: awq(t, symmetric=True), said(AWQ, sym=True)),
    "by module": (by_module, said(GPTQ, extra_config=MODULES)),
    "mxfp8": (mxfp8, said(COMPRESSED, bits=8, data_type="mx_fp")),
    "nvfp4": (nvfp4, said(COMPRESSED, group_size=16, data_type="nv_fp", extra_config={"lm_head": {"bits": 16}})),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers(tmp_path: Path, way: str) -> None:
    torch.manual_seed(0)
    write, settings = WAYS[way]
    stored, plain, _ = write(weights())
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    checkpoint = formats.open_checkpoint(rewritten(tmp_path / "source", tmp_path / "model", stored, settings))
    assert set(checkpoint) == set(plain)
    assert sum(checkpoint.in_few_bits(name) for name in checkpoint) >= 4
    for name in plain:
        assert torch.equal(checkpoint.load(name), plain[name]), name


NO, BAD = UnsupportedError, UsageError
REFUSED: dict[str, tuple[dict[str, Any], type[QCompileError], str]] = {
    "another packing": (said("auto_round:fp8_static"), NO, "auto-round weights with packing_format auto_round:fp8_sta"),
    "no packing": ({"quant_method": "auto-round", "bits": 4}, NO, "packing_format None are not read"),
    "floats as gptq": (said(GPTQ, data_type="fp"), NO, "data_type fp are not read, only int"),
    "awq of an unknown symmetry": (said(AWQ, sym=None), NO, "sym None"),
    "rotated": (said(GPTQ, rotation_config={"a": 1}), NO, "auto-round weights with rotation_config are not read"),
    "bits of gptq": (said(GPTQ, bits=5), NO, "bits 5 are not read"),
    "modules in a list": (said(GPTQ, extra_config=["a"]), BAD, "extra_config .* settings of modules belong there"),
    "a module of a number": (said(GPTQ, extra_config={"a": 8}), BAD, "'a' has '?8'?, and no settings"),
    "a module with more": (said(GPTQ, extra_config={"a": {"super_bits": 6}}), NO, "'super_bits' for 'a' are not read"),
    "a module of floats": (said(GPTQ, extra_config={"a": {"bits": 8, "data_type": "fp"}}), NO, "data_type fp"),
    "a slow pattern": (said(GPTQ, extra_config={"(a+)+b": {"bits": 8}}), NO, "repeats a group"),
    "awq that differs": (said(AWQ, extra_config={"a": {"bits": 8}}), NO, "not read where modules differ"),
    "floats that differ": (
        said(COMPRESSED, data_type="mx_fp", extra_config={"a": {"bits": 8}}),
        NO,
        "not read where modules differ",
    ),
    "floats of 6 bits": (said(COMPRESSED, bits=6, data_type="mx_fp"), NO, "'mx_fp' in '?6'? bits"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    settings, error, message = REFUSED[case]
    with pytest.raises(error, match=message) as caught:
        formats.reader(settings)
    assert "\n" not in str(caught.value)


def test_a_module_that_is_said_to_be_whole(tmp_path: Path) -> None:
    """Has no codes: the configuration contradicts the tensors."""
    stored, _, _ = gptq(weights(), index=False)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    settings = said(GPTQ, extra_config={"model.layers.1.up_proj": {"bits": 16}})
    with pytest.raises(UsageError, match=r"module model.layers.1.up_proj has codes, and dynamic leaves it as it is"):
        formats.open_checkpoint(rewritten(tmp_path / "source", tmp_path / "model", stored, settings))


def test_packed_in_words_is_another_tool(tmp_path: Path) -> None:
    stored, _, _ = compressed(weights())
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    path = rewritten(tmp_path / "source", tmp_path / "model", stored, said(COMPRESSED, data_type="mx_fp"))
    with pytest.raises(UsageError, match=r"_packed is torch.int32 .* a uint8 matrix is needed"):
        formats.open_checkpoint(path)
