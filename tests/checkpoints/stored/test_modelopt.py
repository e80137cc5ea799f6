"""Checkpoints of ModelOpt: NVFP4, and 8-bit floats with factors of several shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qcompile.checkpoints.stored import formats
from qcompile.errors import QCompileError, UnsupportedError, UsageError
from qcompile.formats.registry import weight_format
from tests.checkpoints.stored.test_formats import Tensors

ELEMENTS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
NAME = "a.up_proj.weight"


def made(outputs: int = 24, inputs: int = 48) -> tuple[Tensors, Tensor]:
    """A weight as ModelOpt stores it, and its own product: code * (scale * scale_2), in float32."""
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    codes[codes == 8] = 0
    scales = (torch.rand(outputs, inputs // 16) * 200 + 20).to(torch.float8_e4m3fn)
    scales[0, 0] = 448.0
    codes[0, 0] = 7
    total = torch.rand(()) / 20000 + 1e-5
    value = ELEMENTS[codes.long()] * (scales.float() * total).repeat_interleave(16, 1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    stored = {NAME: packed, f"{NAME}_scale": scales, f"{NAME}_scale_2": total}
    unused = {"a.up_proj.input_scale": torch.ones(()), "a.k_proj.k_scale": torch.ones(())}
    return stored | unused | {"head.weight": torch.ones(4, 4).bfloat16()}, value


def folder(path: Path, tensors: Tensors, algorithm: str = "NVFP4") -> Path:
    path.mkdir()
    settings = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    (path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    save_file(tensors, path / "model.safetensors")
    return path


def test_the_numbers_are_kept(tmp_path: Path) -> None:
    """Within a rounding of ModelOpt's product, and by the format nvfp4 to the bit."""
    format = weight_format("nvfp4")
    for seed in range(8):
        torch.manual_seed(seed)
        tensors, value = made()
        checkpoint = formats.open_checkpoint(folder(tmp_path / str(seed), tensors))
        assert set(checkpoint) == {NAME, "head.weight"}
        result = checkpoint.load(NAME)
        assert ((result - value).abs() <= 2.0**-22 * value.abs()).all()
        assert torch.equal(format.dequantize(format.quantize(result), result.shape[1]), result)


def floats() -> tuple[Tensors, dict[str, Tensor]]:
    """Weights of 8-bit floats with factors of all shapes that ModelOpt writes, and the numbers that they are."""
    stored: Tensors = {}
    value: dict[str, Tensor] = {}
    scales = {
        "whole": torch.rand(()),
        "one": torch.rand(1),
        "outputs": torch.rand(130),
        "blocks": torch.rand(2, 1, 3, 1),
        "powers": torch.randint(115, 125, (130, 10), dtype=torch.uint8),
    }
    for kind, scale in scales.items():
        codes = torch.randn(130, 300).to(torch.float8_e4m3fn)
        numbers = codes.float()
        for i in range(130):
            for j in range(300):
                places = {"whole": (), "one": (0,), "outputs": (i,), "blocks": (i // 128, 0, j // 128, 0)}
                factor = scale[places[kind]] if kind in places else 2.0 ** (float(scale[i, j // 32]) - 127)
                numbers[i, j] *= factor
        stored |= {f"{kind}.weight": codes, f"{kind}.weight_scale": scale}
        value[f"{kind}.weight"] = numbers
    return stored, value


def test_floats_by_the_shape_of_their_factors(tmp_path: Path) -> None:
    """Beside NVFP4 in one checkpoint, as the file beside config.json says that earlier releases wrote."""
    torch.manual_seed(0)
    stored, value = floats()
    path = folder(tmp_path / "model", stored | made()[0])
    algorithms = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "W4A16_NVFP4")
    layers = {algorithm: {"quant_algo": algorithm} for algorithm in algorithms}
    stated = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": ["lm_head"]}
    (path / "config.json").write_text("{}")
    (path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": stated}))
    checkpoint = formats.open_checkpoint(path)
    assert set(checkpoint) == {*value, NAME, "head.weight"}
    for name, numbers in value.items():
        assert torch.equal(checkpoint.load(name), numbers), name


def test_a_file_of_the_cache_alone(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", {"head.weight": torch.ones(4, 4)})
    (path / "config.json").write_text("{}")
    stated = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
    assert set(formats.open_checkpoint(path)) == {"head.weight"}


MIXED = [
    ({}, UsageError, "quantized_layers .* settings of modules"),
    ({"quantized_layers": {"a": 1}}, UsageError, "quantized_layers .* settings of modules"),
    ({"quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}}, UnsupportedError, "quant_algo w4a8_awq"),
    ({"quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 32}}}, UnsupportedError, "group_size 32"),
]


@pytest.mark.parametrize(("more", "error", "message"), MIXED)
def test_mixtures_that_are_refused(more: dict[str, Any], error: type[QCompileError], message: str) -> None:
    with pytest.raises(error, match=message):
        formats.reader({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", **more})


Change = Callable[[Tensors], object]


def put(end: str, value: Tensor) -> Change:
    return lambda tensors: tensors.update({NAME + end: value})


def drop(end: str) -> Change:
    return lambda tensors: tensors.pop(NAME + end)


REFUSED: dict[str, tuple[Change, str, type[QCompileError], str]] = {
    "no codes": (drop(""), "NVFP4", UsageError, f"tensor {NAME} is missing, and {NAME}_scale_2 is there"),
    "codes of words": (put("", torch.ones(24, 6).int()), "NVFP4", UsageError, f"tensor {NAME} is torch.int32"),
    "no scales": (drop("_scale"), "NVFP4", UsageError, f"{NAME}_scale is missing or not float8_e4m3fn"),
    "scales of 32 inputs": (
        put("_scale", torch.ones(24, 2).to(torch.float8_e4m3fn)),
        "NVFP4",
        UsageError,
        rf"{NAME}_scale is missing or not float8_e4m3fn of shape \[24, 3\]",
    ),
    "no scale of the weight": (drop("_scale_2"), "NVFP4", UsageError, f"{NAME}_scale belongs to no weight"),
    "two of them": (put("_scale_2", torch.ones(2)), "NVFP4", UsageError, rf"{NAME}_scale_2 is .*\[2\]"),
    "a scale that is none": (put("_scale_2", torch.tensor(float("nan"))), "NVFP4", UsageError, "holds NaN or inf"),
    "a factor on inputs": (
        lambda t: t.update({"a.up_proj.pre_quant_scale": torch.ones(48)}),
        "NVFP4",
        UsageError,
        "pre_quant_scale belongs to no weight",
    ),
    "floats without a factor": (put("", torch.ones(24, 48).to(torch.float8_e4m3fn)), "FP8", UsageError, "uint8 matrix"),
    "codes without a second scale": (
        lambda t: [t.pop(NAME + end) for end in ("_scale", "_scale_2")],
        "NVFP4",
        UsageError,
        f"tensor {NAME} is torch.uint8, and no {NAME}_scale_2 makes it NVFP4",
    ),
    "factors of another shape": (
        lambda t: t.update({"f.weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "f.weight_scale": torch.ones(3)}),
        "FP8",
        UsageError,
        r"f.weight_scale is torch.float32 of shape \[3\]; floats of shape \[1\]",
    ),
    "no factors": (
        lambda t: t.update({"f.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)}),
        "FP8",
        UsageError,
        "f.weight_scale is missing",
    ),
    "another form": (drop(""), "NVFP4_AWQ", UnsupportedError, "quant_algo nvfp4_awq are not read, only fp8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    change, algorithm, error, message = REFUSED[case]
    tensors, _ = made()
    change(tensors)
    with pytest.raises(error, match=message) as caught:
        checkpoint = formats.open_checkpoint(folder(tmp_path / "model", tensors, algorithm))
        for name in checkpoint:
            checkpoint.load(name)
    assert "\n" not in str(caught.value)
