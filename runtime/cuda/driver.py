"""The CUDA driver through ctypes: memory, kernels, graphs. Needs only the driver's libcuda, neither torch nor Triton.

ctypes is used, and not cuda-bindings, because a step may make hundreds of launches, each of which must cost little. A
launch is one foreign call with an argument block that is prepared once (`LaunchCall`, `SharedCall`). Quick calls use
PyDLL, which keeps Python's lock. cuda-bindings releases the lock in each call: alone, a launch costs the same 5 us, but
beside a thread that runs Python code, as a server's does, it waits 5 ms to get the lock back
(benchmarks/gpu_launch_cost.py).

Every call's return code is checked: out of memory and a GPU that is lost raise ResourceError, any other unexpected code
RuntimeError with the driver's own message.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

from qcompile.errors import ArtifactError, ResourceError
from qcompile.runtime.cuda.mapped import MappedMemory
from qcompile.runtime.preparations import Preparations

# Constants of the driver's API.
_OUT_OF_MEMORY = 2
_GPU_LOST = (4, 46, 100, 101, 214, 220, 226, 802, 999)
"""The driver ends, the GPU is not available, there is none, it is not valid, memory or links have errors that cannot be
corrected (three codes), the system is not ready, and what drivers give for a GPU that has fallen off the bus."""
_NO_BINARY = (200, 209, 218, 222)  # invalid image, no binary for this GPU, invalid PTX, PTX too new
_MAJOR, _MINOR = 75, 76
_MAPS_MEMORY = 102
_DYNAMIC_SHARED = 8
_CAPTURE_THREAD_LOCAL = 1
_PROGRAMMATIC_SERIALIZATION = 6
_RECORD_EXTERNAL = 1
_LAZY_PEER_ACCESS = 1
_NO_PEER_ACCESS = (217, 711, 801)  # peer access unsupported, mapping of memory failed or not supported


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes of which only the first int is used here."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


_PDL = _Attribute(id=_PROGRAMMATIC_SERIALIZATION, value=1)


class MemoryHandle(ctypes.Structure):
    """CUipcMemHandle: names memory of one process, for other processes to open."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


class LaunchCall:
    """A prepared kernel launch: each `run` costs one foreign call.

    `arguments` are addresses and numbers, stored in 64 bits each; the kernel reads only as many bytes as it declares.
    """

    def __init__(
        self,
        driver: Driver,
        function: int,
        grid: Sequence[int],
        threads: int,
        shared: int,
        pdl: bool,
        arguments: Sequence[int],
    ) -> None:
        # Triton's kernels take two more pointers, to scratch memory that these kernels do not use.
        count = len(arguments) + 2
        self._values = (ctypes.c_uint64 * count)(*arguments)
        first = ctypes.addressof(self._values)
        self._params = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        pdl_attribute = ctypes.addressof(_PDL)
        self._config = _Config(*grid, threads, 1, 1, shared, driver.stream, pdl_attribute, int(pdl))
        self.function = function
        self._driver, self._function = driver, ctypes.c_void_p(function)

    def wait_for_all(self) -> None:
        """Turn programmatic dependent launch off: the kernel starts only when the one before it has ended."""
        self._config.count = 0

    def run(self) -> None:
        """Queue the launch on the driver's stream."""
        d = self._driver
        d.check(d.quick.cuLaunchKernelEx(ctypes.byref(self._config), self._function, self._params, None), "launch")


class LaunchShape:
    """Grid and block of launches that change together. threads, shared: of a block, and its bytes of shared memory.

    pdl: whether a kernel may start before the one before it has ended (programmatic dependent launch).
    """

    def __init__(self, stream: int | None, threads: int, shared: int, pdl: bool) -> None:
        attribute = ctypes.addressof(_PDL)
        self._config = _Config(1, 1, 1, threads, 1, 1, shared, stream, attribute, int(pdl))
        self.config = ctypes.byref(self._config)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks in x, y and z."""
        return self._config.grid_x, self._config.grid_y, self._config.grid_z

    @grid.setter
    def grid(self, sizes: Sequence[int]) -> None:
        self._config.grid_x, self._config.grid_y, self._config.grid_z = sizes


class SharedCall:
    """A launch that has its grid and numbers in common with others: they are changed for all of these at once.

    arguments: each in memory of its own, which may be that of other calls, too. The driver reads them when the launch
    is queued.
    """

    def __init__(self, function: int, shape: LaunchShape, arguments: Sequence[ctypes.c_uint64]) -> None:
        # Triton's kernels take two more pointers, to scratch memory that these kernels do not use.
        self._values = [*arguments, *(ctypes.c_uint64() for _ in range(2))]
        self._params = (ctypes.c_void_p * len(self._values))(*map(ctypes.addressof, self._values))
        self.function, self.shape, self.arguments = function, shape, arguments

    @cached_property
    def ready(self) -> tuple[Any, ctypes.c_void_p, ctypes.Array[ctypes.c_void_p]]:
        """What the driver is given."""
        return self.shape.config, ctypes.c_void_p(self.function), self._params


class Driver:
    """A GPU with its primary context and one stream. Use `driver()` to get it.

    Raises ResourceError if there is no driver or GPU, or the driver does not start.
    """

    def __init__(self, number: int = 0) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
            # For calls of microseconds (more where a thousand launches are queued already). They keep Python's lock:
            # else, after each of hundreds in a step, another busy thread would take it and keep it for milliseconds.
            self.quick = ctypes.PyDLL("libcuda.so.1")
        except OSError as error:
            raise ResourceError("no NVIDIA driver (libcuda.so.1) on this machine: build with --target cpu") from error
        code = self.library.cuInit(0)
        if code:
            raise ResourceError(f"the NVIDIA driver does not start: {self._message(code)}")
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        code = self.library.cuDeviceGet(ctypes.byref(device), number)
        if code:
            raise ResourceError(f"there is no GPU {number}: {self._message(code)}")
        self._device = device
        self.check(self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "context")
        self._context = context
        self.use()
        self.check(self.library.cuStreamCreate(ctypes.byref(stream), 1), "stream")
        self.stream = stream.value
        self.preparations = Preparations()
        self._mapped = MappedMemory(self.library, device.value, self.check)

    def launch_all(self, calls: Sequence[SharedCall]) -> None:
        """Queue launches on the stream, one after another."""
        launch = self.quick.cuLaunchKernelEx
        for call in calls:
            if code := launch(*call.ready, None):
                self.check(code, "launch")

    def _message(self, code: int) -> str:
        text = ctypes.c_char_p()
        self.library.cuGetErrorString(code, ctypes.byref(text))
        return (text.value or b"unknown error").decode() + f" (CUDA error {code})"

    def check(self, code: int, what: str) -> None:
        """Raise the error of a driver call's return code, if it is one."""
        if code == _OUT_OF_MEMORY:
            raise ResourceError(f"the GPU has no memory left for {what}: use a smaller batch or cache")
        if code in _GPU_LOST:
            raise ResourceError(
                f"the GPU does not answer ({what}): {self._message(code)}; see the driver's log (dmesg)"
            )
        if code:
            raise RuntimeError(f"CUDA {what}: {self._message(code)}")

    def use(self) -> None:
        """Make this GPU's context current in the calling thread."""
        self.check(self.quick.cuCtxSetCurrent(self._context), "context")

    @property
    def gpus(self) -> int:
        """Number of GPUs that this process sees."""
        count = ctypes.c_int()
        self.check(self.library.cuDeviceGetCount(ctypes.byref(count)), "count")
        return count.value

    def reaches(self, one: int, other: int) -> bool:
        """Whether GPU `one` can write to the memory of GPU `other`."""
        can, devices = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
        for device, number in zip(devices, (one, other), strict=True):
            self.check(self.library.cuDeviceGet(ctypes.byref(device), number), "device")
        self.check(self.library.cuDeviceCanAccessPeer(ctypes.byref(can), *devices), "peer access")
        return bool(can.value)

    def share(self, address: int) -> bytes:
        """A handle by which other processes open the memory that `allocate` returned."""
        handle = MemoryHandle()
        code = self.library.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address))
        self.check(code, "handle of memory")
        return bytes(handle)

    def open_shared(self, handle: bytes) -> int:
        """Address of another process's memory, also of another GPU. Raises ResourceError if it cannot be reached."""
        address = ctypes.c_uint64()
        given = MemoryHandle.from_buffer_copy(handle)
        code = self.library.cuIpcOpenMemHandle_v2(ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        if code in _NO_PEER_ACCESS:
            raise ResourceError(f"a GPU cannot write to the memory of another one: {self._message(code)}")
        self.check(code, "memory of another process")
        return address.value

    def close_shared(self, address: int) -> None:
        """Close memory of another process."""
        self.check(self.library.cuIpcCloseMemHandle(ctypes.c_uint64(address)), "close")

    @property
    def capability(self) -> int:
        """Compute capability as an integer: 90 for 9.0."""
        return 10 * self._attribute(_MAJOR) + self._attribute(_MINOR)

    @property
    def can_release(self) -> bool:
        """Whether memory of `allocate_releasable` can be given back and taken again."""
        return self._attribute(_MAPS_MEMORY) != 0

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self.check(self.library.cuDeviceGetAttribute(ctypes.byref(value), number, self._device), "attribute")
        return value.value

    @property
    def name(self) -> str:
        """The GPU's name."""
        text = ctypes.create_string_buffer(256)
        self.check(self.library.cuDeviceGetName(text, 256, self._device), "name")
        return text.value.decode()

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the GPU's memory."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.check(self.library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "memory")
        return free.value, total.value

    def allocate(self, size: int, what: str) -> int:
        """Address of `size` zeroed bytes, aligned to 256."""
        address = ctypes.c_uint64()
        self.check(self.library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(max(size, 256))), what)
        self._zero(address.value, max(size, 256), what)
        return address.value

    def _zero(self, address: int, size: int, what: str) -> None:
        # On the same stream: on the default stream, zeroing might come after the next write to this memory.
        stream = ctypes.c_void_p(self.stream)
        self.check(self.library.cuMemsetD8Async(ctypes.c_uint64(address), 0, ctypes.c_size_t(size), stream), what)

    def allocate_releasable(self, size: int, what: str) -> int:
        """As `allocate`, in memory that `release` gives back, if the GPU can do that (`can_release`)."""
        if not self.can_release:
            return self.allocate(size, what)
        address = self._mapped.reserve(size, what)
        self._zero(address, size, what)
        return address

    def release(self, address: int) -> None:
        """Give memory of `allocate_releasable` back, and keep its address. No queued work may use it."""
        self._mapped.unmap(address)

    def take_again(self, address: int, what: str) -> None:
        """Take memory for an address that has none since `release`; it is zeroed."""
        if self._mapped.map(address, what):
            self._zero(address, self._mapped.size(address), what)

    def lacking(self, addresses: Iterable[int]) -> int:
        """Bytes that `take_again` would take for these addresses."""
        return self._mapped.lacking(addresses)

    def free(self, address: int) -> None:
        """Free memory of the GPU, of either kind."""
        if address in self._mapped:
            self.synchronize()  # as cuMemFree does
            self._mapped.free(address)
        else:
            self.check(self.library.cuMemFree_v2(ctypes.c_uint64(address)), "free")

    def pinned(self, size: int) -> int:
        """Address of `size` bytes of pinned host memory, for asynchronous copies."""
        address = ctypes.c_void_p()
        self.check(self.library.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(size), 0), "pinned memory")
        assert address.value
        return address.value

    def free_pinned(self, address: int) -> None:
        """Free pinned memory."""
        self.check(self.library.cuMemFreeHost(ctypes.c_void_p(address)), "free")

    def upload(self, to: int, source: int, size: int, pinned: bool = True) -> None:
        """Queue a copy from pinned memory of the host, or make one from other memory."""
        library = self.quick if pinned else self.library
        args = (ctypes.c_uint64(to), ctypes.c_void_p(source), ctypes.c_size_t(size), ctypes.c_void_p(self.stream))
        self.check(library.cuMemcpyHtoDAsync_v2(*args), "upload")

    def download(self, to: int, source: int, size: int, pinned: bool = True) -> None:
        """Queue a copy to pinned memory of the host, or make one to other memory."""
        library = self.quick if pinned else self.library
        args = (ctypes.c_void_p(to), ctypes.c_uint64(source), ctypes.c_size_t(size), ctypes.c_void_p(self.stream))
        self.check(library.cuMemcpyDtoHAsync_v2(*args), "download")

    def copy(self, to: int, source: int, size: int) -> None:
        """Queue a copy from one place of the GPU's memory to another."""
        args = (ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size), ctypes.c_void_p(self.stream))
        self.check(self.quick.cuMemcpyDtoDAsync_v2(*args), "copy")

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        self.check(self.library.cuStreamSynchronize(ctypes.c_void_p(self.stream)), "step")

    def module(self, cubin: bytes, ptx: Callable[[], bytes], notice: Callable[[str], None]) -> ctypes.c_void_p:
        """Load a kernel's machine code. Where it does not fit this GPU, the driver compiles its PTX, after a `notice`.

        Raises ArtifactError when neither runs on this GPU.
        """
        handle = ctypes.c_void_p()
        code = self.library.cuModuleLoadData(ctypes.byref(handle), cubin)
        if code in _NO_BINARY:
            notice(f"kernels were compiled for another GPU than {self.name}: compiling them again")
            code = self.library.cuModuleLoadData(ctypes.byref(handle), ptx() + b"\0")
        if code in _NO_BINARY:
            raise ArtifactError(f"the artifact's kernels do not run on {self.name}: build it for this GPU (--target)")
        self.check(code, "module")
        return handle

    def unload(self, module: ctypes.c_void_p) -> None:
        """Unload a module with its kernels."""
        self.check(self.library.cuModuleUnload(module), "module")

    def function(self, module: ctypes.c_void_p, name: str, shared: int) -> int:
        """Handle of a kernel of a module, which may use `shared` bytes of shared memory."""
        address = ctypes.c_void_p()
        self.check(self.library.cuModuleGetFunction(ctypes.byref(address), module, name.encode()), f"kernel {name}")
        if shared > 48 * 1024:
            self.check(self.library.cuFuncSetAttribute(address, _DYNAMIC_SHARED, shared), f"kernel {name}")
        assert address.value
        return address.value

    @contextmanager
    def captured(self) -> Iterator[list[ctypes.c_void_p]]:
        """Capture the work queued inside the block as a graph, which is in the list when the block has ended."""
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        result: list[ctypes.c_void_p] = []
        stream = ctypes.c_void_p(self.stream)
        self.check(self.library.cuStreamBeginCapture_v2(stream, _CAPTURE_THREAD_LOCAL), "capture")
        try:
            yield result
        finally:
            code = self.library.cuStreamEndCapture(stream, ctypes.byref(graph))
        self.check(code, "capture")
        self.check(self.library.cuGraphInstantiateWithFlags(ctypes.byref(ready), graph, ctypes.c_uint64(0)), "graph")
        self.check(self.library.cuGraphDestroy(graph), "graph")
        result.append(ready)

    def replay(self, graph: ctypes.c_void_p) -> None:
        """Queue a captured graph."""
        self.check(self.quick.cuGraphLaunch(graph, ctypes.c_void_p(self.stream)), "graph")

    def drop(self, graph: ctypes.c_void_p) -> None:
        """Free a captured graph."""
        self.check(self.library.cuGraphExecDestroy(graph), "graph")

    def event(self) -> ctypes.c_void_p:
        """A new event."""
        handle = ctypes.c_void_p()
        self.check(self.library.cuEventCreate(ctypes.byref(handle), 0), "event")
        return handle

    def drop_event(self, event: ctypes.c_void_p) -> None:
        """Free an event."""
        self.check(self.library.cuEventDestroy_v2(event), "event")

    def record(self, event: ctypes.c_void_p, in_graph: bool = False) -> None:
        """Record the time at this point of the stream; with `in_graph`, on each replay of the graph being captured."""
        flags = _RECORD_EXTERNAL if in_graph else 0
        self.check(self.quick.cuEventRecordWithFlags(event, ctypes.c_void_p(self.stream), flags), "event")

    def wait_for(self, event: ctypes.c_void_p) -> None:
        """Wait until the stream has passed a recorded event; at once if it was never recorded."""
        self.check(self.library.cuEventSynchronize(event), "step")

    def seconds_between(self, start: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        """Seconds between two recorded events."""
        milliseconds = ctypes.c_float()
        self.check(self.library.cuEventElapsedTime(ctypes.byref(milliseconds), start, end), "event")
        return milliseconds.value / 1e3


def driver(number: int = 0) -> Driver:
    """The GPU of this process: the first one that it sees, or of a divided model the one of its rank."""
    return _opened(number)


@cache
def _opened(number: int) -> Driver:
    return Driver(number)
