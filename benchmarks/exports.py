"""What other engines compute from exported checkpoints, beside what the artifacts compute.

    python benchmarks/exports.py --engine PYTHON [--model CHECKPOINT] [--cases w4a16:compressed-tensors,...]

PYTHON is the interpreter of an environment with transformers, compressed-tensors and torch; `--prompts` a file of
prompts. Each case builds an artifact, exports it, and compares logits at every position of the sample prompts: those of
the artifact's graph with those of the engine. The graph rounds neither activations nor cache, since the checkpoint has
only weights. Where the engine has no reader (GPTQ, AWQ), it gets the numbers that qcompile's reader finds in the file.
A case passes if logits differ by
at most 2 % of the largest, and the most likely token is the same wherever it leads by more than 0.01.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import RESULTS, write_result
from qcompile import pipeline
from qcompile.artifact.export import Sequence
from qcompile.checkpoints.stored import formats
from qcompile.checkpoints.tokenizer_files import load_tokenizer
from qcompile.codegen.cpu import compiler
from qcompile.exports import checkpoint

SAMPLES = Path(__file__).parents[1] / "samples"
CASES = (
    "w4a16:compressed-tensors",
    "w8a8:compressed-tensors",
    "mxfp4:compressed-tensors",
    "nvfp4:compressed-tensors",
    "w4a16:gptq",
    "w4a16:awq",
    "qserve:hf",
)
ROUNDED = {"nvfp4:compressed-tensors": "compressed-tensors makes bfloat16 numbers of these weights"}
"""Cases in which the engine rounds weights: tokens may differ without failing the run, but are not called passed."""
MOST_TOKENS = 64
LARGEST, GAP = 0.02, 0.01
ENGINE = """
import sys, torch, transformers
from importlib.metadata import version
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
folder, prompts, out = sys.argv[1:]
packed = "compressed-tensors" in open(folder + "/config.json").read()
given = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if packed else {}
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given)
with torch.no_grad():
    save_file({name: model(ids[None]).logits[0].clone() for name, ids in load_file(prompts).items()}, out)
print({name: version(name) for name in ("transformers", "compressed-tensors", "torch")})
"""


def artifact_logits(artifact: Path, prompts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits [T, vocab] of an artifact's weights for each prompt, without the rounding of activations and cache."""
    with torch.no_grad():
        model = Sequence(artifact).unrounded()
        return {name: model(ids) for name, ids in prompts.items()}


def as_floats(folder: Path, out: Path) -> Path:
    """The checkpoint `folder` as floating-point numbers in `out`, by qcompile's reader."""
    stored = formats.open_checkpoint(folder)
    out.mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: stored.load(name) for name in stored}, out / "model.safetensors", {"format": "pt"})
    return out


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, Any]:
    """How far the logits of all prompts are apart."""
    one, other = (torch.cat([logits[name] for name in ours]) for logits in (ours, theirs))
    first, second = one.topk(2).values.unbind(-1)
    sure = first - second > GAP
    same = (one.argmax(-1) == other.argmax(-1))[sure]
    furthest = float((one - other).abs().max() / one.abs().max())
    return {
        "largest_difference_of_largest_logit": furthest,
        "positions": len(one),
        "positions_with_a_gap": int(sure.sum()),
        "same_token": int(same.sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, help="interpreter of the environment with the other engine")
    parser.add_argument("--model", type=Path, default=SAMPLES / "pycode-1m")
    parser.add_argument("--prompts", type=Path, default=SAMPLES / "prompts.jsonl", help='{"prompt": TEXT} a line')
    parser.add_argument("--cases", default=",".join(CASES))
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.model)
    lines = given.prompts.read_text().splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    prompts = {f"{i:03d}": torch.tensor(tokenizer.encode(t).ids[:MOST_TOKENS]) for i, t in enumerate(texts)}
    results: dict[str, Any] = {}
    versions, failed = "", False
    unused = mock.patch.object(compiler, "compile", return_value=b"")  # no kernel runs here
    with tempfile.TemporaryDirectory() as work, unused:
        asked = Path(work) / "prompts.safetensors"
        save_file(prompts, asked)
        for case in given.cases.split(","):
            recipe, format = case.split(":")
            artifact, out = Path(work) / recipe, Path(work) / case.replace(":", "-")
            if not artifact.exists():
                pipeline.build(given.model, artifact, recipe=recipe)
            checkpoint.write(artifact, out, format)
            read = as_floats(out, Path(work) / f"{case}-floats") if format in ("gptq", "awq") else out
            command = [given.engine, "-c", ENGINE, str(read), str(asked), f"{work}/logits"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            versions = done.stdout.strip().splitlines()[-1]
            result = compare(artifact_logits(artifact, prompts), load_file(f"{work}/logits"))
            within = result["largest_difference_of_largest_logit"] <= LARGEST
            same = result["same_token"] == result["positions_with_a_gap"]
            failed |= not (within and (same or case in ROUNDED))
            results[case] = result | {"note": ROUNDED.get(case), "passed": within and same}
            print(case, results[case], flush=True)
    write_result(RESULTS / "exports.json", {"model": given.model.name, "engine": versions, "cases": results})
    sys.exit(4 if failed else 0)


if __name__ == "__main__":
    main()
