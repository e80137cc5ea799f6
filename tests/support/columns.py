"""Many small computations on rows in one compiled library: the logits are what each makes of a token, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qcompile.codegen.buffers import PAD, Buffer
from qcompile.codegen.calls import Call, Gemm, TakeRows
from qcompile.codegen.kv_layout import KVLayout
from qcompile.codegen.program import Program
from qcompile.codegen.sizes import round_up
from qcompile.formats.registry import weight_format
from tests.support.tiny import Chunk, Runner, Tiny

POSITIONS = 64


@dataclass(frozen=True)
class Case:
    """Calls that make the rows of buffer `out`; buffers may be those of other cases too, which come before or after."""

    calls: Sequence[Call]
    out: str


class Columns:
    """`cases` on buffers of `widths` and weights `blobs`, as a model that returns the rows of each case as logits."""

    def __init__(
        self, widths: Mapping[str, int], blobs: Mapping[str, Tensor], cases: Mapping[str, Case], threads: int = 1
    ) -> None:
        total = sum(widths[case.out] for case in cases.values())
        buffers, calls, top = [], [], 0
        for name, width in {**widths, "all": total}.items():
            buffers.append(Buffer(name, "f32", width, offset=top))
            top += 4 * round_up(width, PAD)
        buffers.append(Buffer("last", "f32", total, rows="outputs"))
        self.columns: dict[str, slice] = {}
        weights, end = dict(blobs), 0
        for name, case in cases.items():
            start, end = end, end + widths[case.out]
            self.columns[name] = slice(start, end)
            weights[f"{name}.place"] = _packed(torch.eye(total)[:, start:end])
            more = {"epilogue": "add", "residual": "all"} if start else {}
            codes = {"codes": f"{name}.place"}  # a product with 1 and sums with 0 are exact
            gemm = Gemm(f"{name}.place", case.out, "f32", total, end - start, codes, out="all", **more)  # type: ignore[arg-type]
            calls += [*case.calls, gemm]
        weights["identity"] = _packed(torch.eye(total))
        head = Gemm("head", "last", "f32", total, total, {"codes": "identity"}, "logits")
        calls += [TakeRows("take", "all", "last"), head]
        kv = KVLayout("kv32", 1, 1, 16)
        program = Program(total, POSITIONS, tuple(buffers), tuple(calls), tuple(weights), kv)
        tiny = Tiny(vocab=total, hidden=total, max_position=POSITIONS, kv_heads=1, head_dim=16, layers=1)
        self.runner = Runner(tiny, threads=threads, built=(program, weights))

    def rows(self, tokens: Sequence[int], start: int = 0) -> dict[str, np.ndarray]:
        """What each case makes of `tokens` from position `start`: [tokens, width]."""
        logits = self.runner.step([Chunk(tokens, start, [0])])
        return {name: logits[:, columns] for name, columns in self.columns.items()}

    def close(self) -> None:
        """Free the model."""
        self.runner.close()


def _packed(w: Tensor) -> Tensor:
    return weight_format("f32").pack(weight_format("f32").quantize(w))["codes"]
