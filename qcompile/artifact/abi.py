"""Versions of the interfaces between an artifact's compiled part and the runtime; they rise when an interface changes.

Code generation writes the numbers into artifacts, and the runtime refuses artifacts of another version by name.
"""

CPU_ABI = 6
"""Version of the C interface of a CPU target's library (codegen/cpu/templates/abi.h, runtime/cpu/executor.py)."""
GPU_ABI = 22
"""Version of the launch plans of a GPU target (codegen/gpu/launches.py, runtime/cuda/executor.py)."""
