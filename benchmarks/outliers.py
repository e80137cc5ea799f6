"""Outliers: a model made hard to round without changing its function, and what the passes make of it.

    python benchmarks/outliers.py heldout.jsonl [--max-windows N] [--out FILE]

A copy of the sample model gets ten input channels of every block a hundred times as large (the norm's weight times
100, the columns of what reads it divided by 100; the output head is untied for it) and four key channels per head
thirty times as large (rows of k times 30, of q divided by 30, two rotary pairs). In float nothing changes. Rounding to
W4A8KV4 ruins it; `rotate`, `smooth` and `smooth_attention` must bring it within 0.03 of the clean model's perplexity
under the same passes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, write_result
from qcompile import check

MODEL = Path(__file__).parents[1] / "samples" / "pycode-26m"
FORMATS = {"recipe": "w4a8", "options": {"cache.format": "kv4"}}
PASSES = {
    "fold_norms.enabled": "true",
    "rotate.enabled": "true",
    "smooth.enabled": "true",
    "smooth_attention.enabled": "true",
}
CHANNELS, CHANNEL_FACTOR = 10, 100.0
KEY_PAIRS, KEY_FACTOR = 2, 30.0
WITHIN = 0.03


def inject(source: Path, target: Path, seed: int = 0) -> None:
    """Write `source` with outliers to `target`, in float32 so that the divided weights keep their digits."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    weights: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= {name: value.float() for name, value in load_file(file).items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    config |= {"tie_word_embeddings": False, "torch_dtype": "float32"}
    random = torch.Generator().manual_seed(seed)
    width, head_dim, kv_heads = config["hidden_size"], config["head_dim"], config["num_key_value_heads"]
    loud = torch.randperm(width, generator=random)[:CHANNELS]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        readers = [f"{prefix}self_attn.{name}_proj.weight" for name in "qkv"]
        _scale_input(weights, f"{prefix}input_layernorm.weight", readers, loud)
        readers = [f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up")]
        _scale_input(weights, f"{prefix}post_attention_layernorm.weight", readers, loud)
        pairs = torch.stack([torch.randperm(head_dim // 2, generator=random)[:KEY_PAIRS] for _ in range(kv_heads)])
        factor = torch.ones(kv_heads, head_dim)
        factor.scatter_(1, torch.cat((pairs, pairs + head_dim // 2), 1), KEY_FACTOR)
        weights[readers[0].replace("mlp.gate", "self_attn.k")] *= factor.reshape(-1, 1)
        wide = factor.repeat_interleave(config["num_attention_heads"] // kv_heads, 0)
        weights[readers[0].replace("mlp.gate", "self_attn.q")] /= wide.reshape(-1, 1)
    _scale_input(weights, "model.norm.weight", ["lm_head.weight"], loud)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _scale_input(weights: dict[str, Tensor], norm: str, readers: list[str], channels: Tensor) -> None:
    weights[norm][channels] *= CHANNEL_FACTOR
    for name in readers:
        weights[name][:, channels] /= CHANNEL_FACTOR


def logits_error(a: Path, b: Path) -> float:
    """Max relative difference of the two models' float32 logits, by transformers, on 256 random tokens."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, 8192, (1, 256), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, two = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32)(ids).logits for p in (a, b))
    return check.max_relative_error(one, two)


def perplexity(model: Path, options: dict[str, str], data: Path, windows: int | None) -> float:
    """Of the artifact built with the float output head, through the 4-bit cache."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "artifact"
        qcompile.build(model, out, recipe=str(FORMATS["recipe"]), options=options, head_dtype="f32")
        with qcompile.load(out) as llm:
            return llm.perplexity(data, max_windows=windows).perplexity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--max-windows", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="PASS.FIELD=VALUE", help="with the passes")
    parser.add_argument("--out", type=Path, default=RESULTS / "outliers.json")
    arguments = parser.parse_args()
    formats: Any = FORMATS["options"]
    chosen = dict(pair.split("=") for pair in arguments.set)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        outliers = Path(folder) / "outliers"
        inject(MODEL, outliers)
        error = logits_error(outliers, MODEL)
        print(f"float32 logits differ by {error:.1e}")
        for name, options in (("rounding", formats), ("passes", formats | PASSES | chosen)):
            started = time.perf_counter()
            clean, dirty = (perplexity(m, options, arguments.data, arguments.max_windows) for m in (MODEL, outliers))
            rows.append({"name": name, "options": options, "clean": clean, "outliers": dirty})
            seconds = time.perf_counter() - started
            print(f"{name:10} clean {clean:.4f}, outliers {dirty:.4f} ({seconds:.0f} s)", flush=True)
    document = {
        "model": MODEL.name,
        "recipe": FORMATS["recipe"],
        "windows": arguments.max_windows or "all",
        "logits_error": error,
        "rows": rows,
        "difference": rows[1]["outliers"] - rows[1]["clean"],
        "met": abs(rows[1]["outliers"] - rows[1]["clean"]) <= WITHIN,
    }
    write_result(arguments.out, document)


if __name__ == "__main__":
    main()
