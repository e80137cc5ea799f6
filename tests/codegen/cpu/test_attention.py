"""Attention over a paged cache on the CPU: against float64 over the cached values, and bitwise comparisons."""

from __future__ import annotations

import ctypes
import math
import mmap
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from qcompile.formats.kv import kv_format
from qcompile.targets import cpu_flags
from tests.conftest import MadeOnce
from tests.support.harness import ISAS, AttentionArgs, aligned, compile_harness

FORMATS = ["kv32", "kv16", "kv8", "kv4"]
PAGE = 64


@pytest.fixture(scope="session")
def library(made_once: MadeOnce) -> Callable[[str], ctypes.CDLL]:
    """Compiles the harness for an instruction set; skips the test if the compiler is missing or the CPU lacks it."""

    @cache
    def build(isa: str) -> ctypes.CDLL:
        if shutil.which("g++") is None or not ISAS[isa][1] <= cpu_flags():
            pytest.skip(f"no compiler, or this CPU lacks {sorted(ISAS[isa][1] - cpu_flags())}")
        source = "attention_harness.cpp"
        made = made_once(f"attention-{isa}.so", lambda path: compile_harness(isa, path, source))
        opened = ctypes.CDLL(str(made))
        opened.harness_block_bytes.restype = ctypes.c_int64
        opened.harness_attention_bytes.restype = ctypes.c_size_t
        return opened

    return build


@dataclass(frozen=True)
class Case:
    """Sequences of `lengths` positions, the last `queries` of which are query rows.

    loud: factor on the queries. lowered: subtracted from keys, with queries of mean 1 instead of 0.
    """

    heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    biased: bool = False
    centered: bool = False
    loud: float = 1.0
    lowered: float = 0.0

    def tensors(self) -> dict[str, torch.Tensor]:
        """Queries, keys and values per sequence, and the optional weights."""
        make = torch.Generator().manual_seed(self.heads * self.head_dim)
        sizes = {"q": (sum(self.queries), self.heads), "sinks": (self.heads,)}
        for s, length in enumerate(self.lengths):
            sizes |= {f"k{s}": (length, self.kv_heads), f"v{s}": (length, self.kv_heads)}
        made = {
            name: torch.randn(*size, *([self.head_dim] if name != "sinks" else []), generator=make)
            for name, size in sizes.items()
        }
        made["q"] *= self.loud
        if self.lowered:
            made["q"] += 1
            for s in range(len(self.lengths)):
                made[f"k{s}"] -= self.lowered
        made["bias"] = torch.linspace(-4, 0, 512) * torch.rand(self.heads, 1, generator=make)
        made["center"] = torch.randn(self.kv_heads, self.head_dim, generator=make) / 4
        return made


class Cache:
    """A case's pages, in an arena initialised with NaNs."""

    def __init__(
        self, library: ctypes.CDLL, case: Case, kv: str, place: Callable[[np.ndarray], np.ndarray] = aligned
    ) -> None:
        self.library, self.case, self.format = library, case, FORMATS.index(kv)
        self.tensors = case.tensors()
        pages = max(-(-n // PAGE) for n in case.lengths)
        self.table = np.random.default_rng(1).permutation(len(case.lengths) * pages).astype(np.int32)
        self.table = self.table.reshape(-1, pages)
        size = library.harness_block_bytes(self.format, case.head_dim) * self.table.size * case.kv_heads
        self.arena = place(np.full(size, 255, np.uint8))
        self.scratch = place(np.full(library.harness_attention_bytes(case.head_dim), 255, np.uint8))
        for s, length in enumerate(case.lengths):
            k, v = (self.tensors[f"{name}{s}"].contiguous().data_ptr() for name in "kv")
            library.harness_fill(*self.layer(self.table), s, length, ctypes.c_void_p(k), ctypes.c_void_p(v))

    def layer(self, table: np.ndarray) -> tuple[int | ctypes.c_void_p, ...]:
        """The cache as harness arguments, for sequences with block table `table`."""
        arena, blocks = (ctypes.c_void_p(x.ctypes.data) for x in (self.arena, table))
        return self.format, arena, blocks, table.shape[1], self.case.kv_heads, self.case.head_dim

    def attend(self, parts: list[tuple[int, int, int]], threads: int = 1, apart: bool = False) -> np.ndarray:
        """Rows [queries, heads * head_dim] for `parts`, (sequence, first query, queries) each, in one call.

        apart: runs in a child process first, so that a crash fails only this test.
        """
        case, width = self.case, self.case.heads * self.case.head_dim
        begins = np.cumsum([0, *case.queries])
        q = aligned(np.concatenate([self.tensors["q"].numpy()[begins[s] + i :][:n] for s, i, n in parts]))
        places = [np.arange(case.lengths[s] - case.queries[s] + i, case.lengths[s])[:n] for s, i, n in parts]
        positions = np.concatenate(places).astype(np.int32)
        starts = np.cumsum([0, *(n for _, _, n in parts)]).astype(np.int32)
        stride = -(-width // 32) * 32
        out = aligned(np.full((len(q), stride), np.nan, np.float32))
        extra = {name: self.tensors[name].contiguous() for name in ("sinks", "bias", "center")}
        table = np.ascontiguousarray(self.table[[s for s, _, _ in parts]])
        args = AttentionArgs(
            q=q.ctypes.data,
            q_stride=width,
            out=out.ctypes.data,
            heads=case.heads,
            scale=case.head_dim**-0.5,
            window=case.window,
            chunk=case.chunk,
            softcap=case.softcap,
            sinks=extra["sinks"].data_ptr() if case.sinks else None,
            key_bias=extra["bias"].data_ptr() if case.biased else None,
            key_bias_stride=extra["bias"].shape[1],
            center=extra["center"].data_ptr() if case.centered else None,
            sequences=len(parts),
            positions=positions.ctypes.data,
            query_start=starts.ctypes.data,
        )
        scratch = ctypes.c_void_p(self.scratch.ctypes.data)
        given = (*self.layer(table), ctypes.byref(args), threads, scratch)
        assert not apart or self.library.harness_attend_apart(*given) == 0
        self.library.harness_attend(*given)
        assert not out[:, width:].any()
        return out[:, :width].copy()

    def whole(self) -> list[tuple[int, int, int]]:
        """All queries of all sequences."""
        return [(s, 0, n) for s, n in enumerate(self.case.queries)]

    def reference(self) -> np.ndarray:
        """The same rows in float64, with keys and values as rounded by the cache."""
        case, t = self.case, self.tensors
        rows, begin = [], 0
        for s, (length, count) in enumerate(zip(case.lengths, case.queries, strict=True)):
            k, v = (kv_format(FORMATS[self.format]).round_trip(t[f"{name}{s}"]).double() for name in "kv")
            if case.centered:  # without softcap, the subtracted center does not change the result
                k = k + t["center"].double()
            k, v = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v))
            score = torch.einsum("thd,shd->hts", t["q"][begin : begin + count].double(), k) * case.head_dim**-0.5
            if case.softcap:
                score = case.softcap * torch.tanh(score / case.softcap)
            at, keys = torch.arange(length - count, length)[:, None], torch.arange(length)
            if case.biased:
                score = score + (t["bias"][:, None, keys] - t["bias"][:, at]).double()
            hidden = (keys > at) | (keys <= at - case.window if case.window else torch.tensor(False))
            hidden |= keys < at - at % case.chunk if case.chunk else torch.tensor(False)
            score = score.masked_fill(hidden, -math.inf)
            if case.sinks:
                sink = t["sinks"].double()[:, None, None].expand(-1, count, 1)
                score = torch.cat([score, sink], -1)
            rows.append(torch.einsum("hts,shd->thd", score.softmax(-1)[..., :length], v).reshape(count, -1))
            begin += count
        return torch.cat(rows).numpy()


CASES = {
    "one row": Case(4, 1, 64, (131,), (1,)),
    "a head of keys for each": Case(4, 4, 64, (131,), (9,)),
    "first position": Case(8, 2, 32, (1, 2), (1, 1)),
    "page edges": Case(8, 2, 64, (64, 65, 128, 127), (3, 2, 17, 64)),
    "halves of pages": Case(8, 2, 64, (33, 96, 97, 16, 17), (3, 2, 17, 16, 17)),
    "many rows": Case(8, 1, 64, (300,), (290,)),
    "a group of 3, 20 features": Case(6, 2, 20, (150, 70), (150, 3)),
    "a group of 5, 80 features": Case(5, 1, 80, (140,), (140,)),
    "96 features": Case(4, 1, 96, (140,), (33,)),
    "256 features": Case(8, 2, 256, (90,), (40,)),
    "window": Case(8, 2, 64, (300, 90), (300, 1), window=50),
    "chunk": Case(8, 2, 64, (300, 90), (300, 1), chunk=50),
    "chunk of a page": Case(8, 1, 64, (320, 257), (200, 1), chunk=64),
    "chunk of two pages and more, window": Case(4, 1, 40, (330,), (250,), chunk=150, window=90, biased=True),
    "window of a page": Case(4, 1, 64, (300, 257), (200, 1), window=64),
    "bent and biased": Case(8, 2, 32, (150,), (150,), softcap=5.0, biased=True, centered=True),
    "sinks": Case(8, 2, 32, (150, 9), (17, 9), sinks=True, centered=True),
    "window, bias, two heads": Case(4, 2, 40, (260,), (100,), window=100, biased=True, sinks=True),
    "window, bias": Case(4, 1, 40, (260,), (100,), window=100, biased=True, sinks=True),
}
LOUD = {
    "scores far apart": (100, Case(8, 2, 64, (140, 63), (40, 1), loud=100.0)),
    "sinks far away": (100, Case(8, 1, 64, (130,), (1,), sinks=True, loud=100.0)),
    "all scores far below zero": (200, Case(8, 2, 64, (140, 63), (40, 1), lowered=25.0)),
    "sinks far above all scores": (20, Case(8, 2, 64, (140,), (9,), sinks=True, lowered=2.0)),
    "farther than floats' exponents": (100, Case(8, 2, 32, (70,), (9,), loud=3000.0)),
}
"""Cases, each with the approximate size of scores where more than one score matters."""
LEAST_GROUP = {"kv16": 4, "kv8": 4, "kv4": 2}
"""Minimum query heads per kv head for which products use AMX tiles."""


def on_tiles(isa: str, kv: str, case: Case) -> bool:
    """Whether products use AMX tiles."""
    return isa == "amx" and case.heads // case.kv_heads >= LEAST_GROUP.get(kv, 1 << 30)


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("isa", ["portable", "avx512", "amx"])
def test_equals_float64(library: Callable[[str], ctypes.CDLL], isa: str, kv: str) -> None:
    """Products on tiles use exact terms that hold all bits of q and p, so they are as exact as float products.

    With two terms (17 bits) each, the RMS error would be 4e-6. Where the products of a code and its zero point cancel,
    it is 1e-6.
    """
    for name, case in CASES.items():
        pages = Cache(library(isa), case, kv)
        result, wanted = pages.attend(pages.whole()), pages.reference()
        error = math.sqrt(np.square(result - wanted).mean() / np.square(wanted).mean())
        assert error < (8e-7 if on_tiles(isa, kv, case) else 4e-6), f"{name}: {error}"


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("isa", ["avx512", "amx"])
def test_rows_are_bitwise_independent_of_their_neighbours(
    library: Callable[[str], ctypes.CDLL], isa: str, kv: str
) -> None:
    for name, case in CASES.items():
        pages = Cache(library(isa), case, kv)
        whole = pages.attend(pages.whole())
        begins = np.cumsum([0, *case.queries])
        for s, count in enumerate(case.queries):
            for step in (1, 3, 17):
                for i in (*range(0, count, step)[:3], count // 2, max(0, count - step)):
                    some = min(step, count - i)
                    rows = pages.attend([(s, i, some)])
                    assert rows.tobytes() == whole[begins[s] + i :][:some].tobytes(), f"{name}: {s}, {i} + {some}"
        for threads in (2, 3, 8):
            assert pages.attend(pages.whole(), threads).tobytes() == whole.tobytes(), f"{name}: {threads} threads"
        turned = pages.attend(pages.whole()[::-1])
        parts = [whole[begins[s] : begins[s + 1]] for s in reversed(range(len(case.queries)))]
        assert turned.tobytes() == np.concatenate(parts).tobytes(), name


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("isa", ["portable", "avx512", "amx"])
def test_scores_that_lie_far_apart(library: Callable[[str], ctypes.CDLL], isa: str, kv: str) -> None:
    """Scores have an error of a few units in the last place; it becomes a relative error of the probabilities.

    It is smaller where products are exact than where each product is rounded.
    """
    for name, (size, case) in LOUD.items():
        pages = Cache(library(isa), case, kv)
        result, wanted = pages.attend(pages.whole()), pages.reference()
        error = math.sqrt(np.square(result - wanted).mean() / np.square(wanted).mean())
        assert error < (1.0 if on_tiles(isa, kv, case) else 2.5) * size * 2**-24, f"{name}: {error}"


@pytest.mark.parametrize(
    ("isa", "name", "most", "worst"),
    [
        ("portable", "harness_vexp", 88, 1.2e-7),
        ("avx512", "harness_vexp", 88, 1.2e-7),
        ("amx", "harness_exp_below", 1, 2.4e-7),
    ],
)
def test_exponentials(library: Callable[[str], ctypes.CDLL], isa: str, name: str, most: int, worst: float) -> None:
    """The relative error on [-87, `most`] is below `worst`; smaller arguments give e^-87, never 0 or less."""
    function = getattr(library(isa), name)

    def exponentials(x: np.ndarray) -> np.ndarray:
        x, out = aligned(x.astype(np.float32)), aligned(np.full(x.size, np.nan, np.float32))
        function(ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(x.size), ctypes.c_void_p(out.ctypes.data))
        return out.astype(np.float64)

    x = np.concatenate([np.linspace(-87, most, 1 << 18), np.linspace(-2, 0.01, 1 << 16)]).astype(np.float32)
    error = exponentials(x) / np.exp(x.astype(np.float64)) - 1
    assert np.abs(error).max() < worst, x[np.abs(error).argmax()]
    assert (exponentials(np.zeros(64)) == 1).all()
    low = exponentials(np.full(64, -87.0))
    for far in (-87.5, -89, -128, -1e4, -3e38, -math.inf):
        assert (exponentials(np.full(64, far)) == low).all(), far


def before_a_guard(array: np.ndarray) -> np.ndarray:
    """A copy of the array that ends right before a protected page; its size is whole cache lines."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    size = -(-array.nbytes // page) * page
    memory = np.frombuffer(mmap.mmap(-1, size + page), np.uint8)
    assert libc.mprotect(ctypes.c_void_p(memory.ctypes.data + size), ctypes.c_size_t(page), 0) == 0
    out = memory[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
    assert out.ctypes.data % 64 == 0
    out[...] = array
    return out


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("isa", ["avx512", "amx"])
def test_nothing_behind_the_cache_or_the_scratch_is_touched(
    library: Callable[[str], ctypes.CDLL], isa: str, kv: str
) -> None:
    """Full and partial pages at the end of mapped memory, also with head sizes that are not whole tiles."""
    for head_dim in (16, 20, 64, 80, 112, 256):
        for group, length, queries in ((4, 64, 1), (4, 64, 40), (8, 17, 17), (1, 64, 3)):
            case = Case(group, 1, head_dim, (length,), (queries,))
            pages = Cache(library(isa), case, kv, before_a_guard)
            result = pages.attend(pages.whole(), apart=True)
            assert np.abs(result - pages.reference()).max() < 1e-4, f"{head_dim}, {group}, {length}, {queries}"
