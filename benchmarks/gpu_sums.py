"""Sums over GPUs with norms behind them, and gatherings, as kernels of a divided model do them, beside NCCL's sums.

    python benchmarks/gpu_sums.py [--ranks 2] [--out FILE]

A CUDA graph on each GPU has LAUNCHES of them, one after another; times are those of one, in microseconds. Sums add a
float32 row to those of all GPUs, in both ways (codegen/gpu/exchange.py): alone, where all GPUs have all rows of the
result, and with a norm that is rounded to int8 codes (`norm`), where each GPU has the sums of its own rows, and all
codes. All results are compared bit by bit. NCCL sums float32, too; a process has each of its GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import RESULTS
from benchmarks.gpu_common import facts
from qcompile.codegen.gpu.all_gather import RESIDENT, AllGatherSpec
from qcompile.codegen.gpu.all_reduce import CollectSpec, SendSpec
from qcompile.codegen.gpu.compile import compile_kernel
from qcompile.codegen.gpu.exchange import RowArray, RowExchange, Way
from qcompile.codegen.gpu.kernel import Kernel
from qcompile.codegen.gpu.peer_memory import PeerLayout
from qcompile.codegen.gpu.rows import RowSpec
from qcompile.runtime.cuda.driver import Driver, LaunchCall, driver

SHAPES = ((1, 2048), (1, 4096), (1, 8192), (1, 16384), (16, 4096), (64, 4096), (256, 4096), (2048, 4096))
"""Rows and width of sums: 8 to 64 KiB, and steps of more rows."""
VOCAB, GATHERED = 128256, (1, 16, 64)
LAUNCHES, REPLAYS = 64, 15
SPREAD = 256
"""Elements of a program in sums of few rows."""


class Group:
    """All GPUs, driven by this process, with their peer memory for exchanges of `layout`."""

    def __init__(self, layout: PeerLayout) -> None:
        self.ranks, self.layout = layout.ranks, layout
        self.drivers: list[Driver] = [driver(rank) for rank in range(layout.ranks)]
        size = layout.size(max(rows for rows, _ in SHAPES))
        self.peers = [torch.zeros(size, dtype=torch.uint8, device=f"cuda:{rank}") for rank in range(layout.ranks)]
        self.states = [torch.zeros(layout.state_bytes // 4, dtype=torch.int32, device=one.device) for one in self.peers]
        for one in self.peers:
            for other in self.peers:  # has torch enable access between the GPUs
                other[:16].copy_(one[:16])
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for all GPUs."""
        for rank in range(self.ranks):
            torch.cuda.synchronize(rank)

    def launches(self, kernel: Kernel, grid: Sequence[int], given: Sequence[dict[str, Any]]) -> list[LaunchCall]:
        """A launch on each GPU, with what is `given` to each."""
        made = compile_kernel(kernel, 10 * torch.cuda.get_device_capability(0)[0])
        calls = []
        for rank, gpu in enumerate(self.drivers):
            gpu.use()
            function = gpu.function(gpu.module(made.cubin, made.ptx.encode, print), kernel.name, made.shared_bytes)
            own = {"state": self.states[rank], "failed": self.states[rank], "rank": rank, "own": self.peers[rank]}
            values = given[rank] | own | {f"peer{place}": peer for place, peer in enumerate(self.peers)}
            words = [values[argument.name] for argument in kernel.arguments]
            words = [word.data_ptr() if isinstance(word, Tensor) else word for word in words]
            calls.append(LaunchCall(gpu, function, grid, made.threads, made.shared_bytes, kernel.pdl, words))
        return calls

    def microseconds(self, steps: Sequence[Sequence[LaunchCall]]) -> float:
        """Median time of these launches, each of which is one on each GPU, within graphs of many."""
        graphs = []
        for gpu, calls in zip(self.drivers, zip(*steps, strict=True), strict=True):
            gpu.use()
            with gpu.captured() as result:
                for _ in range(LAUNCHES):
                    for call in calls:
                        call.run()
            graphs.append(result[0])
        times = []
        for _ in range(REPLAYS):
            events = []
            for gpu, graph in zip(self.drivers, graphs, strict=True):
                gpu.use()
                first, last = gpu.event(), gpu.event()
                gpu.replay(graph)  # the others have begun when the second one is measured
                gpu.record(first)
                gpu.replay(graph)
                gpu.record(last)
                events.append((first, last))
            self.synchronize()
            self.drivers[0].use()
            times.append(1e6 * self.drivers[0].seconds_between(*events[0]) / LAUNCHES)
        return statistics.median(times)


def steps_of(group: Group, spec: RowSpec, exchange: RowExchange, given: list[dict[str, Any]]) -> list[list[LaunchCall]]:
    """The launches of a sum and what follows it: one on each GPU for each."""
    rows, layout = len(given[0]["x"]), exchange.layout
    if exchange.way == "packed":
        total = "total" if exchange.total_stride else "out"
        sums = RowSpec(SPREAD, spec.x_stride, spec.width, blocks=spec.width // SPREAD)
        kernel = sums.kernel(90, replace(exchange, total_stride=0, arrays=()))
        steps = [group.launches(kernel, (rows, sums.blocks, 1), [one | {"out": one[total]} for one in given])]
        if exchange.total_stride:
            stored = [one | {"x": one["total"]} for one in given]
            steps.append(group.launches(spec.kernel(90), (rows, 1, 1), stored))
        return steps
    kernel = spec.kernel(90, exchange)
    types = {torch.float32: "*fp32", torch.int8: "*i8", torch.int32: "*i32"}
    collect = CollectSpec(exchange.arrays, tuple(types[given[0][each.name].dtype] for each in exchange.arrays), layout)
    return [
        group.launches(SendSpec(spec.width, spec.x_stride, layout).kernel(90), (rows, 1, 1), given),
        group.launches(kernel, (-(-rows // layout.ranks), 1, 1), given),
        group.launches(collect.kernel(90), (rows, 1, 1), given),
    ]


def sum_row(group: Group, rows: int, width: int) -> dict[str, Any]:
    """Times of the ways to sum `rows` rows, with and without a norm; their results are checked."""
    torch.manual_seed(rows + width)
    xs = [torch.randn(rows, width) for _ in range(group.ranks)]
    other = torch.randn(rows, width)
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    total = other + total
    result: dict[str, Any] = {"rows": rows, "width": width, "kib": rows * width // 256}
    layout = replace(group.layout, width=width, result_bytes=4 * width)
    plain = RowSpec(width, width, width)
    normed = replace(plain, out="q8", norm="rms", eps=1e-6, sums=True)
    codes = (RowArray("out", width // 4, width // 4), RowArray("out_scale", 1, 1), RowArray("out_sum", 1, 1))
    known: dict[str, list[torch.Tensor]] = {}
    ways: list[Way] = ["packed"] * (rows <= layout.few_rows) + ["owned"]  # type: ignore[assignment]
    for way in ways:
        for peer, state in zip(group.peers, group.states, strict=True):  # rows of another width have been there
            peer.zero_()
            state.zero_()
        group.synchronize()
        given = [tensors(x, other, f"cuda:{rank}") for rank, x in enumerate(xs)]
        exchange = RowExchange(layout, way, width, 0, (RowArray("out", width, width),))
        result[f"{way}_us"] = group.microseconds(steps_of(group, plain, exchange, given))
        assert all(torch.equal(one["out"].cpu(), total) for one in given), (rows, width, way)
        given = [one | rounded(one["x"]) for one in given]
        exchange = RowExchange(layout, way, width, width, codes)
        result[f"{way}_norm_us"] = group.microseconds(steps_of(group, normed, exchange, given))
        for one in given:
            for array in codes:
                known.setdefault(array.name, [])
                known[array.name].append(one[array.name].cpu())
    assert all(torch.equal(each, every[0]) for every in known.values() for each in every), (rows, width)
    return result


def tensors(x: Tensor, other: Tensor, place: str) -> dict[str, Any]:
    """Operands of a sum on a GPU."""
    return {"x": x.to(place), "added": other.to(place), "out": torch.empty_like(x, device=place), "tokens": len(x)}


def rounded(x: Tensor) -> dict[str, Any]:
    """Results of a norm that is rounded, on the GPU of x."""
    codes = torch.zeros_like(x, dtype=torch.int8)
    sums = torch.zeros_like(x[:, 0], dtype=torch.int32)
    return {"out": codes, "out_scale": torch.zeros_like(x[:, 0]), "out_sum": sums, "total": torch.zeros_like(x)}


def gather_row(group: Group, rows: int) -> dict[str, Any]:
    """The time of a gathering of rows of logits, which is checked."""
    part = VOCAB // group.ranks
    xs = [torch.randn(rows, part, device=f"cuda:{rank}") for rank in range(group.ranks)]
    group.synchronize()
    count = torch.cuda.get_device_properties(0).multi_processor_count
    kernel = AllGatherSpec(part, part, group.layout).kernel(90)
    calls = group.launches(kernel, (RESIDENT * count, 1, 1), [{"x": x, "rows": rows} for x in xs])
    time = group.microseconds([calls])
    whole = torch.cat([x.cpu() for x in xs], 1)
    for peer in group.peers:
        logits = peer[group.layout.logits :][: 4 * rows * VOCAB].view(torch.float32).view(rows, VOCAB)
        assert torch.equal(logits.cpu(), whole), rows
    return {"rows": rows, "vocabulary": VOCAB, "gather_us": time}


def nccl(rank: int, ranks: int, answers: Any) -> None:
    """NCCL's sums of the same sizes, in the process of one GPU."""
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    times = []
    for rows, width in SHAPES:
        x = torch.randn(rows, width, device="cuda")
        times.append(_graph_us(partial(dist.all_reduce, x)))
    if rank == 0:
        answers.put(times)
    dist.barrier()
    dist.destroy_process_group()


def _graph_us(call: Callable[[], object]) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(LAUNCHES):
            call()
    times = []
    for _ in range(REPLAYS):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(1e3 * first.elapsed_time(last) / LAUNCHES)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_sums.json")
    arguments = parser.parse_args()
    ranks = arguments.ranks
    group = Group(PeerLayout(ranks, 16384, 4 * 16384, VOCAB, SPREAD))
    result: dict[str, Any] = {**facts(), "ranks": ranks, "launches": LAUNCHES, "gathered": []}
    for rows in GATHERED:
        result["gathered"].append(gather_row(group, rows))
        print(json.dumps(result["gathered"][-1]), flush=True)
    result["sums"] = []
    for rows, width in SHAPES:
        result["sums"].append(sum_row(group, rows, width))
        print(json.dumps(result["sums"][-1]), flush=True)
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    torch.multiprocessing.spawn(nccl, (ranks, answers), nprocs=ranks)
    for row, time in zip(result["sums"], answers.get(), strict=True):
        row["nccl_us"] = time
        print(json.dumps(row), flush=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
