"""Compiles the CPU kernel headers with a harness for each instruction set; ctypes mirrors of their C structs."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from pathlib import Path

import numpy as np

from qcompile import user_cache
from qcompile.codegen.cpu import compiler
from tests.support.cases import first

HERE = Path(__file__).resolve().parent
TEMPLATES = HERE.parents[1] / "codegen" / "cpu" / "templates"
BASE_FLAGS = ["-std=c++17", "-ffp-contract=off", "-Wno-psabi", "-fPIC", "-shared"]
OPTIMIZED = ("avx2", "amx")
"""Entries of ISAS with an optimized harness, one for each width of vectors. It takes twice the time to compile, and
changes no bit."""
VNNI = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma"]
ISAS: dict[str, tuple[list[str], set[str]]] = {
    "portable": (["-DQC_ISA_PORTABLE"], set()),
    "avx2": (["-DQC_ISA_AVX2", "-mavx2", "-mfma", "-mf16c"], {"avx2", "fma"}),
    # The AVX-VNNI code path, using the AVX-512VL form of the instruction, which more machines support.
    "avx2-vnni": (["-DQC_ISA_AVX2", *VNNI, "-mprefer-vector-width=256"], {"avx512_vnni", "avx512vl"}),
    "avx512-vnni": (["-DQC_ISA_AVX512", *VNNI], {"avx512_vnni"}),
    "avx512": (
        ["-DQC_ISA_AVX512", *VNNI, "-mavx512bf16", "-mavx512vbmi"],
        {"avx512_vnni", "avx512_bf16", "avx512vbmi"},
    ),
    "amx": (
        ["-DQC_ISA_AVX512", *VNNI, "-mavx512bf16", "-mavx512vbmi", "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
        {"avx512_vnni", "avx512_bf16", "avx512vbmi", "amx_tile", "amx_int8", "amx_bf16"},
    ),
}
TRIED = first(("portable", "avx2", "avx512-vnni", "amx"), ISAS)
"""ISAS as cases of tests. Each takes 20 to 40 s to compile once: `make test-all` tries those in between, too."""


class Gemm(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("m", "n", "k")),
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "zero", "group_scale", "exponent", "low")),
        *((name, ctypes.c_void_p) for name in ("columns", "starts")),
        ("blocks", ctypes.c_int),
        ("epilogue", ctypes.c_int),
        ("act", ctypes.c_int),
        ("limit", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("residual_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("parts", ctypes.c_int * 3),
        ("best", ctypes.c_void_p),
    ]


class Q8Act(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "scale", "sums")),
        ("groups", ctypes.c_int),
        ("scales", ctypes.c_int),
    ]


class Q8Kind(ctypes.Structure):
    _fields_ = [
        ("group", ctypes.c_int),
        ("scale_group", ctypes.c_int),
        ("top", ctypes.c_float),
        ("last_top", ctypes.c_float),
        ("clip", ctypes.c_float),
    ]


class Q8Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "scale", "sums")),
        ("kind", Q8Kind),
        ("groups", ctypes.c_int),
        ("scales", ctypes.c_int),
    ]


class AttentionArgs(ctypes.Structure):
    _fields_ = [
        ("q", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("q_stride", "q_offset")),
        ("out", ctypes.c_void_p),
        ("heads", ctypes.c_int),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("window", "chunk")),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("sinks", "key_bias")),
        ("key_bias_stride", ctypes.c_int),
        ("center", ctypes.c_void_p),
        ("sequences", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("positions", "query_start")),
        *((name, ctypes.c_int) for name in ("k_offset", "v_offset")),
    ]


def compile_harness(isa: str, library: Path, name: str = "gemm_harness.cpp") -> None:
    """Build the harness `name` for `isa` as `library`; what was compiled before comes from the user's cache."""
    source = HERE / name
    level = "-O2" if isa in OPTIMIZED else "-Og"
    command = ["g++", level, *BASE_FLAGS, *ISAS[isa][0], f"-I{TEMPLATES}", str(source), "-o", str(library)]
    texts = [path.read_bytes() for path in (source, *sorted(TEMPLATES.glob("*.h")))]
    key = hashlib.sha256(b"\0".join([*texts, " ".join(command[:-4]).encode(), compiler.version().encode()]))
    cached = user_cache.cache_dir() / f"harness-{key.hexdigest()}.so"
    if (kept := user_cache.recall(cached)) is None:
        subprocess.run(command, check=True)
        kept = library.read_bytes()
        user_cache.remember(cached, kept)
    library.write_bytes(kept)


def open_harness(library: Path) -> ctypes.CDLL:
    """Loads a harness built by `compile_harness`."""
    loaded = ctypes.CDLL(str(library))
    loaded.harness_scratch_bytes.restype = ctypes.c_size_t
    return loaded


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy of the array at a 64-byte aligned address."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out
