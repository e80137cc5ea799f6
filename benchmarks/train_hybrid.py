"""Train the sample of a hybrid decoder: gated delta rule and attention, on the Python of the standard library.

    python benchmarks/train_hybrid.py [--minutes 2.5] [--out DIR] [--device cuda] [--heldout FILE] [--library DIR ...]

The model has 11 M parameters: 6 layers with a recurrent state and 2 with attention, and the tokenizer of pycode-26m.
It exists to measure what quantization costs where a state carries errors along (benchmarks/hybrid_quality.py). The
text is that of standard libraries with their tests: each `--library`, as /usr/lib/python3.12, else the running
interpreter's. Libraries of several versions give more text: a file is read from the first library that has it. Texts
that begin like one of `--heldout`, a JSON lines file, are left out, and the loss on the first of its texts is printed
along the way.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import sysconfig
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "samples" / "pycode-26m"
WINDOW, BATCH = 512, 64
"""Tokens of a training sequence, and sequences of a step."""
PEAK_RATE, WARM_UP, DECAY = 3e-3, 60, 0.1
SHARD = "14MB"
START = 200
"""Characters by which a text to exclude is recognized."""


def config() -> Any:
    """The configuration of the sample."""
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        mlp_only_layers=list(range(8)),
        num_experts=0,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )


def texts(heldout: Sequence[str], libraries: Sequence[Path], left_out: Collection[str] = ()) -> list[str]:
    """The files of the libraries, in an order drawn once, without those that begin as one of `heldout`, and those in
    folders of names that are `left_out`."""
    others = {"site-packages", "dist-packages", "idle_test", *left_out}
    unwanted = {text[:START] for text in heldout}
    files: dict[Path, Path] = {}
    for library in libraries:
        for path in sorted(library.rglob("*.py")):
            if not others & set(path.parts):
                files.setdefault(path.relative_to(library), path)
    read = (path.read_text(encoding="utf-8", errors="ignore") for path in files.values())
    result = [text for text in read if len(text) > START and text[:START] not in unwanted]
    random.Random(0).shuffle(result)
    return result


def tokens(documents: list[str]) -> Tensor:
    """All documents joined, each preceded by token 0: int64 [tokens]."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    joined: list[int] = []
    for encoding in tokenizer.encode_batch(documents, add_special_tokens=False):
        joined += [0, *encoding.ids]
    return torch.tensor(joined)


def train(module: Any, ids: Tensor, unseen: Tensor, seconds: float) -> None:
    """Train for `seconds`, with a learning rate that falls with the time left. Prints the loss on `unseen` too."""
    matrices = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=ids.is_cuda)
    drawn = torch.Generator(ids.device).manual_seed(0)
    start, step = time.perf_counter(), 0
    while (past := (time.perf_counter() - start) / seconds) < 1:
        rate = PEAK_RATE * min(1.0, (step + 1) / WARM_UP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * past)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        first = torch.randint(0, len(ids) - WINDOW - 1, (BATCH, 1), generator=drawn, device=ids.device)
        window = ids[first + torch.arange(WINDOW + 1, device=ids.device)]
        with torch.autocast(ids.device.type, torch.bfloat16):
            logits = module(input_ids=window[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            result = f"loss {loss.item():.3f}, on unseen text {loss_on(module, unseen):.3f}"
            print(f"step {step}: {result}, {100 * past:.0f} % of the time", file=sys.stderr, flush=True)
        step += 1


@torch.no_grad()
def loss_on(module: Any, ids: Tensor) -> float:
    """The mean loss on the first windows of `ids`; NaN if there are none."""
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)[:BATCH]
    if not len(windows):
        return math.nan
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = module(input_ids=windows, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), windows[:, 1:].flatten()).item()


def main() -> int:
    """Train and save the sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.5)
    parser.add_argument("--out", type=Path, default=ROOT / "samples" / "pyhybrid-11m")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--heldout", type=Path)
    parser.add_argument("--library", type=Path, action="append")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config(), dtype=torch.float32).to(options.device)
    lines = options.heldout.read_text(encoding="utf-8").splitlines() if options.heldout else []
    heldout = [json.loads(line)["text"] for line in lines]
    libraries = options.library or [Path(sysconfig.get_paths()["stdlib"])]
    ids, unseen = (tokens(result).to(options.device) for result in (texts(heldout, libraries), heldout))
    print(f"{len(ids):,} tokens, {sum(p.numel() for p in module.parameters()):,} parameters", file=sys.stderr)
    train(module.train(), ids, unseen, 60 * options.minutes)
    module.to(torch.bfloat16).save_pretrained(options.out, max_shard_size=SHARD)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TOKENIZER / name, options.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
