"""This machine, and the target and recipe that fit it: what a model is built for when the user does not say."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcompile import targets
from qcompile.artifact.plain_files import open_plain, read_plain
from qcompile.cli.console import byte_size, counted
from qcompile.errors import ResourceError, UsageError

_CONTAINER = Path("/sys/fs/cgroup/memory.max")
DEVICES = ("auto", "cpu", "gpu")
_QUICK_BYTES_PER_CORE = 1 << 29
"""Weights that a core reads several times in a second, so that text comes faster than one reads it."""
_SHARE = 2
"""Weights take at most half of the memory; the rest is for the cache, and for other programs."""
_KEEPING = {"mxfp4": "mxfp4", "nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
"""The recipe that keeps the numbers of a checkpoint that is quantized already, by `quant_method`, or by the format of
compressed-tensors."""
_INTEGERS = ("awq", "gptq", "pack-quantized", "int-quantized")
"""Methods and formats of checkpoints with integers as weights; `_KEEPING_INTEGERS` has the recipes that keep them."""
_KEEPING_INTEGERS = {4: "w4a8", 8: "w8a8"}
"""The recipe that keeps integers, by their bits: in groups of 128 inputs for 4 bits, per channel for 8."""
_SMALL_GROUP, _GROUP = 32, 128
_INTEGER_BITS = {"U8": 8, "I8": 8, "I32": 32}
"""Bits of the integers that hold codes, by the name of their type in safetensors files."""


@dataclass(frozen=True)
class Machine:
    """Cores that this process may use, the CPU level, and bytes of memory.

    `gpu` is the GPU's name, `gpu_target` the target that it runs ("" if there is none), `gpu_memory` its bytes. All are
    the same for each command, in contrast to what other programs leave free: so a command finds what another built.
    """

    cores: int
    level: targets.Target
    memory: int
    gpu: str = ""
    gpu_target: str = ""
    gpu_memory: int = 0

    def text(self) -> str:
        """`2 cores (AVX2), 7.7 GiB, no GPU`."""
        gpu = f"{self.gpu} ({byte_size(self.gpu_memory)})" if self.gpu else "no GPU"
        return f"{counted(self.cores, 'core')} ({self.level.description}), {byte_size(self.memory)}, {gpu}"


@dataclass(frozen=True)
class Fit:
    """A target and a recipe, and why the recipe."""

    target: str
    recipe: str
    reason: str


def this_machine(device: str) -> Machine:
    """This machine. A GPU is looked for unless `device` is `cpu`. ResourceError if it is `gpu` and none can be used."""
    cpu = len(os.sched_getaffinity(0)), targets.get_target("cpu"), _memory()
    if device == "cpu":
        return Machine(*cpu)
    try:
        return Machine(*cpu, *_gpu())
    except ResourceError:
        if device == "gpu":
            raise
        return Machine(*cpu)


def fit(machine: Machine, directory: Path) -> Fit:
    """The target and the recipe for the checkpoint in `directory`."""
    target = machine.gpu_target or "cpu"
    if kept := _keeping(directory, bool(machine.gpu)):
        return Fit(target, kept, "it keeps the numbers of a checkpoint that is quantized already")
    weights = count_weights(directory)
    if not weights:
        raise UsageError(f"{directory} has no *.safetensors: give a checkpoint with weights")
    memory = (machine.gpu_memory if machine.gpu else machine.memory) // _SHARE
    quick = memory if machine.gpu else machine.cores * _QUICK_BYTES_PER_CORE
    size = byte_size(weights)
    if weights > memory:
        return Fit(target, "w4a8", f"8-bit weights, {size}, would take more than half of the memory")
    if weights > quick:
        return Fit(target, "w4a8", f"8-bit weights, {size}, are many for {counted(machine.cores, 'core')}")
    return Fit(target, "w8a8", f"8-bit weights lose least of what is quantized, and {size} of them fit well")


def _memory() -> int:
    """Bytes of memory: this machine's, or what its container may use."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(installed, int(_CONTAINER.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no limit
        return installed


def _gpu() -> tuple[str, str, int]:
    """The GPU's name, target and bytes of memory. Raises ResourceError if there is none that can be compiled for."""
    from qcompile.runtime.cuda.driver import driver

    gpu = driver()
    alike = [one for one in targets.TARGETS.values() if one.kind == "cuda" and one.capability == gpu.capability]
    if not alike:
        raise ResourceError(f"there is no target for {gpu.name} (compute capability {gpu.capability / 10})")
    if importlib.util.find_spec("triton") is None:
        raise ResourceError("kernels of GPUs are compiled by Triton: pip install 'qcompile[gpu]'")
    named = [one for one in alike if one.name in gpu.name.lower()]
    return gpu.name, (named or alike)[0].name, gpu.memory()[1]


def _keeping(directory: Path, gpu: bool) -> str | None:
    """The recipe that keeps the checkpoint's own quantized numbers, if it has such numbers and there is one."""
    stored = _stored(directory)
    try:
        method = str(stored["format" if stored.get("quant_method") == "compressed-tensors" else "quant_method"])
        if method in _KEEPING:
            return _KEEPING[method]
        if method == "modelopt" and str(stored.get("quantization", stored)["quant_algo"]).lower() == "nvfp4":
            return "nvfp4"
        if method == "bitsandbytes" and stored.get("load_in_8bit"):
            return _KEEPING_INTEGERS[8]
        return _keeping_integers(stored, gpu) if method in _INTEGERS else None
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None  # the build reports what is wrong with it


def _keeping_integers(stored: dict[str, Any], gpu: bool) -> str | None:
    """The recipe that keeps weights that are integers; None if none does.

    stored: the checkpoint's own description of the weights. gpu: whether the recipe is for a GPU.
    """
    groups = stored.get("config_groups")
    weights = next(iter(groups.values()))["weights"] if groups else stored
    bits = int(weights.get("bits", weights.get("num_bits", 4)))
    group = int(weights.get("group_size") or -1)
    if bits == 8 and not weights.get("symmetric", weights.get("sym", False)):
        return None
    if group < 0 or (bits == 4 and group % _GROUP == 0):
        return _KEEPING_INTEGERS.get(bits)
    if group % _SMALL_GROUP or gpu or bits not in _KEEPING_INTEGERS:
        return None
    return f"{_KEEPING_INTEGERS[bits]}-g{_SMALL_GROUP}"


def count_weights(directory: Path) -> int:
    """The number of weights of the checkpoint, which is also their bytes in 8 bits; 0 if it has no weight files.

    Scales and zero points that are stored beside codes count as weights, too.
    """
    from qcompile.checkpoints.gguf.header import read_header

    files, bits = sorted(directory.glob("*.safetensors")), _stored_bits(directory)
    tensors = (place for file in directory.glob("*.gguf") for place in read_header(file).tensors.values())
    return sum(_elements(file, bits) for file in files) or sum(math.prod(place.shape) for place in tensors)


def _stored_bits(directory: Path) -> int:
    """Bits of the codes that the checkpoint's integers hold, if it says that they are few; else 8."""
    stored = _stored(directory)
    try:
        groups = stored.get("config_groups")
        weights = next(iter(groups.values()))["weights"] if groups else stored
        algorithm = str(stored.get("quantization", stored).get("quant_algo")).lower()  # of modelopt
        four = stored.get("load_in_4bit") or stored.get("quant_method") == "mxfp4" or algorithm == "nvfp4"
        bits = 4 if four else int(weights.get("bits", weights.get("num_bits", 8)))
        return bits if 1 <= bits <= 8 else 8
    except (StopIteration, ValueError, AttributeError, KeyError, TypeError):
        return 8


def _stored(directory: Path) -> dict[str, Any]:
    """What the checkpoint's configuration says of how it is quantized; empty if it is not."""
    try:
        config = json.loads(read_plain(directory / "config.json"))
        result = config.get("quantization_config") or config.get("compression_config")
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def _elements(file: Path, bits: int) -> int:
    """The number of weights in a safetensors file; 0 if it is damaged, which the build reports.

    Integers hold several codes of `bits` bits each, as those of AWQ and bitsandbytes do.
    """
    try:
        with open_plain(file) as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(min(length, 1 << 27)))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        return sum(_product(one["shape"]) * _INTEGER_BITS.get(one["dtype"], bits) // bits for one in tensors)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error, RecursionError):
        return 0


def _product(shape: list[int]) -> int:
    result = 1
    for length in shape:
        result *= int(length)
    return result
