"""Runs kernels written in Gluon without a GPU: each program's warp groups are threads, one of which runs at a time.

What they do is what a GPU does, on the values of whole tensors (support/gluon_tensors.py), with mbarriers that really
wait. The order of summation within a tensor is not the GPU's. A kernel fails if it reads or writes outside of an
argument, reads shared memory that is not written, uses a product before it has waited for it, or if all of its warp
groups wait.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from qcompile.codegen.gpu.kernel import Kernel
from tests.support import ptx
from tests.support.gluon_tensors import SIZES, Either, Pending, Pointer, Shared, Tensor, added, read, stored

POINTERS = {
    "*fp32": "float32",
    "*fp16": "float16",
    "*bf16": "bfloat16",
    "*i8": "int8",
    "*i16": "int16",
    "*i32": "int32",
}


class Constexpr:
    """tl.constexpr: as an annotation it keeps numbers what they are."""

    def __new__(cls, value: Any) -> Any:
        return value


class Deadlock(Exception):
    """All warp groups of a program wait for mbarriers."""


class Program:
    """One program: its number in the grid, and its warp groups."""

    def __init__(self, ids: tuple[int, ...], grid: Sequence[int]) -> None:
        self.ids, self.grid = ids, grid
        self.turn, self.waiting, self.running = threading.Condition(), 0, 1
        self.failure: BaseException | None = None
        self.local = threading.local()

    @property
    def products(self) -> list[Pending]:
        """Those that the running warp group has issued and not waited for, oldest first."""
        return self.local.__dict__.setdefault("products", [])

    @property
    def copies(self) -> list[list[tuple[Shared, Pointer, Tensor | None]]]:
        """Groups of copies in flight; the last is not committed."""
        return self.local.__dict__.setdefault("copies", [[]])

    def specialize(self, partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        """Run functions as warp groups, until all have ended."""
        self.running = len(partitions)
        threads = [threading.Thread(target=self._run, args=each, daemon=True) for each in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.running = 1
        if self.failure:
            raise self.failure

    def _run(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        with self.turn:
            try:
                function(*arguments)
                assert not self.products, "a warp group ends before its products do"
                assert not any(self.copies), "a warp group ends before its copies do"
            except BaseException as error:
                self.failure = self.failure or error
            self.running -= 1
            self.tell()

    def tell(self) -> None:
        """Have all warp groups that wait look again."""
        self.waiting = 0
        self.turn.notify_all()

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Let other warp groups run until `reached`."""
        while not reached():
            self.waiting += 1
            if self.waiting == self.running:  # nothing has changed since each of them looked
                self.failure = self.failure or Deadlock(f"program {self.ids}")
                self.turn.notify_all()
            else:
                self.turn.wait()
            if self.failure:
                raise self.failure

    def copy(self, group: Sequence[tuple[Shared, Pointer, Tensor | None]]) -> None:
        for to, pointer, mask in group:
            assert to.values.shape == pointer.items.shape and SIZES[to.type] == SIZES[pointer.type]
            to.values[...] = pointer.load(mask).values


class Barrier:
    """An mbarrier: a phase ends with the last of `count` arrivals."""

    def __init__(self) -> None:
        self.count = self.left = self.phase = 0

    def arrive(self, count: int) -> None:
        assert self.left >= count, "more arrivals than the phase has"
        self.left -= count
        if not self.left:
            self.left, self.phase = self.count, self.phase ^ 1


class Barriers:
    """Shared memory for several mbarriers."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


def _plain(value: Any) -> Any:
    return value.values if isinstance(value, Tensor) else value


def _same_type(values: np.ndarray, *given: Any) -> Tensor:
    """A tensor of the first tensor's type, if NumPy has kept it."""
    types = [one.type for one in given if isinstance(one, Tensor)]
    return Tensor(values, "bfloat16" if types and set(types) == {"bfloat16"} else "")


def _elementwise(function: Callable[..., Any]) -> Callable[..., Tensor]:
    def compute(*given: Any) -> Tensor:
        with np.errstate(all="ignore"):
            return _same_type(function(*map(_plain, given)), *given)

    return compute


def _fma(a: Any, b: Any, c: Any) -> Any:
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


def _registers(values: np.ndarray, type: str, pack: int) -> list[ptx.Words]:
    """The registers of `pack` adjacent elements."""
    raw = stored(values, type).reshape(-1, pack)
    return list(np.ascontiguousarray(raw).view(np.uint32).reshape(len(raw), -1).T.copy())


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool = True, pack: int = 1
) -> Any:
    """tl.inline_asm_elementwise, of packs of elements that are adjacent in a tensor."""
    if not asm.strip():
        return args[0]
    if "griddepcontrol" in asm or "prefetch" in asm:
        return None
    types = dtype if isinstance(dtype, tuple) else (dtype,)
    shape = np.broadcast_shapes(*(np.shape(_plain(arg)) for arg in args))
    if asm.startswith("mov.b32 {"):  # the two halves of a word
        raw = np.ascontiguousarray(args[0].values).view(np.uint16).reshape(*shape, 2)
        return tuple(Tensor(read(raw[..., i].view(_raw(t)), t), t) for i, t in enumerate(types))
    registers: list[ptx.Words] = []
    for arg in args:
        registers += _registers(np.broadcast_to(arg.values, shape), arg.type, pack)
    counts = [max(1, SIZES[t] * pack // 4) for t in types]
    tied = [int(name) for name in constraints.split(",") if name.isdigit()]
    result = ptx.run(asm, sum(counts), *registers, tied=tied)
    results = []
    for count, type in zip(counts, types, strict=True):
        raw = np.stack(result[:count], -1).astype(np.uint32).view(_raw(type))
        results.append(Tensor(read(raw[:, :pack].reshape(shape), type), type))
        result = result[count:]
    return tuple(results) if isinstance(dtype, tuple) else results[0]


def _raw(type: str) -> Any:
    return np.uint16 if type == "bfloat16" else stored(np.zeros(1), type).dtype


def maximum(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else _elementwise(np.maximum)(a, b)


def minimum(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else _elementwise(np.minimum)(a, b)


def where(first: Any, a: Any, b: Any) -> Any:
    return Either(first, a, b) if isinstance(a, Pointer) else _elementwise(np.where)(first, a, b)


def broadcast(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    both = np.broadcast_arrays(_plain(a), _plain(b))
    return Tensor(both[0], a.type), Tensor(both[1], getattr(b, "type", ""))


def atomic_add(pointer: Pointer, value: Any, mask: Tensor | None = None, sem: str = "") -> Tensor:
    before = pointer.load(mask)
    pointer.store(before + value, mask)
    return before


def allocate(type: str, shape: Sequence[int], layout: Any) -> Any:
    return Barriers(shape[0]) if layout == "barrier" else Shared.of(type, shape)


def _layout(*given: Any, **named: Any) -> str:
    return "layout"


_LAYOUTS = (
    *("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "DistributedLinearLayout"),
    *("NVMMASharedLayout", "SwizzledSharedLayout"),
)
_FUNCTIONS: dict[str, Any] = {
    **{name: name for name in SIZES},
    **dict.fromkeys(_LAYOUTS, _layout),
    "constexpr": Constexpr,
    "arange": lambda a, b, layout=None: Tensor(np.arange(a, b, dtype=np.int32)),
    "zeros": lambda shape, type, layout=None: Tensor(np.zeros(shape), type),
    "full": lambda shape, value, type, layout=None: Tensor(np.full(shape, value), type),
    "load": lambda pointer, mask=None, other=0, **hints: pointer.load(mask, _plain(other)),
    "store": lambda pointer, value, mask=None: pointer.store(value, mask),
    "broadcast": broadcast,
    "where": where,
    "minimum": minimum,
    "maximum": maximum,
    "fma": _elementwise(_fma),
    "exp": _elementwise(np.exp),
    "exp2": _elementwise(np.exp2),
    "abs": _elementwise(np.abs),
    "erf": _elementwise(lambda x: torch.erf(torch.from_numpy(x)).numpy()),
    "sum": lambda x, axis: _same_type(added(x.values, axis), x),
    "max": lambda x, axis: _same_type(x.values.max(axis), x),
    "reshape": lambda x, shape: x.reshape(tuple(shape)),
    "permute": lambda x, axes: x.permute(tuple(axes)),
    "join": lambda a, b: Tensor(np.stack((a.values, b.values), -1), a.type),
    "split": lambda x: (Tensor(x.values[..., 0], x.type), Tensor(x.values[..., 1], x.type)),
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "inline_asm_elementwise": inline_asm_elementwise,
    "static_range": range,
    "thread_barrier": lambda: None,
    "atomic_add": atomic_add,
    "allocate_shared_memory": allocate,
}
"""What of Gluon's language does not depend on the program that runs."""


def _language(program: list[Program]) -> SimpleNamespace:
    """What kernels import as `tl`; `program` has the one that runs."""
    return SimpleNamespace(
        **_FUNCTIONS,
        shared_memory_descriptor=Shared,
        program_id=lambda axis: program[0].ids[axis],
        num_programs=lambda axis: program[0].grid[axis],
        warp_specialize=lambda partitions, warps, registers: program[0].specialize(partitions),
    )


def _hopper(program: list[Program]) -> dict[str, Any]:
    """What they import of Gluon's module for sm_90."""

    def warpgroup_mma(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Pending:
        product = Pending(a, b, acc, use_acc)
        program[0].products.append(product)
        return product

    def warpgroup_mma_wait(outstanding: int, deps: Sequence[Any]) -> Any:
        products = program[0].products
        done = products[: max(0, len(products) - outstanding)]
        for product in done:
            product.compute()
        del products[: len(done)]
        result = tuple(p.compute() if isinstance(p, Pending) and p not in products else p for p in deps)
        return result if len(result) > 1 else result[0]

    return {
        "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_init": lambda x: x,
        "warpgroup_mma_wait": warpgroup_mma_wait,
        "fence_async_shared": lambda: None,
        "mbarrier": _mbarrier(program),
        "async_copy": _async_copy(program),
    }


def _mbarrier(program: list[Program]) -> SimpleNamespace:
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.left = count

    def arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        if pred:
            barrier.arrive(count)
            program[0].tell()

    def wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
        if pred:
            program[0].wait_until(lambda: barrier.phase != int(phase))

    return SimpleNamespace(init=init, arrive=arrive, wait=wait, MBarrierLayout=lambda: "barrier")


def _async_copy(program: list[Program]) -> SimpleNamespace:
    def issue(to: Shared, pointer: Pointer, mask: Tensor | None = None) -> None:
        program[0].copies[-1].append((to, pointer, mask))

    def finish(outstanding: int) -> None:
        """Copies are made as late as may be."""
        copies = program[0].copies
        while len(copies) > outstanding + (0 if outstanding == 0 else 1):
            program[0].copy(copies.pop(0))
        if not copies:
            copies.append([])

    def arrive(barrier: Barrier, increment_count: bool = True) -> None:
        finish(0)
        barrier.arrive(128)  # each thread of four warps
        program[0].tell()

    return SimpleNamespace(
        async_load=issue,
        commit_group=lambda: program[0].copies.append([]),
        wait_group=finish,
        mbarrier_arrive=arrive,
    )


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """gluon.jit: numbers become tensors, except where an argument is a constexpr."""
    kept = [p.annotation is Constexpr for p in inspect.signature(function).parameters.values()]

    def call(*given: Any) -> Any:
        numbers = [isinstance(x, int | float) and not keep for x, keep in zip(given, kept, strict=True)]
        return function(*(Tensor(np.asarray(x, np.int32)) if n else x for x, n in zip(given, numbers, strict=True)))

    return call


def launch(kernel: Kernel, grid: Sequence[int], given: Mapping[str, Any]) -> None:
    """Run a kernel with tensors and numbers by the names of its arguments, one program after the other."""
    program: list[Program] = []
    language, hopper = _language(program), _hopper(program)
    source = re.sub(r"^(import triton.*|from triton\S* import \([^)]*\)|from triton.*)$", "", kernel.source, flags=re.M)
    module = ModuleType(kernel.name)
    jit = SimpleNamespace(jit=_jit)
    vars(module).update(tl=language, gluon=jit, triton=jit, **hopper)
    exec(compile(source, f"{kernel.name}.py", "exec"), vars(module))
    arguments = [
        Pointer.to_tensor(given[a.name], POINTERS[a.type]) if a.type in POINTERS else given[a.name]
        for a in kernel.arguments
    ]
    whole = tuple([*grid, 1, 1][:3])
    for ids in np.ndindex(whole[::-1]):
        program[:] = [Program(tuple(ids[::-1]), whole)]
        getattr(module, kernel.name)(*arguments)
