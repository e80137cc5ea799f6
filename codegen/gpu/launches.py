"""Launch plans: for each launch the kernel, grid and operands, in variants by number of rows.

The runtime reads a plan as JSON and needs neither this module nor Triton. codegen/gpu/operands.py describes operands
and grid sizes. Counts of a step:

    tokens, outputs             rows of the step, and rows with requested logits
    sequences, queries          sequences of the step, and most rows of one sequence
    table_stride                entries of the block table for each sequence
    decoding, decoding_tokens   the first sequences, as far as they have few rows, for kernels that decode; their rows
    prompts, prompt_tokens      the other sequences, and their rows
    prompt_queries              most rows of one of these
    few, fine, coarse           one of them is the most rows of one of `decoding`, the others are 0: with little work,
                                programs take a leaf each, `few` if all are resident at once, else `fine`
    near, far, far_unpacked     one of them is not 0 if there are prompts: `near` is `prompt_queries`, or one of the
                                others is their rows if they have several splits behind them
    unpacked                    if `far_unpacked`: pages of each prompt that are unpacked before attention; else 0
    unpacked_room               pages for which there is memory then; else 0
    merged, groups              splits of `decoding` to merge, and groups of splits if there are several
    ordered                     rows of decoding sequences instead of `coarse` and `merged`, where programs sum in order
    fine_merged, fine_groups    these instead if programs take leaves
    splits                      splits of the longest context of `decoding`
    slots                       partial results per token and head of `decoding`: splits, leaves, or 0
    shares                      programs per sequence and KV head, if programs loop over several splits
    decode_tokens, other_tokens the number of tokens, the first if there are no prompts, else the second; the other is 0
    sampled, top_k, top_p       `outputs` if any sequence has a temperature, a top-k or a top-p; else 0
    biased, penalized           `outputs` if any sequence has biases, or penalties, else 0
    masked                      `outputs` if a grammar excludes tokens of any sequence, else 0
    reported                    `outputs` if log probabilities of any sequence are wanted, else 0
    featured                    the number of tokens if the runtime wants the features of rows (features.py), else 0
    adapted                     the number of tokens if any sequence has an adapter, else 0
    kept                        if any of these sequences has biases, penalties or a grammar too, at least the number of
                                outputs for which a token is chosen (their next token is not known); else 0
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from qcompile.artifact.abi import GPU_ABI
from qcompile.codegen.gpu.attention_splits import SplitLimits
from qcompile.codegen.gpu.kernel import Kernel
from qcompile.codegen.gpu.kv_pages import GpuKV, most_heads
from qcompile.codegen.gpu.operands import Grid, Operands, ScratchRef, Size
from qcompile.codegen.gpu.unpack_pages import SHARED_BY, unpacked_pages
from qcompile.codegen.program import Program
from qcompile.formats.kv import PAGE_TOKENS
from qcompile.targets import Target

MOST_ROWS = 8192
"""Most rows of a step."""
MOST_ITEMS = (1 << 31) - 1
"""Most elements of a buffer of a step's rows: kernels compute where a row begins with 32 bits."""
MOST_OUTPUTS = 512
"""Most rows with logits of a step, and most sequences."""
SPLIT_ROWS = 512
"""Up to this number of rows, split_k has the same scratch memory; beyond, as much as the largest step takes."""
TEXT_TOKENS = 1 << 12
"""Most tokens of a text that n-gram lookup searches; a power of two."""


@dataclass(frozen=True)
class Variant:
    """A launch for up to `most` rows (0: any number): the kernel, the grid, and operands by argument.

    Without a kernel, nothing is launched for that many rows.
    """

    code: Kernel | None
    grid: Grid
    args: Operands
    most: int = 0

    @property
    def kernel(self) -> str:
        """Label of the kernel; "" if there is none."""
        return self.code.label if self.code else ""

    def to_json(self) -> dict[str, Any]:
        """The variant in a launch plan."""
        names = [argument.name for argument in self.code.arguments] if self.code else []
        return {
            "kernel": self.kernel,
            "grid": {axis: _size_json(size) for axis, size in zip("xyz", self.grid, strict=True)},
            "args": {name: self.args[name].to_json() for name in names},
            "most": self.most,
        }


@dataclass(frozen=True)
class Launch:
    """Runs the first variant with room for the count named by `by`: `most` is 0 or not below the count.

    Runs nothing if the count is 0 or no variant has room. `site`: if this computes what adapters change in a linear,
    the linear's number.
    """

    name: str
    by: str
    variants: tuple[Variant, ...]
    site: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The launch in a launch plan."""
        site = {} if self.site is None else {"site": self.site}
        return {"name": self.name, "by": self.by, **site, "variants": [variant.to_json() for variant in self.variants]}


class ScratchSize(NamedTuple):
    """Size of scratch memory: `bytes` times the product of the counts. The count `room` is the most rows of a step."""

    bytes: int
    counts: tuple[str, ...]


@dataclass(frozen=True)
class LaunchPlan:
    """The launches of a path's step, in order, and those of what surrounds steps.

    `feedback` passes the tokens of a step to the next one of the same rows, `follow` to one of other rows. `rounds` has
    the launch before and those after verification in a speculation round, `lookup` the n-gram drafts of a round, and
    `drafting` what follows the first and each later step of a draft head. `features` is the width of the features that
    the model returns to a head.
    `slot_bytes`: of a sequence's recurrent states, if there are any. `sums`: of a divided model, its ranks, where
    groups of rows and gathered logits begin in peer memory, bytes of such a group, and of the state of exchanges
    (codegen/gpu/peer_memory.py). `hidden`: where final hidden states are (codegen/gpu/hidden.py). `embeds`: how rows
    have embeddings of their own (codegen/gpu/embeds.py).
    """

    target: Target
    kvs: tuple[GpuKV, ...]
    split: int
    launches: tuple[Launch, ...] = ()
    feedback: tuple[Launch, ...] = ()
    follow: tuple[Launch, ...] = ()
    rounds: tuple[Launch, ...] = ()
    lookup: tuple[Launch, ...] = ()
    drafting: tuple[Launch, ...] = ()
    features: int = 0
    slot_bytes: int = 0
    sums: Mapping[str, int] = field(default_factory=dict)
    hidden: Mapping[str, Any] = field(default_factory=dict)
    embeds: Mapping[str, int] = field(default_factory=dict)

    @property
    def limits(self) -> SplitLimits:
        """How decode attention is divided into programs on the target."""
        return SplitLimits(most_heads(self.kvs), self.target.multiprocessors)

    @property
    def ordered_programs(self) -> list[int]:
        """Programs a sequence, by its rows less one, of decode attention in order; none if not all layers have that."""
        ordered, coarse = ([x for x in self.launches if x.by == by] for by in ("ordered", "coarse"))
        sizes = [[variant.grid[0] for variant in launch.variants] for launch in ordered]
        every = zip(*sizes, strict=True) if len(ordered) == len(coarse) else ()
        return [max(size for size in each if isinstance(size, int)) for each in every]

    @property
    def unpacked_pages(self) -> int:
        """Most pages of prompts that are unpacked before attention; 0 if not all layers have that."""
        far, unpacked = ([x for x in self.launches if x.by == by] for by in ("far", "far_unpacked"))
        return min(map(unpacked_pages, self.kvs)) if unpacked and len(far) == len(unpacked) else 0

    @cached_property
    def _variants(self) -> tuple[Variant, ...]:
        every = (self.launches, self.feedback, self.follow, self.rounds, self.lookup, self.drafting)
        return tuple(variant for launches in every for launch in launches for variant in launch.variants)

    @cached_property
    def kernels(self) -> dict[str, Kernel]:
        """Kernels by label, in the order of their first launch."""
        return {variant.kernel: variant.code for variant in self._variants if variant.code}

    @cached_property
    def scratch(self) -> dict[str, ScratchSize]:
        """Scratch memory by name, of the largest size that any launch needs."""
        sizes: dict[str, ScratchSize] = {}
        for variant in self._variants:
            for operand in variant.args.values():
                if isinstance(operand, ScratchRef):
                    known = sizes.get(operand.name, ScratchSize(0, ()))
                    sizes[operand.name] = ScratchSize(max(known.bytes, operand.bytes), operand.counts)
        return sizes

    def to_json(self, resources: Mapping[str, Mapping[str, Any]], program: Program, peaks: Mapping[str, float]) -> str:
        """The plan as the runtime reads it; `resources` has the launch parameters of each kernel by label.

        `peaks` are those of the target: memory_gb_s, int8_gops, f32_gflops and bf16_gflops.
        """
        kernels = {
            label: {**resources[label], "arguments": [argument.name for argument in kernel.arguments]}
            for label, kernel in self.kernels.items()
        }
        data = {
            "abi": GPU_ABI,
            "capability": self.target.capability,
            "split": self.split,
            "most_rows": most_rows(program),
            **self.limits.facts,
            "multiprocessors": self.target.multiprocessors,
            "ordered_programs": self.ordered_programs,
            "unpacked_pages": min(self.unpacked_pages, _most_prompt_pages(program)),
            "unpacked_rows": SHARED_BY,
            "arena_bytes": {rows: program.arena_bytes(rows) for rows in ("tokens", "outputs")},
            "layer_page_bytes": [kv.heads * kv.block_bytes for kv in self.kvs[: program.kv.layers]],
            "slot_bytes": self.slot_bytes,
            "peaks": dict(peaks),
            "scratch": {name: size._asdict() for name, size in self.scratch.items()},
            "kernels": kernels,
            "launches": _json_of(self.launches),
            "feedback": _json_of(self.feedback),
            "follow": _json_of(self.follow),
            "rounds": _json_of(self.rounds),
            "lookup": _json_of(self.lookup),
            "drafting": _json_of(self.drafting),
            "text_tokens": TEXT_TOKENS,
            "weights": len(program.weights),
            "hidden": dict(self.hidden),
            "features": self.features,
            "reads_features": program.reads_features,
            **({"sums": dict(self.sums)} if self.sums else {}),
            **({"embeds": dict(self.embeds)} if self.embeds else {}),
        }
        return json.dumps(data, sort_keys=True, indent=1) + "\n"


def most_rows(program: Program) -> int:
    """Most rows of a step of `program`: fewer than MOST_ROWS if a buffer of MOST_ROWS rows had over MOST_ITEMS."""
    widest = max((buffer.stride for buffer in program.buffers if buffer.rows == "tokens"), default=1)
    return min(MOST_ROWS, MOST_ITEMS // widest)


def _most_prompt_pages(program: Program) -> int:
    """As many pages as the largest step of long prompts reads, with room for the runtime to round their number up."""
    return MOST_ROWS // SHARED_BY * 2 * -(-program.max_position // PAGE_TOKENS)


def _json_of(launches: Iterable[Launch]) -> list[dict[str, Any]]:
    return [launch.to_json() for launch in launches]


def _size_json(size: Size) -> int | dict[str, Any]:
    return size if isinstance(size, int) else size.to_json()
