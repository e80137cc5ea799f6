"""What GPU measurements share: problems with fresh random operands, launches of kernels, times by graph replay."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from qcompile import targets
from qcompile.codegen.gpu.compile import compile_kernel
from qcompile.codegen.gpu.gemm import render as gemm_render
from qcompile.codegen.gpu.gemm import spec as gpu
from qcompile.codegen.gpu.gemm.pack import GPU_PACKING, MIX_ROWS, pack_gpu
from qcompile.codegen.gpu.gemm.tile import Tile
from qcompile.codegen.gpu.gemm.tiles import choose
from qcompile.codegen.gpu.kernel import Kernel
from qcompile.codegen.sizes import round_up
from qcompile.formats.activations import activation_format
from qcompile.formats.mixed import MIX_4_8
from qcompile.formats.registry import weight_format
from qcompile.runtime.cuda.driver import LaunchCall, driver

ROTATED_BYTES = 5 * 64 * 2**20
"""Bytes through which weights are rotated: more than five times the L2 of any target."""

REPLAYS = 25
WIDE_SHARE = 10
LAUNCHES = 64
"""Fewest launches in a graph, so that what a replay costs by itself does not count."""

Launch = Callable[[], object]


def facts() -> dict[str, Any]:
    """Device, versions and date."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "transformers": version("transformers"),
        "date": time.strftime("%F"),
    }


def this_target() -> str:
    """The name of the target for this GPU: the one in the GPU's name, or else the first with its capability."""
    properties = torch.cuda.get_device_properties(0)
    fit = [t for t in targets.TARGETS.values() if t.capability == 10 * properties.major + properties.minor]
    return next((t.name for t in fit if t.name.upper() in properties.name.upper()), fit[0].name)


@cache
def _function(kernel: Kernel, capability: int) -> tuple[int, int, int, bool]:
    """A kernel on this GPU, as artifacts have it: what LaunchCall wants to know."""
    compiled = compile_kernel(kernel, capability)
    module = driver().module(compiled.cubin, compiled.ptx.encode, print)
    function = driver().function(module, kernel.name, compiled.shared_bytes)
    return function, compiled.threads, compiled.shared_bytes, kernel.pdl


def _use_stream() -> None:
    """From here on all of torch's work goes through the stream that launches go through."""
    if torch.cuda.current_stream().cuda_stream != driver().stream:
        torch.cuda.synchronize()
        torch.cuda.set_stream(torch.cuda.ExternalStream(driver().stream))


def launch(kernel: Kernel, capability: int, grid: Sequence[int], given: Mapping[str, Any]) -> Launch:
    """A launch of what the runtime would launch, with tensors and numbers by the names of the kernel's arguments."""
    _use_stream()
    function, threads, shared, pdl = _function(kernel, capability)
    values = [given[argument.name] for argument in kernel.arguments]
    words = [v.data_ptr() if isinstance(v, Tensor) else v for v in values]
    call = LaunchCall(driver(), function, [*grid, 1, 1][:3], threads, shared, pdl, words)

    def run(kept: Sequence[Any] = values) -> None:
        call.run()

    return run


def graph_us(launches: Sequence[Launch], replays: int = REPLAYS, least: int = LAUNCHES) -> float:
    """Median microseconds per launch of a CUDA graph that repeats `launches` in order, `least` launches or more."""
    _use_stream()
    launches[0]()
    torch.cuda.synchronize()
    rounds = -(-least // len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(rounds):
            for launch in launches:
                launch()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3 / (len(launches) * rounds)


def spec_for(
    format: str, n: int, k: int, tokens: int, x_groups: bool = False, tile: Tile | None = None
) -> gpu.KernelSpec:
    """The kernel for `tokens` rows of x, with the tile that codegen/gpu/gemm/tiles.py chooses, or with `tile`.

    In mix_4_8 a WIDE_SHAREth of rows is wide. Raises UnsupportedError where the tile does not divide the weight.
    """
    rows, width, wide = n, 0, 0
    if format == "mix_4_8":
        wide, narrow = (round_up(part, MIX_ROWS) for part in (n // WIDE_SHARE, n - n // WIDE_SHARE))
        rows, width = wide + narrow, n
    tile = tile or choose(format, rows, k, tokens)
    return gpu.KernelSpec(format, rows, k, tile, width=width, x_groups=x_groups, wide=wide)


class Problem:
    """A weight [n, k] in `format`, packed in as many copies as rotation needs, and activations to multiply it with.

    `format` is one of triton.KernelSpec; activations are bf16 where it takes those, else int8, per token or in groups.
    """

    def __init__(self, format: str, n: int, k: int, x_groups: bool = False) -> None:
        self.format, self.n, self.k, self.x_groups = format, n, k, x_groups
        # Rows off centre, so that zero points matter.
        w = torch.randn(n, k, device="cuda") * 0.02 + 0.01 * torch.rand(n, 1, device="cuda")
        if format == "mix_4_8":
            marked = torch.zeros(n, dtype=torch.bool, device="cuda")
            marked[torch.randperm(n, device="cuda")[: n // WIDE_SHARE]] = True
            parts = MIX_4_8.quantize_rows(w, marked)
            self.weight = weight_format(format).dequantize(parts, k)
            blobs = GPU_PACKING.mixed(marked, False, k).blobs(parts)
            words = ("groups", "columns")
            packed = {role: blob.view(torch.int32 if role in words else torch.int8) for role, blob in blobs.items()}
        else:
            packing = "mxfp4_int8" if format == "mxfp4_a8" else format.removesuffix("_a8")
            number_format = packing.removesuffix("_int8")
            parts = weight_format(number_format).quantize(w)
            self.weight = weight_format(number_format).dequantize(parts, k)
            packed = pack_gpu(parts, packing)
        size = sum(t.numel() * t.element_size() for t in packed.values())
        self.copies = [packed] + [{key: t.clone() for key, t in packed.items()} for _ in range(ROTATED_BYTES // size)]
        self.workspace: dict[str, Tensor] = {}

    def activations(self, tokens: int) -> list[Tensor]:
        """Fresh random x as quantize_activation's parts."""
        x = torch.randn(tokens, self.k, device="cuda")
        floats = self.format in ("w4_asym_g128", "bf16", "mxfp4")
        return activation_format("bf16" if floats else "int8_g128" if self.x_groups else "int8").quantize(x, 0)

    def launches(
        self,
        spec: gpu.KernelSpec,
        x: list[Tensor],
        out: Tensor,
        capability: int,
        more: Mapping[str, Tensor] | None = None,
    ) -> list[Launch]:
        """One launch for each copy of the weight, all writing `out` [M, N]; `more` are other arguments by name."""
        tokens = x[0].shape[0]
        given: dict[str, Any] = {"x": x[0], "out": out, "M": tokens, **self._workspace(spec, tokens), **(more or {})}
        if len(x) > 1:
            given.update(x_scale=x[1], x_sum=x[2])
        kernel, grid = gemm_render.kernel(spec), spec.grid(tokens)
        return [launch(kernel, capability, grid, {**given, **packed}) for packed in self.copies]

    def _workspace(self, spec: gpu.KernelSpec, tokens: int) -> dict[str, Tensor]:
        for name, (items, dtype) in spec.workspace(tokens).items():
            key = f"{name} {dtype}"
            if key not in self.workspace or self.workspace[key].numel() < items:
                self.workspace[key] = torch.zeros(items, dtype=dtype, device="cuda")
        return {name: self.workspace[f"{name} {dtype}"] for name, (_, dtype) in spec.workspace(tokens).items()}

    def relative_error(self, x: list[Tensor], out: Tensor) -> float:
        """Of `out` against the product of the dequantized operands in float64, Frobenius."""
        want = gpu.reference(x, self.weight)
        error = ((out.double() - want).norm() / want.norm()).item()
        return error if error == error else float("inf")
