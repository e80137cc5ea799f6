"""Runs the GPU plan of a rank by Triton's interpreter, in a process that exchanges with those of other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qcompile.codegen.gpu.launches import LaunchPlan
from qcompile.codegen.gpu.operands import Operand, PeerRef, RankRef
from qcompile.codegen.program import Program
from tests.support.gpu_interpreter import Interpreter
from tests.support.tiny import Chunk


class RankInterpreter(Interpreter):
    """Memory of rank `rank`'s plan, with the peer memory of all ranks (int64)."""

    def __init__(self, program: Program, plan: LaunchPlan, blobs: Mapping[str, Tensor], rank: int, peers: list[Tensor]):
        super().__init__(program, plan, blobs)
        self._rank, self._peers = rank, peers
        counters = torch.zeros(plan.sums["state"] // 4, dtype=torch.int32)
        self.inputs |= {"sums": counters, "failed": torch.zeros(1, dtype=torch.int32)}

    def _fill(self, chunks: Sequence[Chunk], outputs: Sequence[int] | None) -> dict[str, int]:
        counts = super()._fill(chunks, outputs)
        if place := self.plan.sums.get("logits"):  # where ranks gather them
            count = counts["outputs"] * self.vocab
            own = self._peers[self._rank].view(torch.float32)[place // 4 :][:count]
            self.inputs["logits"] = own.view(counts["outputs"], self.vocab)
        return counts

    def _value(self, operand: Operand, type: str) -> Any:
        if isinstance(operand, RankRef):
            return self._rank
        if isinstance(operand, PeerRef):
            return self._peers[self._rank if operand.of is None else operand.of]
        return super()._value(operand, type)
