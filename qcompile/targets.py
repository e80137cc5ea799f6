"""Targets: the machines for which kernels are generated. A target is data, stated here and nowhere else.

The peak rates of CPUs are not part of a target. `qcompile bench` measures them on the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from qcompile.errors import UsageError, suggestion


def has_pdl(capability: int) -> bool:
    """Whether GPUs of a compute capability have programmatic dependent launch."""
    return capability >= 90


def has_wgmma(capability: int) -> bool:
    """Whether GPUs of a compute capability have the tensor core instruction wgmma, which only sm_90 has."""
    return capability == 90


@dataclass(frozen=True)
class Target:
    """A kind of machine.

    kind: cpu or cuda; selects the backend (codegen/backend.py).
    isa: the vector instructions of a CPU's kernels, or the architecture of a GPU.
    requires: CPU flags, as named by Linux, that a host must have.
    compiler_flags: of g++ and clang++, for the instructions of a CPU level.
    capability: compute capability of a GPU, 90 for 9.0.
    multiprocessors: of a GPU.
    shared_bytes: maximum shared memory of a program on a GPU.
    memory_gb_s, int8_tops, bf16_tflops, f32_tflops: of a GPU's data sheet: GB/s of memory, dense int8 TOPS, dense bf16
        TFLOPS, and f32 TFLOPS without matrix units.
    memory_gib: memory of a GPU that a process can use.
    link_gb_s: of a GPU's data sheet: GB/s in one direction to the other GPUs of its machine (NVLink, or PCIe).
    """

    name: str
    kind: str
    isa: str
    requires: tuple[str, ...]
    description: str
    compiler_flags: tuple[str, ...] = ()
    capability: int = 0
    multiprocessors: int = 0
    shared_bytes: int = 0
    memory_gb_s: float = 0.0
    int8_tops: float = 0.0
    bf16_tflops: float = 0.0
    f32_tflops: float = 0.0
    memory_gib: float = 0.0
    link_gb_s: float = 0.0

    @property
    def has_pdl(self) -> bool:
        """Whether the GPU has programmatic dependent launch."""
        return has_pdl(self.capability)

    @property
    def has_wgmma(self) -> bool:
        """Whether the GPU has the tensor core instruction wgmma, which only sm_90 has."""
        return has_wgmma(self.capability)

    @property
    def facts(self) -> dict[str, Any]:
        """What an artifact's manifest records about the target."""
        return {"name": self.name, "kind": self.kind, "isa": self.isa, "requires": list(self.requires)}


# What the compiler may use at x86-64-v3 and x86-64-v4 (abm is Linux's name for lzcnt), and the required extensions.
_AVX2 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512vbmi")
_AMX = ("amx_tile", "amx_int8", "amx_bf16")

# Without -mprfchw, a prefetch for writing is compiled to one for reading. CPUs without PREFETCHW treat it as a no-op.
_V3_FLAGS = ("-march=x86-64-v3", "-mprfchw")
_V4_FLAGS = ("-march=x86-64-v4", "-mprfchw", "-mavx512vnni", "-mavx512bf16", "-mavx512vbmi")
_AMX_FLAGS = ("-mamx-tile", "-mamx-int8", "-mamx-bf16")


def _level(name: str, isa: str, requires: tuple[str, ...], description: str, flags: tuple[str, ...]) -> Target:
    return Target(name, "cpu", isa, requires, description, compiler_flags=flags)


def _gpu(name: str, capability: int, multiprocessors: int, shared_kib: int, *rates: float) -> Target:
    """A GPU; `rates` are the fields from `memory_gb_s` to `link_gb_s`, in their order."""
    shared_bytes = shared_kib * 1024
    about = (f"sm_{capability}", (), f"NVIDIA {name.upper()}", ())
    return Target(name, "cuda", *about, capability, multiprocessors, shared_bytes, *rates)


# Best first: `cpu` selects the first one the host can run.
_LEVELS = (
    _level(
        "cpu-amx",
        "amx",
        _AVX2 + _AVX512 + _AMX,
        "AVX-512 and AMX tiles of int8 and bfloat16",
        _V4_FLAGS + _AMX_FLAGS,
    ),
    _level("cpu-avx512vnni", "avx512", _AVX2 + _AVX512, "AVX-512 with VNNI, BF16 and VBMI", _V4_FLAGS),
    _level("cpu-avx2vnni", "avx2vnni", (*_AVX2, "avx_vnni"), "AVX2 with AVX-VNNI", (*_V3_FLAGS, "-mavxvnni")),
    _level("cpu-avx2", "avx2", _AVX2, "AVX2", _V3_FLAGS),
    _level("cpu-portable", "portable", (), "any CPU, plain C++", ("-march=x86-64",)),
)
_GPUS = (
    _gpu("a100", 80, 108, 163, 2039, 624, 312, 19.5, 79.2, 300),
    _gpu("l40s", 89, 142, 99, 864, 733, 362, 91.6, 44.5, 32),
    _gpu("h100", 90, 132, 227, 3350, 1979, 989, 67, 79.1, 450),
    _gpu("h200", 90, 132, 227, 4800, 1979, 989, 67, 140, 450),
    _gpu("b200", 100, 148, 227, 8000, 4500, 2250, 80, 178, 900),
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
            line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        line = ""
    flags = frozenset(line.partition(":")[2].split())
    return flags if "amx_tile" in flags and _tiles_granted() else flags.difference(_AMX)


def _tiles_granted() -> bool:
    """Request the 8 KiB of tile state for this process's threads (arch_prctl, XTILEDATA); False if denied."""
    arch_prctl, ask_for_state, tile_data = 158, 0x1023, 18  # x86-64 only, as are tiles
    return ctypes.CDLL(None).syscall(arch_prctl, ask_for_state, tile_data) == 0


def missing_flags(requires: Collection[str]) -> list[str]:
    """The flags in `requires` that this CPU lacks, in order."""
    return [flag for flag in requires if flag not in cpu_flags()]


def recorded_target(facts: Mapping[str, object]) -> Target | None:
    """The target with the facts that an artifact's manifest has; None if there is no such target."""
    local = (replace(level, name="cpu") for level in _LEVELS)
    return next((target for target in (*local, *TARGETS.values()) if target.facts == facts), None)


def get_target(name: str) -> Target:
    """The target `name`; `cpu` is the best level of this host. Raises UsageError listing the known targets."""
    if name == "cpu":
        best = next(level for level in _LEVELS if not missing_flags(level.requires))
        return replace(best, name="cpu")
    if name not in TARGETS:
        near = " (name the GPU that is to run the model)" if name in ("gpu", "cuda") else suggestion(name, TARGET_NAMES)
        raise UsageError(f"target {name} is unknown; there are {', '.join(TARGET_NAMES)}{near}")
    return TARGETS[name]
