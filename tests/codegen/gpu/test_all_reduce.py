"""Sums over the GPUs of a divided model. What waits for other GPUs runs only on several (benchmarks/gpu_ranks.py)."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qcompile.codegen.gpu.all_gather import AllGatherSpec
from qcompile.codegen.gpu.all_reduce import CollectSpec, SendSpec
from qcompile.codegen.gpu.exchange import RowArray, RowExchange, Way, result_bytes
from qcompile.codegen.gpu.launches import MOST_OUTPUTS, MOST_ROWS
from qcompile.codegen.gpu.peer_memory import FEW_ROWS, MOST_PROGRAMS, OWNED, PACKED, PeerLayout
from qcompile.codegen.gpu.rows import RowSpec
from tests.support.cases import first
from tests.support.compiled import Record
from tests.support.exchanges import Exchanging, peer_memory, shared, together
from tests.support.interpreted import interpreted

WAYS: tuple[Way, ...] = ("packed", "owned")


def run_sum(
    own: Exchanging,
    spec: RowSpec,
    exchange: RowExchange,
    x: Tensor,
    results: dict[str, Tensor],
    added: Tensor | None = None,
) -> None:
    """A sum of the rows of x and what follows it, in the way of `exchange`, on the rank `own`."""
    rows, layout = len(x), exchange.layout
    given = {**results, "x": x, "tokens": rows} | ({"added": added} if added is not None else {})
    if exchange.way == "packed":
        total = "total" if exchange.total_stride else "out"
        part = layout.spread or spec.width
        stride = exchange.total_stride or spec.out_stride
        sums = RowSpec(part, spec.x_stride, stride, blocks=spec.width // part)
        kernel = sums.kernel(80, replace(exchange, total_stride=0, arrays=()))
        named = {**given, "out": given[total]}
        names = [argument.name for argument in kernel.arguments if argument.name in named]
        own.run(kernel, (rows, sums.blocks, 1), *(named[name] for name in names))
        if exchange.total_stride:
            run_alone(replace(spec, x_stride=stride), rows, {**given, "x": given["total"]})
        return
    kernel = spec.kernel(80, exchange)
    names = [argument.name for argument in kernel.arguments if argument.name in given]
    own.run(SendSpec(spec.width, spec.x_stride, layout).kernel(80, asm=False), (rows, 1, 1), x)
    own.run(kernel, (-(-rows // layout.ranks), 1, 1), *(given[name] for name in names))
    types = {torch.float32: "*fp32", torch.int8: "*i8", torch.int32: "*i32", torch.bfloat16: "*bf16"}
    collected = [results[array.name] for array in exchange.arrays]
    collect = CollectSpec(exchange.arrays, tuple(types[each.dtype] for each in collected), layout)
    own.run(collect.kernel(80, asm=False), (rows, 1, 1), *collected)


def sums(xs: list[Tensor], other: Tensor | None, way: Way, stride: int) -> list[Tensor]:
    """What each rank has stored, [rows, width], in processes that have TRITON_INTERPRET set."""
    rows, width = xs[0].shape
    arrays = (RowArray("out", stride, width),)
    layout = PeerLayout(len(xs), width, result_bytes(arrays), spread=0 if width % 512 else 512)
    spec = RowSpec(width, width, stride)
    exchange = RowExchange(layout, way, width if other is not None else 0, 0, arrays, asm=False)
    outs = [shared(rows, stride).fill_(torch.nan) for _ in xs]

    def work(own: Exchanging) -> None:
        for number in range(3):  # later sums find what the first ones have left
            run_sum(own, spec, exchange, xs[own.rank] * (number - 1), {"out": outs[own.rank]}, other)
        counters = rows * (layout.row_programs if way == "packed" else 1)
        counted = own.state[{"packed": PACKED, "owned": OWNED}[way] :][:counters]
        assert (counted == 3).all() and int((own.state != 0).sum()) == counters

    together(peer_memory(layout, rows), work)
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
    for way in WAYS:
        assert all(torch.equal(result, expected) for result in sums(xs, None, way, width + 3))
        assert all(torch.equal(result, other + expected) for result in sums(xs, other, way, width))
        row = rows // 2
        alone = sums([x[row : row + 1].contiguous() for x in xs], None, way, width)
        assert all(torch.equal(result[0], expected[row]) for result in alone)


@pytest.mark.parametrize(
    ("ranks", "width", "rows"), first(((2, 1024, 5),), [(2, 1024, 5), (2, 1501, 5), (3, 1031, 17)])
)
def test_sums_are_in_the_order_of_ranks_interpreted(ranks: int, width: int, rows: int) -> None:
    interpreted(__name__, f"interpret_sums({ranks}, {width}, {rows})")


def interpret_places() -> None:
    """A rank that is a sum ahead has written nothing over the parts that the other one has yet to read."""
    from qcompile.codegen.gpu import compile as gpu_compile

    width, layout = 64, PeerLayout(2, 64, 256)
    own, other = (torch.zeros(-(-layout.size(1) // 8), dtype=torch.int64) for _ in range(2))
    state, failed = torch.zeros(layout.state_bytes // 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    kernel = RowSpec(width, width, width).kernel(80, RowExchange(layout, "packed", asm=False))
    for number in (1, 2):
        for place in (0, 1):  # the other rank's part of this sum, wherever this one looks
            own[: 4 * layout.packed_items].view(2, 2, -1)[place, 1, :width] = number << 32
        x, out = torch.full((1, width), float(number)), torch.zeros(1, width)
        gpu_compile.load(kernel)[1, 1, 1](x, out, state, failed, 0, own, own, other)
        assert torch.equal(out, x)
    sent = other[: 4 * layout.packed_items].view(2, 2, -1)[:, 0, :width] >> 32
    assert (sent == torch.tensor([[2], [1]])).all()


def test_parts_of_a_sum_stay_while_a_rank_is_a_sum_ahead_interpreted() -> None:
    interpreted(__name__, "interpret_places()")


# ---- norms of sums ---------------------------------------------------------------------------------


def quantized(rows: int, width: int, scales: int, fill: int = 0) -> dict[str, Tensor]:
    """Buffers of int8 codes, scales, and sums of codes."""
    codes = shared(rows, width, dtype=torch.int8).fill_(fill)
    sums_of_codes = shared(rows, dtype=torch.int32).fill_(fill)
    return {"out": codes, "out_scale": shared(rows, scales).fill_(fill), "out_sum": sums_of_codes}


def interpret_norms(group: int) -> None:
    """A norm of a sum is that of the stored sum, to the bit, in each way; with many rows, others' sums stay away."""
    rows, width, ranks = 7, 384, 2
    torch.manual_seed(1)
    xs, other, weight = [torch.randn(rows, width) for _ in range(ranks)], torch.randn(rows, width), torch.rand(width)
    total, scales = other + total_of(xs), width // group if group else 1
    spec = RowSpec(width, width, width, out="q8", norm="rms", weight=True, eps=1e-6, group=group, sums=not group)
    arrays = (RowArray("out", width // 4, width // 4), RowArray("out_scale", scales, scales))
    arrays += (RowArray("out_sum", 1, 1),) * (not group)
    want = quantized(rows, width, scales)
    plain = {**want, "x": total, "weight": weight}
    run_alone(spec, rows, plain)
    layout = PeerLayout(ranks, width, result_bytes(arrays))
    for way in WAYS:
        exchange = RowExchange(layout, way, width, width, arrays, asm=False)
        every = [quantized(rows, width, scales, 99) | {"total": shared(rows, width)} for _ in range(ranks)]

        def work(own: Exchanging, exchange: RowExchange = exchange, every: list[dict[str, Tensor]] = every) -> None:
            run_sum(own, spec, exchange, xs[own.rank], {**every[own.rank], "weight": weight}, other)

        together(peer_memory(layout, rows), work)
        for rank, one in enumerate(every):
            names = ("out", "out_scale", *(() if group else ("out_sum",)))
            assert all(torch.equal(one[name], want[name]) for name in names), (way, rank)
            own = slice(rank, None, ranks) if way == "owned" else slice(None)
            assert torch.equal(one["total"][own], total[own]), (way, rank)
            assert way == "packed" or not one["total"][1 - rank :: ranks].any()


def run_alone(spec: RowSpec, rows: int, given: dict[str, Tensor]) -> None:
    """A row kernel without other GPUs."""
    from qcompile.codegen.gpu import compile as gpu_compile

    kernel = spec.kernel(80)
    gpu_compile.load(kernel)[(rows, 1, 1)](*(given[argument.name] for argument in kernel.arguments))


@pytest.mark.parametrize("group", [0, 128])
def test_a_norm_of_a_sum_is_that_of_the_stored_sum_interpreted(group: int) -> None:
    interpreted(__name__, f"interpret_norms({group})")


@pytest.mark.parametrize(
    ("width", "ranks", "out", "group"),
    first(((4096, 2, "q8", 0),), [(4096, 2, "q8", 0), (5120, 4, "bf16", 0), (8192, 8, "q8", 128)]),
)
def test_norms_sum_in_the_same_order_in_both_ways(width: int, ranks: int, out: str, group: int) -> None:
    """The order of a sum over a row is that of the layout of its elements over threads."""
    from qcompile.codegen.gpu import compile as gpu_compile

    spec = RowSpec(width, width, width, out=out, norm="rms", eps=1e-6, group=group, sums=out == "q8" and not group)
    layout, arrays = PeerLayout(ranks, width, 2 * width), (RowArray("out", width // 4, width // 4),)
    kernels = spec.kernel(90), spec.kernel(90, RowExchange(layout, "owned", width, width, arrays))
    orders = [layouts(gpu_compile.build(kernel, 90).asm["ttgir"]) for kernel in kernels]
    assert orders[0] == orders[1] and orders[0] and kernels[0].warps == kernels[1].warps


def layouts(code: str) -> list[str]:
    """The types of what a kernel reduces, with the layout over threads spelled out."""
    named = dict(re.findall(r"(#\w+) = (#ttg\.\w+<\{.*?\}>)", code))
    reduced = re.findall(r'"tt\.reduce"\(.*?\}\) : \((.*?)\) ->', code, re.DOTALL)
    return [re.sub(r"#\w+", lambda each: named[each[0]], types) for types in reduced]


# ---- one exchange after another --------------------------------------------------------------------


def interpret_exchanges(ranks: int) -> None:
    """Sums of several widths in both ways, some in place, and gatherings of logits between them."""
    part, vocab, most = 1056, 1056 * ranks - 12, 5
    layout = PeerLayout(ranks, 1536, 4 * 1536, vocab, spread=256)
    memory = peer_memory(layout, most)
    chosen = random.Random(ranks)
    tasks: list[tuple[Way, int]] = [(chosen.choice(WAYS), chosen.randint(1, most)) for _ in range(16)]

    def work(own: Exchanging) -> None:
        for number, (way, rows) in enumerate(tasks):
            torch.manual_seed(number)
            width = (256, 768, 1536)[number % 3]
            xs = [torch.randn(rows, width) for _ in range(ranks)]
            x, out = xs[own.rank].clone(), torch.zeros(rows, width)
            place = x if number % 2 else out  # the result may be where the part was
            exchange = RowExchange(layout, way, arrays=(RowArray("out", width, width),), asm=False)
            run_sum(own, RowSpec(width, width, width), exchange, x, {"out": place})
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
def test_sums_compile_without_spills(ranks: int, compiled: Record) -> None:
    layout = PeerLayout(ranks, 8192, 4 * 8192, spread=256)
    arrays = RowArray("out", 2048, 2048), RowArray("out_scale", 1, 1)
    spec = RowSpec(8192, 8192, 8192, out="q8", norm="rms", eps=1e-6)
    kernels = [spec.kernel(90, RowExchange(layout, "owned", 8192, 8192, arrays))]
    kernels.append(RowSpec(256, 8192, 8192, blocks=32).kernel(90, RowExchange(layout, "packed", 8192)))
    for kernel in kernels:
        result = compiled(kernel, 90)
        assert result.spill_bytes == 0 and result.registers <= 128


@pytest.mark.parametrize("ranks", [2, 8])
def test_sending_and_collecting_compile_without_spills(ranks: int, compiled: Record) -> None:
    layout, arrays = PeerLayout(ranks, 8192, 4 * 8192), (RowArray("out", 8192, 8192),)
    for kernel in (SendSpec(8192, 8192, layout).kernel(90), CollectSpec(arrays, ("*fp32",), layout).kernel(90)):
        assert compiled(kernel, 90).spill_bytes == 0


@pytest.mark.parametrize("ranks", [2, 8])
def test_gathering_compiles_without_spills(ranks: int, compiled: Record) -> None:
    result = compiled(AllGatherSpec(64128, 64128, PeerLayout(ranks, 8192, 0, 128256)).kernel(90), 90)
    assert result.spill_bytes == 0 and result.registers <= 128


def test_parts_of_peer_memory_do_not_overlap() -> None:
    for ranks, width, results, vocab in ((2, 1, 16, 7), (3, 1501, 0, 0), (8, 16384, 65536, 128256)):
        layout = PeerLayout(ranks, width, results, vocab)
        assert 1 <= layout.few_rows <= FEW_ROWS and layout.state_bytes == 4 * (PACKED + layout.few_rows)
        assert layout.arrived == 16 * ranks * layout.few_rows * width
        assert layout.done - layout.arrived >= 4 * -(-MOST_ROWS // ranks) * ranks
        assert layout.passed - layout.done == 4 * MOST_ROWS
        assert layout.logits - layout.passed >= 8 * ranks * MOST_PROGRAMS and layout.logits % 1024 == 0
        assert layout.data - layout.logits >= 4 * MOST_OUTPUTS * vocab and layout.data % 1024 == 0
        assert layout.part_bytes >= 4 * width and layout.group_bytes == ranks * (layout.part_bytes + results)
        assert layout.size(2 * ranks) - layout.size(1) == layout.group_bytes
    spread = PeerLayout(2, 4096, spread=512)
    assert spread.few_rows == FEW_ROWS and spread.state_bytes == 4 * (PACKED + 8 * FEW_ROWS)


def test_a_plan_of_a_divided_model_has_its_sums() -> None:
    from qcompile import pipeline
    from qcompile.codegen.gpu.plan import make_plan
    from qcompile.targets import TARGETS
    from tests.support.graphs import decoder

    graph = decoder(vocab=40, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, layers=1)
    result = pipeline.plan(graph, target="h100", recipe="w4a16", options={"shard.ranks": "2"})
    plan = make_plan(result.program, TARGETS["h100"], 64)
    layout = PeerLayout(2, 256, 4 * 256, 40, 256)
    assert plan.sums["ranks"] == 2 and plan.sums["group"] == layout.group_bytes
    assert plan.sums["data"] == layout.data and plan.sums["logits"] == layout.logits
    assert plan.sums["state"] == layout.state_bytes
    kernels = [kernel.name for kernel in plan.kernels.values()]
    assert kernels.count("send_rows_2") == 1 and kernels.count("collect_rows_2") == 2 and kernels.count("gather_2") == 1
    assert kernels.count("rows_sum_packed_f32") == kernels.count("rows_sum_owned_f32") == 1
    assert kernels.count("rows_sum_owned_rms_bf16") == 1
    assert len(result.ranks) == 2 and result.ranks[1].calls != result.ranks[0].calls
    whole = make_plan(pipeline.plan(graph, target="h100", recipe="w4a16").program, TARGETS["h100"], 64)
    assert not whole.sums


def test_owners_send_a_sum_that_others_read() -> None:
    """Behind the last sum, rows are taken; the one before is only added to it and normalized."""
    from qcompile import pipeline
    from qcompile.codegen.gpu.plan import make_plan
    from qcompile.targets import TARGETS
    from tests.support.graphs import decoder

    graph = decoder(vocab=40, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, layers=2)
    plan = make_plan(
        pipeline.plan(graph, target="h100", recipe="w8a8", options={"shard.ranks": "2"}).program, TARGETS["h100"], 64
    )
    collected = [
        [argument.name for argument in launch.variants[1].code.arguments if argument.name in launch.variants[1].args]
        for launch in plan.launches
        if launch.name.endswith(".collect") and launch.variants[1].code
    ]
    shared_with = [sorted({"out", "out_scale", "out_sum", "total"} & set(names)) for names in collected]
    assert shared_with[-1] == ["out"] and all("total" not in names for names in shared_with)
    assert all("out_scale" in names for names in shared_with[:-1])
    few = {variant.most for launch in plan.launches for variant in launch.variants[:1] if "all_reduce" in launch.name}
    assert few == {FEW_ROWS}  # the same for all, since what is added must have the same owners


@pytest.mark.parametrize("reader", ["norm", "rows", "sum", None])
def test_owners_send_the_sum_behind_a_norm_only_if_a_call_reads_all_rows_of_it(reader: str | None) -> None:
    """Another norm and rows with outputs read all; a later sum adds rows of the same owners."""
    from qcompile.codegen.calls import AllReduce, Call, Elementwise, Norm, TakeRows
    from qcompile.codegen.gpu import fuse
    from qcompile.codegen.gpu.context import PlanContext
    from qcompile.codegen.gpu.planned_sums import sent_arrays
    from qcompile.targets import TARGETS
    from tests.codegen.gpu.test_fuse import program

    first = (AllReduce("sum", "part", "whole", 2), Elementwise("add", "add", "stream", "next", other="whole"))
    readers: dict[str | None, tuple[Call, ...]] = {
        "norm": (Norm("other_norm", "rms", "next", "more", 1e-5),),
        "rows": (TakeRows("take", "next", "rows"),),
        "sum": (AllReduce("late", "later", "added", 2), Elementwise("end", "add", "next", "last", other="added")),
        None: (),
    }
    made = program(*first, Norm("norm", "rms", "next", "codes", 1e-5), *readers[reader])
    made = fuse.norm_in_sums(fuse.add_in_sums(made))
    context = PlanContext(made, (), 64, TARGETS["h100"])
    sent = [array.name for array in sent_arrays(context, made.calls[0])]  # type: ignore[arg-type]
    assert sent == (["out", "total"] if reader in ("norm", "rows") else ["out"])
