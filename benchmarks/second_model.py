"""Models of other families, and the share of the loss of rounding that calibration recovers on each.

    python benchmarks/second_model.py heldout.jsonl --calib calib.jsonl [--steps 300] [--windows 64]
        [--only-models DIR]

Three models start from the weights of samples/pycode-1m, a Llama: a Qwen3 (norms on queries and keys, biases on all
projections of attention, embedding tied to the head), a Qwen2 (biases on queries, keys and values, those of keys large,
head of its own) and a Gemma2 (scores and logits capped, norms behind blocks too, windows). They are trained, always by
the same seed, to predict what pycode-1m predicts on Python's standard library, in windows as long as those of the
evaluation. Calibration and evaluation use other text, since a model's results on text of its training say little. Each
recipe is built with rounding to nearest and calibrated. `--only-models DIR` trains the models and leaves them in DIR,
for benchmarks/learned_rounding.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, machine, write_result
from qcompile.checkpoints.tokenizer_files import load_tokenizer

SAMPLES = Path(__file__).parents[1] / "samples"
MODEL = SAMPLES / "pycode-1m"
KV32 = {"cache.format": "kv32"}
OFF = {f"{name}.enabled": "false" for name in ("fold_norms", "rotate", "center_keys", "smooth_attention")}
DESCENT = {"calibrate.descent": "4"}
RECIPES: tuple[tuple[str, dict[str, str], dict[str, str]], ...] = (
    ("w4a16", KV32, {}),
    ("mixllm", KV32, {}),
    ("mixllm", KV32 | DESCENT, {}),
    ("qserve", {}, OFF),
    ("qserve", DESCENT, OFF),
    ("w4a4-g128", KV32 | DESCENT, {"fold_norms.enabled": "false", "rotate.enabled": "false"}),
)
"""Recipe, its options, and those that leave it with rounding alone."""

LENGTH, BATCH = 512, 4
"""Tokens of a window, of training and of evaluation, and windows of a step."""

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"attention_bias": True},
    "qwen2": {"tie_word_embeddings": False},
    "gemma2": {
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": LENGTH // 2,
    },
}
"""Model type, and what its configuration says beyond KEPT."""

KEPT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)

KEY_BIAS = 2.0
"""Standard deviation of the biases of keys before training; of others 0.02."""


def make(family: str, folder: Path, steps: int) -> float:
    """Write the trained model to `folder`; how far it is from pycode-1m in its last steps (mean divergence, nats)."""
    torch.manual_seed(0)
    teacher = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    settings = {name: getattr(teacher.config, name) for name in KEPT}
    settings |= {"max_position_embeddings": LENGTH, "attn_implementation": "eager"}
    config = AutoConfig.for_model(family, **settings | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    start(model, teacher)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    apart = []
    for rows in batches(steps):
        with torch.no_grad():
            wanted = teacher(rows, use_cache=False).logits.log_softmax(-1).flatten(0, 1)
        given = model(rows, use_cache=False).logits.log_softmax(-1).flatten(0, 1)
        loss = torch.nn.functional.kl_div(given, wanted, reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        apart.append(float(loss.detach()))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
    return sum(apart[-20:]) / len(apart[-20:])


def start(model: Any, teacher: Any) -> None:
    """Give `model` the teacher's weights where it has such, in its own terms, and biases their first values."""
    gemma = model.config.model_type == "gemma2"
    own = model.state_dict()
    taken = {name: value.clone() for name, value in teacher.state_dict().items() if name in own}
    if gemma:  # a norm's scale is 1 more than its weight there, and embeddings are multiplied by the root of the width
        width = model.config.hidden_size
        behind = [name for name in taken if "post_attention" in name]  # which means the norm ahead of the MLP elsewhere
        taken |= {name.replace("post_attention", "pre_feedforward"): taken.pop(name) for name in behind}
        taken |= {name: size.expand_as(own[name]) for name, size in written(teacher).items()}
        taken["model.norm.weight"] *= width**0.5  # the head has the embeddings as they are stored
        taken |= {name: value - 1 for name, value in taken.items() if value.dim() == 1}
        taken |= {name: value / width**0.5 for name, value in taken.items() if "embed" in name or "lm_head" in name}
    elif not model.config.tie_word_embeddings:
        taken["lm_head.weight"] = teacher.get_input_embeddings().weight.detach().clone()
    model.load_state_dict(taken, strict=False)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("proj.bias"):
                value.normal_(std=KEY_BIAS if "k_proj" in name else 0.02)


def written(teacher: Any) -> dict[str, Tensor]:
    """Root mean square of what each block of the teacher writes, by the weight of Gemma2's norm behind it."""
    result: dict[str, Tensor] = {}
    hooks = []
    for index, layer in enumerate(teacher.model.layers):
        for block, norm in ((layer.self_attn, "post_attention"), (layer.mlp, "post_feedforward")):

            def keep(_: Any, __: Any, output: Any, name: str = f"model.layers.{index}.{norm}_layernorm.weight") -> None:
                value = output[0] if isinstance(output, tuple) else output
                result[name] = value.square().mean().sqrt()

            hooks.append(block.register_forward_hook(keep))
    with torch.no_grad():
        teacher(next(batches(1)))
    for hook in hooks:
        hook.remove()
    return result


def batches(steps: int) -> Iterator[Tensor]:
    """Token ids int64 [BATCH, LENGTH] of the standard library's sources, each window once, in an order of their own."""
    tokenizer = load_tokenizer(MODEL)
    needed = steps * BATCH * LENGTH
    stream: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py")):
        if "site-packages" not in path.parts and len(stream) < needed:
            stream += [0, *tokenizer.encode(path.read_text(encoding="utf-8", errors="replace")).ids]
    windows = torch.tensor(stream)[: len(stream) // LENGTH * LENGTH].view(-1, LENGTH)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    for step in range(steps):
        yield windows[order[torch.arange(step * BATCH, (step + 1) * BATCH) % len(order)]]


def perplexity(model: Path, recipe: str, options: dict[str, str], calib: Path | None, data: Path, most: int) -> float:
    """Of `model` built so, with the output head in float32."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "artifact"
        qcompile.build(model, out, recipe=recipe, options=options, head_dtype="f32", calib=calib)
        with qcompile.load(out) as llm:
            return llm.perplexity(data, window=LENGTH, max_windows=most).perplexity


def measured(model: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of results for each recipe."""
    given = arguments.data, arguments.windows
    exact = perplexity(model, "f32", KV32, None, *given)
    print(f"{model.name:10} float32 {exact:.4f}", flush=True)
    for recipe, options, plain in RECIPES:
        nearest = perplexity(model, recipe, options | plain, None, *given)
        chosen = perplexity(model, recipe, options, arguments.calib, *given)
        share = 1 - (chosen - exact) / (nearest - exact)
        losses = f"{nearest - exact:+.4f} {chosen - exact:+.4f}"
        print(f"{model.name:10} {recipe:10} {options} {losses} {share:.0%}", flush=True)
        figures = {"float": exact, "nearest": nearest, "calibrated": chosen, "recovered": share}
        yield {"model": model.name, "recipe": recipe, "options": options, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--windows", type=int, default=64)
    every = [MODEL.name, *FAMILIES]
    parser.add_argument("--families", default=",".join(every), help="separated by commas; rows of others stay")
    parser.add_argument("--only-models", type=Path, metavar="DIR", help="train the models, and measure nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "second_model.json")
    arguments = parser.parse_args()
    wanted = arguments.families.split(",")
    if unknown := set(wanted) - set(every):
        parser.error(f"no such families: {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    if arguments.only_models:
        for family in (name for name in wanted if name != MODEL.name):
            apart = make(family, arguments.only_models / f"{family}-1m", arguments.steps)
            print(f"{arguments.only_models / f'{family}-1m'}: {apart:.3f} nats apart", flush=True)
        return
    document: dict[str, Any] = {"windows": arguments.windows, "steps": arguments.steps, "divergence": {}, "rows": []}
    if arguments.out.is_file() and wanted != every:
        kept = json.loads(arguments.out.read_text(encoding="utf-8"))
        if any(kept[name] != document[name] for name in ("windows", "steps")):
            parser.error(f"{arguments.out} was measured with other --windows or --steps: run all families")
        document = kept
    for family in wanted:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            model = MODEL if family == MODEL.name else Path(folder) / f"{family}-1m"
            if model != MODEL:
                apart = document["divergence"][model.name] = make(family, model, arguments.steps)
                print(f"{model.name} trained in {time.perf_counter() - started:.0f} s, {apart:.3f} nats apart")
            others = [row for row in document["rows"] if row["model"] != model.name]
            document["rows"] = [*others, *measured(model, arguments)]
            if "device" in document:  # the head is of the run that the others are of
                document["measured_apart"] = document.get("measured_apart", {}) | {model.name: machine()}
        write_result(arguments.out, document)


if __name__ == "__main__":
    main()
