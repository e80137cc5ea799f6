"""Checkpoints of GPTQ in the order of the Marlin kernel: the weights are those of the numbers written out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qcompile
from qcompile import pipeline
from qcompile.checkpoints.stored import formats
from qcompile.cli import doctor
from qcompile.errors import QCompileError, UnsupportedError, UsageError
from qcompile.formats.registry import weight_format
from tests.checkpoints.stored.test_formats import SETTINGS, Tensors, rewritten
from tests.support.cases import first

OF_SEVERAL = [first + 8 * second for first in range(8) for second in range(8)]
"""For each of 64 stored scales, the output that it belongs to, if there are several groups."""
OF_ONE = [2 * first + second for first in range(4) for second in (0, 1, 8, 9, 16, 17, 24, 25)]
"""For each of 32 stored scales, the output that it belongs to, if there is one group."""
UP = "model.layers.0.mlp.up_proj"
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}


def places() -> list[tuple[int, int]]:
    """(input, output) in 16 inputs of 64 outputs of each of 1,024 consecutive codes, as the kernel's threads take them.

    32 threads take the four parts of 16 outputs in turn. Of a part, a thread takes four inputs of two outputs, and its
    eight codes are interleaved: those with even numbers come before those with odd numbers.
    """
    result = []
    for thread in range(32):
        for part in range(4):
            eight = []
            for half in range(2):
                for pair in (thread % 4, thread % 4 + 4):
                    for one in range(2):
                        eight.append((2 * pair + one, 16 * part + 8 * half + thread // 4))
            result += [eight[which] for which in (0, 2, 4, 6, 1, 3, 5, 7)]
    return result


def packed(codes: Tensor, scales: Tensor) -> Tensors:
    """Codes [outputs, inputs] and scales [groups, outputs] as the tensors that Marlin stores, place by place."""
    outputs, inputs = codes.shape
    rows = []
    for top in range(0, inputs, 16):
        words = []
        for left in range(0, outputs, 64):
            taken = [int(codes[left + output, top + row]) for row, output in places()]
            for start in range(0, len(taken), 8):
                word = sum(code << 4 * place for place, code in enumerate(taken[start : start + 8]))
                words.append(word - (1 << 32) if word >> 31 else word)
        rows.append(words)
    order = OF_ONE if len(scales) == 1 else OF_SEVERAL
    stored = torch.empty_like(scales)
    for place in range(outputs):
        block = place // len(order) * len(order)
        stored[:, place] = scales[:, block + order[place % len(order)]]
    return {"B": torch.tensor(rows, dtype=torch.int32), "s": stored}


def written(outputs: int, inputs: int, size: int) -> tuple[Tensors, Tensor]:
    """A random weight as it is stored, and the numbers that it stands for."""
    size = inputs if size < 0 else size
    codes = torch.randint(0, 16, (outputs, inputs))
    scales = (torch.rand(inputs // size, outputs) / 50 + 0.001).half()
    value = torch.empty(outputs, inputs)
    for i in range(inputs):
        value[:, i] = (codes[:, i] - 8).float() * scales[i // size].float()
    return packed(codes, scales), value


@pytest.mark.parametrize(
    ("outputs", "inputs", "size"),
    first(
        ((256, 256, 128), (256, 128, 128), (1280, 128, -1)),
        [(256, 256, 128), (256, 128, 128), (1280, 128, -1), (512, 384, 128), (256, 256, -1), (64, 64, 32)],
    ),
)
def test_the_numbers(tmp_path: Path, outputs: int, inputs: int, size: int) -> None:
    """With several groups, with a group of all inputs, and with more outputs than are unpacked at once."""
    torch.manual_seed(0)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    stored, value = written(outputs, inputs, size)
    tensors = {f"a.proj.{end}": part for end, part in stored.items()} | {"a.proj.bias": torch.ones(outputs)}
    path = rewritten(tmp_path / "source", tmp_path / "model", tensors, settings(size))
    checkpoint = formats.open_checkpoint(path)
    assert set(checkpoint) == {"a.proj.weight", "a.proj.bias"}
    assert torch.equal(checkpoint.load("a.proj.weight"), value)
    if size != 32:
        format = weight_format("w4_asym_g128")
        assert torch.equal(format.dequantize(format.quantize(value), inputs), value)


def settings(size: int, **more: Any) -> dict[str, Any]:
    said = {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": True, "desc_act": False}
    return said | {"checkpoint_format": "marlin"} | more


SAID: dict[str, dict[str, Any]] = {
    "marlin": settings(128),
    "an older flag": settings(128, checkpoint_format="gptq", is_marlin_format=True),
    "a method of its own": {"quant_method": "marlin", "group_size": 128},
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """A folder with a configuration that says nothing, and the tensors of one weight."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("one")
    (path / "config.json").write_text("{}")
    return path, {f"{UP}.{end}": part for end, part in written(512, 256, 128)[0].items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors, Tensors]:
    """A model of floats, its tensors with projections stored for Marlin, and the same as numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("marlin") / "qwen2"
    config = AutoConfig.for_model("qwen2", **{**SETTINGS, **SIZES, "head_dim": 32})
    float_model = AutoModelForCausalLM.from_config(config)
    float_model.save_pretrained(path)
    plain = {name: value.clone() for name, value in float_model.state_dict().items()}
    stored = dict(plain)
    for name, value in plain.items():
        if "proj.weight" in name:
            parts, plain[name] = written(value.shape[0], value.shape[1], 128)
            del stored[name]
            stored |= {name.removesuffix("weight") + end: part for end, part in parts.items()}
    assert len(stored) == len(plain) + 7
    return path, stored, plain


@pytest.mark.parametrize("said", SAID)
def test_the_ways_to_say_so(one: tuple[Path, Tensors], tmp_path: Path, said: str) -> None:
    source, stored = one
    checkpoint = formats.open_checkpoint(rewritten(source, tmp_path / "model", stored, SAID[said]))
    assert checkpoint.in_few_bits(f"{UP}.weight")


@pytest.mark.exhaustive  # the numbers above are what other tests of formats build of
@pytest.mark.parametrize("said", SAID)
def test_the_logits(model: tuple[Path, Tensors, Tensors], tmp_path: Path, said: str) -> None:
    """Under a recipe with groups of 128, which keeps the codes: also as `doctor` says without the weights."""
    source, stored, plain = model
    paths = rewritten(source, tmp_path / "stored", stored, SAID[said]), rewritten(source, tmp_path / "plain", plain)
    result = []
    for path in paths:
        pipeline.build(path, tmp_path / f"{path.name}.out", recipe="w4a16")
        with qcompile.load(tmp_path / f"{path.name}.out") as llm:
            result.append(llm.logits([[0, 17, 60, 25, 12, 12, 3]]))
    assert torch.equal(*result)
    (paths[0] / "model.safetensors").unlink()
    assert doctor.examine(str(paths[0]), "cpu-avx2", "w4a16", {}, None).exportable


# ---- what is refused -------------------------------------------------------------------------------

Change = Callable[[Tensors, dict[str, Any]], object]


def put(name: str, value: Tensor) -> Change:
    return lambda tensors, said: tensors.update({f"{UP}.{name}": value})


def say(**more: Any) -> Change:
    return lambda tensors, said: said.update(more)


NO, BAD = UnsupportedError, UsageError
REFUSED: dict[str, tuple[Change, type[QCompileError], str]] = {
    "8 bits": (say(bits=8), NO, "marlin weights with bits 8 are not read, only 4"),
    "not symmetric": (say(sym=False), NO, "marlin weights with sym False are not read"),
    "in order of activations": (say(desc_act=True), NO, "marlin weights with desc_act True are not read"),
    "another kernel": (say(checkpoint_format="bitblas"), NO, "only gptq or gptq_v2 or marlin"),
    "a flag that is none": (say(is_marlin_format="no"), NO, "is_marlin_format no are not read"),
    "groups of other size": (say(group_size=64), BAD, rf"{UP}\.s is .*\[2, 512\]; floats of shape \[4, 512\]"),
    "groups that do not fill": (say(group_size=96), BAD, r"\.B has 256 inputs, which groups of 96 do not fill"),
    "groups unknown": (say(group_size=None), BAD, "group_size of the checkpoint's marlin weights is None"),
    "not said to be": (say(checkpoint_format="gptq"), BAD, r"proj\.B is in Marlin's order: say so in checkpoint_"),
    "no scales": (lambda t, s: t.pop(f"{UP}.s"), BAD, f"tensor {UP}.s is missing from .*: download the file again"),
    "no codes": (lambda t, s: t.pop(f"{UP}.B"), BAD, f"tensor {UP}.s belongs to no weight"),
    "codes of bytes": (put("B", torch.ones(16, 1024).byte()), BAD, f"{UP}.B is torch.uint8 .* int32 matrix"),
    "codes of no tiles": (put("B", torch.ones(16, 1000).int()), BAD, f"{UP}.B has 1000 words a row; tiles of 128"),
    "fewer codes": (put("B", torch.ones(16, 896).int()), BAD, rf"{UP}.s is .*\[2, 512\]; .*\[2, 448\] belongs"),
    "scales of another shape": (put("s", torch.ones(2, 510)), BAD, rf"{UP}.s is .*\[2, 510\]; .*\[2, 512\]"),
    "scales that are none": (
        put("s", torch.full((2, 512), float("nan"))),
        BAD,
        f"weight {UP}.weight holds NaN or infinite values, as tensor {UP}.s does: download the file again",
    ),
    "beside codes of gptq": (put("qweight", torch.ones(2, 2).int()), BAD, f"{UP}.qweight belongs to no weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(one: tuple[Path, Tensors], tmp_path: Path, case: str) -> None:
    change, error, message = REFUSED[case]
    source, stored = one
    tensors, said = dict(stored), copy.deepcopy(SAID["marlin"])
    change(tensors, said)
    path = rewritten(source, tmp_path / "model", tensors, said)
    with pytest.raises(error, match=message) as caught:
        checkpoint = formats.open_checkpoint(path)
        for name in checkpoint:
            checkpoint.load(name)
    assert "\n" not in str(caught.value)
