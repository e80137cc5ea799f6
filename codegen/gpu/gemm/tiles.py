"""Tile selection for a GEMM weight, by target, format, class of M and shape.

The tuned tiles are a data file (tile_table.py), measured on an H200, those of 256 tokens on an H100. Those of bf16 and
of serial_k with a large M were measured on an H100, and are stated here. Other NVIDIA targets use the same tiles, with
split_k by their number of multiprocessors, stages by their shared memory, and no programmatic dependent launch before
sm_90. Where a tile that overlaps unpacking with the tensor cores does not divide the weight, and on every target that
is not sm_90, `without_unpack_k` replaces it. If accumulators are floats, the choice depends on the class of M, never on
M itself.

docs/gpu_kernels.md lists what else was tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from qcompile.codegen.gpu.attention import AttentionSpec
from qcompile.codegen.gpu.attention_splits import SplitLimits
from qcompile.codegen.gpu.gemm import expert_tiles
from qcompile.codegen.gpu.gemm.spec import KernelSpec
from qcompile.codegen.gpu.gemm.tile import DECODE_TOKENS, MMA_MIN_TOKENS, WS_MIN_TOKENS, Tile
from qcompile.codegen.gpu.gemm.tile_table import load_table
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.codegen.sizes import power_of_two
from qcompile.errors import UnsupportedError
from qcompile.formats.gpu import MIX_ROWS
from qcompile.formats.registry import gpu_kernel
from qcompile.targets import TUNED_ON, Target

TUNED = load_table("tiles_h200")
"""The tuned tiles."""

MAX_SPLIT_K = {False: 4, True: 8}
"""Largest split_k given to a weight that was not tuned, by whether its accumulators are integers."""

MIN_SPLIT_INPUTS = 512
"""Least inputs (of K) per split."""

LARGE_M = 1 << 20
"""A number of rows that falls into the last class of M."""


def token_classes(format: str) -> list[int]:
    """The classes of M that a format has tiles for, by their largest M; the last is 0, any M."""
    tuned = _tuned_classes(format)
    if not tuned:
        raise UnsupportedError(f"format {format} has no GPU tiles")
    kernel = gpu_kernel(format)
    gemv = {of.most_tokens for of, tile in TUNED.tiles.items() if of.format == format and tile.tokens < MMA_MIN_TOKENS}
    small_m = [WS_MIN_TOKENS] if kernel.few_rows else []
    return [
        *sorted(
            small_m + [most for most in tuned[:-1] if most >= DECODE_TOKENS or not kernel.float_sum or most in gemv]
        ),
        0,
    ]


def _tuned_classes(format: str) -> list[int]:
    """The classes of M with tuned tiles for `format` or similar formats, in increasing order."""
    return sorted({of.most_tokens for of in TUNED.tiles if of.format in TUNED.sources(format)})


def _last_class(format: str, gpu: Target) -> int:
    """The tuned class for any M. Where all of its tiles need wgmma, a GPU without takes the class before if it can."""
    classes = _tuned_classes(format)
    plain = {of.most_tokens for of, tile in TUNED.tiles.items() if of.format == format and not tile.unpack_k}
    return classes[-1] if gpu.has_wgmma or plain.isdisjoint(classes[-2:]) else max(plain.intersection(classes[-2:]))


def choose(format: str, n: int, k: int, tokens: int, gpu: Target = TUNED_ON) -> Tile:
    """The tile for a weight [n, k] in `format` and M = `tokens`: that of the nearest tuned shape that divides it.

    Nearest is by the logarithms of N and K. Raises UnsupportedError when the shape has no packing.
    """
    tile = _nearest_tuned(format, n, k, tokens, gpu)
    if gpu_kernel(format).few_rows and tokens <= WS_MIN_TOKENS and tile.warp_specialized:
        # Same order of summation; half the activations to copy, and half the work for the tensor cores.
        return replace(tile, tokens=WS_MIN_TOKENS)
    return tile


def _nearest_tuned(format: str, n: int, k: int, tokens: int, gpu: Target) -> Tile:
    """The tile of the tuned class that `tokens` falls into; the class of WS_MIN_TOKENS was not tuned by itself."""
    most = next((each for each in token_classes(format) if tokens <= each), None)
    most = DECODE_TOKENS if most == WS_MIN_TOKENS else most or _last_class(format, gpu)
    source = next(each for each in TUNED.sources(format) if any(of[:2] == (each, most) for of in TUNED.tiles))
    for shape, tuned in TUNED.by_distance(source, most, n, k):
        candidates = (tuned, without_unpack_k(format, tuned))
        tile = next(filter(None, (fit_tile(format, n, k, each, gpu) for each in candidates)), None)
        if tile is not None:
            tile = _fill_multiprocessors(format, n, k, tile, most, gpu)
            return tile if shape == (n, k) else _gemv_with_more_warps(format, n, k, tile, gpu)
    unroll = gpu_kernel(format).min_unroll
    return Tile(16 if most <= DECODE_TOKENS else 64, 32, unroll=unroll, fused_planes=gpu.has_wgmma)


def _fill_multiprocessors(format: str, n: int, k: int, tile: Tile, most: int, gpu: Target) -> Tile:
    """`tile` with a larger split_k where the grid for `most` rows would leave multiprocessors idle.

    Past the decode class a quarter of them may stay idle. A float accumulator must have the same split_k for every M,
    and a large M makes the reduction expensive. An integer one is worth splitting past a small M only in a
    warp-specialized kernel.
    """
    integers = not gpu_kernel(format).float_sum
    integers_apart = integers and tile.warp_specialized
    busy = gpu.multiprocessors * (4 if most <= DECODE_TOKENS else 3) // 4
    if tile.gemv or tile.sliced_k > 1 or (most > DECODE_TOKENS and not integers_apart):
        return tile
    while n // tile.rows * tile.split_k * max(1, most // tile.tokens) < busy:
        more = replace(tile, rows=64, warps=4) if tile.rows > 64 else replace(tile, split_k=2 * tile.split_k)
        if tile.tokens > 128:
            more = replace(tile, tokens=128, persistent=False)
        fitted = fit_tile(format, n, k, more, gpu)
        too_many = more.split_k > MAX_SPLIT_K[integers]
        if fitted is None or too_many or k < more.split_k * MIN_SPLIT_INPUTS:
            break
        tile = fitted
    return tile


def _gemv_with_more_warps(format: str, n: int, k: int, tile: Tile, gpu: Target) -> Tile:
    """`tile`, or for a GEMV with too few warps in flight a tile of four warps."""
    kernel = gpu_kernel(format)
    if tile.tokens > 1 or kernel.float_sum or n // tile.rows * tile.warps >= 8 * gpu.multiprocessors:
        return tile
    unroll = 1024 // kernel.row_bytes
    return fit_tile(format, n, k, replace(tile, rows=8, unroll=unroll, warps=4, stages=4), gpu) or tile


def choose_batch_invariant(format: str, n: int, k: int, tokens: int, gpu: Target = TUNED_ON) -> Tile:
    """As `choose`, but a float accumulator is summed in the same order for every M (batch invariance).

    A row's bits then do not depend on how many rows share its step. Every tile cuts K into the same parts as that of
    the decode class, sums each part separately, adds the partial sums in order, and uses the same tensor core
    instruction where it can.
    """
    tile = choose(format, n, k, tokens, gpu)
    if not KernelSpec(format, n, k, tile, width=n).float_sum:
        return tile
    decode = choose(format, n, k, DECODE_TOKENS, gpu)
    parts, least = decode.sliced_k * decode.split_k, gpu_kernel(format).min_unroll
    starts = KernelSpec(format, n, k, decode, width=n).k_parts.starts
    if tile.gemv:
        warps = max(1, tile.warps * parts // tile.sliced_k)
        gemv = fit_tile(format, n, k, replace(tile, sliced_k=parts, warps=warps), gpu)
        if gemv and KernelSpec(format, n, k, gemv, width=n).k_parts.starts != starts:
            gemv = None
        return gemv or choose_batch_invariant(format, n, k, WS_MIN_TOKENS, gpu)
    for large in _large_m_tiles(format, n, k, tokens, parts, gpu) if gpu.has_wgmma else ():
        if large is not None and KernelSpec(format, n, k, large, width=n).k_parts.starts == starts:
            return large
    rows = tile.rows if tile.rows % 64 == 0 and decode.rows % 64 == 0 else 64 if n % 64 == 0 else 32
    unrolls = sorted({tile.unroll, least}, reverse=True)
    for candidate, unroll in itertools.product((tile, without_unpack_k(format, tile)), unrolls):
        same_parts = replace(candidate, rows=rows, sliced_k=1, split_k=parts, unroll=unroll)
        same = fit_tile(format, n, k, same_parts, gpu)
        if same is not None and KernelSpec(format, n, k, same, width=n).k_parts.starts == starts:
            return same
    raise UnsupportedError(f"weight [{n}, {k}] in {format} has no tile for {tokens} rows with K in {parts} parts")


def _large_m_tiles(format: str, n: int, k: int, tokens: int, parts: int, gpu: Target) -> Iterator[Tile | None]:
    """Tiles that are faster with a large M than that of the decode class, for K in `parts` parts; the fastest first."""
    if tokens > 128 and n % 128 == 0:
        tokens = min(power_of_two(tokens), 512)  # the largest of its class
        if gpu_kernel(format).is_whole:
            yield _copied_tile(format, n, k, tokens, parts, gpu)
        elif gpu_kernel(format).by_plane and parts > 1:
            yield from _unpacked_in_turn(format, n, k, tokens, parts, gpu)
    if parts > 1:
        yield _serial_k_tile(format, n, k, tokens, parts, gpu)


def _copied_tile(format: str, n: int, k: int, tokens: int, parts: int, gpu: Target) -> Tile | None:
    """A tile of bf16 weights: they need no unpacking, and operands are copied while the tensor cores multiply.

    None where programs would be too few, even if the last tiles are halved. Found on an H100 (docs/gpu_kernels.md).
    """
    programs = n // 128 * (tokens // 128)
    stages = min(k // 64 // parts, 7)
    if 2 * programs < 100 or stages < 3:
        return None
    small = Tile(128, 128, warps=8, stages=stages, unpack_k=64, serial_k=parts, persistent=True)
    large = Tile(256, 128, warps=8, stages=min(stages, 4), unpack_k=64, persistent=programs > 4 * gpu.multiprocessors)
    return fit_tile(format, n, k, large if parts == 1 and programs >= 200 else small, gpu)


def _unpacked_in_turn(format: str, n: int, k: int, tokens: int, parts: int, gpu: Target) -> Iterator[Tile | None]:
    """Tiles of programs that unpack the parts of K one after the other, in steps of blocks that divide the parts.

    None where programs would be too few. Found on an H100 (docs/gpu_kernels.md).
    """
    programs = n // 128 * (tokens // 128)
    persistent = programs > gpu.multiprocessors  # the last tiles are halved; otherwise PDL is worth more
    tile = Tile(128, 128, warps=8, stages=1, serial_k=parts, persistent=persistent)
    block = gpu_kernel(format).packing.block
    tile = replace(tile, unpack_k=32 if block == 128 else 16, prefetch_bytes=0 if persistent else 128)
    for unroll in (512 // block, 256 // block):
        yield fit_tile(format, n, k, replace(tile, unroll=unroll), gpu) if programs >= 96 else None


def _serial_k_tile(format: str, n: int, k: int, tokens: int, parts: int, gpu: Target) -> Tile | None:
    """A serial_k tile of `parts` parts for a class of up to `tokens` rows (a step has at most 512).

    None where split_k is faster: a small M, or too few programs for the multiprocessors. Found on an H200 with weights
    of 4096 by 4096 and 3584 by 18944 (docs/gpu_kernels.md).
    """
    tokens = min(power_of_two(tokens), 512)  # the largest of its class
    kernel = gpu_kernel(format)
    if kernel.is_whole:
        few = Tile(32, 64, stages=5) if tokens <= 64 else Tile(64, 64, stages=6)
        many = Tile(64, 64, stages=5) if tokens <= 256 else Tile(128, 64, stages=4)
        tile = few if tokens <= 128 else many
    elif kernel.by_plane:
        rows, warps = (64, 4) if tokens <= 128 else (128, 8)
        tile = Tile(64, rows, warps=warps, stages=3, prefetch_bytes=128)
    else:
        tile = (
            Tile(64, 128, warps=8, stages=6) if tokens <= 256 else Tile(128, 128, warps=8, stages=6, token_halves=True)
        )
    programs = n // tile.rows * (tokens // tile.tokens)
    small_m = tokens <= 128 and not kernel.serial_few_rows
    if small_m or tokens <= DECODE_TOKENS or programs < (96 if kernel.is_whole else 100):
        return None
    # With a large K, tiles of few tokens lose more than the split_k reduction costs.
    small = tile.tokens == (32 if kernel.is_whole else 64)
    if k > 2 * n and small and not (kernel.mixed and tokens == 256):
        return None
    return fit_tile(format, n, k, replace(tile, serial_k=parts, unpack_k=0 if kernel.is_whole else 128), gpu)


def choose_for_experts(format: str, n: int, k: int, tokens: int, gpu: Target) -> Tile:
    """The tile for experts' weights of [n, k] each and up to `tokens` slots per program (1: a GEMV).

    The first of expert_tiles.candidates that fits the weight; raises UnsupportedError if none does.
    """
    for tile in expert_tiles.candidates(format, n, k, tokens, gpu):
        fitted = fit_tile(format, n, k, tile, gpu)
        if fitted is not None:
            return fitted
    raise UnsupportedError(f"experts' weights [{n}, {k}] in {format} have no tile of {tokens} tokens")


def without_unpack_k(format: str, tile: Tile) -> Tile:
    """`tile`, or, if it has unpack_k, a tile of about its size for the kernel that Triton pipelines (gemm.py.jinja)."""
    if not tile.unpack_k:
        return tile
    stages, unroll = 4 if tile.tokens <= DECODE_TOKENS else 3, gpu_kernel(format).min_unroll
    tokens = max(MMA_MIN_TOKENS, min(tile.tokens, 128))
    tile = replace(tile, tokens=tokens, rows=64, unroll=unroll, warps=4, stages=stages)
    return replace(tile, unpack_k=0, token_halves=False, persistent=False)


def fit_tile(format: str, n: int, k: int, tile: Tile, gpu: Target) -> Tile | None:
    """`tile` with its prefetch and stages reduced to what the weight and shared memory allow; None if it cannot fit."""
    tile = tile if gpu.has_wgmma else without_unpack_k(format, tile)
    prefetch_bytes = tile.prefetch_bytes if gpu.has_pdl else 0
    tile = replace(tile, prefetch_bytes=prefetch_bytes, fused_planes=gpu.has_wgmma)
    tile = replace(tile, persistent=tile.persistent and tile.split_k == 1)
    if gpu_kernel(format).mixed:
        tile = _fit_mixed_widths(n, tile)
    elif tile.warp_specialized and n % tile.rows:
        tile = replace(tile, rows=64, warps=4, persistent=False)
    if tile.gemv:
        tile = _limit_gemv_padding(k, tile)
    bound = n * k  # more than any program prefetches: halved until a program has as much
    while tile.prefetch_bytes and not _is_valid(format, n, k, tile) and bound > 1:
        half = tile.prefetch_bytes // 2 if tile.prefetch_bytes > 128 else 0
        tile, bound = replace(tile, prefetch_bytes=half), bound // 2
    if not _is_valid(format, n, k, tile):
        return None
    step = KernelSpec(format, n, k, tile, width=n).step_bytes
    if not step:
        return tile
    stages = max(1, min(tile.stages, gpu.shared_bytes // step))
    return replace(tile, stages=stages) if stages * step <= gpu.shared_bytes else None


def _limit_gemv_padding(k: int, tile: Tile) -> Tile:
    """A GEMV `tile` unrolled so little that at most half of the blocks it takes are padding past the end of K."""
    while tile.unroll > 1 and 2 * (-(k // 128) % tile.unroll) > k // 128:
        tile = replace(tile, unroll=tile.unroll // 2)
    return tile


def _fit_mixed_widths(n: int, tile: Tile) -> Tile:
    """`tile` for n packed 8-bit and 4-bit rows; only in a warp-specialized kernel may one program have both.

    With split_k, every warp of every program must have rows.
    """
    if not tile.unpack_k:
        return replace(tile, rows=min(tile.rows, MIX_ROWS), prefetch_bytes=0)
    if tile.split_k > 1 and n % tile.rows:
        return replace(tile, rows=MIX_ROWS, warps=4)
    return tile


def _is_valid(format: str, n: int, k: int, tile: Tile) -> bool:
    try:
        KernelSpec(format, n, k, tile, width=n)
    except UnsupportedError:
        return False
    return True


CHAINED_SPLIT = 256
"""Positions per split where leaves are chained: with more, decoding has too few programs."""
LATENT_SPLIT = 1024
"""Positions per split of attention over latents: with few, partial results of many heads are as many bytes as keys."""


def split_positions(kv: GpuKV) -> int:
    """Positions per split of decode attention, which fixes the order of summation; a leaf fits in registers."""
    if kv.value:
        return LATENT_SPLIT
    return CHAINED_SPLIT if kv.chained else kv.leaves * (64 if kv.dim <= 128 else 32)


def decode_attention(base: AttentionSpec, limits: SplitLimits) -> dict[str, AttentionSpec]:
    """Decode attention kernels by amount of work: positions per program, and how keys and values are loaded.

    The names are those of attention_counts (runtime/cuda/counts.py), which chooses by `limits`. The kernels differ only
    in how work is divided and in the loads in flight, on which no sum depends. They are the fastest of
    benchmarks/gpu_attention.py on an H200 for heads of 128. Programs that loop over splits (as many as all
    multiprocessors hold) need more registers, which elements of more than 4 bits do not leave. docs/gpu_kernels.md
    lists what was tried for several queries.
    """
    kv = base.kv
    loops = kv.hierarchical or (kv.bits == 4 and kv.dim <= 128)
    deep = kv.hierarchical or (kv.chained and kv.bits < 16)
    coarse = replace(base, cut="split", stages=3 if deep else 2, multi_split=loops)
    leaf = replace(base, cut="leaf", stages=2)
    kernels = {"coarse": coarse}
    if limits.fine_splits:
        kernels |= {"few": leaf} if limits.few_splits else {}
        kernels["fine"] = replace(leaf, direct=kv.hierarchical)
    return kernels
