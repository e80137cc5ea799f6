"""Attention over latents on this GPU: kernels beside the bytes that they read, and checks of the bits of whole models.

    python benchmarks/gpu_latent.py [out.json] [--parts=kernels,models] [--formats=kv16,...]
    python benchmarks/gpu_latent.py [out.json] --parts=splits   times by the positions of a split

Kernels: decode attention at DeepSeek-V3's sizes, 128 query heads over latents of 64 + 512 features, or the 16 of them
that one of 8 GPUs has. Checked first: against float64, and for the same bits as the kernel for prompts. Times are
microseconds by CUDA graph replay, of attention and of attention with the merge of its splits; caches are rotated
through more than five times the L2. Reading takes what a sum over as many bytes takes by torch, in the same run.

Models: small random decoders. Logits in pieces and alone must have the bits of whole prompts. The exit code is 4 if
anything differs.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.gpu_common import ROTATED_BYTES, Launch, facts, graph_us, launch, this_target
from qcompile.codegen.gpu.attention_latent import LatentSpec, shape_for
from qcompile.codegen.gpu.attention_merge import MergeSpec
from qcompile.codegen.gpu.compile import compile_kernel
from qcompile.codegen.gpu.gemm.tiles import split_positions
from qcompile.codegen.gpu.kernel import Kernel
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.codegen.gpu.latent_launches import ALL_SPLITS
from qcompile.errors import QualityError
from qcompile.formats.kv import LATENT_GROUP
from qcompile.targets import get_target
from tests.support.graphs import latent

Row = dict[str, Any]
DIM, VALUE = 576, (64, 576)
FORMATS = ("kv16", "kv8", "kv4")
CASES = ((128, 1, 1024), (128, 1, 65536), (128, 64, 1024), (128, 64, 65536), (16, 1, 65536), (16, 64, 8192))
"""(query heads, sequences, context)."""
SPLITS = (512, 1024, 2048)
"""Positions of a split that are tried."""
QUERIES = 3
"""Rows a sequence of a check."""
MOST_ERROR = 6e-3
"""Queries and weights of values are rounded to bf16, and so is what codes stand for."""


class Cache:
    """Random pages of `batch` sequences in shuffled order, in as many copies as rotation needs."""

    def __init__(self, format: str, batch: int, context: int, copies: int = 0) -> None:
        self.kv = GpuKV(format, 1, DIM, value=VALUE)
        self.batch, self.context = batch, context
        pages = batch * -(-context // self.kv.page_tokens)
        self.bytes = batch * context * self.kv.block_bytes // self.kv.page_tokens
        self.table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(batch, -1)
        self.copies = [self._random(pages) for _ in range(copies or ROTATED_BYTES // self.bytes + 1)]

    def _random(self, pages: int) -> Tensor:
        kv = self.kv
        if kv.bits == 16:
            return torch.randn(pages, kv.page_tokens, DIM, device="cuda", dtype=torch.bfloat16)
        memory = torch.randint(-128, 128, (pages, kv.block_bytes), device="cuda", dtype=torch.int8)
        scale = (0.5 + torch.rand(pages, kv.page_tokens * kv.word_groups, device="cuda")) * 3 / 2**kv.bits
        words = scale.view(torch.int32) & -256 | torch.randint(0, 2**kv.bits, scale.shape, device="cuda").int()
        memory[:, kv.part_bytes :] = words.view(torch.int8)
        return memory

    def dense(self, sequence: int) -> Tensor:
        """Keys bf16 [context, DIM] of a sequence in the first copy."""
        kv, blocks = self.kv, self.copies[0][self.table[sequence].long()]
        if kv.bits == 16:
            return blocks.flatten(0, 1)[: self.context]
        codes = blocks[:, : kv.part_bytes].unflatten(1, (kv.page_tokens, -1)).int() & 255
        codes = codes if kv.bits == 8 else torch.stack((codes & 15, codes >> 4), -1).flatten(2)
        words = blocks[:, kv.part_bytes :].contiguous().view(torch.int32).unflatten(1, (kv.page_tokens, -1))
        words = words.repeat_interleave(LATENT_GROUP, 2)
        keys = (codes - (words & 255)).float() * (words & -256).view(torch.float32)
        return keys.bfloat16().flatten(0, 1)[: self.context]


class Problem:
    """A step of `queries` rows of each sequence over a cache."""

    def __init__(self, cache: Cache, heads: int, queries: int = 1, split: int = 0) -> None:
        self.cache, self.heads, self.queries, self.split = cache, heads, queries, split
        self.tokens = cache.batch * queries
        self.q = torch.randn(self.tokens, heads * DIM, device="cuda")
        last = torch.arange(cache.context - queries, cache.context, device="cuda", dtype=torch.int32)
        self.positions = last.repeat(cache.batch)
        self.query_start = torch.arange(cache.batch + 1, device="cuda", dtype=torch.int32) * queries

    def launches(self, out: Tensor, merged: bool = True, whole: bool = False) -> Iterator[list[Launch]]:
        """The launches for each copy of the cache: of splits, and their merge; or of all positions in order."""
        cache, heads = self.cache, self.heads
        spec, merge = specs(cache.kv.format, heads, self.split)
        splits = -(-cache.context // spec[0].split)
        items = 1 if whole else self.tokens * heads * splits
        parts = torch.full((items, VALUE[1] - VALUE[0]), math.nan, device="cuda")
        stats = torch.full((items, 2), math.nan, device="cuda")
        given: dict[str, Any] = {"q": self.q, "positions": self.positions, "query_start": self.query_start}
        given |= {"block_table": cache.table, "table_stride": cache.table.shape[1], "splits": splits}
        given |= {"parts": parts, "stats": stats, "out": out}
        programs = -(-self.queries * heads // spec[0].rows)
        for copy in cache.copies:
            pages = {"kv": copy, "kv_words": copy}
            if whole:
                yield [launch(spec[1].kernel(90), 90, (programs, cache.batch, 1), given | pages)]
                continue
            result = [launch(spec[0].kernel(90), 90, (programs, cache.batch, splits), given | pages)]
            if merged:
                result.append(launch(merge.kernel(90), 90, (self.tokens, merge.programs, 1), given))
            yield result

    def run(self, whole: bool = False) -> Tensor:
        """Results f32 [tokens, heads, value features]."""
        out = torch.full((self.tokens, self.heads, VALUE[1] - VALUE[0]), math.nan, device="cuda")
        for each in next(self.launches(out, whole=whole)):
            each()
        torch.cuda.synchronize()
        return out

    def wanted(self, sequence: int) -> Tensor:
        """The same of a sequence, in float64."""
        keys = self.cache.dense(sequence).double()
        rows = slice(sequence * self.queries, (sequence + 1) * self.queries)
        q = self.q[rows].double().unflatten(1, (self.heads, DIM))
        score = torch.einsum("qhd,td->qht", q, keys) * DIM**-0.5
        hidden = torch.arange(self.cache.context, device="cuda") > self.positions[rows, None]
        score = score.masked_fill(hidden[:, None], -math.inf)
        return score.softmax(-1) @ keys[:, VALUE[0] :]

    def us(self, **how: bool) -> float:
        """Microseconds a step."""
        out = torch.empty(self.tokens, self.heads, VALUE[1] - VALUE[0], device="cuda")
        steps = list(self.launches(out, **how))
        one = [each for step in steps for each in step]
        return graph_us(one, 9, 16) * len(steps[0])


def specs(format: str, heads: int, split: int = 0) -> tuple[tuple[LatentSpec, LatentSpec], MergeSpec]:
    """The kernels of splits and of all positions, and of the merge."""
    kv, target = GpuKV(format, 1, DIM, value=VALUE), get_target(this_target())
    result, split = [], split or split_positions(kv)
    for cut in ("split", "whole"):
        spec = LatentSpec(kv, heads, heads * DIM, DIM**-0.5, split=split, cut=cut)
        result.append(shape_for(spec, target.capability, target.shared_bytes))
    merge = MergeSpec(kv, heads, split=split, most_splits=ALL_SPLITS)
    return (result[0], result[1]), merge


def compiled_kernels(splits: Sequence[int], formats: Sequence[str]) -> None:
    """Compile all kernels of a part beside each other."""
    heads = {heads for heads, _, _ in CASES}
    both = [specs(format, each, split) for format in formats for each in heads for split in splits]
    kernels: list[Kernel] = [kernel.kernel(90) for (split, whole), merge in both for kernel in (split, whole, merge)]
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_kernel, kernels, [90] * len(kernels)))


def checked(format: str, heads: int) -> Row:
    """How far a step is from float64, and numbers with other bits than by a prompt's kernel or in a step of one row."""
    torch.manual_seed(0)
    problem = Problem(Cache(format, 2, 1500, 1), heads, QUERIES)
    result, whole = problem.run(), problem.run(whole=True)
    wanted = problem.wanted(1)
    error = ((result[QUERIES:].double() - wanted).norm() / wanted.norm()).item()
    last = Problem(problem.cache, heads)
    last.q = problem.q[QUERIES - 1 :: QUERIES].contiguous()
    differ = (result.view(torch.int32) != whole.view(torch.int32)).sum()
    differ += (result[QUERIES - 1 :: QUERIES].view(torch.int32) != last.run().view(torch.int32)).sum()
    row = {"format": format, "heads": heads, "error": error, "different_bits": int(differ)}
    print(f"{format} {heads} heads: error {error:.1e}, {int(differ)} numbers differ", flush=True)
    return row


class Read(NamedTuple):
    """How fast torch sums float32 numbers, which only reads."""

    bytes_a_us: float

    @classmethod
    def measured(cls) -> Read:
        numbers = torch.randn(1 << 30, device="cuda")
        out = torch.empty((), device="cuda")
        return cls(4 * numbers.numel() / graph_us([partial(torch.sum, numbers, dim=0, out=out)], 9, 4))


def timed(format: str, heads: int, batch: int, context: int, read: Read, split: int = 0) -> Row:
    """Times of decoding, one row a sequence."""
    problem = Problem(Cache(format, batch, context), heads, split=split)
    row: Row = {"format": format, "heads": heads, "batch": batch, "context": context, "bytes": problem.cache.bytes}
    row |= {"attention_us": problem.us(merged=False), "us": problem.us(), "whole_us": problem.us(whole=True)}
    best = min(row["us"], row["whole_us"])
    row |= {"of_reading": problem.cache.bytes / read.bytes_a_us / best}
    row["tflops"] = 2 * heads * batch * context * (DIM + VALUE[1] - VALUE[0]) / best / 1e6
    times = ", ".join(f"{row[name]:8.1f}" for name in ("attention_us", "us", "whole_us"))
    print(
        f"  {format} {heads:3} heads, batch {batch:2} at {context:5}: {times} us,"
        f" {row['of_reading']:4.0%} of reading, {row['tflops']:.0f} TFLOP/s",
        flush=True,
    )
    return row


def kernels(formats: Sequence[str]) -> Row:
    """Checks and times."""
    compiled_kernels((0,), formats)
    read = Read.measured()
    print(f"reading {read.bytes_a_us / 1e6:.2f} TB/s", flush=True)
    heads = sorted({heads for heads, _, _ in CASES})
    result: Row = {"reading_tb_s": read.bytes_a_us / 1e6, "decoding": []}
    result["checks"] = [checked(format, each) for format in formats for each in heads]
    for format in formats:
        for case in CASES:
            result["decoding"].append(timed(format, *case, read))
            torch.cuda.empty_cache()
    return result


def splits() -> list[Row]:
    """Times by the positions of a split."""
    compiled_kernels(SPLITS, FORMATS[:1])
    read, result = Read.measured(), []
    for split in SPLITS:
        print(f"splits of {split}", flush=True)
        for case in CASES:
            result.append({"split": split, **timed(FORMATS[0], *case, read, split)})
            torch.cuda.empty_cache()
    return result


# ---- models ------------------------------------------------------------------------------------------

VOCAB, LENGTH = 512, 1100
"""More positions than a split has."""
MODELS = {"bf16 kv16": 0.02, "w8a8 kv16": 0.04, "bf16 kv8": 0.03, "bf16 kv4": 0.1}
"""Largest relative error of logits by recipe and cache: values are rounded to bf16, or to codes."""
SIZES: Row = {"hidden": 256, "heads": 16, "plain": 128, "turned": 64, "narrow": 128, "rank": 512}


def examine(case: str, folder: Path) -> Row:
    """A model's error, and its bits in pieces."""
    recipe, format = case.split()
    graph = latent(vocab=VOCAB, **SIZES)
    graph.info = replace(graph.info, max_position=2 * LENGTH)
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    wanted = graph.run(ids, torch.arange(LENGTH).expand(2, -1).contiguous())
    artifact = folder / case.replace(" ", "-")
    options = {"cache.format": format}
    qcompile.build(graph, artifact, target=this_target(), recipe=recipe, options=options)
    with qcompile.load(artifact, kv_cache_bytes=1 << 27) as llm:
        result = llm.logits(ids)
        bits = result.view(torch.int32)
        differ = {str(c): int((llm.logits(ids, chunk=c).view(torch.int32) != bits).sum()) for c in (1, 2, 5, 17, 40)}
        differ["alone"] = int((llm.logits(ids[:1]).view(torch.int32) != bits[:1]).sum())
    error = ((result - wanted).norm() / wanted.norm()).item()
    print(f"{case}: error {error:.4f}, {sum(differ.values())} logits differ", flush=True)
    return {"model": case, "error": error, "different_bits": differ}


def models() -> list[Row]:
    """All recipes and caches."""
    with tempfile.TemporaryDirectory() as temporary:
        return [examine(case, Path(temporary)) for case in MODELS]


def main() -> int:
    """Do the parts; the exit code."""
    given = {a.partition("=")[0]: a.partition("=")[2].split(",") for a in sys.argv[1:] if a.startswith("--")}
    parts: dict[str, Callable[[], Any]] = {"models": models, "splits": splits}
    parts["kernels"] = partial(kernels, given.get("--formats", FORMATS))
    path = next((Path(a) for a in sys.argv[1:] if not a.startswith("--")), None)
    results: Row = {**facts()}
    for part in given.get("--parts", ("kernels", "models")):
        results[part] = parts[part]()
        if path:
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    checks = results.get("kernels", {}).get("checks", [])
    wrong = [row for row in checks if not row["error"] < MOST_ERROR or row["different_bits"]]
    for row in results.get("models", []):
        wrong += [row] * (not row["error"] < MODELS[row["model"]] or any(row["different_bits"].values()))
    print(f"{len(wrong)} wrong")
    return QualityError.exit_code if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
