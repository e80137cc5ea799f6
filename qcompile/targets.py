"""Targets: the machines for which kernels are generated. A target is data.

The peak rates of CPUs are not part of it; they are measured on the host when needed (`qcompile bench`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from qcompile.errors import UsageError


@dataclass(frozen=True)
class Target:
    """A kind of machine; `kind` is cpu or cuda.

    `isa` selects the kernels' vector code or GPU architecture; `requires` are CPU flags as named by Linux. For a GPU:
    compute `capability` (90 for 9.0), number of `multiprocessors`, maximum shared memory of a program in bytes, and
    from its data sheet GB/s of memory, dense int8 TOPS, bf16 TFLOPS and (without matrix units) f32 TFLOPS.
    """

    name: str
    kind: str
    isa: str
    requires: tuple[str, ...]
    description: str
    capability: int = 0
    multiprocessors: int = 0
    shared_bytes: int = 0
    memory_gb_s: float = 0.0
    int8_tops: float = 0.0
    bf16_tflops: float = 0.0
    f32_tflops: float = 0.0

    @property
    def facts(self) -> dict[str, Any]:
        """What an artifact's manifest records about the target."""
        return {"name": self.name, "kind": self.kind, "isa": self.isa, "requires": list(self.requires)}


# What the compiler may use at x86-64-v3 and x86-64-v4 (abm is Linux's name for lzcnt), and the required extensions.
_AVX2 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512vbmi")
_AMX = ("amx_tile", "amx_int8", "amx_bf16")

# Best first: `cpu` selects the first one the host can run.
_LEVELS = (
    Target("cpu-amx", "cpu", "amx", _AVX2 + _AVX512 + _AMX, "AVX-512 and AMX tiles of int8 and bfloat16"),
    Target("cpu-avx512vnni", "cpu", "avx512", _AVX2 + _AVX512, "AVX-512 with VNNI, BF16 and VBMI"),
    Target("cpu-avx2vnni", "cpu", "avx2vnni", (*_AVX2, "avx_vnni"), "AVX2 with AVX-VNNI"),
    Target("cpu-avx2", "cpu", "avx2", _AVX2, "AVX2"),
    Target("cpu-portable", "cpu", "portable", (), "any CPU, plain C++"),
)
_GPUS = (
    Target("a100", "cuda", "sm_80", (), "NVIDIA A100", 80, 108, 163 * 1024, 2039, 624, 312, 19.5),
    Target("l40s", "cuda", "sm_89", (), "NVIDIA L40S", 89, 142, 99 * 1024, 864, 733, 362, 91.6),
    Target("h100", "cuda", "sm_90", (), "NVIDIA H100", 90, 132, 227 * 1024, 3350, 1979, 989, 67),
    Target("h200", "cuda", "sm_90", (), "NVIDIA H200", 90, 132, 227 * 1024, 4800, 1979, 989, 67),
    Target("b200", "cuda", "sm_100", (), "NVIDIA B200", 100, 148, 227 * 1024, 8000, 4500, 2250, 80),
)
TARGETS = {target.name: target for target in (*_LEVELS, *_GPUS)}
TARGET_NAMES = ("cpu", *TARGETS)
TUNED_ON = TARGETS["h200"]
"""The GPU on which the tiles of kernels were tuned."""


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU as named by Linux (avx2, avx512_vnni, ...); empty if unknown.

    AMX is included if the kernel grants this process the use of its tiles, which is requested here.
    """
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        found = ""
    flags = frozenset(found.partition(":")[2].split())
    return flags if "amx_tile" in flags and _tiles_granted() else flags.difference(_AMX)


def _tiles_granted() -> bool:
    """Request the 8 KiB of tile state for this process's threads (arch_prctl, XTILEDATA); False if denied."""
    arch_prctl, ask_for_state, tile_data = 158, 0x1023, 18  # x86-64 only, as are tiles
    return ctypes.CDLL(None).syscall(arch_prctl, ask_for_state, tile_data) == 0


def missing_flags(requires: Collection[str]) -> list[str]:
    """The flags in `requires` that this CPU lacks, in order."""
    return [flag for flag in requires if flag not in cpu_flags()]


def get_target(name: str) -> Target:
    """The target `name`; `cpu` is the best level of this host. Raises UsageError listing the known targets."""
    if name == "cpu":
        best = next(level for level in _LEVELS if not missing_flags(level.requires))
        return replace(best, name="cpu")
    if name not in TARGETS:
        raise UsageError(f"target {name} is unknown; there are {', '.join(TARGET_NAMES)}")
    return TARGETS[name]
