"""Every decoder family of `family_list.py` that compiles, on this GPU, beside transformers in float32.

    python benchmarks/gpu_families.py [out.json] [--recipes=w8a8,bf16] [--only=TEXT] [--resume]

A row is right where its logits lie as near to transformers' as those of the CPU's artifact of the same recipe do, up
to a factor of OVER_CPU, and no bit of them differs between one step and steps of 1, 2, 5, 17 and 40 tokens, nor from
those of a sequence alone. The distance is that of the median position, relative to its norm: where the scores of two
experts nearly tie, another expert may be chosen, in a position or two. Weights are random, norms and biases too. Builds
run side by side, a core for each. The exit code is 4 if a row is wrong.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import current_process, get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.families import Row, quiet, save_random, tokens
from benchmarks.family_list import FAMILIES
from benchmarks.gpu_common import facts, this_target
from qcompile.errors import QualityError, UnsupportedError

OVER_CPU = 1.25
"""Both round the same numbers, but sum them in other orders, so that some fall the other way: a tenth was seen."""
LENGTH, CHUNKS = 57, (1, 2, 5, 17, 40)


def one_core() -> None:
    """This worker's share of the machine: what it builds starts no more processes than that."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(current_process()._identity or (0,))[0] % len(cores)]})
    torch.set_num_threads(1)


def prepare(name: str, recipe: str, target: str, folder: Path) -> Row:
    """The family's model, its float32 logits and its artifact in `folder`, and how far the CPU's is from them.

    Or why there is none.
    """
    kind, settings = next((kind, settings) for other, kind, settings in FAMILIES if other == name)
    row: Row = {"type": kind, "recipe": recipe}
    with quiet():
        try:
            reference = save_random(kind, settings, folder / "model")
            qcompile.build(folder / "model", folder / "artifact", target=target, recipe=recipe)
            with torch.no_grad():
                ids = tokens(2, LENGTH, reference.config.vocab_size)
                wanted = reference(ids, use_cache=False).logits
            torch.save(wanted, folder / "logits.pt")
            qcompile.build(folder / "model", folder / "cpu", recipe=recipe)
            with qcompile.load(folder / "cpu") as llm:
                row["cpu_error"] = float(distances(llm.logits(ids), wanted).median())
        except UnsupportedError as error:
            return {**row, "outcome": "refused", "reason": str(error)}
        except Exception as error:  # whatever is not a refusal is a bug, and the other rows are wanted all the same
            return {**row, "outcome": "WRONG", "reason": f"{type(error).__name__}: {error}"[:300]}
    return row


def distances(result: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of logits [..., vocabulary] from those wanted, relative to their norm, of each position."""
    return (result - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def examine(folder: Path, cpu_error: float) -> Row:
    """An artifact's logits beside the reference's, where the CPU's are `cpu_error` away, and in chunks."""
    wanted = torch.load(folder / "logits.pt")
    ids = tokens(2, LENGTH, wanted.shape[-1])
    with qcompile.load(folder / "artifact", kv_cache_bytes=1 << 27) as llm:
        result = llm.logits(ids)
        bits = result.view(torch.int32)
        differ = {str(c): int((llm.logits(ids, chunk=c).view(torch.int32) != bits).sum()) for c in CHUNKS}
        differ["alone"] = int((llm.logits(ids[:1]).view(torch.int32) != bits[:1]).sum())
    far = distances(result, wanted)
    error = float(far.median())
    right = error <= OVER_CPU * cpu_error and not any(differ.values())
    return {
        "outcome": "right" if right else "WRONG",
        "error": error,
        "worst_error": float(far.max()),
        "different_bits": differ,
    }


def rows(wanted: list[tuple[str, str]], target: str) -> Iterator[tuple[str, str, Row]]:
    """(family, recipe, row) of each that is wanted, as their builds are done."""
    with (
        tempfile.TemporaryDirectory() as temporary,
        ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn"), one_core) as pool,
    ):
        folders = [Path(temporary) / str(index) for index in range(len(wanted))]
        builds = [pool.submit(prepare, *each, target, to) for each, to in zip(wanted, folders, strict=True)]
        for (name, recipe), folder, build in zip(wanted, folders, builds, strict=True):
            row = build.result()
            if "outcome" not in row:
                try:
                    row |= examine(folder, row["cpu_error"])
                except Exception as error:
                    row |= {"outcome": "WRONG", "reason": f"{type(error).__name__}: {error}"[:300]}
            yield name, recipe, row


def options() -> tuple[Path | None, dict[str, str]]:
    """The result file, and options by name."""
    given = dict(a[2:].partition("=")[::2] for a in sys.argv[1:] if a.startswith("--"))
    path = next((Path(a) for a in sys.argv[1:] if not a.startswith("--")), None)
    return path, given


def main() -> int:
    """Do the rows; the exit code."""
    path, given = options()
    recipes = given.get("recipes", "w8a8,bf16").split(",")
    known: dict[str, Any] = {}
    if path and "resume" in given and path.is_file():
        known = json.loads(path.read_text(encoding="utf-8"))["rows"]
    names = [name for name, _, _ in FAMILIES if given.get("only", "") in name]
    wanted = [(name, recipe) for recipe in recipes for name in names if f"{name}; {recipe}" not in known]
    start = time.perf_counter()
    for name, recipe, row in rows(wanted, this_target()):
        known[f"{name}; {recipe}"] = row
        what = row.get("reason") or (
            f"{row['error']:.4f} (CPU {row['cpu_error']:.4f}), {sum(row['different_bits'].values())} bits"
        )
        print(f"{time.perf_counter() - start:5.0f} s {name:45} {recipe:5} {row['outcome']:8} {what}", flush=True)
        if path:
            counts = {o: sum(r["outcome"] == o for r in known.values()) for o in ("right", "refused", "WRONG")}
            path.write_text(json.dumps({**facts(), **counts, "rows": known}, indent=1) + "\n", encoding="utf-8")
    return QualityError.exit_code if any(row["outcome"] == "WRONG" for row in known.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
