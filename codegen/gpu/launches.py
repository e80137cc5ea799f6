"""Launch plans: for each launch the kernel, grid and arguments, in variants by number of rows.

The runtime reads a plan as JSON and needs neither this module nor Triton. An argument is a list:

    ["tokens", b], ["outputs", b]   address in the arena of that kind of rows, at b bytes per row of the step
    ["weight", name]                address of a weight
    ["input", name]                 address of a step's input (token_ids, positions, ...) or result
    ["input", name, count, ...]     the same, past as many numbers of 32 bits as the product of these counts
    ["work", name]                  address of scratch memory
    ["kv", layer]                   address of a layer's pages
    ["count", name]                 a number: tokens, outputs, sequences, queries, table_stride, ...
    ["number", n]                   the number n
    ["draft", name]                 address of an input or result of the draft path
    ["state", name]                 address of an array of the state of speculation rounds

A grid size is a number, the name of a count, [count, divisor] (the quotient, rounded up), or [count, divisor, times,
plus] (the rounded quotient times `times`, plus `plus`). Counts:

    queries                     most rows of one sequence
    decoding, decoding_tokens   the first sequences, as far as they have few rows, for kernels that decode; their rows
    prompts, prompt_tokens      the other sequences, and their rows
    prompt_queries              most rows of one of them
    few, fine, coarse           one of them is the most rows of one of `decoding`, the others are 0: with little work,
                                programs take a leaf each, `few` if all are resident at once, else `fine`
    near, far                   one of them is not 0 if there are prompts: `near` is `prompt_queries`, or `far` is their
                                rows if they have several splits behind them
    merged, groups              splits of `decoding` to merge, and groups of splits if there are several
    fine_merged, fine_groups    these instead if programs take leaves
    splits                      splits of the longest context of `decoding`
    slots                       partial results per token and head of `decoding`: splits, leaves, or 0
    shares                      programs per sequence and KV head, if programs loop over several splits
    decode_tokens, other_tokens the number of tokens, the first if there are no prompts, else the second; the other is 0
    sampled, top_k, top_p       `outputs` if any sequence has a temperature, a top-k or a top-p; else 0
    biased, penalized           `outputs` if any sequence has biases, or penalties, else 0
    reported                    `outputs` if log probabilities of any sequence are wanted, else 0
    kept                        if any of these sequences has biases or penalties too, at least the number of outputs
                                whose next token is not known; else 0
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qcompile.artifact.abi import GPU_ABI
from qcompile.codegen import program as p
from qcompile.codegen.gpu.attention import MOST_QUERIES, GpuKV, SplitLimits
from qcompile.codegen.gpu.compile import Argument, Kernel, render_template
from qcompile.targets import Target

MOST_ROWS = 512
"""Most rows of a step."""
TEXT_TOKENS = 1 << 12
"""Most tokens of a text that n-gram lookup searches; a power of two."""

Ref = list[Any]
Size = int | str | list[Any]


def grid_size(size: Size, counts: Mapping[str, int]) -> int:
    """A grid size for these counts."""
    if isinstance(size, list):
        count, divisor, times, plus = (*size, 1, 0)[:4]
        return -(-counts[count] // divisor) * times + plus
    return counts[size] if isinstance(size, str) else size


@dataclass(frozen=True)
class Variant:
    """A launch for up to `most` rows (0: any number): the kernel's label, the grid, and arguments by name.

    If `kernel` is empty, nothing is launched for that many rows.
    """

    kernel: str
    grid: tuple[Size, Size, Size]
    args: dict[str, Ref]
    most: int = 0


@dataclass(frozen=True)
class Launch:
    """Runs the first variant whose `most` is not below the count named `by`; nothing if that is 0 or none fits."""

    name: str
    by: str
    variants: tuple[Variant, ...]


@dataclass
class Plan:
    """Launches in order, kernels by label, and zeroed scratch memory (`work`): bytes, to multiply by the counts."""

    target: Target
    kv: GpuKV
    split: int
    launches: list[Launch] = field(default_factory=list)
    feedback: list[Launch] = field(default_factory=list)
    follow: list[Launch] = field(default_factory=list)
    rounds: list[Launch] = field(default_factory=list)
    lookup: list[Launch] = field(default_factory=list)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    work: dict[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)

    @property
    def limits(self) -> SplitLimits:
        """How much work decode attention divides in which way on the target."""
        return SplitLimits(self.kv, self.target.multiprocessors)

    def add(self, kernel: Kernel) -> str:
        """Add a kernel; returns its label."""
        self.kernels.setdefault(kernel.label, kernel)
        return kernel.label

    def need(self, name: str, size: int, *counts: str) -> Ref:
        """Reserve scratch memory of at least `size` bytes times the counts; returns its reference."""
        self.work[name] = (max(size, self.work.get(name, (0,))[0]), counts)
        return ["work", name]

    def add_feedback(self) -> None:
        """Adds the kernels that feed the tokens of a step to the next: of the same rows, or of others."""
        self.feedback = [self._of_tokens("advance", "argmax", "token_ids", "positions", "decoded", "counter")]
        self.follow = [self._of_tokens("follow", "argmax", "token_ids")]

    def _of_tokens(self, name: str, *inputs: str) -> Launch:
        """The launch of a kernel with one program for all rows."""
        arguments = (*(Argument(each, "*i32") for each in inputs), Argument("M", "i32"))
        source = render_template(f"{name}.py.jinja", arguments=arguments, block=2 * MOST_ROWS)
        args: dict[str, Ref] = {each: ["input", each] for each in inputs} | {"M": ["count", "tokens"]}
        variant = Variant(self.add(Kernel(name, source, arguments, 4, 1)), (1, 1, 1), args, 2 * MOST_ROWS)
        return Launch(name, "tokens", (variant,))

    def add_rounds(self) -> None:
        """For a target with drafts: adds the kernels before and after verification in a speculation round."""
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
        """For a target with n-gram lookup: adds the kernel that drafts in a round."""
        state = ("text", "length", "match", "most", "left", "counter", "gained", "tokens", "drafted")
        places: dict[str, Ref] = {name: ["state", name] for name in state} | {"decoded": ["draft", "decoded"]}
        arguments = (*(Argument(n, "*i32") for n in places), Argument("S", "i32"), Argument("Q", "i32"))
        values = {"arguments": arguments, "text": TEXT_TOKENS, "queries": MOST_QUERIES}
        kernel = Kernel("ngram_lookup", render_template("ngram_lookup.py.jinja", **values), arguments, 8, 1)
        places |= {"S": ["count", "sequences"], "Q": ["count", "queries"]}
        self.lookup = [Launch("look_up", "sequences", (Variant(self.add(kernel), ("sequences", 1, 1), places),))]

    def to_json(self, resources: dict[str, dict[str, Any]], program: p.Program, peaks: list[float]) -> str:
        """The plan as the runtime reads it; `resources` has the launch parameters of each kernel by label.

        `peaks` are the target's memory GB/s, int8 GOPS, f32 and bf16 GFLOPS.
        """
        data = {
            "abi": GPU_ABI,
            "capability": self.target.capability,
            "split": self.split,
            "most_rows": MOST_ROWS,
            **self.limits.facts,
            "arena_bytes": {rows: program.arena_bytes(rows) for rows in ("tokens", "outputs")},
            "layer_page_bytes": self.kv.heads * self.kv.block_bytes,
            "layers": program.kv.layers,
            "peaks": peaks,
            "work": {name: [size, list(counts)] for name, (size, counts) in self.work.items()},
            "kernels": resources,
            "launches": [_launch_json(launch, self.kernels) for launch in self.launches],
            "feedback": [_launch_json(launch, self.kernels) for launch in self.feedback],
            "follow": [_launch_json(launch, self.kernels) for launch in self.follow],
            "rounds": [_launch_json(launch, self.kernels) for launch in self.rounds],
            "lookup": [_launch_json(launch, self.kernels) for launch in self.lookup],
            "text_tokens": TEXT_TOKENS,
            "weights": len(program.weights),
        }
        return json.dumps(data, sort_keys=True, indent=1) + "\n"


def _launch_json(launch: Launch, kernels: dict[str, Kernel]) -> dict[str, Any]:
    """One launch, with arguments in the kernel's order."""
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
