"""A sample model on this GPU beside the CPU: perplexity of each recipe, and which rows' bits depend on their company.

    python benchmarks/gpu_quality.py MODEL heldout.jsonl [out.json] [--gpu-only] [--recipes=qserve,w4a16,...]

Differences count logits of four sequences' last nine rows against each row computed alone: in steps of so many
rows, as a batch, and by the kernels of long steps (which differ where sums are floating point).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.gpu_common import facts
from qcompile.runtime.executor import Rows

RECIPES = ("qserve", "qserve-channel", "w4a8", "w8a8", "w4a16", "bf16")
LENGTHS = (300, 1111, 64, 700)
LAST = 9


def different_bits(llm: qcompile.LLM) -> dict[str, int]:
    """Logits that differ in any bit from those of rows alone, by how the rows were computed."""
    executor, pool = llm.executor, llm.engine.pool
    random = np.random.default_rng(0)
    texts = [random.integers(2, llm.vocab_size, length).tolist() for length in LENGTHS]
    pages = [pool.take(-(-length // executor.limits.page_tokens)) for length in LENGTHS]
    starts = [length - LAST for length in LENGTHS]

    def step(sequence: int, start: int, end: int, outputs: int) -> np.ndarray:
        _, logits = executor.step([Rows(texts[sequence][start:end], start, pages[sequence], outputs)], True)
        return np.empty(0) if logits is None else logits.view(np.int32).copy()

    def together(row: int) -> np.ndarray:
        rows = [Rows(texts[i][s + row : s + row + 1], s + row, pages[i], 1) for i, s in enumerate(starts)]
        logits = executor.step(rows, True)[1]
        assert logits is not None
        return logits.view(np.int32).copy()

    for i, start in enumerate(starts):
        for begin in range(0, start, 512):
            step(i, begin, min(begin + 512, start), 0)
    alone = [np.concatenate([step(i, s + r, s + r + 1, 1) for r in range(LAST)]) for i, s in enumerate(starts)]

    def differ(found: Sequence[np.ndarray], rows: int) -> int:
        return sum(int((a != b[:rows]).sum()) for a, b in zip(found, alone, strict=True))

    result = {}
    for rows in (2, 3, 4, 5, LAST):
        result[f"{rows} rows"] = differ([step(i, s, s + rows, rows) for i, s in enumerate(starts)], rows)
    batches = [together(row) for row in range(LAST)]
    result["batch"] = differ([np.stack([batch[i] for batch in batches]) for i in range(len(starts))], LAST)
    long = [step(i, max(0, s - 40), s + LAST, LAST) for i, s in enumerate(starts)]
    result["long step"] = differ(long, LAST)
    for each in pages:
        pool.give_back(each)
    return result


def measure(model: str, documents: str, recipe: str, folder: Path, targets: Sequence[str]) -> dict[str, Any]:
    """Perplexity by kind of target, and on the GPU what different_bits counts."""
    found: dict[str, Any] = {"recipe": recipe}
    for target in targets:
        path = qcompile.build(model, folder / f"{recipe}-{target}", target=target, recipe=recipe).path
        with qcompile.load(path) as llm:
            kind = "cpu" if target == "cpu" else "gpu"
            result = llm.perplexity(documents)
            found[kind] = {"perplexity": result.perplexity}
            if kind == "gpu":
                found[kind]["different_bits"] = different_bits(llm)
    print(found, flush=True)
    return found


def main() -> None:
    options = [a for a in sys.argv[1:] if a.startswith("--")]
    model, documents, *out = [a for a in sys.argv[1:] if not a.startswith("--")]
    named = [a.split("=", 1)[1].split(",") for a in options if a.startswith("--recipes=")]
    targets = ("h200",) if "--gpu-only" in options else ("h200", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(model, documents, r, Path(folder), targets) for r in (named[0] if named else RECIPES)]
    if out:
        Path(out[0]).write_text(json.dumps({**facts(), "recipes": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
