"""Barriers between the calls of a step on the CPU: where threads must wait for each other, as C++ conditions.

A thread needs no barrier before it reads what it computed itself: its private copies of rows, its share of columns, or
the heads for which it computes attention next.
"""

from __future__ import annotations

from itertools import pairwise

from qcompile.codegen.calls import Attention, Gemm, RopeAppend
from qcompile.codegen.cpu import flow
from qcompile.codegen.cpu.cpp import boolean, rows_kind
from qcompile.codegen.lora_calls import GateRows, LoraExpand, LoraShrink, adapted
from qcompile.codegen.program import Program


class Barriers:
    """The barriers of a program in which flow.separate_buffers has separated buffers.

    `own` are the buffers of which threads have private copies. `conditions` are names of C++ variables by the condition
    that each of them holds: whether threads quantize the columns that they produced.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.own = flow.own_buffers(program)
        self.shares = {i: share for i in range(len(program.calls)) if (share := flow.producer_share(program, i))}
        conditions = dict.fromkeys(share.condition for share in self.shares.values())
        self.conditions = {condition: f"own_columns{number}" for number, condition in enumerate(conditions)}

    def is_own(self, name: str) -> str:
        """The C++ condition for private copies of a buffer where rows are few: its columns are not split."""
        made = next((i for i in self.shares if name in self.program.calls[i].writes), None)
        if made is not None and name in self.own:
            return f"!{self.producer_condition(made)}"
        return boolean(name in self.own)

    def producer_condition(self, index: int) -> str:
        """The C++ name of the condition under which call `index` quantizes the columns that each thread produced."""
        return self.conditions[self.shares[index].condition]

    def after(self, index: int) -> str:
        """The C++ condition for a barrier after call `index`: none after what each thread computed for itself."""
        calls = self.program.calls
        call = calls[index]
        if index + 1 == len(calls):
            return "false"  # the step ends with a barrier
        if isinstance(call, LoraShrink):
            return "false"  # the gemm that follows reads none of its results
        if isinstance(call, LoraExpand) or (isinstance(call, GateRows) and self.gate_of(index - 2)):
            return adapted(call.site)  # else it does nothing
        if isinstance(call, RopeAppend):
            return f"!s.by_head({call.kv_heads})" if isinstance(calls[index + 1], Attention) else "true"
        if self.by_head(index) and (rope := self.rope_after(index)):
            return f"!s.by_head({rope.kv_heads})"
        if index + 1 in self.shares:
            return f"!{self.producer_condition(index + 1)}"
        private = [name for name in call.writes if name in self.own]
        if private and not self._overwritten_early(index):
            shared = f"{self.producer_condition(index)} || " if index in self.shares else ""
            return f"{shared}!s.few[{rows_kind(self.program.buffer(private[0]))}]"
        return "true"

    def by_head(self, index: int) -> bool:
        """Whether call `index` computes q, k and v such that each thread can compute those of its own heads.

        The thread then proceeds to their attention without a barrier, unless that overwrites what others still read.
        """
        call, rope = self.program.calls[index], self.rope_after(index)
        if rope is None or not isinstance(call, Gemm) or call.blocks or call.out != rope.qkv or rope.head_dim % 32:
            return False
        attention = self.program.calls[index + 2]
        if not isinstance(attention, Attention) or attention.q != rope.qkv:
            return False
        if rope.v_offset is None:
            return False
        ends = (rope.q_offset, rope.k_offset, rope.v_offset, call.n)
        widths = [end - start for start, end in pairwise(ends)]
        each = [heads * rope.head_dim for heads in (rope.heads, rope.kv_heads, rope.kv_heads)]
        if rope.q_offset or widths != each or call.epilogue != "store":
            return False
        return not self._overwritten_early(index)

    def rope_after(self, index: int) -> RopeAppend | None:
        """The call after `index` if it is a RopeAppend."""
        after = self.program.calls[index + 1 : index + 2]
        return after[0] if after and isinstance(after[0], RopeAppend) else None

    def gate_of(self, index: int) -> GateRows | None:
        """The gate that call `index`, a gemm, computes itself where no row has an adapter; None if there is none."""
        call, after = self.program.calls[index], self.program.calls[index + 1 : index + 3]
        gate = after[1] if len(after) == 2 and isinstance(after[0], LoraExpand) else None
        return gate if isinstance(gate, GateRows) and isinstance(call, Gemm) and not call.blocks else None

    def _overwritten_early(self, index: int) -> bool:
        """Whether, without a barrier after call `index`, a faster thread may overwrite what the call still reads."""
        call = self.program.calls[index]
        # Private buffers are safe: with few rows each thread has a copy, otherwise a barrier follows.
        shared = isinstance(call, Gemm)
        read = [self.program.buffer(name) for name in call.reads if shared or name not in self.own]
        for place, call in enumerate(self.program.calls[index + 1 :], start=index + 1):
            written = [self.program.buffer(name) for name in call.writes if name not in self.own]
            if any(flow.overlap(target, source) for target in written for source in read):
                return True
            if not call.writes or (written and not (self.by_head(place) or isinstance(call, RopeAppend | LoraShrink))):
                return False  # a barrier follows this call, or it ends the step
            read += [self.program.buffer(name) for name in call.reads if name not in self.own]
        return False
