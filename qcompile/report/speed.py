"""Predicted speed of a model on one GPU or on several that divide it: a roofline with measured efficiencies.

A kernel takes the time of a launch, of the bytes it moves and of the operations it does; a sum over GPUs takes the time
of its exchanges and of the bytes it sends. The shares of the data sheets' rates that kernels reach were fitted to
measured steps (benchmarks/predictions.py compares both). Nothing here was measured on the machine that is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qcompile.errors import UsageError
from qcompile.roofline import Cost, StepShape, call_cost, peaks_of
from qcompile.targets import Target

Json = Mapping[str, Any]

TILE_ROWS = 32
"""Rows that a GEMM of several rows computes at least."""
LAUNCH_US = 1.7
"""Microseconds of a launch in a CUDA graph that moves and computes little."""
MEMORY, CACHE = 0.92, 0.6
"""Shares of the memory's rate at which kernels read weights, and attention of decoding reads the cache."""
MATRIX, ATTENTION = {"int8": 0.55, "bf16": 0.7, "f32": 0.7}, 0.4
"""Shares of the rates of matrix units at which GEMMs compute, by type, and attention computes."""
EXCHANGE_US = 3.0
"""Microseconds of one exchange between the GPUs of a machine, beside the time of its bytes."""
LINK = 0.5
"""Share of a link's rate at which sums send: 0.53 for 32 MiB on two H200 (benchmarks/results/gpu_sums_h200.json)."""
NETWORK_GB_S, NETWORK_US = 50.0, 20.0
"""A network of 400 Gb/s for each GPU: its rate in GB/s, and microseconds of an exchange. Assumed, not measured."""
_ONE_EXCHANGE = 1 << 18
"""Bytes of a sum up to which every GPU sends its part to all others. Larger sums of more than two GPUs take two
exchanges."""


@dataclass(frozen=True)
class Machines:
    """GPUs that divide a model: `ranks` of them in all, spread evenly over `nodes` machines."""

    target: Target
    ranks: int = 1
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.target.kind != "cuda":
            raise UsageError(
                f"target {self.target.name} is no GPU: the speed of several can be predicted for GPUs only"
            )
        if self.nodes < 1 or self.ranks % self.nodes:
            raise UsageError(f"{self.ranks} GPUs cannot be spread evenly over {self.nodes} machines")

    def sum_us(self, size: float) -> float:
        """Microseconds of a sum over all GPUs of `size` bytes of float32 on each."""
        near = self.ranks // self.nodes
        total = 0.0
        if near > 1:
            once = size <= _ONE_EXCHANGE or near == 2
            sent = (near - 1) * size if once else 2 * (near - 1) * size / near
            if size <= _ONE_EXCHANGE:  # each number has the sum's beside it
                sent *= 2
            total += (1 if once else 2) * EXCHANGE_US + sent / (LINK * self.target.link_gb_s * 1e3)
        if self.nodes > 1:
            total += 2 * NETWORK_US + 2 * (self.nodes - 1) * size / self.nodes / (NETWORK_GB_S * 1e3)
        return total

    def gather_us(self, size: float) -> float:
        """Microseconds in which all GPUs send each other their parts of `size` bytes."""
        near = self.ranks // self.nodes
        sent = size * (near - 1) / self.ranks
        total = EXCHANGE_US + sent / (LINK * self.target.link_gb_s * 1e3) if near > 1 else 0.0
        if self.nodes > 1:
            total += NETWORK_US + size * (self.ranks - near) / self.ranks / (NETWORK_GB_S * 1e3)
        return total


@dataclass(frozen=True)
class Divided:
    """One GPU's part of a model: its program (Program.to_json, parsed), bytes of weights by name, launches a step."""

    program: Json
    weight_bytes: Mapping[str, int]
    launches: int

    def step_ns(self, machines: Machines, step: StepShape) -> dict[str, int]:
        """Nanoseconds of a step: `all`, and `sums`, the part that sums over GPUs take."""
        sums = others = 0.0
        dense = self._dense_type()
        for call in self.program["calls"]:
            if call["kernel"] == "all_reduce":
                width = next(buffer["width"] for buffer in self.program["buffers"] if buffer["name"] == call["out"])
                sums += machines.sum_us(4.0 * step.rows * width)
            elif call["kernel"] == "all_gather":  # of logits
                sums += machines.gather_us(4.0 * step.outputs * call["width"])
            else:
                cost = call_cost(call, self.program, self.weight_bytes, step)
                if call["kernel"] == "gemm" and step.rows > 1:
                    cost = cost._replace(ops=cost.ops * max(1.0, TILE_ROWS / step.rows))
                others += _microseconds(call["kernel"], cost, machines.target, dense)
        total = sums + others + LAUNCH_US * self.launches
        return {"all": round(1e3 * total), "sums": round(1e3 * sums)}

    def _dense_type(self) -> str:
        """The type in which most GEMMs compute."""
        buffers = {buffer["name"]: buffer["dtype"] for buffer in self.program["buffers"]}
        types = [buffers[call["x"]] for call in self.program["calls"] if call["kernel"] == "gemm"]
        return "int8" if types.count("q8") * 2 > len(types) else "bf16"


def _microseconds(kernel: str, cost: Cost, target: Target, dense: str) -> float:
    """Microseconds of a kernel without its launch; the times of moving and of computing add up."""
    peaks = peaks_of(target.name)
    attention = kernel == "attention"
    dtype = "bf16" if attention else dense if kernel == "expert_gemm" else cost.dtype
    moving = cost.bytes / (peaks.bytes_per_second * (CACHE if attention else MEMORY))
    computing = cost.ops / (peaks.ops_per_second[dtype] * (ATTENTION if attention else MATRIX[dtype]))
    return 1e6 * (moving + computing)


BATCHES: tuple[int, ...] = (1, 16, 64, 256)
"""Numbers of sequences for which decoding is predicted."""
PROMPT = 2048
"""Tokens of a step of a prompt."""


def predicted(part: Divided, machines: Machines, context: int) -> dict[str, Any]:
    """Whole numbers that grow with the depth of a model: nanoseconds of steps by their kind and number of sequences.

    Sequences decode after `context` tokens. The prompt is one sequence of as many tokens, in steps of PROMPT tokens.
    """
    decoding = {str(batch): part.step_ns(machines, StepShape(context, batch, batch)) for batch in BATCHES}
    starts = range(0, context, PROMPT)
    chunks = [min(PROMPT, context - start) for start in starts]
    steps = [
        part.step_ns(machines, StepShape(start + rows / 2, rows)) for start, rows in zip(starts, chunks, strict=True)
    ]
    prompt = {key: sum(step[key] for step in steps) for key in ("all", "sums")}
    return {"decode_ns": decoding, "prompt_ns": prompt}
