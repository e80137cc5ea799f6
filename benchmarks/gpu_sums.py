"""Sums and gatherings over GPUs, as kernels of a divided model do them, beside NCCL's, all in CUDA graphs.

    python benchmarks/gpu_sums.py [--ranks 2] [--out FILE]

A graph on each GPU has LAUNCHES of them, one after another; times are those of one, in microseconds. All sums are
compared bit by bit with those in the order of ranks. NCCL sums float32, too; a process has each of its GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import RESULTS
from benchmarks.gpu_common import facts
from qcompile.codegen.gpu.all_gather import AllGatherSpec
from qcompile.codegen.gpu.all_reduce import RESIDENT, SumSpec, Way
from qcompile.codegen.gpu.compile import compile_kernel
from qcompile.codegen.gpu.kernel import Kernel
from qcompile.codegen.gpu.peer_memory import CHUNK, STATE_BYTES, PeerLayout
from qcompile.runtime.cuda.driver import Driver, LaunchCall, driver

SHAPES = ((1, 2048), (1, 4096), (1, 8192), (1, 16384), (16, 4096), (64, 4096), (2048, 4096))
"""Rows and width of sums: 8 to 64 KiB, and steps of more rows."""
VOCAB, GATHERED = 128256, (1, 16, 64)
LAUNCHES, REPLAYS = 64, 15


class Group:
    """All GPUs, driven by this process, with their peer memory for exchanges of `layout`."""

    def __init__(self, layout: PeerLayout) -> None:
        self.ranks, self.layout = layout.ranks, layout
        self.drivers: list[Driver] = [driver(rank) for rank in range(layout.ranks)]
        size = layout.data + 8 * layout.chunks * CHUNK
        self.peers = [torch.zeros(size, dtype=torch.uint8, device=f"cuda:{rank}") for rank in range(layout.ranks)]
        self.states = [torch.zeros(STATE_BYTES // 4, dtype=torch.int32, device=one.device) for one in self.peers]
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
            own = {"state": self.states[rank], "failed": self.states[rank][2:], "rank": rank, "own": self.peers[rank]}
            values = given[rank] | own | {f"peer{place}": peer for place, peer in enumerate(self.peers)}
            words = [values[argument.name] for argument in kernel.arguments]
            words = [word.data_ptr() if isinstance(word, Tensor) else word for word in words]
            calls.append(LaunchCall(gpu, function, grid, made.threads, made.shared_bytes, kernel.pdl, words))
        return calls

    def microseconds(self, calls: Sequence[LaunchCall]) -> float:
        """Median time of a launch within graphs of many."""
        graphs = []
        for gpu, call in zip(self.drivers, calls, strict=True):
            gpu.use()
            with gpu.captured() as result:
                for _ in range(LAUNCHES):
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


def sum_row(group: Group, rows: int, width: int) -> dict[str, Any]:
    """Times of the ways to sum `rows` rows; their results are checked."""
    torch.manual_seed(rows + width)
    xs = [torch.randn(rows, width) for _ in range(group.ranks)]
    other = torch.randn(rows, width)
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    result: dict[str, Any] = {"rows": rows, "width": width, "kib": rows * width // 256}
    few = rows * -(-width // 256) <= 256
    ways: list[Way] = ["small"] * few + ["medium"] + ["large"] * (group.ranks > 2)  # type: ignore[assignment]
    for way in ways:
        spec = SumSpec(width, width, width, group.layout, way, width)
        places = [f"cuda:{rank}" for rank in range(group.ranks)]
        outs = [torch.full((rows, width), torch.nan, device=place) for place in places]
        given = [
            {"x": x.to(place), "other": other.to(place), "out": out, "tokens": rows}
            for x, out, place in zip(xs, outs, places, strict=True)
        ]
        group.synchronize()
        count = torch.cuda.get_device_properties(0).multi_processor_count
        grid = (rows, spec.programs, 1) if way == "small" else ((RESIDENT if way == "medium" else 1) * count, 1, 1)
        calls = group.launches(spec.kernel(90), grid, given)
        result[f"{way}_us"] = group.microseconds(calls)
        assert all(torch.equal(out.cpu(), other + total) for out in outs), (rows, width, way)
    return result


def gather_row(group: Group, rows: int) -> dict[str, Any]:
    """The time of a gathering of rows of logits, which is checked."""
    part = VOCAB // group.ranks
    xs = [torch.randn(rows, part, device=f"cuda:{rank}") for rank in range(group.ranks)]
    group.synchronize()
    count = torch.cuda.get_device_properties(0).multi_processor_count
    kernel = AllGatherSpec(part, part, group.layout).kernel(90)
    calls = group.launches(kernel, (RESIDENT * count, 1, 1), [{"x": x, "rows": rows} for x in xs])
    time = group.microseconds(calls)
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
    group = Group(PeerLayout(ranks, 8192 * 4096, VOCAB))
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
