"""Launches of GPU kernels as data: which kernel, over what grid, with what arguments, by number of rows.

The runtime reads it as JSON and needs neither this module nor Triton. An argument is a list:

    ["tokens", b], ["outputs", b]   address b bytes a row into the activations of that kind of rows
    ["weight", name]                address of a weight
    ["input", name]                 address of a step's input (token_ids, positions, ...) or result
    ["work", name]                  address of scratch memory
    ["kv", layer]                   address of a layer's pages
    ["count", name]                 a number: tokens, outputs, sequences, queries, splits, table_stride, ...
    ["draft", name]                 address of an input or result of the path that drafts
    ["state", name]                 address of what rounds of speculation go by

A size of a grid is a number, the name of a count, or [count, divisor]: the quotient rounded up, or [count, divisor,
times, plus]: that many times the quotient, and so many more. Queries is the most
rows of one sequence, splits how many parts attention takes of the longest context. `fine` is queries where they are of
the decode class and there is little to do, so that programs take a leaf of a split each (`few` where so little that all
are resident at once), and `coarse` where not. `merged` is splits where queries are of the decode class, `groups` is
groups of splits where there are several to merge; they are 0 where leaves are taken, and `fine_merged` and
`fine_groups` where not. `slots` is how many sums of a token are kept: of splits, of leaves, or none. `shares` is how
many programs take the splits of a sequence and KV head, where programs take several. `decode_tokens` is tokens where
queries are of the decode class, else `other_tokens` is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qcompile.codegen import program as p
from qcompile.codegen.gpu_attention import MOST_QUERIES, GpuKV
from qcompile.codegen.gpu_compile import Argument, Kernel, render_template

MOST_ROWS = 512
"""Most rows of a step."""
GPU_ABI = 13
"""Raised where plans change: a runtime refuses those of another."""
TEXT_TOKENS = 1 << 12
"""Most tokens of a text that n-gram lookup searches: a power of two."""

Ref = list[Any]
Size = int | str | list[Any]


def grid_size(size: Size, counts: Mapping[str, int]) -> int:
    """A size of a grid for these counts."""
    if isinstance(size, list):
        count, divisor, times, plus = (*size, 1, 0)[:4]
        return -(-counts[count] // divisor) * times + plus
    return counts[size] if isinstance(size, str) else size


@dataclass(frozen=True)
class Variant:
    """A launch for up to `most` rows (0: any number): a kernel by its label, a grid, arguments by name.

    Without a kernel nothing is launched for so many rows.
    """

    kernel: str
    grid: tuple[Size, Size, Size]
    args: dict[str, Ref]
    most: int = 0


@dataclass(frozen=True)
class Launch:
    """The first variant whose `most` is not below the count `by` runs; none does nothing."""

    name: str
    by: str
    variants: tuple[Variant, ...]


@dataclass
class Plan:
    """Launches in order, kernels by label, and scratch memory: bytes times the counts named, zeroed when it is made."""

    capability: int
    kv: GpuKV
    split: int
    launches: list[Launch] = field(default_factory=list)
    feedback: list[Launch] = field(default_factory=list)
    rounds: list[Launch] = field(default_factory=list)
    lookup: list[Launch] = field(default_factory=list)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    work: dict[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)

    def add(self, kernel: Kernel) -> str:
        """Keep a kernel; its label."""
        self.kernels.setdefault(kernel.label, kernel)
        return kernel.label

    def need(self, name: str, size: int, *counts: str) -> Ref:
        """Ask for scratch memory of at least `size` bytes times the counts; its reference."""
        self.work[name] = (max(size, self.work.get(name, (0,))[0]), counts)
        return ["work", name]

    def add_rounds(self) -> None:
        """For a target with drafts: the kernels before and after its launches in a round of speculation."""
        inputs = {"token_ids": "token_ids", "positions": "positions", "argmax": "argmax"}
        places: dict[str, Ref] = {name: ["input", name] for name in inputs}
        state = ("last", "place", "left", "most", "counter", "tokens", "gained", "pair_tokens", "pair_positions")
        places |= {name: ["state", name] for name in state}
        places |= {f"draft_{name}": ["draft", name] for name in ("token_ids", "positions", "counter")}
        places |= {"decoded": ["draft", "decoded"], "S": ["count", "sequences"], "Q": ["count", "queries"]}
        rows: tuple[str, ...] = ("last", "place", "decoded", "token_ids", "positions")
        accept = ("argmax", "decoded", *state, "draft_token_ids", "draft_positions", "draft_counter")
        for name, pointers in (("round_rows", rows), ("round_accept", accept)):
            arguments = (*(Argument(n, "*i32") for n in pointers), Argument("S", "i32"), Argument("Q", "i32"))
            values = {"name": name, "arguments": arguments, "accept": pointers is accept, "most": MOST_ROWS}
            kernel = Kernel(name, render_template("speculation_round.py.jinja", **values), arguments, 4, 1)
            variant = Variant(self.add(kernel), (1, 1, 1), {a.name: places[a.name] for a in arguments})
            self.rounds.append(Launch(name, "sequences", (variant,)))

    def add_lookup(self) -> None:
        """For a target with n-gram lookup: the kernel that drafts in a round."""
        state = ("text", "length", "match", "most", "left", "counter", "gained", "tokens", "drafted")
        places: dict[str, Ref] = {name: ["state", name] for name in state} | {"decoded": ["draft", "decoded"]}
        arguments = (*(Argument(n, "*i32") for n in places), Argument("S", "i32"), Argument("Q", "i32"))
        values = {"arguments": arguments, "text": TEXT_TOKENS, "queries": MOST_QUERIES}
        kernel = Kernel("ngram_lookup", render_template("ngram_lookup.py.jinja", **values), arguments, 8, 1)
        places |= {"S": ["count", "sequences"], "Q": ["count", "queries"]}
        self.lookup = [Launch("look_up", "sequences", (Variant(self.add(kernel), ("sequences", 1, 1), places),))]

    def to_json(self, resources: dict[str, dict[str, Any]], program: p.Program, peaks: list[float]) -> str:
        """What the runtime reads; `resources` says of each kernel's label how it is launched.

        `peaks` are the target's GB/s of memory, int8 GOPS, f32 and bf16 GFLOPS.
        """
        data = {
            "abi": GPU_ABI,
            "capability": self.capability,
            "split": self.split,
            "most_rows": MOST_ROWS,
            **self.kv.choices,
            "arena_bytes": {rows: program.arena_bytes(rows) for rows in ("tokens", "outputs")},
            "layer_page_bytes": self.kv.heads * self.kv.block_bytes,
            "layers": program.kv.layers,
            "peaks": peaks,
            "work": {name: [size, list(counts)] for name, (size, counts) in self.work.items()},
            "kernels": resources,
            "launches": [_launch_json(launch, self.kernels) for launch in self.launches],
            "feedback": [_launch_json(launch, self.kernels) for launch in self.feedback],
            "rounds": [_launch_json(launch, self.kernels) for launch in self.rounds],
            "lookup": [_launch_json(launch, self.kernels) for launch in self.lookup],
            "text_tokens": TEXT_TOKENS,
            "weights": len(program.weights),
        }
        return json.dumps(data, sort_keys=True, indent=1) + "\n"


def _launch_json(launch: Launch, kernels: dict[str, Kernel]) -> dict[str, Any]:
    """One launch; arguments in the order the kernel takes them."""
    variants = [
        {
            "kernel": v.kernel,
            "grid": list(v.grid),
            "args": [v.args[a.name] for a in kernels[v.kernel].arguments] if v.kernel else [],
            "most": v.most,
        }
        for v in launch.variants
    ]
    return {"name": launch.name, "by": launch.by, "variants": variants}
