"""Roofline: the minimum time of a kernel, from the data it moves, the operations it does, and the machine's peaks.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 2009.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from qcompile.targets import get_target


@dataclass(frozen=True)
class Peaks:
    """Peak rates of a machine, for the threads that will be used.

    `bytes_per_second` of memory; `ops_per_second` by type (int8, f32, bf16), where multiply-add counts as two;
    `overhead_us` is the fixed cost of a kernel (launch, barrier).
    """

    bytes_per_second: float
    ops_per_second: Mapping[str, float]
    overhead_us: float = 0.0


CPU_CORE = Peaks(25e9, {"int8": 400e9, "bf16": 200e9, "f32": 100e9})
"""Rates for predicting times on a CPU: a core of a recent server. `qcompile bench` measures the actual one."""


def peaks_of(target: str) -> Peaks:
    """Rates for predicting times on `target`: a GPU's data sheet, or a typical CPU core. UsageError if unknown."""
    machine = get_target(target)
    if not machine.memory_gb_s:
        return CPU_CORE
    rates = {"int8": machine.int8_tops, "bf16": machine.bf16_tflops, "f32": machine.f32_tflops}
    return Peaks(machine.memory_gb_s * 1e9, {dtype: 1e12 * rate for dtype, rate in rates.items()})


@dataclass(frozen=True)
class StepShape:
    """What a step computes: rows (tokens) of a number of sequences, and the positions that a row's attention reads.

    context: mean number of positions. outputs: rows with logits.
    """

    context: float
    rows: int = 1
    sequences: int = 1

    @property
    def outputs(self) -> int:
        """Rows with logits: one a sequence."""
        return self.sequences


class Cost(NamedTuple):
    """What one run of a kernel moves (bytes) and computes (multiply-add counts as two), and in which type."""

    bytes: float
    ops: float
    dtype: str


def predicted_us(bytes: float, ops: float, peaks: Peaks, dtype: str = "int8") -> float:
    """Microseconds: the maximum of the times to move `bytes` and to compute `ops` in `dtype`, plus the overhead."""
    moving = bytes / peaks.bytes_per_second
    computing = ops / peaks.ops_per_second[dtype]
    return max(moving, computing) * 1e6 + peaks.overhead_us


_ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "q8": 1, "i8": 1}
_MATH = {"f32": "f32", "bf16": "bf16", "q8": "int8"}


def call_cost(
    call: Mapping[str, Any], program: Mapping[str, Any], weight_bytes: Mapping[str, int], step: StepShape
) -> Cost:
    """Cost of one call of a program (codegen/program.py, as JSON) for the rows of a step.

    `weight_bytes` are sizes by weight name. An embedding lookup reads one row of its table for each row of the step.
    Of the experts, the share is read that rows which choose independently of each other would choose. Every other
    weight is read completely, once. The positions of a sequence are read once for all of its rows: the newest that a
    window or a chunk has, or all.
    """
    buffers = {buffer["name"]: buffer for buffer in program["buffers"]}
    named = [call.get(key) for key in ("x", "qkv", "q", "out", "residual", "other")]
    row_bytes = sum(_ITEM_BYTES[buffers[n]["dtype"]] * buffers[n]["width"] for n in named if n in buffers)
    kernel = call["kernel"]
    if kernel == "gemm":
        weights = [*call["weights"].values(), call["bias"]]
        read = sum(weight_bytes[name] for name in weights if name)
        rows = step.outputs if call.get("epilogue") == "logits" else step.rows
        return Cost(rows * row_bytes + read, rows * 2.0 * call["n"] * call["k"], _MATH[buffers[call["x"]]["dtype"]])
    if kernel == "expert_gemm":
        read = sum(weight_bytes[name] for name in call["weights"].values())
        chosen = 1.0 - (1.0 - call["slots"] / call["experts"]) ** step.rows
        ops = step.rows * 2.0 * call["slots"] * call["rows"] * call["k"]
        return Cost(step.rows * row_bytes + chosen * read, ops, "f32")
    if kernel == "attention":
        first, stop = call["value"] or (0, call["head_dim"])
        widths = call["heads"] * (call["head_dim"] + stop - first)
        context = min(step.context, call.get("window") or step.context, call.get("chunk") or step.context)
        cached = step.sequences * context * _position_bytes(call, program)
        return Cost(step.rows * row_bytes + cached, step.rows * 2.0 * context * widths, "f32")
    if kernel in ("conv_step", "recurrence_step"):
        moved, ops = _state(call)
        return Cost(step.rows * row_bytes + step.sequences * moved, step.rows * ops, "f32")
    rows = step.outputs if kernel == "logits" else step.rows
    cost = _row_cost(call, program, buffers, row_bytes)
    return Cost(rows * cost.bytes, rows * cost.ops, cost.dtype)


def _position_bytes(call: Mapping[str, Any], program: Mapping[str, Any]) -> float:
    """Bytes of a position in the cache of the layer of `call`."""
    kv = program["kv"]
    return float(kv["layer_page_bytes"][call["layer"]] / kv["page_tokens"])


def _state(call: Mapping[str, Any]) -> tuple[float, float]:
    """Bytes of a sequence's recurrent state that a step of a call reads and writes, and operations of a row."""
    if call["kernel"] == "conv_step":
        taps = call["width"] * call["features"]
        return 2.0 * 4 * taps, 2.0 * taps
    from qcompile.formats.states import RecurrenceState  # only here, so that `qcompile --help` imports few modules

    heads, key_heads, key_dim, value_dim = (call[name] for name in ("heads", "key_heads", "key_dim", "value_dim"))
    layer = RecurrenceState(heads, key_heads, key_dim, value_dim, call["by_key"], call.get("stored", "f32"))
    state = layer.heads * layer.key_dim * layer.value_dim
    return layer.step_bytes, (8.0 if call["delta"] else 6.0) * state


def _row_cost(
    call: Mapping[str, Any], program: Mapping[str, Any], buffers: Mapping[str, Any], row_bytes: float
) -> Cost:
    """Cost for one row of a call that reads no weights but its row's, and no other positions."""
    kernel = call["kernel"]
    if kernel == "logits":
        return Cost(2 * row_bytes, 1.0, "f32")
    if kernel == "rope_append":
        heads = call["heads"] + (1 if call["v_offset"] is None else 2) * call["kv_heads"]
        return Cost(row_bytes + _position_bytes(call, program), 3.0 * heads * call["head_dim"], "f32")
    if kernel == "gather":
        moved = 3 * buffers[call["out"]]["width"]  # one element read, one written, and its index
        return Cost(_ITEM_BYTES["f32"] * moved, moved, "f32")
    if kernel == "norm_heads":  # in place, over some columns of x
        normed = call["heads"] * call["width"]
        return Cost(2 * 4 * normed, 4.0 * normed, "f32")
    width = buffers[call["out" if "out" in call else "x"]]["width"]
    if kernel == "embed":
        return Cost(row_bytes + width * _ITEM_BYTES[call["table_dtype"]], width, "f32")
    return Cost(row_bytes, (4.0 if kernel == "norm" else 2.0) * width, "f32")
