"""Times of rounds with trees of drafts, from measured times of steps: on this CPU, and of an 8 B model on an H200.

A tree of N nodes and D levels costs what a chain of D drafts costs, and for verification the difference between a step
of N + 1 rows and one of D + 1. Attention of branches, which reads their common positions once a branch, is left out.
`bound` takes the least time that the measurements allow, so that its gain is an upper bound: levels of one row, and for
more rows than were measured with that number of sequences, the time of the most rows and what the matrix products alone
take longer. `estimate` counts the rows of levels, and takes the time of as many rows of more sequences, which attend to
more; past the most of these, it grows with the rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import RESULTS
from qcompile.runtime.cpu.executor import Executor
from qcompile.runtime.step import Rows

GPU = RESULTS / "gpu_speculation_h200.json"
GPU_WEIGHTS = {"w4a16+head": "w4_asym_g128", "qserve+head": "qoq_g128", "nested": "nested_8_4"}
"""The target's weights by variant, for those that this file has too."""
GEMMS = RESULTS / "gpu_gemm_h200.json"
SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336))
LAYERS = 32
"""Layers of the 8 B model, and the shapes (N, K) of their products."""
CPU_ROWS = (*range(1, 18), 25, 33, 61)
"""Rows of the steps that are timed."""
CONTEXT = 200
"""Positions before these rows."""
WIDTH = 10
"""Nodes that a level of a tree expands, and choices of each that are looked at."""
DEPTH = 8
"""Most levels of a tree, and most drafts of a chain or of the chain of a comb."""
NODES = (4, 6, 8, 12, 16, 24, 32, 60)
"""Nodes of trees, without the root."""
TURNS = 60
"""Times that each step is timed; the fastest counts, since other processes can only add to it."""


class Rounds(NamedTuple):
    """Times of rounds on a machine, with chains of up to `longest` drafts.

    seconds(rows, levels, level_rows, estimate): of a round with drafts of `levels` levels and a step of `rows` rows.
    """

    longest: int
    seconds: Callable[[int, int, int, bool], float]


def step_seconds(target: Executor, draft: Executor) -> dict[str, dict[str, float]]:
    """Seconds of the target's step of consecutive rows, and of the draft's of one row of each branch, by rows."""
    pages = list(range(-(-(CONTEXT + CPU_ROWS[-1]) // target.limits.page_tokens)))
    whole = CONTEXT // draft.limits.page_tokens
    steps: dict[tuple[str, int], Callable[[], Any]] = {}
    for many in CPU_ROWS:
        rows = [Rows([100] * many, CONTEXT, pages, many)]
        steps["target", many] = lambda rows=rows: target.step(rows, False)  # type: ignore[misc]
        if many <= WIDTH:
            branches = [Rows([100], CONTEXT, [*pages[:whole], len(pages) + i], 1) for i in range(many)]
            steps["draft", many] = lambda rows=branches: draft.step(rows, False)  # type: ignore[misc]
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(TURNS):
        for key, step in steps.items():
            started = time.perf_counter()
            step()
            best[key] = min(best[key], time.perf_counter() - started)
    return {
        path: {str(many): round(seconds, 7) for (of, many), seconds in best.items() if of == path}
        for path in ("target", "draft")
    }


def cpu_rounds(steps: Mapping[str, Mapping[str, float]]) -> Rounds:
    """Rounds on this CPU. All steps of rows that trees have were timed."""
    target, draft = ({int(many): each for many, each in steps[path].items()} for path in ("target", "draft"))

    def seconds(rows: int, levels: int, level_rows: int, estimate: bool) -> float:
        later = draft[min(level_rows, WIDTH)] if estimate else draft[1]
        return target[rows] + draft[1] + (levels - 1) * later

    return Rounds(DEPTH, seconds)


def products(weights: str) -> list[tuple[int, float]]:
    """Rows, and seconds of the products that were timed of the 8 B model's layers (those of its queries, keys and
    values were not)."""
    kernels = json.loads(GEMMS.read_text(encoding="utf-8"))["kernels"]
    times = [each["times"] for each in kernels if each["format"] == weights and (each["N"], each["K"]) in SHAPES]
    return [(row[0]["M"], LAYERS * 1e-6 * sum(each["us"] for each in row)) for row in zip(*times, strict=True)]


def gpu_rounds(entry: Mapping[str, Any], others: Sequence[Mapping[str, Any]], weights: str) -> Rounds:
    """Rounds on the GPU: an entry of the result file, and those of the same recipe with any number of sequences."""
    chains = {int(gamma): seconds for gamma, seconds in entry["round_seconds"].items()}
    most, batch, level = max(chains), entry["batch"], (max(chains.values()) - min(chains.values())) / (len(chains) - 1)
    longer, own, points = level, dict.fromkeys(range(2, most + 2), 0.0), []
    if "steps" in entry:
        level, longer = (entry["steps"][str(most)][name] for name in ("head", "head first"))
        own = {int(gamma) + 1: each["target"] for gamma, each in entry["steps"].items()}
        every = [(each["batch"] * (int(g) + 1), one["target"]) for each in others for g, one in each["steps"].items()]
        points = sorted(every)
    gemms = products(weights)

    def least(rows: int) -> float:
        known = min(rows, max(own))
        above = min((seconds for many, seconds in gemms if many >= known * batch), default=gemms[-1][1])
        below = max((seconds for many, seconds in gemms if many <= rows * batch), default=0.0)
        return max(seconds for many, seconds in own.items() if many <= rows) + max(0.0, below - above)

    def likely(rows: int) -> float:
        total = rows * batch
        at, each = zip(*points, strict=True)
        return max(1, total / at[-1]) * float(np.interp(total, at, np.maximum.accumulate(each)))

    def seconds(rows: int, levels: int, level_rows: int, estimate: bool) -> float:
        step = likely if estimate and points else least
        chain = chains.get(levels) or chains[most] + (levels - most) * level
        wider = (levels - 1) * (longer - level) if estimate and level_rows > 1 else 0.0
        return chain + max(0.0, step(rows) - step(levels + 1)) + wider

    return Rounds(most, seconds)


def combined(variants: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each variant and machine the best chain, and what the best trees and combs gain over it."""
    result = []
    measured = json.loads(GPU.read_text(encoding="utf-8"))
    for name, variant in variants.items():
        yields = variant["tokens_a_round"]
        cpu = cpu_rounds(variant["cpu_step_seconds"])
        result.append({"variant": name, "machine": "this CPU", "batch": 1, **gains(yields, cpu)})
        entries = [each for each in measured["speculation"] if each["recipe"] == name and name in GPU_WEIGHTS]
        for entry in entries:
            place = {"variant": name, "machine": measured["device"], "batch": entry["batch"]}
            result.append({**place, **gains(yields, gpu_rounds(entry, entries, GPU_WEIGHTS[name]))})
    return result


def gains(yields: Mapping[str, float], rounds: Rounds) -> dict[str, Any]:
    """The best chain that was timed, and by shape the levels with the greatest gain over it."""
    sizes = range(1, DEPTH + 1)
    chains = {
        size: yields[f"chain {size}"] / rounds.seconds(size + 1, size, 1, False) for size in sizes[: rounds.longest]
    }
    best = max(chains, key=lambda size: chains[size])
    shapes = {
        "chain": [(f"chain {size}", size, size, 1) for size in sizes],
        "comb": [(f"comb {size}", 2 * size, size, 1) for size in sizes],
        **{f"tree {n}": [(f"tree {n}, {size} levels", n, size, n) for size in sizes if size <= n] for n in NODES},
    }
    result: dict[str, Any] = {"chain": {"gamma": best, "tokens_a_round": yields[f"chain {best}"]}}
    for kind in ("bound", "estimate"):
        result[kind] = {}
        for shape, choices in shapes.items():
            rates = [
                (yields[key] / rounds.seconds(nodes + 1, levels, width, kind == "estimate") / chains[best], levels, key)
                for key, nodes, levels, width in choices
            ]
            gain, levels, key = max(rates)
            result[kind][shape] = {"levels": levels, "tokens_a_round": yields[key], "gain": round(gain, 3)}
    return result
