"""A second model of another family, and the share of the loss of rounding that calibration recovers on both.

    python benchmarks/second_model.py heldout.jsonl --calib calib.jsonl [--steps 600] [--windows 24]

The model is a Qwen3 with biases on all projections of attention and norms on queries and keys, its embedding tied to
the output head. It starts from the weights of samples/pycode-1m and is trained on the calibration text until norms and
biases have settled, always by the same seed. Each recipe is built with rounding to nearest and calibrated.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, write_result
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import qcompile
from qcompile import calibration

SAMPLES = Path(__file__).parents[1] / "samples"
MODEL = SAMPLES / "pycode-1m"
KV32 = {"cache.format": "kv32"}
OFF = {"fold_norms.enabled": "false", "rotate.enabled": "false", "smooth_attention.enabled": "false"}
RECIPES: tuple[tuple[str, dict[str, str], dict[str, str]], ...] = (
    ("w4a16", KV32, {}),
    ("mixllm", KV32, {}),
    ("qserve", {}, OFF),
    ("w4a4-g128", KV32, {"fold_norms.enabled": "false", "rotate.enabled": "false"}),
)
"""Recipe, its options, and those that leave it with rounding alone."""


def make(folder: Path, text: Path, steps: int, length: int = 512, batch: int = 4) -> float:
    """Write the trained model to `folder`; the loss of its last steps."""
    torch.manual_seed(0)
    source = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    settings = {name: getattr(source.config, name) for name in KEPT}
    config = Qwen3Config(**settings, attention_bias=True, layer_types=None, use_sliding_window=False)
    model = Qwen3ForCausalLM(config)
    model.load_state_dict(source.state_dict(), strict=False)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("proj.bias"):
                value.normal_(std=0.02)
    tokens = windows(text, length)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    losses = []
    for _ in range(steps):
        rows = tokens[torch.randint(len(tokens), (batch,))]
        logits = model(rows).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
    return sum(losses[-20:]) / len(losses[-20:])


KEPT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "rope_parameters"),
)


def windows(text: Path, length: int) -> Tensor:
    """int64 [windows, length]: all of the text."""
    tokenizer = calibration.load_tokenizer(MODEL)
    found = calibration.read(text, tokenizer, bos=0, vocabulary=8192, samples=10**9, length=length)
    return found.tokens


def perplexity(model: Path, recipe: str, options: dict[str, str], calib: Path | None, data: Path, most: int) -> float:
    """Of `model` built so, with the output head in float32."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "artifact"
        qcompile.build(model, out, recipe=recipe, options=options, head_dtype="f32", calib=calib)
        with qcompile.load(out) as llm:
            return llm.perplexity(data, max_windows=most).perplexity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--out", type=Path, default=RESULTS / "second_model.json")
    arguments = parser.parse_args()
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "qwen3-1m"
        loss = make(other, arguments.calib, arguments.steps)
        print(f"trained in {time.perf_counter() - started:.0f} s, loss {loss:.3f}", flush=True)
        for model in (MODEL, other):

            def measured(recipe: str, options: dict[str, str], text: Path | None, model: Path = model) -> float:
                return perplexity(model, recipe, options, text, arguments.data, arguments.windows)

            exact = measured("f32", KV32, None)
            print(f"{model.name:10} float32 {exact:.4f}", flush=True)
            for recipe, options, plain in RECIPES:
                nearest, chosen = measured(recipe, options | plain, None), measured(recipe, options, arguments.calib)
                share = 1 - (chosen - exact) / (nearest - exact)
                figures = {"float": exact, "nearest": nearest, "calibrated": chosen, "recovered": share}
                rows.append({"model": model.name, "recipe": recipe, **figures})
                print(
                    f"{model.name:10} {recipe:10} {nearest - exact:+.4f} {chosen - exact:+.4f} {share:.0%}", flush=True
                )
    document = {"windows": arguments.windows, "steps": arguments.steps, "training_loss": loss, "rows": rows}
    write_result(arguments.out, document)


if __name__ == "__main__":
    main()
