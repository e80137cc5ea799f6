"""Prompts given as embeddings on this GPU, beside the same prompts as tokens: what differs, and seconds.

    python benchmarks/gpu_embeds.py [--recipes nested,w8a8] [--out FILE]

24 prompts of pycode-26m of 1 to 1,800 tokens, 16 at once, 48 greedy tokens each. `different`: requests with other
tokens or another sum of log probabilities, of two runs. `same_logits`: whether a step that has a text as tokens, as
embeddings and as some of each gives the same bits. The exit code is 4 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS
from benchmarks.gpu_common import facts, this_target
from qcompile.errors import QualityError
from tests.support.embeds import step_with_both

SAMPLE = Path(__file__).parents[1] / "samples" / "pycode-26m"
LENGTHS = (1, 5, 33, 200, 900, 1800) * 4


def table() -> Any:
    """The table of the sample's embeddings, float32 [vocab, width]."""
    from safetensors import safe_open

    index = json.loads((SAMPLE / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name in index if name.endswith("embed_tokens.weight"))
    with safe_open(SAMPLE / index[name], "pt") as file:
        return file.get_tensor(name).float()


def measure(artifact: Path, rows: Any) -> dict[str, Any]:
    """The numbers of a loaded model."""
    prompts = [[(7 * i + number) % 8000 for i in range(length)] for number, length in enumerate(LENGTHS)]
    with qcompile.load(artifact, max_batch=16) as llm:

        def run(**given: Any) -> tuple[list[Any], float]:
            started = time.perf_counter()
            outputs = llm.generate(**given, temperature=0, max_tokens=48, ignore_eos=True, logprobs=0)
            taken = time.perf_counter() - started
            return [(each.outputs[0].token_ids, each.outputs[0].cumulative_logprob) for each in outputs], taken

        run(prompts=prompts[:8])  # graphs are captured from here on
        embeds = [rows[prompt] for prompt in prompts]
        wanted, seconds = run(prompts=prompts)
        given = [run(prompt_embeds=embeds) for _ in range(2)]
        same = step_with_both(llm, prompts[2], rows[prompts[2]].numpy())
    different = sum(one != other for made, _ in given for one, other in zip(made, wanted, strict=True))
    times = {"seconds_tokens": seconds, "seconds_embeds": [taken for _, taken in given]}
    return {"requests": len(prompts), "different": different, "same_logits": same, **times}


def main() -> int:
    """Measure each recipe; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="nested,w8a8")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_embeds.json")
    given = parser.parse_args()
    result: dict[str, Any] = {**facts(), "model": SAMPLE.name, "recipes": {}}
    for recipe in given.recipes.split(","):
        with tempfile.TemporaryDirectory() as made:
            qcompile.build(SAMPLE, Path(made) / "artifact", recipe=recipe, target=this_target())
            result["recipes"][recipe] = measure(Path(made) / "artifact", table())
        print(recipe, json.dumps(result["recipes"][recipe]), flush=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")  # also if a later run fails
    rows = result["recipes"].values()
    return QualityError.exit_code if any(row["different"] or not row["same_logits"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
