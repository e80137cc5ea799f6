"""report.json: figures of a build by layer and kernel; report/page.py renders it for people.

Parts of a layer are identified by their dataflow in the program, never by their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qcompile import ops
from qcompile.formats.registry import weight_format
from qcompile.graph import Graph
from qcompile.ops import GATED
from qcompile.roofline import CPU_CORE, Peaks, StepShape, call_cost, peaks_of, predicted_us

Json = dict[str, Any]

HEAD, QKV, ATTENTION_OUT, GATE_UP, DOWN, OTHER = (
    "output head",
    "query, key, value",
    "attention output",
    "gate and up",
    "down",
    "other",
)
PARTS = (QKV, ATTENTION_OUT, GATE_UP, DOWN, OTHER, HEAD)
"""Kinds of linear layers, in the order of a step."""

OTHER_WEIGHTS = "embedding and others"
"""Weights that belong to no linear layer of the model: the embedding, norms, and what drafts have for themselves."""


@dataclass(frozen=True)
class DraftFigures:
    """A draft path: its Program.to_json, parsed, and what its passes did."""

    name: str
    program: Json
    shares_cache: bool
    passes: list[Json]


def collect(
    program: Json,
    weight_bytes: Mapping[str, int],
    target: str,
    figures: Mapping[str, Json],
    wide: Mapping[str, float],
    drafts: Sequence[DraftFigures] = (),
    **known: Any,
) -> Json:
    """The whole report. `known` entries are added unchanged: model, recipe, study, bits_per_weight, passes, outliers,
    perplexity, calibration, command, versions.

    `program` is Program.to_json, parsed; `weight_bytes` maps packed weights of all paths to their sizes; `figures` and
    `wide` come from figures_of and wide_of. Cache bytes per token also cover all paths.
    """
    peaks = peaks_of(target)
    caches = [program, *(draft.program for draft in drafts if not draft.shares_cache)]
    return {
        **known,
        "target": target,
        "weights": dict(weight_bytes),
        "weight_bytes": sum(weight_bytes.values()),
        "activation_bytes_per_token": program["arena_bytes_per_token"],
        "context": program["max_position"],
        "kv_format": program["kv"]["format"],
        "kv_bytes_per_token": sum(one["kv"]["page_bytes"] // one["kv"]["page_tokens"] for one in caches),
        "calibrated": bool(figures),
        "linears": linears(program, weight_bytes, figures, wide),
        "kernels": kernels(program, weight_bytes, peaks),
        "drafts": [_drafted(draft, weight_bytes, peaks) for draft in drafts],
        "predicted_by": "the rates of one usual core" if peaks is CPU_CORE else "the target's data sheet",
    }


def _drafted(draft: DraftFigures, weight_bytes: Mapping[str, int], peaks: Peaks) -> Json:
    """name, passes, shares_cache, and the predicted time per drafted token."""
    time = sum(row["predicted_us"] for row in kernels(draft.program, weight_bytes, peaks))
    return {"name": draft.name, "passes": draft.passes, "shares_cache": draft.shares_cache, "predicted_us": time}


def figures_of(graph: Graph) -> dict[str, Json]:
    """The figures that calibration recorded for the weights of each call of the last graph, by the call's name."""
    return {
        node.name: source.meta["calibrated"]
        for node in graph.nodes
        for source in node.all_input_nodes
        if "calibrated" in source.meta
    }


def wide_of(graph: Graph) -> dict[str, float]:
    """Share of 8-bit output features of each call with a mixed weight, by the call's name."""
    return {
        node.name: float(graph.evaluate(ops.operand(source, "wide")).double().mean())
        for node in graph.nodes
        for source in node.all_input_nodes
        if ops.name_of(source.target) == "quantize_mixed"
    }


def linears(
    program: Json, weight_bytes: Mapping[str, int], figures: Mapping[str, Json], wide: Mapping[str, float]
) -> list[Json]:
    """One entry per linear layer of `program` (Program.to_json, parsed), in order.

    Keys: name, layer (of the attention it feeds or follows; None for the head), part (one of PARTS), format, outputs,
    inputs, bytes, bits (per weight), wide_share (of output features with 8 bits or more), and error and error_nearest
    from calibration, relative to the size of the layer's output (None if it did not run). `figures` and `wide` (the
    share of mixed weights) are keyed by call name.
    """
    calls = program["calls"]
    feeds = [(at, call["qkv"], call["layer"]) for at, call in enumerate(calls) if call["kernel"] == "rope_append"]
    written: dict[str, Json] = {}
    rows, layer = [], None
    for number, call in enumerate(calls):
        if call["kernel"] == "attention":
            layer = call["layer"]
        elif call["kernel"] == "gemm":
            fed = [place for at, source, place in feeds if at > number and source == call["out"]]
            part = QKV if fed else _part(call, written)
            place = None if part == HEAD else fed[0] if fed else layer
            rows.append(_linear(call, part, place, weight_bytes, figures.get(call["name"], {}), wide))
        if call.get("out"):
            written[call["out"]] = call
    return rows


def _part(call: Json, written: Mapping[str, Json]) -> str:
    """One of PARTS, other than QKV; `written` maps each buffer to the last call that wrote it."""
    if call["epilogue"] == "logits":
        return HEAD
    source = call["x"]
    while source in written and written[source]["kernel"] in ("quantize", "hadamard"):
        source = written[source]["x"]
    writer = written.get(source, {})
    if writer.get("kernel") == "attention":
        return ATTENTION_OUT
    if call["epilogue"] in GATED:
        return GATE_UP
    return DOWN if writer.get("kernel") in ("gemm", "elementwise") else OTHER


def _linear(
    call: Json,
    part: str,
    layer: int | None,
    weight_bytes: Mapping[str, int],
    figures: Json,
    wide: Mapping[str, float],
) -> Json:
    name, size = call["name"], sum(weight_bytes[blob] for blob in call["weights"].values())
    return {
        "name": name,
        "layer": layer,
        "part": part,
        "format": call["format"],
        "outputs": call["n"],
        "inputs": call["k"],
        "bytes": size,
        "bits": 8 * size / (call["n"] * call["k"]),
        "wide_share": wide[name] if weight_format(call["format"]).marks_rows else float(bits_of(call["format"]) >= 8),
        "error": figures.get("error"),
        "error_nearest": figures.get("error_nearest"),
    }


def bytes_by_part(report: Json) -> list[tuple[str, int, float | None]]:
    """Parts with their bytes and their bits per weight, in the order of a step; last what is no linear layer."""
    parts: list[tuple[str, int, float | None]] = []
    for part in PARTS:
        rows = [row for row in report["linears"] if row["part"] == part]
        if rows:
            size = sum(row["bytes"] for row in rows)
            parts.append((part, size, 8 * size / sum(row["outputs"] * row["inputs"] for row in rows)))
    rest = report["weight_bytes"] - sum(size for _, size, _ in parts)
    return [*parts, (OTHER_WEIGHTS, rest, None)] if rest > 0 else parts


def bits_of(format: str) -> int:
    """Bits of a code; for a part of another format, those of the format it is read as."""
    return weight_format(format).read_as.bits


def kernels(program: Json, weight_bytes: Mapping[str, int], peaks: Peaks, context: int = 1024) -> list[Json]:
    """Predicted microseconds per decoded token by kernel; entries have kernel, calls, predicted_us, bytes."""
    rows: dict[str, Json] = {}
    for call in program["calls"]:
        cost = call_cost(call, program, weight_bytes, StepShape(context))
        row = rows.setdefault(call["kernel"], {"kernel": call["kernel"], "calls": 0, "predicted_us": 0.0, "bytes": 0})
        row["calls"] += 1
        row["predicted_us"] += predicted_us(cost.bytes, cost.ops, peaks, cost.dtype)
        row["bytes"] += round(cost.bytes)
    return sorted(rows.values(), key=lambda row: -row["predicted_us"])
