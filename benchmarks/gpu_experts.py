"""Kernels of mixtures of experts on this GPU, each beside its reference in float64, and whole models beside the CPU.

    python benchmarks/gpu_experts.py [out.json] [--no-models]

Kernels have the shapes of Qwen3-30B-A3B with 16 experts, 8 of them for a token: `error` is relative over all outputs,
which begin as NaN, of 1, 3, 17 and 512 tokens; `different_bits` are outputs of one kind of program that differ from
another's, or from those of the token alone. Models are random ones of families that have experts, some with
attention sinks: `error` is that of logits against the CPU's artifact of the same recipe (its median row: where scores
nearly tie, a token may get another expert), `different_bits` are logits in chunks that differ from those of one step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.gpu_common import facts, launch, this_target
from qcompile import ops
from qcompile.codegen.gpu.compile import compile_all
from qcompile.codegen.gpu.gemm import render as gemm_render
from qcompile.codegen.gpu.gemm import spec as gemm
from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.gemm.pack import pack_gpu, unpack_gpu
from qcompile.codegen.gpu.kernel import Kernel
from qcompile.codegen.gpu.operands import grid_size
from qcompile.codegen.gpu.router import CombineSpec, RouteSpec, RouteStep, ScoresSpec
from qcompile.codegen.gpu.sorted_slots import BlocksSpec
from qcompile.formats.activations import activation_format, dequantize_activation
from qcompile.formats.registry import gpu_kernel, weight_format
from qcompile.targets import TUNED_ON

EXPERTS, SLOTS, HIDDEN, INNER, MOST = 16, 8, 2048, 768, 512
TOKENS = (1, 3, 17, MOST)
STRIDE = 32  # elements from one token's choice to the next
FORMATS = {  # of kernels, with their packings and activations
    "qoq_g128": ("qoq_g128", "int8"),
    "qoq_channel": ("qoq_channel", "int8"),
    "w8_sym_channel": ("w8_sym_channel", "int8"),
    "w4_asym_g128_int8": ("w4_asym_g128_int8", "int8"),
    "nested_8_4": ("nested_8_4", "int8_g128"),
    "mxfp4_a8": ("mxfp4_int8", "int8_g128"),
    "w4_asym_g128": ("w4_asym_g128", "bf16"),
    "mxfp4": ("mxfp4", "bf16"),
    "bf16": ("bf16", "bf16"),
}
SHAPES = {"gate and up": (2 * INNER, HIDDEN, False, "silu"), "down": (HIDDEN, INNER, True, "")}
MODELS = {
    "qwen3_moe": ("qserve", "bf16", "w4a16", "mixllm", "nested", "mxfp4"),
    "mixtral": ("qserve",),
    "qwen2_moe": ("qserve",),
    "olmoe": ("w8a8",),
    "gpt_oss": ("mxfp4", "qserve", "bf16"),
}
SETTINGS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "sliding_window": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CHUNKS = (1, 2, 5, 16, 17, 40)


def spec_of(format: str, rows: int, k: int, by_slot: bool, gated: str, tokens: int) -> gemm.KernelSpec:
    """The kernel of a program of `tokens` tokens, as plans have it."""
    width = rows // 2 if gated else rows
    experts = gemm.Experts(EXPERTS, SLOTS, by_slot, SLOTS * width, STRIDE)
    options: dict[str, Any] = {"out": "f32", "width": width, "gated": gated, "experts": experts}
    grouped = FORMATS[format][1] == "int8_g128"
    tile = tiles.choose_for_experts(format, rows, k, tokens, TUNED_ON)
    return gemm.KernelSpec(format, EXPERTS * rows, k, tile, x_groups=grouped, **options)


def specs() -> Iterator[tuple[str, str, gemm.KernelSpec]]:
    """Format, shape and kernel: for single slots, where there is one, and for blocks of 16 and of 64."""
    for format in FORMATS:
        for name, shape in SHAPES.items():
            for tokens in (1, 16, 64) if gpu_kernel(format).gemv else (16, 64):
                yield format, name, spec_of(format, *shape, tokens)


def blocks_of(tokens: int) -> BlocksSpec:
    return BlocksSpec(EXPERTS, SLOTS, STRIDE, tokens, MOST)


def choice(rows: int) -> Tensor:
    """SLOTS different experts of each token, int32 [rows, STRIDE]; what lies behind them is no expert."""
    index = torch.full((rows, STRIDE), 1 << 20, dtype=torch.int32, device="cuda")
    index[:, :SLOTS] = torch.rand(rows, EXPERTS, device="cuda").argsort(1)[:, :SLOTS]
    return index


def run(kernel: Kernel, grid: tuple[int, int, int], **given: Any) -> None:
    launch(kernel, 90, grid, given)()
    torch.cuda.synchronize()


def slots_of(index: Tensor, tokens: int) -> dict[str, Tensor]:
    """What the kernel that orders slots makes, checked against sorting."""
    spec, rows = blocks_of(tokens), len(index)
    made = {"order": torch.full((rows * SLOTS,), -7, dtype=torch.int32, device="cuda")}
    made["blocks"] = torch.full((spec.list, 3), -7, dtype=torch.int32, device="cuda")
    run(spec.kernel(90), (EXPERTS, 1, 1), index=index, M=rows, **made)
    chosen = index[:, :SLOTS].flatten()
    assert torch.equal(made["order"].long(), torch.sort(chosen, stable=True).indices)
    listed = made["blocks"][: grid_size(spec.grid, {"tokens": rows})]
    result = listed[listed[:, 0] >= 0]
    assert int((result[:, 2] - result[:, 1]).sum()) == rows * SLOTS and bool(
        (result[:, 2] - result[:, 1] <= tokens).all()
    )
    return made


def outputs(spec: gemm.KernelSpec, packed: dict[str, Tensor], x: list[Tensor], index: Tensor) -> Tensor:
    """What the kernel makes of these rows, [tokens, SLOTS, width]."""
    tokens, rows = spec.tile.tokens, len(index)
    given = {**packed, **dict(zip(("x", "x_scale", "x_sum"), x, strict=False)), "index": index}
    programs = rows * SLOTS if tokens == 1 else grid_size(blocks_of(tokens).grid, {"tokens": rows})
    given |= {} if tokens == 1 else slots_of(index, tokens)
    given["out"] = torch.full((rows, SLOTS, spec.width), float("nan"), device="cuda")
    run(gemm_render.kernel(spec), (programs, spec.n // EXPERTS // spec.tile.rows, 1), **given)
    return given["out"]


def check_gemms() -> list[dict[str, Any]]:
    """Errors of each format and shape, and outputs with bits that depend on the program or on a step's other tokens."""
    result = []
    for format, (packing, activation) in FORMATS.items():
        number_format = packing.removesuffix("_int8")
        for name, (rows, k, by_slot, gated) in SHAPES.items():
            weight = torch.randn(EXPERTS * rows, k, device="cuda") * 0.05
            packed = pack_gpu(weight_format(number_format).quantize(weight), packing)
            dense = (
                weight_format(number_format).dequantize(unpack_gpu(packed, packing), k).double().view(EXPERTS, rows, k)
            )
            error, differing = 0.0, 0
            kinds = [spec for f, n, spec in specs() if (f, n) == (format, name)]
            for tokens in TOKENS:
                index = choice(tokens)
                values = torch.randn(tokens * SLOTS if by_slot else tokens, k, device="cuda")
                x = activation_format(activation).quantize(values, 0)
                exact = dequantize_activation(x).double()
                exact = exact.view(tokens, SLOTS, k) if by_slot else exact
                want = ops.expert_linear(exact, index[:, :SLOTS].long(), dense)
                want = ops.quantized.gate(want, gated, rows // 2) if gated else want
                made = [outputs(spec, packed, x, index) for spec in kinds]
                error = max(error, *(float((y - want).norm() / want.norm()) for y in made))
                each = SLOTS if by_slot else 1
                alone = outputs(kinds[-1], packed, [part[-each:] for part in x], index[-1:])
                differing += sum(int((y.view(torch.int32) != made[0].view(torch.int32)).sum()) for y in made)
                differing += int((alone[0].view(torch.int32) != made[0][-1].view(torch.int32)).sum())
            row: dict[str, Any] = {"kernel": "expert_gemm", "format": format, "shape": name}
            row |= {"error": error, "different_bits": differing}
            print(row, flush=True)
            result.append(row)
    return result


def route_spec() -> RouteSpec:
    """A router's steps of Qwen3: softmax, the best SLOTS, their weights over their sum."""
    return RouteSpec(
        (
            RouteStep("softmax", 128, 128, x_stride=128),
            RouteStep("top_k", 128, SLOTS, x=0, out_stride=STRIDE),
            RouteStep("pick", 128, SLOTS, x=0, index=1),
            RouteStep("normalize", SLOTS, SLOTS, x=2, out_stride=STRIDE),
        )
    )


def check_router() -> list[dict[str, Any]]:
    """A router's scores of 128 experts, its choice, and the sum of what a token's slots say."""
    worst = dict.fromkeys(("scores", "route", "combine"), 0.0)
    differing = dict.fromkeys(worst, 0)
    w = torch.randn(128, HIDDEN, device="cuda")
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, device="cuda")
        scores = []
        for each, rows_first in ((1, False), (2, False), (4, False), (4, True)):
            spec = ScoresSpec(128, HIDDEN, HIDDEN, 128, tokens=each, rows_first=rows_first)
            out = torch.full((tokens, 128), float("nan"), device="cuda")
            blocks = -(-tokens // each)
            grid = (spec.programs, blocks, 1) if rows_first else (blocks, spec.programs, 1)
            run(spec.kernel(90), grid, x=x, w=w, out=out, M=tokens)
            want = x.double() @ w.double().T
            worst["scores"] = max(worst["scores"], float((out - want).norm() / want.norm()))
            scores.append(out)
        bits = [each.view(torch.int32) for each in scores]
        differing["scores"] += sum(int((bits[0] != other).sum()) for other in bits[1:])
        index = torch.zeros(tokens, STRIDE, dtype=torch.int32, device="cuda")
        factor = torch.zeros(tokens, STRIDE, device="cuda")
        run(route_spec().kernel(90), (tokens, 1, 1), x0=scores[0], out1=index, out3=factor)
        soft = torch.softmax(scores[0].double(), -1)
        picked = soft.gather(1, index[:, :SLOTS].long())
        # Of two experts with probabilities that are equal in float32, either may be chosen.
        short = (soft.topk(SLOTS).values - picked).abs().max()
        want = picked / picked.sum(-1, keepdim=True)
        worst["route"] = max(worst["route"], float((factor[:, :SLOTS] - want).norm() / want.norm()), float(short))
        alone = [torch.zeros(1, STRIDE, dtype=torch.int32, device="cuda"), torch.zeros(1, STRIDE, device="cuda")]
        run(route_spec().kernel(90), (1, 1, 1), x0=scores[0][-1:], out1=alone[0], out3=alone[1])
        for whole, one in ((index, alone[0]), (factor.view(torch.int32), alone[1].view(torch.int32))):
            differing["route"] += int((whole[-1:] != one).sum())
        y, other = torch.randn(tokens, SLOTS, HIDDEN, device="cuda"), torch.randn(tokens, HIDDEN, device="cuda")
        sums = CombineSpec(SLOTS, HIDDEN, SLOTS * HIDDEN, HIDDEN, STRIDE, HIDDEN)
        out = torch.full((tokens, HIDDEN), float("nan"), device="cuda")
        run(sums.kernel(90), (tokens, sums.programs, 1), x=y, out=out, scores=factor, other=other)
        want = other.double() + (y.double() * factor[:, :SLOTS, None]).sum(1)
        worst["combine"] = max(worst["combine"], float((out - want).norm() / want.norm()))
    rows = [{"kernel": name, "error": worst[name], "different_bits": differing[name]} for name in worst]
    print(*rows, sep="\n", flush=True)
    return rows


def check_model(kind: str, recipe: str, source: Path, folder: Path) -> dict[str, Any]:
    """Logits of a model's artifact for this GPU beside those of the CPU's, and in chunks."""
    ids = torch.randint(0, SETTINGS["vocab_size"], (2, 70), generator=torch.Generator().manual_seed(1))
    logits = {}
    row: dict[str, Any] = {"model": kind, "recipe": recipe}
    gpu = this_target()
    for target in ("cpu", gpu):
        path = qcompile.build(source, folder / f"{kind}-{recipe}-{target}", target=target, recipe=recipe).path
        with qcompile.load(path, kv_cache_bytes=1 << 28) as llm:
            logits[target] = llm.logits(ids)
            if target != "cpu":
                parts = {chunk: llm.logits(ids, chunk=chunk) for chunk in CHUNKS}
                bits = logits[target].view(torch.int32)
                row["different_bits"] = {c: int((part.view(torch.int32) != bits).sum()) for c, part in parts.items()}
    far = (logits[gpu] - logits["cpu"]).norm(dim=-1) / logits["cpu"].norm(dim=-1)
    row |= {"error": float(far.median()), "worst_error": float(far.max())}
    print(row, flush=True)
    return row


def check_models() -> Iterator[dict[str, Any]]:
    """All families and recipes, of random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        for kind, recipes in MODELS.items():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SETTINGS), dtype=torch.bfloat16)
            model.save_pretrained(Path(folder) / kind)
            for recipe in recipes:
                yield check_model(kind, recipe, Path(folder) / kind, Path(folder))


def write(results: dict[str, Any]) -> None:
    for path in (a for a in sys.argv[1:] if not a.startswith("--")):
        Path(path).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    torch.manual_seed(0)
    kernels = [gemm_render.kernel(spec) for _, _, spec in specs()] + [
        blocks_of(tokens).kernel(90) for tokens in (16, 64)
    ]
    compile_all(kernels, 90, len(os.sched_getaffinity(0)), None)
    results: dict[str, Any] = {**facts(), "kernels": check_router() + check_gemms(), "models": []}
    for row in () if "--no-models" in sys.argv else check_models():
        results["models"].append(row)
        write(results)
    write(results)


if __name__ == "__main__":
    main()
