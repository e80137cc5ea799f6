"""What a kernel launch costs the host: the ctypes driver (runtime/cuda/driver.py) beside cuda-bindings.

    python benchmarks/gpu_launch_cost.py

Both queue the same empty kernel with 16 arguments, prepared before the loop: 200 launches, then a wait, by turns; once
alone, and once beside a thread that runs Python code, as a server's does. Prints and writes the median time of a
launch, in microseconds, to results/gpu_launch_cost_GPU.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import RESULTS
from benchmarks.gpu_common import facts
from qcompile.runtime.cuda.driver import Driver, LaunchCall, driver

ARGUMENTS = 16
LAUNCHES, ROUNDS = 200, 100
PTX = (
    ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry empty("
    + ", ".join(f".param .u64 p{i}" for i in range(ARGUMENTS + 2))
    + ") { ret; }\n"
).encode()


def with_bindings(stream: int, function: int) -> Callable[[], None]:
    """A launch through cuda-bindings, with its configuration and arguments prepared once."""
    import ctypes

    from cuda.bindings import driver as cuda

    config = cuda.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
    config.sharedMemBytes, config.hStream, config.numAttrs = 0, cuda.CUstream(stream), 0
    values = (ctypes.c_uint64 * (ARGUMENTS + 2))()
    first = ctypes.addressof(values)
    pointers = (ctypes.c_void_p * (ARGUMENTS + 2))(*range(first, first + 8 * (ARGUMENTS + 2), 8))
    address, handle = ctypes.addressof(pointers), cuda.CUfunction(function)

    def launch(kept: Any = (values, pointers)) -> None:
        (code,) = cuda.cuLaunchKernelEx(config, handle, address, 0)
        if code != cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuLaunchKernelEx: {code}")

    return launch


def medians(ways: Mapping[str, Callable[[], None]], device: Driver) -> dict[str, float]:
    """The median time of a launch in microseconds, by name."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, launch in ways.items():
            start = time.perf_counter()
            for _ in range(LAUNCHES):
                launch()
            seconds[name].append((time.perf_counter() - start) / LAUNCHES)
            device.synchronize()
    return {name: round(1e6 * statistics.median(result), 3) for name, result in seconds.items()}


def run_python(stop: threading.Event) -> None:
    """Run Python code until `stop`."""
    while not stop.is_set():
        sum(range(1000))


def main() -> int:
    """Measure both by turns and write the result file."""
    device = driver()
    device.use()
    module = device.module(PTX + b"\0", lambda: PTX, print)
    function = device.function(module, "empty", 0)
    prepared = LaunchCall(device, function, (1, 1, 1), 32, 0, False, [0] * ARGUMENTS)
    ways: dict[str, Callable[[], None]] = {
        "ctypes": prepared.run,
        "cuda-bindings": with_bindings(device.stream or 0, function),
    }
    outcome = {"alone": medians(ways, device)}
    stop = threading.Event()
    busy = threading.Thread(target=run_python, args=(stop,))
    busy.start()
    outcome["beside a busy thread"] = medians(ways, device)
    stop.set()
    busy.join()
    result = {**facts(), "cuda-bindings": version("cuda-bindings"), "microseconds_per_launch": outcome}
    gpu = "h200" if "H200" in result["device"] else "h100"
    (RESULTS / f"gpu_launch_cost_{gpu}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
