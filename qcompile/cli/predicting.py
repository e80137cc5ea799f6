"""What `doctor` predicts of a model on GPUs: memory of each, time of steps, and the share of sums between GPUs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qcompile.cli import console
from qcompile.errors import UsageError
from qcompile.report.speed import Divided, Machines, predicted
from qcompile.targets import get_target

if TYPE_CHECKING:
    from qcompile.pipeline import CompilationPlan

CONTEXT = 1024
"""Tokens of context of each sequence, unless the command says another number."""


@dataclass(frozen=True)
class Scenario:
    """The GPUs for which speed is predicted, and the tokens of context of each sequence."""

    machines: Machines
    context: int


def scenario_of(target: str, ranks: int, nodes: int, context: int) -> Scenario | None:
    """What to predict; None for one CPU machine. UsageError for several machines with CPUs, and for uneven numbers."""
    machine = get_target(target)
    return Scenario(Machines(machine, ranks, nodes), context) if machine.kind == "cuda" or nodes > 1 else None


def costs_of(plan: CompilationPlan, scenario: Scenario) -> dict[str, Any]:
    """Costs of one GPU's part of `plan` as whole numbers, which grow with the model's depth: nanoseconds and bytes.

    Raises UsageError for a context that the model does not have.
    """
    from qcompile.pipeline import backend_of
    from qcompile.runtime.step import pages_for

    program, machines, context = plan.program, scenario.machines, scenario.context
    if context > (most := plan.graphs[-1].info.max_position):
        raise UsageError(f"--context {context}: the model has a context of {most}")
    own = set(program.weights)
    weights = {name: size for weight in plan.weights for name, size in weight.blobs if name in own}
    part = Divided(json.loads(program.to_json()), weights, backend_of(machines.target).launches(program))
    pages = pages_for(context, program.kv.page_tokens, program.kv.ring_tokens)
    return predicted(part, machines, context) | {
        "weight_bytes": sum(weights.values()),
        "sequence_bytes": pages * program.kv.page_bytes + program.states.slot_bytes,
    }


def prediction(costs: Mapping[str, Any], activation_bytes: int, scenario: Scenario) -> dict[str, Any]:
    """What is predicted, by the costs of the whole model: `doctor --json` prints it as `prediction`.

    Of each number of sequences: milliseconds of a step, tokens a second of all sequences, the share of the step that
    sums over GPUs take, the bytes that one GPU needs, and whether it has them.
    """
    machines, context = scenario.machines, scenario.context
    fixed = costs["weight_bytes"] + activation_bytes
    room = machines.target.memory_gib * 2**30
    decoding = []
    for batch, step in costs["decode_ns"].items():
        needed = fixed + int(batch) * costs["sequence_bytes"]
        rates = {"milliseconds": step["all"] / 1e6, "tokens_per_second": int(batch) * 1e9 / step["all"]}
        entry = {"sequences": int(batch), **rates, "sums_share": step["sums"] / step["all"]}
        decoding.append(entry | {"gpu_bytes": needed, "fits": needed <= room})
    prompt = costs["prompt_ns"]
    return {
        "target": machines.target.name,
        "gpus": machines.ranks,
        "nodes": machines.nodes,
        "context": context,
        "gpu_weight_bytes": costs["weight_bytes"],
        "gpu_memory_bytes": round(room),
        "decode": decoding,
        "prompt": {
            "tokens": context,
            "tokens_per_second": context * 1e9 / prompt["all"],
            "sums_share": prompt["sums"] / prompt["all"],
        },
    }


def text_of(result: Mapping[str, Any]) -> str:
    """A prediction for people: a line of what it is, a table, and a line of prompts."""
    gpus = f"{result['gpus']} {result['target']}" + (f" in {result['nodes']} machines" if result["nodes"] > 1 else "")
    rows = [
        [
            f"{entry['sequences']} x {result['context']:,}",
            f"{entry['milliseconds']:.2f}",
            f"{entry['tokens_per_second']:,.0f}",
            f"{entry['sums_share']:.0%}",
            console.byte_size(entry["gpu_bytes"]) + ("" if entry["fits"] else " (too much)"),
        ]
        for entry in result["decode"]
    ]
    prompt = result["prompt"]
    header = ["sequences x context", "ms a step", "tokens/s", "sums", "memory of a GPU"]
    return (
        f"predicted, not measured, on {gpus} with {console.byte_size(result['gpu_memory_bytes'])} each\n"
        f"{console.table(header, rows)}\n"
        f"a prompt of {prompt['tokens']:,} tokens: {prompt['tokens_per_second']:,.0f} tokens/s"
    )
