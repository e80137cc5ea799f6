"""Targets: the machines kernels are generated for. A target is data.

Peak rates are not among it for a CPU: they are probed on the host when they are needed (`qcompile bench`).
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
    """One kind of machine, `kind` cpu or cuda.

    `isa` chooses the kernels' vector code or GPU architecture; `requires` are Linux's names of CPU flags. Of a
    GPU: compute `capability`, most shared memory of a program, and by data sheet GB/s of memory and dense int8
    TOPS, bf16 TFLOPS and (without matrix units) f32 TFLOPS.
    """

    name: str
    kind: str
    isa: str
    requires: tuple[str, ...]
    description: str
    capability: int = 0
    shared_bytes: int = 0
    memory_gb_s: float = 0.0
    int8_tops: float = 0.0
    bf16_tflops: float = 0.0
    f32_tflops: float = 0.0

    @property
    def facts(self) -> dict[str, Any]:
        """What an artifact's manifest says of the target."""
        return {"name": self.name, "kind": self.kind, "isa": self.isa, "requires": list(self.requires)}


# What the compiler may use at x86-64-v3 and x86-64-v4 (abm is Linux's name of lzcnt), and the extensions asked for.
_AVX2 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512vbmi")
_AMX = ("amx_tile", "amx_int8", "amx_bf16")

# The best first: `cpu` means the first one the host can run.
_LEVELS = (
    Target("cpu-amx", "cpu", "amx", _AVX2 + _AVX512 + _AMX, "AVX-512 and AMX tiles of int8 and bfloat16"),
    Target("cpu-avx512vnni", "cpu", "avx512", _AVX2 + _AVX512, "AVX-512 with VNNI, BF16 and VBMI"),
    Target("cpu-avx2vnni", "cpu", "avx2vnni", (*_AVX2, "avx_vnni"), "AVX2 with AVX-VNNI"),
    Target("cpu-avx2", "cpu", "avx2", _AVX2, "AVX2"),
    Target("cpu-portable", "cpu", "portable", (), "any CPU, plain C++"),
)
_GPUS = (
    Target("a100", "cuda", "sm_80", (), "NVIDIA A100", 80, 163 * 1024, 2039, 624, 312, 19.5),
    Target("l40s", "cuda", "sm_89", (), "NVIDIA L40S", 89, 99 * 1024, 864, 733, 362, 91.6),
    Target("h100", "cuda", "sm_90", (), "NVIDIA H100", 90, 227 * 1024, 3350, 1979, 989, 67),
    Target("h200", "cuda", "sm_90", (), "NVIDIA H200", 90, 227 * 1024, 4800, 1979, 989, 67),
    Target("b200", "cuda", "sm_100", (), "NVIDIA B200", 100, 227 * 1024, 8000, 4500, 2250, 80),
)
TARGETS = {target.name: target for target in (*_LEVELS, *_GPUS)}
TARGET_NAMES = ("cpu", *TARGETS)


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU as Linux names them (avx2, avx512_vnni, ...); empty where unknown.

    AMX is among them if the system lets this process use its tiles, which it is asked for here.
    """
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        found = ""
    flags = frozenset(found.partition(":")[2].split())
    return flags if "amx_tile" in flags and _tiles_granted() else flags.difference(_AMX)


def _tiles_granted() -> bool:
    """Whether Linux keeps the tiles' 8 KiB for this process's threads from now on (arch_prctl, XTILEDATA)."""
    arch_prctl, ask_for_state, tile_data = 158, 0x1023, 18  # of x86-64, which alone has them
    return ctypes.CDLL(None).syscall(arch_prctl, ask_for_state, tile_data) == 0


def missing_flags(requires: Collection[str]) -> list[str]:
    """Those of `requires` that this CPU lacks, in order."""
    return [flag for flag in requires if flag not in cpu_flags()]


def get_target(name: str) -> Target:
    """The target called `name`; `cpu` is the best level of this host. UsageError listing those there are."""
    if name == "cpu":
        best = next(level for level in _LEVELS if not missing_flags(level.requires))
        return replace(best, name="cpu")
    if name not in TARGETS:
        raise UsageError(f"target {name} is unknown; there are {', '.join(TARGET_NAMES)}")
    return TARGETS[name]
