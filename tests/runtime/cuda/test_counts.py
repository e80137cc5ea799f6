"""The counts of a step on a GPU, which choose its launches and their grids."""

from __future__ import annotations

from typing import Any

from qcompile.runtime.cuda.counts import AttentionWork, attention_counts, attention_work, eighths, power_of_two

ATTENTION: dict[str, Any] = {
    **{"most_queries": 16, "group_splits": 16, "leaves": 4, "fine_splits": 33, "few_splits": 9, "near_splits": 2},
    **{"shares": 132, "shared": False},
}


def decoding_counts(*work: int, **plan: Any) -> dict[str, int]:
    """Of a step of the decode class."""
    return attention_counts(ATTENTION | plan, AttentionWork(*work), AttentionWork())


def test_attention_takes_leaves_where_there_is_little_to_do() -> None:
    few = decoding_counts(33, 5, 1, 5)
    assert few["fine"] == 5 and few["slots"] == 132 and few["fine_merged"] == 33 and few["fine_groups"] == 3
    assert few["decode_tokens"] == few["decoding_tokens"] == 5 and few["other_tokens"] == 0
    assert not any(few[name] for name in ("few", "coarse", "merged", "groups", "near", "far"))
    fewer = decoding_counts(3, 6, 3, 2)
    assert fewer["few"] == 2 and fewer["fine"] == fewer["coarse"] == 0 and fewer["fine_merged"] == 3
    # As many splits of several sequences have more rings: up to twice as many count as few.
    assert decoding_counts(16, 1, 1, 1)["fine"] == decoding_counts(8, 2, 2, 1)["few"] == 1
    many = decoding_counts(17, 2, 2, 1)
    assert many["coarse"] == 1 and many["slots"] == many["merged"] == 17 and many["groups"] == 2
    assert not any(many[name] for name in ("few", "fine", "fine_merged", "fine_groups"))
    assert decoding_counts(300, 2, 1, 2)["shares"] == 100
    sizes = ((32, 1, 1), (512, 1, 1), (16, 20, 20), (9, 200, 200))
    shares = [decoding_counts(*how, 1, shared=True, fine_splits=0)["shares"] for how in sizes]
    assert shares == [32, 128, 6, 1]  # with four splits each, not four or three


def test_attention_of_prompts_goes_by_what_is_behind_them() -> None:
    for splits, kind, count in ((2, "near", 17), (3, "far", 21)):  # most rows of one, or of all
        result = attention_counts(ATTENTION, AttentionWork(), AttentionWork(splits, 21, 2, 17))
        others = {"prompts": 2, "prompt_tokens": 21, "prompt_queries": 17, "other_tokens": 21}
        assert {name: count for name, count in result.items() if count} == {kind: count, **others}


def test_pages_are_unpacked_before_attention_of_many_rows() -> None:
    """Where many rows see each page, and there is room for the pages of all prompts."""

    def result(splits: int, tokens: int, sequences: int = 1, **plan: int) -> tuple[int, ...]:
        work = AttentionWork(splits, tokens, sequences, tokens)
        room = {"unpacked_pages": 1000, "unpacked_rows": 512, "split": 256} | plan
        counts = attention_counts(ATTENTION | room, AttentionWork(), work)
        assert counts["unpacked_room"] == (1000 if counts["unpacked"] else 0)
        return tuple(counts[name] for name in ("near", "far", "far_unpacked", "unpacked"))

    assert result(3, 512) == (0, 0, 512, 12)
    assert result(250, 1024, 1) == (0, 0, 1024, 1000) and result(125, 1024, 2) == (0, 0, 1024, 500)
    assert result(2, 512) == (512, 0, 0, 0)  # few positions
    assert result(3, 511) == (0, 511, 0, 0) and result(3, 1023, 2) == (0, 1023, 0, 0)  # few rows
    assert result(251, 1024, 1) == (0, 1024, 0, 0) and result(126, 1024, 2) == (0, 1024, 0, 0)  # no room
    assert result(3, 512, unpacked_pages=0) == (0, 512, 0, 0)
    assert result(3, 512, split=512, leaves=16) == (0, 0, 512, 24)  # leaves of half a page


def test_sequences_that_decode_have_kernels_of_their_own_beside_prompts() -> None:
    work = attention_work(ATTENTION, [1, 16, 17, 3], [90, 20, 50, 400], lambda pages: pages // 10)
    assert work == (AttentionWork(9, 17, 2, 16), AttentionWork(40, 20, 2, 17))  # those after a prompt are with it
    result = attention_counts(ATTENTION, *work)
    assert result["few"] == 16 and result["far"] == 20 and result["decoding"] == result["prompts"] == 2
    assert result["decoding_tokens"] == 17 and result["prompt_tokens"] == 20
    assert result["other_tokens"] == 37 and result["decode_tokens"] == 0
    assert attention_work(ATTENTION, [1, 5], [9, 2], abs) == (AttentionWork(9, 6, 2, 5), AttentionWork())
    assert attention_work(ATTENTION, [20], [9], abs) == (AttentionWork(), AttentionWork(9, 20, 1, 20, True))


def test_programs_that_sum_in_order_keep_all_multiprocessors_busy() -> None:
    def ordered(splits: int, sequences: int, queries: int = 1, even: bool = True) -> bool:
        plan = {"ordered_programs": [2, 4, 6], "multiprocessors": 132, "fine_splits": 0}
        work = AttentionWork(splits, sequences * queries, sequences, queries, even)
        result = attention_counts(ATTENTION | plan, work, AttentionWork())
        assert (result["ordered"], result["coarse"]) in ((queries, 0), (0, queries))
        assert result["merged"] == (0 if result["ordered"] else splits)
        return bool(result["ordered"])

    assert ordered(64, 64) and ordered(64, 32, 2) and ordered(1, 1) and ordered(1, 3, even=False)
    assert not ordered(64, 64, even=False) and not ordered(2, 1) and not ordered(64, 52) and not ordered(64, 67)
    assert ordered(64, 128) and not decoding_counts(64, 64, 64, 1)["ordered"]
    assert attention_work(ATTENTION, [1, 1], [40, 20], abs)[0].even
    assert not attention_work(ATTENTION, [1, 1], [41, 20], abs)[0].even


def test_grids_are_for_eighths_of_a_power_of_two() -> None:
    assert [eighths(n) for n in (1, 9, 64, 65, 129, 257, 640)] == [8, 16, 64, 80, 160, 320, 640]
    assert all(n <= eighths(n) <= power_of_two(n) for n in range(8, 3000))
