"""Runs a GPU plan on tensors of this machine, each kernel by Triton's interpreter (set TRITON_INTERPRET first)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from qcompile.codegen.buffers import PAD
from qcompile.codegen.gpu import compile as gpu_compile
from qcompile.codegen.gpu.attention_splits import NEAR_SPLITS
from qcompile.codegen.gpu.launches import Launch, LaunchPlan
from qcompile.codegen.gpu.operands import (
    ActivationRef,
    CacheRef,
    CountRef,
    InputRef,
    NumberRef,
    Operand,
    ScratchRef,
    SlotsRef,
    WeightRef,
    grid_size,
)
from qcompile.codegen.program import Program
from qcompile.runtime.cuda.counts import attention_counts, attention_work
from tests.support.tiny import Chunk

_TYPES = {"*fp32": torch.float32, "*bf16": torch.bfloat16, "*i32": torch.int32, "*i16": torch.int16, "*i8": torch.int8}
_TYPES |= {"*fp64": torch.float64, "*fp16": torch.float16, "*i64": torch.int64}


class Interpreter:
    """Memory of one opened plan: activations for `rows` rows, `pages` KV pages of garbage, scratch as asked for.

    Recurrent states have `slots` slots of garbage.
    """

    def __init__(
        self,
        program: Program,
        plan: LaunchPlan,
        blobs: Mapping[str, Tensor],
        rows: int = 64,
        pages: int = 8,
        slots: int = 3,
    ):
        self.plan, self.rows, self.vocab = plan, rows, program.vocab_size
        # Poisoned: what is read before it is written shows as NaN.
        self.arena = {r: _poison(rows * program.arena_bytes(r)) for r in ("tokens", "outputs")}  # type: ignore[arg-type]
        for b in program.buffers:  # memory begins as zeros on a GPU, which rows of some buffers are filled up with
            if b.pad != PAD:
                self.arena[b.rows][rows * b.offset : rows * (b.offset + b.row_bytes)] = 0
        self.weights = {name: blob.clone() for name, blob in blobs.items()}
        self.layer_places = [
            pages * each for each in accumulate((kv.heads * kv.block_bytes for kv in plan.kvs), initial=0)
        ]
        self.kv = _poison(self.layer_places[-1])
        self.states = _poison(slots * program.states.slot_bytes)
        self.work: dict[str, Tensor] = {}
        limits = plan.limits
        self.fine, self.few, self.shares = limits.fine_splits, limits.few_splits, limits.shares
        self.near = NEAR_SPLITS
        self.inputs: dict[str, Tensor] = {"counter": torch.zeros(1, dtype=torch.int32)}
        self.inputs["embeds"] = torch.zeros(2, dtype=torch.int32)  # the address of none

    def step(self, chunks: Sequence[Chunk], outputs: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Logits [outputs, vocab] and the index of each row's largest."""
        self.counts = self._fill(chunks, outputs)
        for launch in self.plan.launches:
            self.launch(launch)
        return self.inputs["logits"].clone(), self.inputs["argmax"].clone()

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Only the keys and values of a step, which in a program of one layer need nothing of what follows them."""
        self.counts = self._fill(chunks, [])
        result = [(launch.variants[0].kernel.split("_")[0], launch) for launch in self.plan.launches]
        last = max(i for i, (kind, _) in enumerate(result) if kind in ("append", "round"))
        for at, (kind, launch) in enumerate(result):
            if at <= last or kind == "staged":
                self.launch(launch)

    def forget(self) -> None:
        """Scratch memory anew: sums that a step does not write are not those of the step before."""
        self.work.clear()

    def feed_back(self, steps: int) -> None:
        """What follows each greedy step of `steps`."""
        tokens = self.counts["tokens"]
        self.inputs.setdefault("decoded", torch.full((steps * tokens,), -1, dtype=torch.int32))
        for launch in self.plan.feedback:
            self.launch(launch)

    def _fill(self, chunks: Sequence[Chunk], outputs: Sequence[int] | None) -> dict[str, int]:
        ids = [t for c in chunks for t in c.tokens]
        wanted = list(range(len(ids))) if outputs is None else list(outputs)
        stride = max(len(c.pages) for c in chunks)
        lengths = [len(c.tokens) for c in chunks]
        values = {
            "token_ids": ids,
            "positions": [c.start + i for c in chunks for i in range(len(c.tokens))],
            "query_start": [sum(lengths[:i]) for i in range(len(chunks) + 1)],
            "row_sequence": [s for s, c in enumerate(chunks) for _ in c.tokens],
            "block_table": [page for c in chunks for page in [*c.pages, *[0] * (stride - len(c.pages))]],
            "output_rows": wanted,
            "state_slots": [c.slot for c in chunks],
            "certain": [c.certain for c in chunks],
            "argmax": [-1] * len(wanted),
        }
        self.inputs |= {name: torch.tensor(v, dtype=torch.int32) for name, v in values.items()}
        self.inputs["logits"] = torch.full((len(wanted), self.vocab), math.nan)
        chosen = {"fine_splits": self.fine, "few_splits": self.few, "shares": self.shares, "near_splits": self.near}
        plan = self.plan.limits.facts | chosen
        positions = [c.start + len(c.tokens) for c in chunks]
        decoding, prompts = attention_work(plan, lengths, positions, lambda most: -(-most // self.plan.split))
        self.inputs["prompt_start"] = self.inputs["query_start"][decoding.sequences :].clone()
        return {
            "tokens": len(ids),
            "outputs": len(wanted),
            "sequences": len(chunks),
            "queries": max(lengths),
            "table_stride": stride,
            **dict.fromkeys(("sampled", "top_k", "top_p", "biased", "penalized", "masked", "reported", "kept"), 0),
            "adapted": 0,
            "featured": 0,
            **attention_counts(plan, decoding, prompts),
        }

    def launch(self, launch: Launch) -> None:
        """Run the variant for this step's counts."""
        count = self.counts[launch.by]
        variant = next((v for v in launch.variants if not v.most or count <= v.most), None)
        if variant is None or not count or variant.code is None:
            return
        kernel = variant.code
        grid = tuple(grid_size(size, self.counts) for size in variant.grid)
        gpu_compile.load(kernel)[grid](*(self._value(variant.args[a.name], a.type) for a in kernel.arguments))

    def _value(self, operand: Operand, type: str) -> Any:
        if isinstance(operand, CountRef):
            return self.counts[operand.name]
        if isinstance(operand, NumberRef):
            return operand.value
        if isinstance(operand, WeightRef):
            return self.weights[operand.name].view(_TYPES[type])
        if isinstance(operand, InputRef):
            skipped = math.prod(self.counts[name] for name in operand.past) if operand.past else 0
            return self.inputs[operand.name].view(_TYPES[type])[skipped:]
        memory = self._memory(operand)
        return memory[: len(memory) // 4 * 4].view(_TYPES[type])

    def _memory(self, operand: Operand) -> Tensor:
        if isinstance(operand, ActivationRef):
            return self.arena[operand.rows][self.rows * operand.bytes_per_row + operand.column_bytes :]
        if isinstance(operand, SlotsRef):
            return self.states
        if isinstance(operand, CacheRef):
            return self.kv[self.layer_places[operand.layer] : self.layer_places[operand.layer + 1]]
        assert isinstance(operand, ScratchRef)
        size = self.plan.scratch[operand.name]
        need = size.bytes * math.prod((self.counts | {"room": self.rows})[name] for name in size.counts)
        if operand.name not in self.work or len(self.work[operand.name]) < need:
            self.work[operand.name] = torch.zeros(need, dtype=torch.uint8)
        return self.work[operand.name]


def _poison(size: int) -> Tensor:
    return torch.full((size,), 255, dtype=torch.uint8)
