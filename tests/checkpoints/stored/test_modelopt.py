"""Checkpoints of ModelOpt in NVFP4."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

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
    "another form": (drop(""), "NVFP4_AWQ", UnsupportedError, "quant_algo nvfp4_awq are not read, only fp8 or nvfp4"),
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
