"""Sums over the GPUs of a divided model. What waits for other GPUs runs only on several (benchmarks/gpu_ranks.py)."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from qcompile.codegen.gpu.all_gather import AllGatherSpec
from qcompile.codegen.gpu.all_reduce import SumSpec, Way
from qcompile.codegen.gpu.launches import MOST_OUTPUTS
from qcompile.codegen.gpu.peer_memory import CHUNK, MEDIUM_ITEMS, MOST_PROGRAMS, STATE, PeerLayout
from tests.support.cases import first
from tests.support.compiled import Record
from tests.support.exchanges import Exchanging, peer_memory, shared, together
from tests.support.interpreted import interpreted


def sums(xs: list[Tensor], other: Tensor | None, way: Way, out_stride: int) -> list[Tensor]:
    """What each rank has stored, [rows, width], in processes that have TRITON_INTERPRET set."""
    rows, width = xs[0].shape
    layout = PeerLayout(len(xs), rows * width)
    spec = SumSpec(width, width, out_stride, layout, way, width if other is not None else 0)
    outs = [shared(rows, out_stride).fill_(torch.nan) for _ in xs]
    # Interpreted programs run one after another, so those of large sums, which wait for others, cannot be several.
    grid = {"small": (rows, spec.programs, 1), "medium": (2, 1, 1), "large": (1, 1, 1)}[way]
    kernel = spec.kernel(80, asm=False)

    def work(own: Exchanging) -> None:
        for number in range(3):  # later sums find what the first ones have left
            given = [xs[own.rank] * (number - 1), outs[own.rank], *([other] if other is not None else [])]
            own.run(kernel, grid, *given, *[rows] * (way != "small"))
        counted = own.state[:1] if way == "large" else own.state[STATE : STATE + grid[0] * grid[1]]
        assert (counted == 3).all() and int((own.state != 0).sum()) == len(counted)

    together(peer_memory(layout), work)
    assert all(out[:, width:].isnan().all() for out in outs)
    return [out[:, :width] for out in outs]


def total_of(xs: list[Tensor]) -> Tensor:
    """The sum in the order of ranks."""
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def interpret_sums(ranks: int, width: int, rows: int) -> None:
    """All ranks have the sum in the order of ranks, to the bit, in each way, whatever the rows."""
    torch.manual_seed(0)
    xs = [torch.randn(rows, width) * 10**rank for rank in range(ranks)]
    other, expected = torch.randn(rows, width), total_of(xs)
    ways: tuple[Way, ...] = ("small", "medium", "large")
    for way in ways:
        assert all(torch.equal(result, expected) for result in sums(xs, None, way, width + 3))
        assert all(torch.equal(result, other + expected) for result in sums(xs, other, way, width))
    row = rows // 2
    alone = sums([x[row : row + 1].contiguous() for x in xs], None, "small", width)
    assert all(torch.equal(result[0], expected[row]) for result in alone)


# 17 rows are chunks of two groups, in which each of three ranks owns one.
@pytest.mark.parametrize(("ranks", "width", "rows"), first(((2, 1501, 5),), [(2, 1501, 5), (3, 1031, 17)]))
def test_sums_are_in_the_order_of_ranks_interpreted(ranks: int, width: int, rows: int) -> None:
    interpreted(__name__, f"interpret_sums({ranks}, {width}, {rows})")


def interpret_exchanges(ranks: int) -> None:
    """Sums of several widths and ways, some in place, and gatherings of logits between them."""
    part, vocab, most = 1056, 1056 * ranks - 12, 5
    layout = PeerLayout(ranks, 1501 * most, vocab)
    memory = peer_memory(layout)
    chosen = random.Random(ranks)
    tasks: list[tuple[Way, int]] = [(chosen.choice(("small", "medium")), chosen.randint(1, most)) for _ in range(16)]

    def work(own: Exchanging) -> None:
        for number, (way, rows) in enumerate(tasks):
            torch.manual_seed(number)
            width = (300, 600, 1501)[number % 3]
            xs = [torch.randn(rows, width) for _ in range(ranks)]
            spec = SumSpec(width, width, width, layout, way)
            x, out = xs[own.rank].clone(), torch.zeros(rows, width)
            place = x if number % 2 else out  # the result may be where the part was: a model's next buffer often is
            # A rank with one program sends before it waits: nothing but the two places keeps what is not read yet.
            grid = (rows, spec.programs, 1) if way == "small" else (chosen.choice((1, 3)), 1, 1)
            own.run(spec.kernel(80, asm=False), grid, x, place, *[rows] * (way != "small"))
            assert torch.equal(place, total_of(xs)), number
            if number % 3:
                continue
            xs = [torch.randn(rows, part + 5) for _ in range(ranks)]
            own.run(AllGatherSpec(part, part + 5, layout).kernel(80, asm=False), (2, 1, 1), xs[own.rank], rows)
            logits = memory[own.rank].view(torch.float32)[layout.logits // 4 :][: (most + 1) * vocab].view(-1, vocab)
            assert torch.equal(logits[:rows], torch.cat([x[:, :part] for x in xs], 1)[:, :vocab]), number
            assert not logits[most].any()

    together(memory, work)


@pytest.mark.parametrize("ranks", [2, 3])
def test_exchanges_of_ranks_that_are_early_or_late_interpreted(ranks: int) -> None:
    interpreted(__name__, f"interpret_exchanges({ranks})")


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("way", ["small", "medium", "large"])
def test_kernels_compile_without_spills(ranks: int, way: Way, compiled: Record) -> None:
    spec = SumSpec(8192, 8192, 8192, PeerLayout(ranks, 8192 * 8192), way, 8192)
    result = compiled(spec.kernel(90), 90)
    assert result.spill_bytes == 0 and result.registers <= 128


@pytest.mark.parametrize("ranks", [2, 8])
def test_gathering_compiles_without_spills(ranks: int, compiled: Record) -> None:
    result = compiled(AllGatherSpec(64128, 64128, PeerLayout(ranks, 8192 * 8192, 128256)).kernel(90), 90)
    assert result.spill_bytes == 0 and result.registers <= 128


def test_parts_of_peer_memory_do_not_overlap() -> None:
    for ranks, items, vocab in ((2, 1, 7), (3, 12345, 0), (8, 8192 * 16384, 128256)):
        layout = PeerLayout(ranks, items, vocab)
        assert layout.arrived == 16 * ranks * 65536
        assert layout.chunks % ranks == 0 and layout.chunks * CHUNK >= items
        assert layout.summed - layout.arrived == 4 * ranks * layout.chunks
        assert layout.passed - layout.summed == 4 * layout.chunks
        assert layout.logits - layout.passed >= 8 * ranks * MOST_PROGRAMS and layout.logits % 1024 == 0
        assert layout.sent - layout.logits >= 4 * MOST_OUTPUTS * vocab and layout.sent % 1024 == 0
        assert layout.data - layout.sent == (8 * (ranks - 1) * MEDIUM_ITEMS if ranks > 2 else 0)


def test_a_plan_of_a_divided_model_has_its_sums() -> None:
    from qcompile import pipeline
    from qcompile.codegen.gpu.plan import make_plan
    from qcompile.targets import TARGETS
    from tests.support.graphs import decoder

    graph = decoder(vocab=40, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, layers=1)
    result = pipeline.plan(graph, target="h100", recipe="w4a16", options={"shard.ranks": "2"})
    plan = make_plan(result.program, TARGETS["h100"], 64)
    layout = PeerLayout(2, 8192 * 256, 40)
    assert plan.sums["ranks"] == 2 and plan.sums["width"] == 256 and plan.sums["chunk"] == CHUNK
    assert plan.sums["data"] == layout.data and plan.sums["logits"] == layout.logits
    assert plan.sums["state"] == 4 * (STATE + MOST_PROGRAMS)
    kernels = [kernel.name for kernel in plan.kernels.values()]
    assert kernels.count("sum_small_2") == kernels.count("sum_medium_2") > 0
    assert kernels.count("gather_2") == 1 and "sum_large_2" not in kernels
    assert len(result.ranks) == 2 and result.ranks[1].calls != result.ranks[0].calls
    whole = make_plan(pipeline.plan(graph, target="h100", recipe="w4a16").program, TARGETS["h100"], 64)
    assert not whole.sums
    result = pipeline.plan(graph, target="h100", recipe="w8a8", options={"shard.ranks": "4"})
    kernels = [kernel.name for kernel in make_plan(result.program, TARGETS["h100"], 64).kernels.values()]
    assert kernels.count("sum_large_4") == kernels.count("sum_medium_4") > 0
