"""Sums over the GPUs of a divided model. What waits for other GPUs runs only on several (benchmarks/gpu_ranks.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qcompile.codegen.gpu.all_reduce import CHUNK, SMALL_ITEMS, PeerLayout, SumSpec
from tests.support.compiled import Record
from tests.support.interpreted import interpreted


def sums(ranks: int, xs: list[Tensor], other: Tensor | None, large: bool, out_stride: int) -> list[Tensor]:
    """What each rank has stored, [rows, width]; in a process that has TRITON_INTERPRET set."""
    from qcompile.codegen.gpu import compile as gpu_compile

    rows, width = xs[0].shape
    layout = PeerLayout(ranks, rows * width)
    spec = SumSpec(width, width, out_stride, layout, large, width if other is not None else 0)
    memory = [torch.zeros(layout.data // 8 + layout.chunks * CHUNK, dtype=torch.int64) for _ in range(ranks)]
    outs = [torch.full((rows, out_stride), float("nan")) for _ in range(ranks)]
    run = gpu_compile.load(spec.kernel(80, asm=False))[(2, 1, 1) if large else (rows, spec.programs, 1)]
    for number in (4, 5):  # the second sum finds what the first has left
        for _ in range(3 if large else 2):
            for rank in range(ranks):
                state = torch.tensor([number, 0, 0], dtype=torch.int32)
                given = [xs[rank] * (number - 4), outs[rank], *([other] if other is not None else [])]
                given += [rows] * large
                run(*given, state, torch.zeros(1, dtype=torch.int32), rank, memory[rank], *memory)
                assert state.tolist() == [number + 1, 0, 0]
    assert all(out[:, width:].isnan().all() for out in outs)
    return [out[:, :width] for out in outs]


def interpret_sums(ranks: int, width: int, rows: int) -> None:
    """All ranks have the sum in the order of ranks, to the bit, in one exchange or in two steps, whatever the rows."""
    torch.manual_seed(0)
    xs = [torch.randn(rows, width) * 10**rank for rank in range(ranks)]
    other = torch.randn(rows, width)
    expected = xs[0]
    for x in xs[1:]:
        expected = expected + x
    for large in (False, True):
        assert all(torch.equal(found, expected) for found in sums(ranks, xs, None, large, width + 3))
        assert all(torch.equal(found, other + expected) for found in sums(ranks, xs, other, large, width))
    row = rows // 2
    alone = sums(ranks, [x[row : row + 1].contiguous() for x in xs], None, False, width)
    assert all(torch.equal(found[0], expected[row]) for found in alone)


@pytest.mark.parametrize(("ranks", "width", "rows"), [(2, 1501, 9), (3, 1031, 5), (4, 64, 1)])
def test_sums_are_in_the_order_of_ranks_interpreted(ranks: int, width: int, rows: int) -> None:
    interpreted(__name__, f"interpret_sums({ranks}, {width}, {rows})")


def interpret_a_sum_in_place() -> None:
    """The result may be where the part was: a model's next buffer often is."""
    from qcompile.codegen.gpu import compile as gpu_compile

    torch.manual_seed(0)
    xs = [torch.randn(3, 300) for _ in range(2)]
    expected = xs[0] + xs[1]
    layout = PeerLayout(2, 900)
    memory = [torch.zeros(layout.data // 8 + layout.chunks * CHUNK, dtype=torch.int64) for _ in range(2)]
    run = gpu_compile.load(SumSpec(300, 300, 300, layout).kernel(80, asm=False))[(3, 2, 1)]
    failed = torch.zeros(1, dtype=torch.int32)
    parts = [x.clone() for x in xs]
    for _ in range(2):
        for rank in range(2):
            place = parts[rank].copy_(xs[rank])
            run(place, place, torch.zeros(3, dtype=torch.int32), failed, rank, memory[rank], *memory)
    assert torch.equal(parts[1], expected)


def test_a_sum_in_place_interpreted() -> None:
    interpreted(__name__, "interpret_a_sum_in_place()")


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("large", [False, True])
def test_kernels_compile_without_spills(ranks: int, large: bool, compiled: Record) -> None:
    spec = SumSpec(8192, 8192, 8192, PeerLayout(ranks, 8192 * 8192), large, 8192)
    found = compiled(spec.kernel(90), 90)
    assert found.spill_bytes == 0 and found.registers <= 128


def test_parts_of_peer_memory_do_not_overlap() -> None:
    for ranks, items in ((2, 1), (3, 12345), (8, 8192 * 16384)):
        layout = PeerLayout(ranks, items)
        assert layout.arrived == 16 * ranks * SMALL_ITEMS
        assert layout.chunks % ranks == 0 and layout.chunks * CHUNK >= items
        assert layout.summed - layout.arrived == 4 * ranks * layout.chunks
        assert layout.data - layout.summed >= 4 * layout.chunks and layout.data % 1024 == 0


def test_a_plan_of_a_divided_model_has_its_sums() -> None:
    from qcompile import pipeline
    from qcompile.codegen.gpu.plan import make_plan
    from qcompile.targets import TARGETS
    from tests.support.graphs import decoder

    graph = decoder(vocab=40, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, layers=1)
    found = pipeline.plan(graph, target="h100", recipe="w4a16", options={"shard.ranks": "2"})
    plan = make_plan(found.program, TARGETS["h100"], 64)
    layout = PeerLayout(2, 8192 * 2 * 256)
    assert plan.sums["ranks"] == 2 and plan.sums["width"] == 256 and plan.sums["chunk"] == CHUNK
    assert plan.sums["data"] >= layout.arrived
    kernels = [kernel.name for kernel in plan.kernels.values()]
    assert kernels.count("sum_small_2") == kernels.count("sum_large_2") > 0
    assert len(found.ranks) == 2 and found.ranks[1].calls != found.ranks[0].calls
    whole = make_plan(pipeline.plan(graph, target="h100", recipe="w4a16").program, TARGETS["h100"], 64)
    assert not whole.sums
