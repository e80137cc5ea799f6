"""Checkpoints of AWQ, GPTQ and compressed-tensors: the graph's weights are those of the numbers written out."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qcompile
from qcompile import pipeline
from qcompile.checkpoints.stored import compressed as stored_compressed
from qcompile.checkpoints.stored import formats
from qcompile.checkpoints.stored.compressed_targets import module_schemes
from qcompile.cli import doctor
from qcompile.errors import QCompileError, UnsupportedError, UsageError
from qcompile.formats import rounding
from qcompile.formats.registry import weight_format
from tests.checkpoints.stored.test_formats import Tensors, rewritten, same_weights, saved
from tests.support.cases import first
from tests.support.make_bitsandbytes import FILES

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


# ---- writing them, bit by bit ----------------------------------------------------------------------


def packed(codes: Tensor, bits: int, order: Sequence[int] = ()) -> Tensor:
    """Codes [n, k] in words of 32 bits along k; `order` are the codes of a word, from its lowest bits on."""
    if 32 % bits:
        return filled(codes, bits)
    each = 32 // bits
    rows = []
    for row in codes.tolist():
        words = [0] * -(-len(row) // each)
        for word in range(len(words)):
            for place, which in enumerate(order or range(each)):
                code = row[word * each + which] if word * each + which < len(row) else 0
                for bit in range(bits):
                    words[word] |= (code >> bit & 1) << (place * bits + bit)
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def filled(codes: Tensor, bits: int) -> Tensor:
    """Codes [n, k] in words of 32 bits along k without gaps: the row as one number, cut into words."""
    rows = []
    for row in codes.tolist():
        number = sum(code << bits * place for place, code in enumerate(row))
        words = [number >> first & 0xFFFFFFFF for first in range(0, bits * len(row), 32)]
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


@dataclass
class Rounded:
    """Random codes [n, k] of a weight, zeros and scales [n, groups], each input's group, and what it all stands for."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    index: Tensor
    value: Tensor


def rounded(like: Tensor, size: int, bits: int, order: bool = False, zero: int | None = None) -> Rounded:
    """A weight of the shape of `like`, `size` inputs to a group, which lie in any order if `order`."""
    n, k = like.shape
    size = k if size < 0 else size
    index = torch.arange(k) // size
    index = index[torch.randperm(k)] if order else index
    codes = torch.randint(0 if zero is None else 1, 2**bits, (n, k))  # symmetric: one more below 0 than above
    zeros = torch.randint(1, 2**bits, (n, -(-k // size))) if zero is None else torch.full((n, -(-k // size)), zero)
    scales = (0.2 * torch.rand(zeros.shape) / 2**bits + 0.001).half()
    value = torch.empty(n, k)
    for i in range(k):
        value[:, i] = (codes[:, i] - zeros[:, index[i]]).float() * scales[:, index[i]].float()
    return Rounded(codes, zeros, scales, index.to(torch.int32), value)


Written = tuple[Tensors, Tensors, dict[str, Any]]
"""Stored tensors, the same as numbers, and the quantization_config."""


def written(
    tensors: Tensors, parts: Callable[[Tensor], tuple[Tensors, Tensor]], suffix: str, settings: dict[str, Any]
) -> Written:
    """The projections of `tensors` as `parts` writes them: tensors by the ends of their names, and their numbers."""
    torch.manual_seed(1)
    stored, plain = dict(tensors), dict(tensors)
    for name, value in tensors.items():
        if "proj" in name and name.endswith(".weight"):
            del stored[name]
            made, plain[name] = parts(value)
            stored |= {name.removesuffix("weight") + suffix + end: part.contiguous() for end, part in made.items()}
    assert len(stored) > len(plain)
    return stored, plain, settings


def awq(tensors: Tensors, size: int = 32, symmetric: bool = False) -> Written:
    def parts(value: Tensor) -> tuple[Tensors, Tensor]:
        w = rounded(value, size, 4, zero=8 if symmetric else None)
        zeros = packed(w.zeros.T, 4, AWQ_ORDER)
        return {"qweight": packed(w.codes.T, 4, AWQ_ORDER), "qzeros": zeros, "scales": w.scales.T}, w.value

    settings = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": not symmetric}
    return written(tensors, parts, "", settings | {"version": "gemm"})


def gptq(
    tensors: Tensors,
    size: int = 32,
    bits: int = 4,
    order: bool = False,
    v2: bool = False,
    index: bool = True,
    symmetric: bool = False,
    less_one: bool | None = None,
) -> Written:
    """`less_one` is whether zero points are stored so; by default as the version (`v2` or not) has it."""
    less_one = not v2 if less_one is None else less_one

    def parts(value: Tensor) -> tuple[Tensors, Tensor]:
        w = rounded(value, size, bits, order, 2 ** (bits - 1) if symmetric else None)
        zeros = packed((w.zeros - int(less_one)).T, bits)
        made = {"qweight": packed(w.codes, bits).T, "qzeros": zeros, "scales": w.scales.T}
        return made | ({"g_idx": w.index} if index else {}), w.value

    version = {"checkpoint_format": "gptq_v2"} if v2 else {}
    settings = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": order, "sym": symmetric}
    return written(tensors, parts, "", settings | version)


def gptq_by_rules(tensors: Tensors) -> Written:
    """Down projections of 3 bits in other groups, symmetric; output projections as they are; others of 4 bits."""
    down = {name: value for name, value in tensors.items() if "down_proj" in name}
    whole = {name: value for name, value in tensors.items() if "o_proj" in name}
    others = {name: value for name, value in tensors.items() if name not in down | whole}
    stored, plain, settings = gptq(others)
    three, numbers, _ = gptq(down, 16, bits=3, symmetric=True)
    changed = {"bits": 3, "group_size": 16, "sym": True, "damp_percent": 0.1}
    dynamic = {
        r"-:.*\.o_proj$": {},
        r"+:model\.layers\.\d+\.mlp\.down": changed,
        ".*_proj": {"bits": 4},
        "": {"bits": 8},
    }
    return {**stored, **three, **whole}, {**plain, **numbers, **whole}, settings | {"dynamic": dynamic}


def compressed(
    tensors: Tensors,
    size: int = 32,
    bits: int = 4,
    symmetric: bool = True,
    order: bool = False,
    unsaid: bool = False,
) -> Written:
    def parts(value: Tensor) -> tuple[Tensors, Tensor]:
        w = rounded(value, size, bits, order, 2 ** (bits - 1) if symmetric else None)
        made = {"packed": packed(w.codes, bits), "scale": w.scales, "shape": torch.tensor(value.shape)}
        if not symmetric:
            made["zero_point"] = packed(w.zeros.T, bits).T
        if order or unsaid:
            made["g_idx"] = torch.full_like(w.index, -1) if unsaid else w.index
        return made, w.value

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "actorder": "group" if order else None}
    weights |= {"strategy": "channel"} if size < 0 else {"strategy": "group", "group_size": size}
    return written(tensors, parts, "weight_", configuration("pack-quantized", weights))


def packed_whole(tensors: Tensors) -> Written:
    """Codes of 8 bits with one scale and one zero point, which is not packed."""

    def parts(value: Tensor) -> tuple[Tensors, Tensor]:
        codes, zero = torch.randint(0, 256, value.shape), torch.randint(-9, 9, (1,))
        scale = (torch.rand(1) / 500 + 0.001).bfloat16()
        made = {"packed": packed(codes, 8), "scale": scale, "shape": torch.tensor(value.shape)}
        return made | {"zero_point": zero.to(torch.int8)}, (codes - 128 - zero).float() * scale.float()

    weights = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor"}
    return written(tensors, parts, "weight_", configuration("pack-quantized", weights))


def in_two_groups(tensors: Tensors) -> Written:
    """Down projections of 8 bits by a pattern, gate projections by their names before it, and others of 4 bits."""
    down = {name: value for name, value in tensors.items() if "down_proj" in name}
    named = {name: value for name, value in tensors.items() if "gate_proj" in name}
    others = {name: value for name, value in tensors.items() if name not in down and name not in named}
    (stored, plain, settings), (eight, numbers, _) = compressed(others), eight_bits(down, strategy="channel")
    (one, its, _) = compressed(named, symmetric=False)
    four = settings["config_groups"]["group_0"]
    channel = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    groups = {
        "usual": four | {"targets": ["Linear"]},
        "down": {"targets": [r"re:.*\.(down|gate)_proj$"], "format": "int-quantized", "weights": channel},
        "one": four | {"targets": [n.removesuffix(".weight") for n in named]},
    }
    groups["one"]["weights"] = four["weights"] | {"symmetric": False}
    settings = settings | {"config_groups": groups, "format": "pack-quantized"}
    return {**stored, **eight, **one}, {**plain, **numbers, **its}, settings


def eight_bits(
    tensors: Tensors, kind: str = "int", strategy: str = "channel", symmetric: bool = True, size: Any = None
) -> Written:
    def parts(value: Tensor) -> tuple[Tensors, Tensor]:
        n, k = value.shape
        sides, wide = {"tensor": ((1,), k), "channel": ((n, 1), k)}.get(
            str(strategy), ((n, -(-k // (size or 1))), size)
        )
        codes = torch.randint(-128, 128, (n, k)).to(torch.int8)
        codes = codes if kind == "int" else (codes.float() / 16).to(torch.float8_e4m3fn)
        scales, zeros = (torch.rand(sides) / 500 + 0.001).bfloat16(), torch.randint(-9, 9, sides).to(torch.int8)
        numbers = codes.float()
        for i in range(k):
            column = (slice(None), i // wide) if len(sides) == 2 else ()
            numbers[:, i] = (numbers[:, i] - (0 if symmetric else zeros[column].float())) * scales[column].float()
        made = {"": codes, "_scale": scales}
        return made if symmetric else made | {"_zero_point": zeros}, numbers

    weights = {"num_bits": 8, "type": kind, "symmetric": symmetric, "strategy": strategy, "group_size": size}
    dynamic = {"num_bits": 8, "dynamic": True, "type": kind, "strategy": "token"}
    return written(tensors, parts, "weight", configuration(f"{kind}-quantized", weights, input_activations=dynamic))


def blocks(tensors: Tensors, rows: int = 40, columns: int = 24) -> Written:
    """8-bit floats with a scale for each block, and stored scales of activations and of the cache."""

    def parts(value: Tensor) -> tuple[Tensors, Tensor]:
        n, k = value.shape
        scales = (torch.rand(-(-n // rows), -(-k // columns)) + 0.5).bfloat16()
        codes = (value / 0.1).to(torch.float8_e4m3fn)
        numbers = codes.float()
        for i in range(n):
            for j in range(k):
                numbers[i, j] *= scales[i // rows, j // columns].float()
        return {"": codes, "_scale": scales}, numbers

    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "block",
        "block_structure": [rows, columns],
    }
    given = {"num_bits": 8, "dynamic": False, "type": "float", "strategy": "tensor"}
    stored, plain, settings = written(
        tensors, parts, "weight", configuration("float-quantized", weights, input_activations=given)
    )
    settings["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    for name in [name for name in stored if name.endswith("k_proj.weight")]:
        stem = name.removesuffix("k_proj.weight")
        more = ("k_proj.input_scale", "k_scale", "v_scale", "k_proj.input_zero_point")
        stored |= {stem + end: torch.ones(1) for end in more}
    return stored, plain, settings


def nvfp4(tensors: Tensors, inputs_scaled: bool = False) -> Written:
    def parts(value: Tensor) -> tuple[Tensors, Tensor]:
        n, k = value.shape
        elements = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
        codes[codes == 8] = 0
        scales = (torch.rand(n, -(-k // 16)) * 200 + 20).to(torch.float8_e4m3fn)
        scales[0, 0] = 448.0
        total = torch.rand(1) * 1000 + 20000
        numbers = torch.empty(n, k)
        for i in range(k):
            numbers[:, i] = elements[codes[:, i].long()] * (scales[:, i // 16].float() / total)
        made = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales}
        made["weight_global_scale"] = total
        return made | ({"input_global_scale": torch.rand(1)} if inputs_scaled else {}), numbers

    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    incoming = weights | {"dynamic": "local"} if inputs_scaled else None
    return written(tensors, parts, "", configuration("nvfp4-pack-quantized", weights, input_activations=incoming))


def mxfp8(tensors: Tensors) -> Written:
    def parts(value: Tensor) -> tuple[Tensors, Tensor]:
        n, k = value.shape
        exponents = torch.randint(115, 125, (n, -(-k // 32)), dtype=torch.uint8)
        codes = (torch.randn(n, k) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        numbers = codes.float()
        for i in range(k):
            numbers[:, i] *= 2.0 ** (exponents[:, i // 32].float() - 127)
        return {"": codes, "_scale": exponents}, numbers

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    return written(tensors, parts, "weight", configuration("mxfp8-quantized", weights))


def configuration(format: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors as its releases write them."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None} | more
    settings = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    nothing = {"kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {}, "ignore": ["lm_head"]}
    return settings | nothing | {"quantization_status": "compressed"}


# ---- reading them ----------------------------------------------------------------------------------

Way = Callable[[Tensors], Written]
WAYS: dict[str, tuple[str, Way]] = {
    "awq": ("llama", awq),
    "awq, one group": ("llama", lambda t: awq(t, -1)),
    "awq, a short last group": ("llama", lambda t: awq(t, 24)),
    "awq, experts one by one": ("qwen3_moe", awq),
    "gptq with biases": ("qwen2", gptq),
    "gptq, in order of activations": ("llama", lambda t: gptq(t, order=True)),
    "gptq, 8 bits and a short last group": ("llama", lambda t: gptq(t, 20, bits=8)),
    "gptq, one group and no index": ("llama", lambda t: gptq(t, -1, index=False)),
    "gptq_v2, in order of activations": ("llama", lambda t: gptq(t, 16, order=True, v2=True)),
    "gptq, symmetric": ("llama", lambda t: gptq(t, symmetric=True)),
    "gptq, symmetric, zeros as v2 stores them": ("llama", lambda t: gptq(t, symmetric=True, less_one=False)),
    "gptq of 8 bits, the same": ("llama", lambda t: gptq(t, bits=8, symmetric=True, less_one=False)),
    "gptq_v2, symmetric, zeros as v1 stores them": ("llama", lambda t: gptq(t, v2=True, symmetric=True, less_one=True)),
    "gptq of 3 bits": ("llama", lambda t: gptq(t, bits=3)),
    "gptq_v2 of 2 bits, in order of activations": ("llama", lambda t: gptq(t, 16, bits=2, order=True, v2=True)),
    "gptq by rules": ("llama", gptq_by_rules),
    "awq, symmetric": ("llama", lambda t: awq(t, symmetric=True)),
    "packed": ("llama", compressed),
    "packed, zeros, in order of activations": ("qwen2", lambda t: compressed(t, 24, symmetric=False, order=True)),
    "packed, an index that says nothing": ("llama", lambda t: compressed(t, unsaid=True)),
    "packed, 8 bits a channel": ("llama", lambda t: compressed(t, -1, bits=8, symmetric=False)),
    "packed of 3 bits": ("llama", lambda t: compressed(t, bits=3)),
    "packed of 6 bits a channel, zeros": ("llama", lambda t: compressed(t, -1, bits=6, symmetric=False)),
    "packed, one scale": ("llama", packed_whole),
    "mxfp8": ("llama", mxfp8),
    "packed, experts one by one": ("qwen3_moe", lambda t: compressed(t, 8)),
    "packed and int8": ("llama", in_two_groups),
    "int8": ("llama", eight_bits),
    "int8 with zeros, in groups": ("llama", lambda t: eight_bits(t, strategy="group", symmetric=False, size=24)),
    "int8, one scale": ("llama", lambda t: eight_bits(t, strategy="tensor", symmetric=False)),
    "float8": ("llama", lambda t: eight_bits(t, "float")),
    "nvfp4": ("llama", nvfp4),
    "nvfp4 with scales of activations": ("qwen2", lambda t: nvfp4(t, inputs_scaled=True)),
    "float8 in blocks, with scales of activations and cache": ("llama", blocks),
    "float8, one scale": ("llama", lambda t: eight_bits(t, "float", "tensor")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensors]]:
    """(checkpoint, its tensors) of models of floats by transformers' type."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: (folder / kind, saved(kind, folder / kind)) for kind in ("llama", "qwen2", "qwen3_moe")}


def both(models: dict[str, tuple[Path, Tensors]], path: Path, kind: str, way: Way) -> tuple[Path, Path]:
    """Checkpoints in `path` of a model stored the `way` and as the numbers that this stands for."""
    source, tensors = models[kind]
    stored, plain, quantization = way(tensors)
    return rewritten(source, path / "stored", stored, quantization), rewritten(source, path / "plain", plain)


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers(models: dict[str, tuple[Path, Tensors]], tmp_path: Path, way: str) -> None:
    stored, plain = (formats.open_checkpoint(path) for path in both(models, tmp_path, *WAYS[way]))
    assert set(stored) == set(plain)
    for name in plain:
        assert torch.equal(stored.load(name), plain.load(name)), name


@pytest.mark.parametrize("place", ["compression_config", "text_config"])
def test_said_in_other_places(models: dict[str, tuple[Path, Tensors]], tmp_path: Path, place: str) -> None:
    """As early releases of compressed-tensors did, and as models with images do; also as files called it then."""
    source, tensors = models["llama"]
    stored, plain, settings = eight_bits(tensors)
    path = rewritten(source, tmp_path / "model", stored)
    said = settings | {"quantization_status": "frozen"}
    more = {place: {"quantization_config": said} if place == "text_config" else said}
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | more))
    checkpoint = formats.open_checkpoint(path)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(checkpoint.load(name), plain[name])


def test_matrices_that_the_model_has_the_other_way_round(tmp_path: Path) -> None:
    """GPT-2 multiplies by [inputs, outputs]; tools put linears in their place. One of its projections is square."""
    tensors = saved("gpt2", tmp_path / "model")
    matrices = {name: value.T for name, value in tensors.items() if name.endswith("c_proj.weight")}
    stored, plain, settings = gptq(matrices)
    assert {value.shape for value in plain.values()} == {(64, 64), (64, 256)}
    rest = {name: value for name, value in tensors.items() if name not in matrices}
    same_weights(
        rewritten(tmp_path / "model", tmp_path / "stored", stored | rest, settings),
        rewritten(tmp_path / "model", tmp_path / "plain", {n: w.T for n, w in plain.items()} | rest),
    )


@pytest.mark.parametrize(
    ("way", "recipe"),
    first(
        (("packed, zeros, in order of activations", "w4a16"),),
        [("awq", "w4a16"), ("gptq with biases", "f32"), ("packed, zeros, in order of activations", "w4a16")],
    ),
)
def test_the_logits(models: dict[str, tuple[Path, Tensors]], tmp_path: Path, way: str, recipe: str) -> None:
    result = []
    for path in both(models, tmp_path, *WAYS[way]):
        pipeline.build(path, tmp_path / f"{path.name}.out", recipe=recipe)
        with qcompile.load(tmp_path / f"{path.name}.out") as llm:
            result.append(llm.logits([[0, 17, 60, 25, 12, 12, 3]]))
    assert torch.equal(*result)


@pytest.mark.parametrize("way", first((gptq, eight_bits), [awq, gptq, compressed, eight_bits]))
def test_doctor_needs_no_weights(models: dict[str, tuple[Path, Tensors]], tmp_path: Path, way: Way) -> None:
    stored, _ = both(models, tmp_path, "llama", way)
    (stored / "model.safetensors").unlink()
    assert doctor.examine(str(stored), "cpu-avx2", "w4a16", {}, None).exportable


def test_a_target_with_a_small_letter_is_a_name() -> None:
    schemes = module_schemes([("a", ["Linear"], 4), ("b", ["lm_head"], 8)])
    assert [schemes.scheme(module) for module in ("lm_head", "model.lm_head", "up")] == [8, 4, 4]


def test_inputs_that_fill_no_word() -> None:
    codes = torch.randint(0, 16, (5, 13))
    value = stored_compressed.from_packed("w", 13, 4, 13, packed(codes, 4), torch.ones(5, 1))
    assert torch.equal(value, codes.float() - 8)


# ---- rounding them to 4 bits once more -------------------------------------------------------------


def again(w: Tensor) -> Tensor:
    return weight_format("w4_asym_g128").dequantize(weight_format("w4_asym_g128").quantize(w), w.shape[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("least", "top"), [(0, 15), (1, 15), (0, 9), (4, 11), (7, 8)])
def test_four_bits_stay_what_they_are(least: int, top: int, dtype: torch.dtype) -> None:
    """In groups of 128 and of more, whichever codes are in use: those at the ends, as of AWQ, or not, as of GPTQ."""
    torch.manual_seed(0)
    for groups in (5, 1):
        codes, zeros = torch.randint(least, top + 1, (200, 5, 128)), torch.randint(least, top + 1, (200, groups, 1))
        scales = (torch.rand(200, groups, 1) / 100 + 1e-4).to(dtype).float()
        w = ((codes - zeros) * scales).flatten(1)
        assert torch.equal(again(w), w)
        assert torch.equal(again(w[:, :600]), w[:, :600])


EIGHT_BITS = ("w8_sym_g128", "w8_sym_g64", "w8_sym_g32")


@pytest.mark.parametrize("format", ["w3_asym_g128", "w4_asym_g64", "w4_asym_g32", *EIGHT_BITS])
@pytest.mark.parametrize("dtype", first((torch.bfloat16,), [torch.float16, torch.bfloat16]))
def test_small_groups_stay_what_they_are(format: str, dtype: torch.dtype) -> None:
    """Whichever codes are in use, of a width that fills no group, too: as of Q4_0 and Q8_0, AWQ and GPTQ."""
    torch.manual_seed(0)
    rounding = weight_format(format)
    signed = format in EIGHT_BITS
    ranges = ((-127, 127), (-128, 127), (-128, 3), (-40, 90)) if signed else ((0, 15), (1, 15), (4, 11))
    ranges = ((0, 7), (1, 7), (2, 5)) if rounding.bits == 3 else ranges
    for least, top in ranges:
        codes = torch.randint(least, top + 1, (100, 4, rounding.group))
        zeros = 0 if signed else torch.randint(least, top + 1, (100, 4, 1))
        w = ((codes - zeros) * (torch.rand(100, 4, 1) / 100 + 1e-4).to(dtype).float()).flatten(1)
        for kept in (w, w[:, : 3 * rounding.group + 5]):
            assert torch.equal(rounding.dequantize(rounding.quantize(kept), kept.shape[1]), kept)


def test_eight_bits_in_groups_are_otherwise_rounded_to_nearest() -> None:
    torch.manual_seed(0)
    w, format = torch.randn(300, 64), weight_format("w8_sym_g32")
    steps = w.view(300, 2, 32).abs().amax(2, keepdim=True) / 127
    expected = ((w.view(300, 2, 32) / steps).round() * steps).flatten(1)
    assert torch.equal(format.dequantize(format.quantize(w), 64), expected)


@pytest.mark.parametrize(
    ("recipe", "way"),
    [
        ("w4a16-g32", awq),
        ("w4a8-g32", gptq),
        pytest.param("w4a16-g32", compressed, marks=pytest.mark.exhaustive),
        pytest.param("w8a8-g32", lambda t: gptq(t, 32, bits=8, symmetric=True), marks=pytest.mark.exhaustive),
        ("w8a8-g32", lambda t: compressed(t, bits=8)),
    ],
)
def test_recipes_of_small_groups_keep_the_numbers(
    models: dict[str, tuple[Path, Tensors]], tmp_path: Path, recipe: str, way: Callable[[Tensors], Written]
) -> None:
    path, _ = both(models, tmp_path, "llama", way)
    graph = pipeline.plan(path, recipe=recipe).graphs[-1]
    kept = [node for node in graph.calls("quantize_weight") if str(node.args[1]).endswith("_g32")]
    assert len(kept) >= 4
    for node in kept:
        w = graph.evaluate(node.all_input_nodes[0])
        assert torch.equal(weight_format(str(node.args[1])).dequantize(graph.evaluate(node), w.shape[1]), w)


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8", "qspec", "nested"])
def test_recipes_of_four_bits_keep_the_numbers(
    models: dict[str, tuple[Path, Tensors]], tmp_path: Path, recipe: str
) -> None:
    path, _ = both(models, tmp_path, "llama", lambda t: compressed(t, -1))
    graph = pipeline.plan(path, recipe=recipe).graphs[-1]
    rounded = [node for node in graph.calls("quantize_weight") if node.args[1] in ("w4_asym_g128", "nested_8_4")]
    kept = rounded[:-1] if recipe == "nested" else rounded  # all but its head, which is stored in 16 bits
    assert len(kept) >= 4
    for node in kept:
        w = graph.evaluate(node.all_input_nodes[0])
        assert torch.equal(weight_format(str(node.args[1])).dequantize(graph.evaluate(node), w.shape[1]), w)


def test_nvfp4_is_found_again_to_the_bit() -> None:
    torch.manual_seed(0)
    format = weight_format("nvfp4")
    for seed in range(20):
        w = nvfp4({"a.proj.weight": torch.zeros(48, 80 + 16 * (seed % 3))})[1]["a.proj.weight"]
        assert torch.equal(format.dequantize(format.quantize(w), w.shape[1]), w)
        assert torch.equal(format.dequantize(format.quantize(w[:, :40]), 40), w[:, :40])


def test_steps_of_float32_are_found_to_their_precision() -> None:
    torch.manual_seed(0)
    w = (torch.randint(0, 13, (400, 128)) - 6) * torch.rand(400, 1)
    assert ((again(w) - w).abs() <= 2e-7 * w.abs()).all()


def test_other_weights_are_rounded_as_ever() -> None:
    """Also those that need one code more than there are, or a zero point beyond the codes."""
    torch.manual_seed(0)
    even = torch.arange(128.0) % 17
    rows = [torch.randn(128), torch.randn(128).bfloat16().float(), even - 3, even + 1, torch.zeros(128)]
    w = torch.stack(rows) * 0.01
    for kept, plain in zip(rounding.asymmetric(w, 4, keep=True), rounding.asymmetric(w, 4), strict=True):
        assert torch.equal(kept, plain)


# ---- what is refused -------------------------------------------------------------------------------

UP = "model.layers.0.mlp.up_proj"
Change = Callable[[Tensors, dict[str, Any]], object]


def put(name: str, value: Tensor) -> Change:
    return lambda tensors, settings: tensors.update({f"{UP}.{name}": value})


def drop(name: str) -> Change:
    return lambda tensors, settings: tensors.pop(f"{UP}.{name}")


def fill(name: str, number: float) -> Change:
    return lambda tensors, settings: tensors[f"{UP}.{name}"].fill_(number)


def say(**more: Any) -> Change:
    return lambda tensors, settings: settings.update(more)


def say_of_weights(**more: Any) -> Change:
    return lambda tensors, settings: settings["config_groups"]["group_0"]["weights"].update(more)


def say_of_group(**more: Any) -> Change:
    return lambda tensors, settings: settings["config_groups"]["group_0"].update(more)


def another_group(targets: list[str] | None) -> Change:
    """A second group, of 8 bits, where both have these targets."""

    def change(tensors: Tensors, settings: dict[str, Any]) -> None:
        first = settings["config_groups"]["group_0"] | {"targets": targets}
        second = first | {"weights": first["weights"] | {"num_bits": 8}}
        settings["config_groups"] = {"group_0": first, "group_1": second}

    return change


NO, BAD = UnsupportedError, UsageError
NAN = float("nan")
REFUSED: dict[str, tuple[Way, Change, type[QCompileError], str]] = {
    "awq of 3 bits": (awq, say(bits=3), NO, "awq weights with bits 3 are not read, only 4"),
    "awq of true bits": (awq, say(bits=True), NO, "bits True"),
    "another awq": (awq, say(version="GEMV"), NO, "awq weights with version gemv are not read, only gemm"),
    "awq that is no text": (awq, say(version=[1]), NO, r"version \[1\]"),
    "awq in many lines": (awq, say(version="x\n" * 9999), NO, r"^awq weights with version 'x.{1,60}' are not read"),
    "awq in groups of a text": (awq, say(group_size="9" * 9999), BAD, r"^group_size .* is '9{1,60}\.\.\.9+'; it must"),
    "awq of llm-awq": (awq, say(backend="llm-awq"), NO, "backend llm-awq"),
    "awq of an unknown zero": (awq, say(zero_point="no"), NO, "zero_point no are not read, only True or False"),
    "awq with zeros that it denies": (awq, say(zero_point=False), BAD, "qzeros holds zero points 1 to 15, and zero_"),
    "awq in no groups": (awq, say(group_size=0), BAD, "group_size of the checkpoint's awq weights is 0"),
    "awq in other groups": (awq, say(group_size=16), BAD, r"down_proj.qzeros is .*\[3, 8\]; .* \[6, 8\]"),
    "awq that lost its zeros": (awq, drop("qzeros"), BAD, f"{UP}.qzeros is missing"),
    "awq that lost its scales": (awq, drop("scales"), BAD, f"{UP}.scales is missing"),
    "awq that lost its codes": (awq, drop("qweight"), BAD, f"{UP}.qzeros belongs to no weight"),
    "awq codes of bytes": (awq, put("qweight", torch.ones(64, 12).byte()), BAD, f"{UP}.qweight is torch.uint8"),
    "awq codes in a row": (
        awq,
        put("qweight", torch.ones(64).int()),
        BAD,
        rf"{UP}.qweight is .*\[64\]; an int32",
    ),
    "awq codes of nothing": (awq, put("qweight", torch.ones(0, 12).int()), BAD, rf"{UP}.qweight is .*\[0, 12\]"),
    "awq scales of whole numbers": (awq, put("scales", torch.ones(2, 96).int()), BAD, f"{UP}.scales is torch.int32"),
    "awq scales that are none": (awq, fill("scales", NAN), BAD, f"{UP}.weight holds NaN"),
    "awq beside the numbers": (awq, put("weight", torch.ones(96, 64)), BAD, f"{UP}.weight is stored twice"),
    "awq with scaled activations": (
        awq,
        lambda t, s: t.update({"model.layers.0.mlp.act_fn.scales": torch.ones(96)}),
        BAD,
        "mlp.act_fn.scales belongs to no weight",
    ),
    "awq that differs by module": (awq, say(dynamic={"+:.*down": {"bits": 8}}), NO, r"dynamic has \+:\.\*down"),
    "awq by a number of modules": (awq, say(dynamic=5), NO, "dynamic has 5"),
    "awq by a list of modules": (awq, say(dynamic=["-:x"]), NO, r"dynamic has \['-:x'\]"),
    "gptq of 5 bits": (gptq, say(bits=5), NO, "gptq weights with bits 5 are not read, only 2 or 3 or 4 or 8"),
    "gptq of 3 bits that has 4": (gptq, say(bits=3), BAD, "which codes of 3 bits do not fill|qzeros is"),
    "gptq by a list of modules": (gptq, say(dynamic=["-:x"]), BAD, "patterns with settings belong there"),
    "gptq by no settings": (gptq, say(dynamic={".*": 4}), BAD, r"\.\* has 4, and no settings"),
    "gptq by other settings": (gptq, say(dynamic={".*": {"rotation": "x"}}), NO, "with rotation for some modules"),
    "gptq by no pattern": (gptq, say(dynamic={"-:(": {}}), BAD, "is no pattern"),
    "gptq by a slow pattern": (gptq, say(dynamic={"-:(a+)+b": {}}), NO, "repeats a group"),
    "gptq by many repetitions": (gptq, say(dynamic={".*.*.*.*.*.*x": {}}), NO, "over 5 repetitions"),
    "gptq that its rules leave": (gptq, say(dynamic={"-:.*up_proj": {}}), BAD, "has codes, and dynamic leaves it"),
    "gptq by rules of other bits": (gptq, say(dynamic={".*up_proj": {"bits": 5}}), NO, "bits 5 are not read"),
    "gptq of no bits": (gptq, lambda t, s: s.pop("bits"), NO, "bits None"),
    "gptq of 8 bits that has 4": (gptq, say(bits=8), BAD, r"proj.qzeros is .* belongs there"),
    "another gptq": (gptq, say(checkpoint_format="bitblas"), NO, "checkpoint_format bitblas .* only gptq or gptq_v2"),
    "gptq said to be for marlin": (gptq, say(is_marlin_format=True, sym=True), BAD, "qweight belongs to no weight"),
    "gptq in words of 64 bits": (gptq, say(pack_dtype="int64"), NO, "pack_dtype int64"),
    "gptq with something added": (gptq, say(adapter={"name": "lora"}), NO, "gptq weights with adapter"),
    "gptq in groups unknown": (gptq, lambda t, s: s.pop("group_size"), BAD, "group_size .* is None"),
    "gptq that lost its zeros": (gptq, drop("qzeros"), BAD, f"{UP}.qzeros is missing"),
    "gptq that lost its index": (lambda t: gptq(t, order=True), drop("g_idx"), BAD, f"{UP}.g_idx is missing"),
    "gptq with a short index": (gptq, put("g_idx", torch.zeros(8).int()), BAD, rf"{UP}.g_idx is .*\[8\]; .*\[64\]"),
    "gptq with an index beyond": (gptq, fill("g_idx", 2), BAD, f"{UP}.g_idx holds 2 to 2; there are 2 groups"),
    "gptq with an index below": (gptq, fill("g_idx", -1), BAD, f"{UP}.g_idx holds -1 to -1"),
    "gptq in an order it denies": (gptq, fill("g_idx", 1), BAD, f"{UP}.g_idx has .* desc_act is false"),
    "gptq with a zero of 0": (gptq, fill("qzeros", -1), BAD, f"{UP}.qzeros holds zero points less one below 0"),
    "gptq with zeros that it denies": (gptq, say(sym=True), BAD, "qzeros holds zero points 0 to 14, and sym is true"),
    "gptq with zeros of another middle": (
        lambda t: gptq(t, symmetric=True),
        fill("qzeros", 0),
        BAD,
        f"{UP}.qzeros holds zero points 0 to 0, and sym is true, which means 8 everywhere",
    ),
    "gptq of an unknown symmetry": (gptq, say(sym=1), NO, "sym 1 are not read"),
    "gptq scales that are none": (gptq, fill("scales", float("inf")), BAD, f"{UP}.weight holds NaN or inf"),
    "packed in 9 bits": (compressed, say_of_weights(num_bits=9), NO, "num_bits 9 are not read, only 2 or 3 or 4"),
    "packed in 3 bits that has 4": (
        compressed,
        say_of_weights(num_bits=3),
        BAD,
        r"weight_packed is .*; torch.int32 of",
    ),
    "packed with packed zeros of a whole": (
        lambda t: compressed(t, symmetric=False),
        say_of_weights(strategy="tensor"),
        BAD,
        r"weight_scale is .*; floats of shape \[1\]",
    ),
    "mxfp8 with scales of floats": (
        mxfp8,
        put("weight_scale", torch.ones(96, 2)),
        BAD,
        f"{UP}.weight_scale is torch.float32 of shape .*; torch.uint8",
    ),
    "mxfp8 with scales that are none": (mxfp8, fill("weight_scale", 255), BAD, f"{UP}.weight holds NaN"),
    "packed floats": (compressed, say_of_weights(type="float"), NO, "type float"),
    "packed in blocks": (compressed, say_of_weights(strategy="block"), NO, "strategy block"),
    "packed in groups unknown": (compressed, say_of_weights(group_size=None), BAD, "group_size .* is None"),
    "another packing": (compressed, say(format="marlin-24"), NO, "format marlin-24"),
    "packed and calibrated": (compressed, say(quantization_status="calibration"), NO, "quantization_status calibr"),
    "frozen floats": (
        eight_bits,
        lambda t, s: (s.update(quantization_status="frozen"), t.update({f"{UP}.weight": torch.ones(96, 64)})),
        BAD,
        f"{UP}.weight_scale belongs to no weight",
    ),
    "packed and sparse": (compressed, say(sparsity_config={"format": "sparse-24-bitmask"}), NO, "sparsity_config"),
    "packed and turned": (compressed, say(transform_config={"config_groups": {"a": 1}}), NO, "transform_config"),
    "no groups": (compressed, say(config_groups={}), BAD, "config_groups .* do not say"),
    "groups that differ for no module": (compressed, another_group(None), BAD, "targets of group_0 are None"),
    "groups that differ for a class": (compressed, another_group(["MLP"]), NO, r"for class 'MLP' \(group_0\)"),
    "groups that leave modules out": (compressed, another_group(["re:x"]), BAD, "no targets of config_groups name it"),
    "groups by the same pattern": (compressed, another_group(["re:.*_proj"]), BAD, r"\.\*_proj match module .*differ"),
    "groups by a slow pattern": (compressed, another_group(["re:(x*)*"]), NO, "targets of group_0: .* repeats a group"),
    "blocks of nothing": (
        lambda t: blocks(t),
        say_of_weights(block_structure=[16, 0]),
        BAD,
        r"block_structure .* is \[16, 0\]; rows and columns",
    ),
    "blocks with zeros": (lambda t: blocks(t), say_of_weights(symmetric=False), NO, "symmetric False"),
    "blocks of another size": (
        lambda t: blocks(t),
        say_of_weights(block_structure=[16, 16]),
        BAD,
        r"weight_scale is .*\[2, 4\]; floats of shape \[4, 6\]",
    ),
    "rounded outputs": (eight_bits, say_of_group(output_activations={"dynamic": True}), NO, "output_activations"),
    "packed without a shape": (compressed, drop("weight_shape"), BAD, f"{UP}.weight_shape is missing"),
    "packed in another shape": (compressed, fill("weight_shape", 64), BAD, rf"{UP}.weight_shape says \[64, 64\]"),
    "packed in a wider shape": (
        compressed,
        put("weight_shape", torch.tensor([96, 80])),
        BAD,
        rf"{UP}.weight_packed is .*\[96, 8\]; torch.int32 of shape \[96, 10\]",
    ),
    "packed without zeros": (compressed, say_of_weights(symmetric=False), BAD, r"weight_zero_point is missing"),
    "packed with zeros": (
        lambda t: compressed(t, symmetric=False),
        say_of_weights(symmetric=True),
        BAD,
        "weight_zero_point belongs to no weight",
    ),
    "packed without an index": (
        lambda t: compressed(t, order=True),
        drop("weight_g_idx"),
        BAD,
        f"{UP}.weight_g_idx is missing",
    ),
    "packed scales that are none": (compressed, fill("weight_scale", NAN), BAD, f"{UP}.weight holds NaN"),
    "int8 without scales": (eight_bits, drop("weight_scale"), BAD, f"{UP}.weight_scale is missing"),
    "int8 that is float8": (eight_bits, say_of_weights(type="float"), NO, "type float"),
    "float8 that is int8": (
        lambda t: eight_bits(t, "float"),
        put("weight", torch.ones(96, 64, dtype=torch.int8)),
        BAD,
        f"{UP}.weight is torch.int8",
    ),
    "nvfp4 in groups of 32": (nvfp4, say_of_weights(group_size=32), NO, "group_size 32 are not read, only 16"),
    "nvfp4 of whole numbers": (nvfp4, say_of_weights(type="int"), NO, "type int are not read, only float"),
    "nvfp4 by channel": (nvfp4, say_of_weights(strategy="channel"), NO, "strategy channel"),
    "nvfp4 without scales": (nvfp4, drop("weight_scale"), BAD, f"{UP}.weight_scale is missing or not float8_e4m3fn"),
    "nvfp4 with scales in 16 bits": (
        nvfp4,
        put("weight_scale", torch.ones(96, 4).bfloat16()),
        BAD,
        rf"{UP}.weight_scale is missing or not float8_e4m3fn of shape \[96, 4\]",
    ),
    "nvfp4 without a scale of the tensor": (nvfp4, drop("weight_global_scale"), BAD, "weight_global_scale is missing"),
    "nvfp4 with two scales of the tensor": (
        nvfp4,
        put("weight_global_scale", torch.ones(2)),
        BAD,
        f"{UP}.weight_global_scale is",
    ),
    "nvfp4 with a scale of the tensor of 0": (
        nvfp4,
        fill("weight_global_scale", 0),
        BAD,
        f"{UP}.weight holds NaN or inf",
    ),
    "nvfp4 with a scale of the tensor that is none": (nvfp4, fill("weight_global_scale", NAN), BAD, "holds NaN"),
    "nvfp4 codes of 32 bits": (
        nvfp4,
        put("weight_packed", torch.ones(96, 8).int()),
        BAD,
        f"{UP}.weight_packed is torch.int32",
    ),
    "nvfp4 codes of nothing": (
        nvfp4,
        put("weight_packed", torch.ones(0, 32).byte()),
        BAD,
        rf"{UP}.weight_packed is .*\[0, 32\]",
    ),
    "not said at all": (awq, lambda t, s: s.clear(), NO, r"already quantized \(unknown\)"),
}


MADE: dict[Way, Written] = {}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(models: dict[str, tuple[Path, Tensors]], tmp_path: Path, case: str) -> None:
    way, change, error, message = REFUSED[case]
    source, tensors = models["llama"]
    if way not in MADE:
        MADE[way] = way(tensors)
    stored, _, settings = copy.deepcopy(MADE[way])
    change(stored, settings)
    path = rewritten(source, tmp_path / "model", stored, settings)
    with pytest.raises(error, match=message) as caught:
        checkpoint = formats.open_checkpoint(path)
        for name in checkpoint:
            checkpoint.load(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("way", "what"), [(gptq, "qweight is of a packed"), (eight_bits, "weight has factors beside it")]
)
def test_not_said_how(models: dict[str, tuple[Path, Tensors]], tmp_path: Path, way: Way, what: str) -> None:
    source, tensors = models["llama"]
    path = rewritten(source, tmp_path / "model", way(tensors)[0])
    with pytest.raises(UsageError, match=f"{what}.* quantization_config is missing"):
        formats.open_checkpoint(path)


@pytest.mark.parametrize("method", ["bitsandbytes", "quanto", "torchao"])
def test_not_said_how_in_files_of_tools(tmp_path: Path, method: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    shutil.copy(FILES / f"{method}.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"is of a packed weight, and .* quantization_config is missing"):
        formats.open_checkpoint(tmp_path)
