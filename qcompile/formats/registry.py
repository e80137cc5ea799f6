"""All weight formats, by name."""

from __future__ import annotations

from qcompile.errors import UnsupportedError, UsageError, shown, suggestion
from qcompile.formats.activations import activation_format
from qcompile.formats.asymmetric import W3_ASYM_G128, W4_ASYM_G32, W4_ASYM_G64, W4_ASYM_G128
from qcompile.formats.floats import BF16, F32
from qcompile.formats.gpu import GpuKernel, GpuPacking
from qcompile.formats.mixed import MIX_4_8
from qcompile.formats.mxfp4 import MXFP4
from qcompile.formats.nested import NESTED_4, NESTED_8_4
from qcompile.formats.nvfp4 import NVFP4
from qcompile.formats.qoq import QOQ_CHANNEL, QOQ_G128
from qcompile.formats.symmetric import W8_SYM_CHANNEL, W8_SYM_G32, W8_SYM_G64, W8_SYM_G128
from qcompile.formats.trellis import W2_TRELLIS_G128, W3_TRELLIS_G128, W4_TRELLIS_G128
from qcompile.formats.weight import WeightFormat
from qcompile.plugins.entries import PluginEntry, entries

STORED_FORMATS: dict[str, WeightFormat] = {
    format.name: format
    for format in (
        *(F32, BF16, W8_SYM_CHANNEL, W8_SYM_G32, W8_SYM_G64, W8_SYM_G128, W4_ASYM_G128, W4_ASYM_G64, W4_ASYM_G32),
        *(W3_ASYM_G128, QOQ_G128, QOQ_CHANNEL, MXFP4, NVFP4, NESTED_8_4, MIX_4_8),
        *(W4_TRELLIS_G128, W3_TRELLIS_G128, W2_TRELLIS_G128),
    )
}
"""Formats that tensors of an artifact can have."""
WEIGHT_FORMATS: dict[str, WeightFormat] = {**STORED_FORMATS, NESTED_4.name: NESTED_4}
"""Formats that a linear can have: those, and formats that read part of another one's tensors."""

GPU_KERNELS = {kernel.name: kernel for format in STORED_FORMATS.values() for kernel in format.gpu.kernels}
_GPU_PACKINGS = {kernel.packing.name: kernel.packing for kernel in GPU_KERNELS.values()}


def gpu_kernel(name: str) -> GpuKernel:
    """The GPU's GEMM kernels for the kernel format `name`. Raises UnsupportedError if there are none."""
    if name not in GPU_KERNELS:
        raise UnsupportedError(f"format {name} has no GPU packing; there are {', '.join(GPU_KERNELS)}")
    return GPU_KERNELS[name]


def gpu_packing(name: str) -> GpuPacking:
    """The GPU packing called `name`. Raises UnsupportedError if there is none."""
    if name not in _GPU_PACKINGS:
        raise UnsupportedError(f"format {name} has no GPU packing; there are {', '.join(_GPU_PACKINGS)}")
    return _GPU_PACKINGS[name]


def format_of_packing(name: str) -> WeightFormat:
    """The format of the weights that the GPU packing called `name` packs. Raises UnsupportedError if there is none."""
    packing = gpu_packing(name)
    formats = STORED_FORMATS.values()
    return next(format for format in formats if packing in [kernel.packing for kernel in format.gpu.kernels])


def gpu_kernel_of(packing: str, integers: bool) -> GpuKernel:
    """The kernels that read a packing with integer or bf16 activations. Raises UnsupportedError if there are none."""
    for kernel in GPU_KERNELS.values():
        if kernel.packing.name == packing and kernel.float_x != integers:
            return kernel
    raise UnsupportedError(f"packing {packing} has no kernels for {'integer' if integers else 'bf16'} activations")


def weight_format(name: str) -> WeightFormat:
    """The weight format called `name`, which may be another package's. Raises UsageError if there is none."""
    others = {} if name in WEIGHT_FORMATS else entries("qcompile.formats")
    if name in others:
        _add(others[name])
    if name not in WEIGHT_FORMATS:
        known = (*WEIGHT_FORMATS, *others)
        raise UsageError(f"weight format {name} is unknown; there are {', '.join(known)}{suggestion(name, known)}")
    return WEIGHT_FORMATS[name]


def _add(entry: PluginEntry) -> None:
    """Add the weight format of another package. Raises UsageError for anything else."""
    format = entry.load()
    if not isinstance(format, WeightFormat) or format.name != entry.point.name:
        raise UsageError(f"{entry}: {shown(format)} is no WeightFormat of this name")
    for kernel in format.gpu.kernels:
        if GPU_KERNELS.setdefault(kernel.name, kernel) is not kernel:
            raise UsageError(f"{entry}: another format has GPU kernels called {kernel.name}")
        _GPU_PACKINGS.setdefault(kernel.packing.name, kernel.packing)
    WEIGHT_FORMATS[format.name] = STORED_FORMATS[format.name] = format


def gpu_kernel_for(format: str, activation: str) -> GpuKernel:
    """The kernels for a weight format and an activation format. UnsupportedError if there are none."""
    kernel = weight_format(format).gpu.kernel(activation_format(activation))
    if kernel is None:
        raise UnsupportedError(f"weights in {format} with activations in {activation} have no GPU kernels")
    return kernel


def is_row_major(format: str, activation: str) -> bool:
    """Whether weights in `format` are row-major on GPUs: those of routers of experts."""
    return weight_format(format).gpu.row_major and activation in [
        kind.name for kind in weight_format(format).activations
    ]


def packing_of(format: str, activation: str) -> str:
    """The packing of a weight in `format` for an activation format; for row-major weights, the format's name.

    UnsupportedError if there are no GPU kernels for them.
    """
    return format if is_row_major(format, activation) else gpu_kernel_for(format, activation).packing.name


def kernel_of(packing: str, activation: str) -> str:
    """The format of the GEMM kernels (KernelSpec) for a packing and an activation format."""
    return gpu_kernel_of(packing, activation_format(activation).is_integer).name
