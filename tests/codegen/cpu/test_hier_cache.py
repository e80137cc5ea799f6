"""The hierarchical cache in the generated library: against torch, bit against bit, and after rejected drafts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from qcompile.codegen.kv_layout import KVLayout
from qcompile.formats.kv import HIER_GROUP, kv_format, read_hier, round_trip_hier
from qcompile.runtime.engine.blocks import BlockPool
from qcompile.runtime.step import pages_for
from qcompile.targets import TARGETS, get_target, missing_flags
from tests.support.tiny import Chunk, Runner, Tiny, attend_hier, reference

GROUP = HIER_GROUP
RING = KVLayout("kv_hier", 1, 1, 32).ring_tokens
TOKENS = np.random.default_rng(7).integers(0, 203, 560).tolist()
PAGES = np.random.default_rng(8).permutation(64)[: pages_for(len(TOKENS), 64, RING)].tolist()
SHAPES = {
    "8 bits": Tiny(kv="kv_hier", max_position=1024),
    "4 bits": Tiny(kv="kv_hier4", max_position=1024),
    "odd widths": Tiny(
        kv="kv_hier", hidden=72, inner=80, heads=6, kv_heads=1, head_dim=20, rotary_dim=20, max_position=1024
    ),
    "window and softcap": Tiny(kv="kv_hier", window=300, softcap=15.0, max_position=1024),
}
Open = Callable[..., Runner]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes Runners with pages enough, and closes them."""
    runners: list[Runner] = []

    def make(*args: Any, **options: Any) -> Runner:
        runners.append(Runner(*args, **({"pages": 64, "max_tokens": 600} | options)))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


@pytest.mark.parametrize("tiny", SHAPES.values(), ids=SHAPES.keys())
def test_equals_torch(opened: Open, tiny: Tiny) -> None:
    error = np.abs(opened(tiny).forward(TOKENS, PAGES, len(TOKENS)) - reference(tiny, TOKENS))
    # bf16 keys, and in double a value between two codes may round the other way: rare, and small. The draft's queries
    # are bytes: half a percent of what its 4-bit keys leave of a score.
    median, most = (5e-3, 0.1) if tiny.kv == "kv_hier4" else (2e-3, 2e-2)
    assert np.median(error) < median and error.max() < most


def test_older_positions_are_rounded_and_the_newest_are_not() -> None:
    """The reference itself, on keys that rounding changes; 4 bits err about 16 times as much as 8."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 300, 2, 32, generator=generator).unbind()
    errors = {}
    for bits in (8, 4):
        read = read_hier(k, v, bits)
        for x, seen in zip((k, v), read, strict=True):
            assert torch.equal(seen[GROUP:], x[GROUP:]) and not torch.equal(seen[:GROUP], x[:GROUP])
        errors[bits] = (read[0] - k)[:GROUP].square().mean().sqrt()
    assert 12 < errors[4] / errors[8] < 18  # the 8-bit lower half is cut at +-8: a little over a sixteenth
    assert torch.equal(read_hier(k[: 2 * GROUP], v[: 2 * GROUP], 4)[0], k[: 2 * GROUP])
    flat = round_trip_hier(torch.full((3, 8), -2.5), -1, 8)
    assert torch.equal(flat, torch.full((3, 8), -2.5))


@pytest.mark.parametrize("name", ["8 bits", "4 bits", "odd widths"])
def test_rows_are_bitwise_independent_of_the_step(opened: Open, name: str) -> None:
    tiny = SHAPES[name]
    whole = opened(tiny).forward(TOKENS, PAGES, len(TOKENS))
    for threads, chunk in ((1, 1), (1, 3), (2, 17), (3, 64), (1, 200), (2, 129)):
        rows = opened(tiny, threads=threads).forward(TOKENS, PAGES[::-1], chunk)
        assert rows.tobytes() == whole.tobytes(), f"{threads} threads, {chunk} rows a step"


def test_rows_are_bitwise_independent_of_the_batch(opened: Open) -> None:
    tiny = SHAPES["8 bits"]
    alone = opened(tiny).forward(TOKENS, PAGES, len(TOKENS))
    shared = opened(tiny, threads=2, pages=96)
    others = [page for page in range(96) if page not in PAGES]
    for start in range(0, 560, 80):
        mine = Chunk(TOKENS[start : start + 80], start, PAGES)
        other = Chunk(TOKENS[::-1][start // 2 : start // 2 + 40], start // 2, others)
        rows = shared.step([other, mine] if start % 160 else [mine, other])
        got = rows[40:] if start % 160 else rows[:80]
        assert got.tobytes() == alone[start : start + 80].tobytes()


@pytest.mark.parametrize("boundary", [256, 384, 512])
@pytest.mark.parametrize("ahead", [1, 9])
def test_rejected_drafts_leave_no_trace(opened: Open, boundary: int, ahead: int) -> None:
    """Wrong tokens across a group's boundary, computed and taken back, from every distance."""
    tiny = SHAPES["8 bits"]
    model = opened(tiny)
    whole = model.forward(TOKENS, PAGES, len(TOKENS))
    model.forward(TOKENS[: boundary - 6], PAGES, 600)
    wrong = [(token + 1) % 203 for token in TOKENS]
    for at in range(boundary - 6, boundary + 4):
        model.step([Chunk(wrong[at : at + ahead], at, PAGES)])
        rows = model.step([Chunk([TOKENS[at], *wrong[at + 1 : at + ahead]], at, PAGES)])
        assert rows[0].tobytes() == whole[at].tobytes(), f"position {at}"
    rest = model.step([Chunk(TOKENS[boundary + 4 :], boundary + 4, PAGES)])
    assert rest.tobytes() == whole[boundary + 4 :].tobytes()


def test_portable_and_avx2_agree_with_the_best(opened: Open) -> None:
    tiny = SHAPES["odd widths"]
    best = opened(tiny).forward(TOKENS[:300], PAGES, 300)
    for target in ("cpu-avx2", "cpu-portable"):
        if not missing_flags(TARGETS[target].requires):
            rows = opened(tiny, target=get_target(target)).forward(TOKENS[:300], PAGES, 300)
            np.testing.assert_allclose(rows, best, atol=1e-2)  # other last bits now and then round to another bf16


def test_pages_of_a_hierarchical_cache() -> None:
    counts = [pages_for(tokens, 64, RING) for tokens in range(2000)]
    assert counts[:66] == [0, *[2] * 64, 4] and counts[256:258] == [8, 14] and counts[384:386] == [14, 16]
    assert all(a <= b for a, b in itertools.pairwise(counts))
    assert all(count >= -(-tokens // 64) for tokens, count in enumerate(counts))  # a draft's own cache fits too
    pool = BlockPool(20, 64, RING)
    assert pool.pages_for(pool.most_tokens) <= 20 < pool.pages_for(pool.most_tokens + 1)
    assert BlockPool(3, 64).most_tokens == 192


def test_tables_that_end_before_the_rounded_pages_are_refused(opened: Open) -> None:
    model = opened(SHAPES["8 bits"])
    model.forward(TOKENS[:256], PAGES[:8], 256)
    batch, _ = model.batch([Chunk([1], 256, PAGES[:13])])
    assert model.library.qc_step(model.handle, batch) == 1


def test_attention_reads_as_the_reference_operator() -> None:
    """The torch reference of a step, row by row, is the one that the operator has."""
    from qcompile import ops

    tiny = Tiny(kv="kv_hier", heads=2, kv_heads=1, head_dim=16)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(300, heads, 16, generator=generator) for heads in (2, 1, 1))
    place = (torch.arange(300), torch.zeros(300, dtype=torch.int64), torch.arange(5)[None])
    cache = ops.kv_append(k, v, *place, torch.zeros(1, 2, 320, 1, 16), 0, "kv_hier")
    got = ops.kv_attention(q, *place, cache, 0, 16**-0.5, 0, 0.0, None, None, 8)
    k, v = (kv_format("kv_hier").round_trip(x) for x in (k, v))
    want = attend_hier(tiny, q, k, v)
    torch.testing.assert_close(got.flatten(1), want, atol=1e-5, rtol=0)  # float32, another order
