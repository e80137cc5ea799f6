"""GGUF files in both directions beside llama.cpp: what qcompile exports, and what llama.cpp's own quantizer writes.

    python benchmarks/gguf_peers.py LLAMA_BIN [--out=FILE] [--model=samples/pycode-26m] [--data=samples/heldout.jsonl]

LLAMA_BIN: the folder of llama.cpp's programs llama-perplexity and llama-quantize. Perplexities are those of
llama-perplexity: windows of 512 tokens, of which the second half counts. `exported`: an artifact's kernels, and
llama.cpp on the file that `qcompile export` wrote. `read`: files of llama-quantize, built with recipe f32, and in
llama.cpp. llama.cpp rounds activations to 8 bits where weights have fewer than 16, and qcompile under w8a8 alone, in
another way. The exit code is 4 where perplexities differ by more than MOST_DIFFERENCE.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, write_result
from qcompile.exports import checkpoint

WINDOW = 512
CHARACTERS = 60_000
EXPORTED = ("bf16", "w8a8", "w4a16", "mxfp4")
QUANTIZED = ("Q8_0", "Q6_K", "Q5_K_S", "Q4_K_M", "Q3_K_M", "Q2_K", "IQ4_XS", "Q5_1", "Q4_0")
MOST_DIFFERENCE = 0.01
"""Relative: what 8-bit activations, rounded in two ways or not, move the perplexity of pycode-26m by (at most 0.3 % on
the day of the first run), with a margin."""


def own_perplexity(artifact: Path, text: str) -> float:
    """What llama-perplexity computes, by an artifact's kernels."""
    with qcompile.load(artifact) as llm:
        assert llm.tokenizer is not None
        tokens: list[int] = llm.tokenizer.encode(text).ids
        total, count = 0.0, 0
        for start in range(0, len(tokens) - WINDOW + 1, WINDOW):
            window = tokens[start : start + WINDOW]
            logits = torch.as_tensor(llm.logits([window]))[0, WINDOW // 2 : -1].double()
            target = torch.tensor(window[WINDOW // 2 + 1 :])
            total += torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
            count += len(target)
    return math.exp(total / count)


def peer_perplexity(programs: Path, file: Path, text: Path) -> float:
    """What llama-perplexity prints. Weights are not repacked: some processors with AMX cannot run kernels for that."""
    command = [programs / "llama-perplexity", "-m", file, "-f", text, "-c", str(WINDOW), "--no-repack"]
    ended = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    result = re.search(r"Final estimate: PPL = ([\d.]+)", ended.stdout + ended.stderr)
    assert result is not None
    return float(result[1])


def peer_version(programs: Path) -> str:
    """What llama.cpp says of itself."""
    told = subprocess.run([str(programs / "llama-perplexity"), "--version"], capture_output=True, text=True, check=True)
    return re.sub(r"^version: ", "", (told.stdout + told.stderr).splitlines()[0])


def compared(name: str, ours: float, theirs: float) -> dict[str, Any]:
    """A row of the results, which is printed as well: two perplexities, and their relative difference."""
    row = {"name": name, "qcompile": ours, "llama.cpp": theirs, "difference": ours / theirs - 1}
    print(f"{name:8} qcompile {ours:.4f}  llama.cpp {theirs:.4f}  {row['difference']:+.3%}", flush=True)
    return row


def main() -> None:
    options = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
    (programs,) = (Path(a) for a in sys.argv[1:] if not a.startswith("--"))
    model = Path(options.get("model", "samples/pycode-26m"))
    lines = Path(options.get("data", "samples/heldout.jsonl")).read_text(encoding="utf-8").splitlines()
    text = "".join(json.loads(line)["text"] for line in lines)[:CHARACTERS]
    results: dict[str, Any] = {"gguf": version("gguf"), "llama.cpp": peer_version(programs), "model": model.name}
    results |= {"exported": [], "read": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        given = folder / "text.txt"
        given.write_text(text, encoding="utf-8")
        for recipe in EXPORTED:
            artifact, file = folder / recipe, folder / f"{recipe}.gguf"
            qcompile.build(model, out=artifact, recipe=recipe)
            checkpoint.write(artifact, file, "gguf")
            row = compared(recipe, own_perplexity(artifact, text), peer_perplexity(programs, file, given))
            results["exported"].append(row)
        for kind in QUANTIZED:
            file, artifact = folder / f"{kind}.gguf", folder / f"read-{kind}"
            command = [str(programs / "llama-quantize"), str(folder / "bf16.gguf"), str(file), kind]
            subprocess.run(command, capture_output=True, check=True)
            qcompile.build(file, out=artifact, recipe="f32")
            row = compared(kind, own_perplexity(artifact, text), peer_perplexity(programs, file, given))
            results["read"].append(row)
    write_result(Path(options.get("out", RESULTS / "gguf_peers.json")), results)
    if any(abs(row["difference"]) > MOST_DIFFERENCE for row in results["exported"] + results["read"]):
        raise SystemExit(4)


if __name__ == "__main__":
    main()
