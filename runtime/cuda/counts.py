"""The counts of a step on a GPU, and the launches and grids that they choose (see codegen/gpu/launches.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from qcompile.formats.kv import PAGE_TOKENS

Counts = dict[str, int]
PARTS = "whole", "before masks", "from masks on", "before the head"
"""Parts of a step that are launched together."""
MIN_PAGES = 8
"""Fewest pages to which those of the longest context are rounded up in the counts of a step."""


class AttentionWork(NamedTuple):
    """The work of attention for sequences that are next to each other in a step.

    A sequence has at most `splits` splits of positions and `queries` rows. `even`: most contexts are nearly as long as
    the longest.
    """

    splits: int = 0
    tokens: int = 0
    sequences: int = 0
    queries: int = 0
    even: bool = False


def attention_work(
    plan: Mapping[str, Any], lengths: Sequence[int], pages: Sequence[int], splits: Callable[[int], int]
) -> tuple[AttentionWork, AttentionWork]:
    """The work of the kernels for decoding and of those for prompts, for sequences of `lengths` rows over `pages`.

    splits: number of splits of a context, by its pages. Sequences of few rows at the beginning of a step, where
    schedulers put them, are decoded even if prompts follow: kernels for prompts would take several times as long for
    them.
    """
    decoding = next((i for i, count in enumerate(lengths) if count > plan["most_queries"]), len(lengths))

    def work(part: slice) -> AttentionWork:
        some, most = lengths[part], max(pages[part], default=0)
        even = 4 * sum(pages[part]) >= 3 * most * len(some)
        return AttentionWork(splits(most), sum(some), len(some), max(some), even) if some else AttentionWork()

    return work(slice(decoding)), work(slice(decoding, None))


def attention_counts(plan: Mapping[str, Any], decoding: AttentionWork, prompts: AttentionWork) -> Counts:
    """The counts of attention's launches."""
    splits, ordered = decoding.splits, _ordered(plan, decoding)
    fine = 0 < splits * decoding.sequences <= plan["fine_splits"]
    far = prompts.splits > plan["near_splits"]
    unpacked = _unpacked_pages(plan, prompts) if far else 0
    # Several sequences read their rings at once, which kernels that pipeline those loads take better.
    few = fine and splits * decoding.sequences <= plan["few_splits"] * min(decoding.sequences, 2)
    groups = -(-splits // plan["group_splits"]) if splits > plan["group_splits"] else 0
    slots = splits * (plan["leaves"] if fine else 1)
    most_shares = max(1, plan["shares"] // (decoding.sequences if plan["shared"] and decoding.sequences else 1))
    shares = -(-slots // -(-slots // most_shares)) if slots else 0  # programs with equally many splits
    tokens = decoding.tokens + prompts.tokens
    return {
        "few": decoding.queries if few else 0,
        "fine": decoding.queries if fine and not few else 0,
        "ordered": decoding.queries if ordered else 0,
        "coarse": 0 if fine or ordered else decoding.queries,
        "near": 0 if far else prompts.queries,
        "far": prompts.tokens if far and not unpacked else 0,
        "far_unpacked": prompts.tokens if unpacked else 0,
        "unpacked": unpacked,
        "unpacked_room": plan["unpacked_pages"] if unpacked else 0,
        "merged": 0 if fine or ordered else splits,
        "groups": 0 if fine else groups,
        "fine_merged": splits if fine else 0,
        "fine_groups": groups if fine else 0,
        "decoding": decoding.sequences,
        "decoding_tokens": decoding.tokens,
        "prompts": prompts.sequences,
        "prompt_tokens": prompts.tokens,
        "prompt_queries": prompts.queries,
        "decode_tokens": 0 if prompts.sequences else tokens,
        "other_tokens": tokens if prompts.sequences else 0,
        "splits": splits,
        "slots": slots,
        "shares": shares,
    }


def _unpacked_pages(plan: Mapping[str, Any], prompts: AttentionWork) -> int:
    """Pages for each of the prompts that a kernel unpacks before attention; 0 if attention itself unpacks them.

    The kernel pays if many rows see each page. Plans without it have room for no pages.
    """
    room = plan.get("unpacked_pages", 0)
    if not room or prompts.tokens < plan["unpacked_rows"] * prompts.sequences:
        return 0
    pages = -(-prompts.splits * plan["split"] // PAGE_TOKENS)
    return pages if pages * prompts.sequences <= room else 0


def _ordered(plan: Mapping[str, Any], work: AttentionWork) -> bool:
    """Whether programs that sum all positions of their rows are faster than programs of splits, with sums to merge.

    They are if they keep nearly all multiprocessors busy to the end. A plan without such programs lists none.
    """
    if not plan.get("ordered_programs") or not work.queries:
        return False
    programs = plan["ordered_programs"][work.queries - 1] * work.sequences
    room = -(-programs // plan["multiprocessors"]) * plan["multiprocessors"]
    return work.splits == 1 or (work.even and 4 * room <= 5 * programs)


def active_launches(launches: list[dict[str, Any]], counts: Counts) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The launches that have work for these counts, each with the variant for its number of rows."""
    for launch in launches:
        count = counts[launch["by"]]
        for variant in launch["variants"] if count else ():
            if not variant["most"] or count <= variant["most"]:
                if variant["kernel"]:
                    yield launch, variant
                break


def grid(variant: dict[str, Any], counts: Counts) -> list[int]:
    """The grid of a launch."""
    return [_size(variant["grid"][axis], counts) for axis in "xyz"]


def _size(size: Any, counts: Counts) -> int:
    if type(size) is int:
        return size
    quotient: int = -(-counts[size["count"]] // size.get("divisor", 1))
    return quotient * int(size.get("times", 1)) + int(size.get("plus", 0))


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << (max(value, 1) - 1).bit_length()


def eighths(value: int) -> int:
    """`value` rounded up to an eighth of a power of two: few distinct graphs, with grids not much too large."""
    step = max(power_of_two(value) // 8, MIN_PAGES)
    return -(-value // step) * step
