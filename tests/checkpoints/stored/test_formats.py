"""Checkpoints stored in few bits: the graph's weights are those of the numbers written out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qcompile import pipeline
from qcompile.checkpoints import frontend
from qcompile.checkpoints.stored import formats
from qcompile.errors import QCompileError, UnsupportedError, UsageError
from qcompile.formats.registry import weight_format
from tests.support.cases import first

SETTINGS: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts": 3,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
Tensors = dict[str, Tensor]


def saved(kind: str, path: Path) -> Tensors:
    """A random model of transformers' type `kind` at `path`; its stored tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SETTINGS)).save_pretrained(path)
    return load_file(path / "model.safetensors")


def rewritten(source: Path, path: Path, tensors: Tensors, quantization: dict[str, Any] | None = None) -> Path:
    """A checkpoint at `path` with the configuration of `source` and these tensors, said to be stored so."""
    path.mkdir()
    settings = json.loads((source / "config.json").read_text())
    if quantization is not None:
        settings["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(settings))
    save_file({name: value.contiguous() for name, value in tensors.items()}, path / "model.safetensors")
    return path


def same_weights(stored: Path, plain: Path) -> None:
    """Assert that both checkpoints give graphs of the same weights, bit for bit."""
    a, numbers = frontend.load(stored).weights, formats.open_checkpoint(plain)
    if a.entries.keys() == set(numbers):  # that graph would have the file's own tensors, and takes as long to trace
        for name in numbers:
            assert torch.equal(a[name], numbers.load(name)), name
        return
    b = frontend.load(plain).weights
    assert list(a.entries) == list(b.entries)
    for name in a.entries:
        assert torch.equal(a[name], b[name]), name


def as_fp8(tensors: Tensors, rows: int, columns: int) -> tuple[Tensors, Tensors]:
    """Matrices of projections as 8-bit floats with factors of blocks, and as the numbers that those are."""
    stored, plain = dict(tensors), dict(tensors)
    for name, value in tensors.items():
        if "proj" not in name:
            continue
        n, k = value.shape
        factors = torch.rand(-(-n // rows), -(-k // columns)) + 0.5
        codes = (8 * value).to(torch.float8_e4m3fn)
        numbers = codes.float()
        for i in range(n):
            for j in range(0, k, columns):
                numbers[i, j : j + columns] *= factors[i // rows, j // columns]
        stored |= {name: codes, f"{name}_scale_inv": factors}
        plain[name] = numbers
    return stored, plain


# Files have the experts of qwen3_moe one by one.
@pytest.mark.parametrize("kind", first(("qwen3_moe",), ["llama", "qwen3_moe"]))
def test_fp8_in_blocks(tmp_path: Path, kind: str) -> None:
    stored, plain = as_fp8(saved(kind, tmp_path / "model"), 48, 24)  # the last ones are short
    quantization = {"quant_method": "fp8", "weight_block_size": [48, 24]}
    same_weights(
        rewritten(tmp_path / "model", tmp_path / "stored", stored, quantization),
        rewritten(tmp_path / "model", tmp_path / "plain", plain),
    )


@pytest.mark.parametrize(
    "shape", [(1,), *(pytest.param(shape, marks=pytest.mark.exhaustive) for shape in ((), (1, 1)))]
)
def test_fp8_by_one_factor(tmp_path: Path, shape: tuple[int, ...]) -> None:
    stored, plain = as_fp8(saved("llama", tmp_path / "model"), 1 << 20, 1 << 20)
    scales = {name: value.view(shape) for name, value in stored.items() if name.endswith("_scale_inv")}
    quantization = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    unused = {"model.layers.0.mlp.up_proj.activation_scale": torch.ones(())}
    same_weights(
        rewritten(tmp_path / "model", tmp_path / "stored", stored | scales | unused, quantization),
        rewritten(tmp_path / "model", tmp_path / "plain", plain),
    )


@pytest.mark.parametrize("settings", [{"quant_method": "fp8"}, {"quant_method": "modelopt", "quant_algo": "FP8"}])
def test_fp8_of_other_tools(tmp_path: Path, settings: dict[str, Any]) -> None:
    """One factor a weight under another name, and scales of activations and of the cache, which the recipe rounds."""
    stored, plain = as_fp8(saved("llama", tmp_path / "model"), 1 << 20, 1 << 20)
    renamed = {name.removesuffix("_inv"): value.view(()) if "_inv" in name else value for name, value in stored.items()}
    unused = {f"model.layers.0.self_attn.{name}": torch.ones(()) for name in ("k_scale", "q_proj.input_scale")}
    path = rewritten(tmp_path / "model", tmp_path / "stored", renamed | unused, settings)
    checkpoint = formats.open_checkpoint(path)
    assert set(checkpoint) == set(plain)
    assert all(torch.equal(checkpoint.load(name), plain[name].float()) for name in plain)
    with pytest.raises(UnsupportedError, match="modelopt weights with quant_algo w4a8 are not read, only fp8"):
        formats.reader({"quant_method": "modelopt", "quantization": {"quant_algo": "W4A8"}})


def test_fp8_by_output(tmp_path: Path) -> None:
    """As Meta published Llama 3.1 405B: projections with a factor for each output, others as they are."""
    torch.manual_seed(0)
    codes, scales = torch.randn(6, 40).to(torch.float8_e4m3fn), torch.rand(6, 1)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    stored = {"a.weight": codes, "a.weight_scale": scales, "b.weight": torch.ones(2, 2)}
    settings = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["b"]}
    checkpoint = formats.open_checkpoint(rewritten(tmp_path / "source", tmp_path / "model", stored, settings))
    assert set(checkpoint) == {"a.weight", "b.weight"}
    for output in range(6):
        assert torch.equal(checkpoint.load("a.weight")[output], codes[output].float() * scales[output])


def as_mxfp4(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Experts of random codes, and as transformers reads them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, plain = dict(tensors), dict(tensors)
    for name, value in tensors.items():
        if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
            continue
        experts, inputs, outputs = value.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert len(stored) == len(plain) + 2
    return stored, plain


def test_mxfp4(tmp_path: Path) -> None:
    """They are read as transformers reads them, and rounding them to MXFP4 changes no number."""
    stored, plain = as_mxfp4(saved("gpt_oss", tmp_path / "model"))
    path = rewritten(tmp_path / "model", tmp_path / "stored", stored, {"quant_method": "mxfp4"})
    same_weights(path, rewritten(tmp_path / "model", tmp_path / "plain", plain))
    experts = next(value for name, value in plain.items() if name.endswith("experts.down_proj"))
    for w in experts.transpose(1, 2):
        again = weight_format("mxfp4").dequantize(weight_format("mxfp4").quantize(w), w.shape[1])
        assert torch.equal(again, w)


def test_a_kept_trace_reads_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCOMPILE_CACHE", str(tmp_path / "cache"))
    stored, _ = as_fp8(saved("llama", tmp_path / "model"), 48, 24)
    path = rewritten(tmp_path / "model", tmp_path / "stored", stored, FP8)
    first, second = (pipeline.plan(path).graphs[0].weights for _ in range(2))
    assert list((tmp_path / "cache" / "traces").iterdir())
    for name in second.entries:
        assert torch.equal(first[name], second[name]), name


FP8, MXFP4 = {"quant_method": "fp8", "weight_block_size": [48, 24]}, {"quant_method": "mxfp4"}
UP, EXPERTS = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.experts.down_proj"
REFUSED: dict[str, tuple[Any, Callable[[Tensors], object], type[QCompileError], str]] = {
    "another method": ({"quant_method": "quip"}, lambda t: None, UnsupportedError, r"already quantized \(quip\)"),
    "no method": ({"bits": 4}, lambda t: None, UnsupportedError, r"already quantized \(unknown\)"),
    "no object": (["fp8"], lambda t: None, UnsupportedError, "already quantized"),
    "an empty object": ({}, lambda t: None, UnsupportedError, r"already quantized \(unknown\)"),
    "a method that is no name": ({"quant_method": ["fp8"]}, lambda t: None, UnsupportedError, "already quantized"),
    "factors that nothing speaks of": (None, lambda t: None, UsageError, "has factors beside it, .*is missing"),
    "blocks that are none": (FP8 | {"weight_block_size": [0, 24]}, lambda t: None, UsageError, r"is \[0, 24\]; two"),
    "no factors": (FP8, lambda t: t.pop(f"{UP}_scale_inv"), UsageError, f"{UP} is of 8-bit floats and has no"),
    "factors of another shape": (
        FP8,
        lambda t: t.update({f"{UP}_scale_inv": torch.ones(2, 2)}),
        UsageError,
        rf"{UP}_scale_inv is torch.float32 of shape \[2, 2\]; floats of shape \[2, 3\]",
    ),
    "factors that are whole numbers": (
        FP8,
        lambda t: t.update({f"{UP}_scale_inv": torch.ones(2, 3, dtype=torch.int32)}),
        UsageError,
        f"{UP}_scale_inv is torch.int32",
    ),
    "8-bit floats that are no matrix": (
        FP8,
        lambda t: t.update({UP: t[UP].flatten()}),
        UsageError,
        rf"{UP} of 8-bit floats has shape \[6144\]; matrices",
    ),
    "factor that is not finite": (
        FP8,
        lambda t: t.update({f"{UP}_scale_inv": torch.full((2, 3), float("nan"))}),
        UsageError,
        f"weight {UP} holds NaN or infinite",
    ),
    "no powers": (MXFP4, lambda t: t.pop(f"{EXPERTS}_scales"), UsageError, f"{EXPERTS}_blocks has no"),
    "a tensor beside its blocks": (
        MXFP4,
        lambda t: t.update({EXPERTS: torch.ones(3, 64, 64)}),
        UsageError,
        f"{EXPERTS} is stored twice: as it is, and as {EXPERTS}_blocks and",
    ),
    "powers of another shape": (
        MXFP4,
        lambda t: t.update({f"{EXPERTS}_scales": torch.ones(3, 5, 3, dtype=torch.uint8)}),
        UsageError,
        rf"{EXPERTS}_scales are .*\[3, 5, 3\]",
    ),
    "power that stands for NaN": (
        MXFP4,
        lambda t: t[f"{EXPERTS}_scales"].fill_(255),
        UsageError,
        f"weight {EXPERTS} holds NaN or infinite",
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensors]]:
    """(plain checkpoint, tensors of the stored one) of a method."""
    folder = tmp_path_factory.mktemp("stored")
    llama, gpt_oss = saved("llama", folder / "llama"), saved("gpt_oss", folder / "gpt_oss")
    fp8 = folder / "llama", as_fp8(llama, 48, 24)[0]
    return {"mxfp4": (folder / "gpt_oss", as_mxfp4(gpt_oss)[0]), "fp8": fp8}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(models: dict[str, tuple[Path, Tensors]], tmp_path: Path, case: str) -> None:
    quantization, change, error, message = REFUSED[case]
    source, tensors = models["mxfp4" if quantization == MXFP4 else "fp8"]
    tensors = {name: value.clone() for name, value in tensors.items()}
    change(tensors)
    path = rewritten(source, tmp_path / "model", tensors, quantization)
    with pytest.raises(error, match=message):
        checkpoint = formats.open_checkpoint(path)
        for name in checkpoint:
            checkpoint.load(name)


def test_a_configuration_that_says_nothing(tmp_path: Path, models: dict[str, tuple[Path, Tensors]]) -> None:
    """`null` is what a model of floats may have there."""
    source, _ = models["fp8"]
    plain = load_file(source / "model.safetensors")
    path = rewritten(source, tmp_path / "model", plain)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"quantization_config": None}))
    same_weights(path, source)
