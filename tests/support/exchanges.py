"""Processes that interpret the kernels of all ranks at once, which wait for each other in memory that they share."""

from __future__ import annotations

import mmap
import multiprocessing
import random
import time
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from qcompile.codegen.gpu.kernel import Kernel
from qcompile.codegen.gpu.peer_memory import PACKED, PeerLayout

_PATIENCE = 40.0
"""Seconds after which processes wait for each other forever."""
_COUNTERS = PACKED + 1024
"""Counters of a rank, more than tests have programs."""


def shared(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros that processes share with those that they fork."""
    return torch.frombuffer(mmap.mmap(-1, max(1, prod(shape)) * dtype.itemsize), dtype=dtype)[: prod(shape)].view(shape)


def peer_memory(layout: PeerLayout, rows: int) -> list[Tensor]:
    """The peer memory of all ranks, for steps of up to `rows` rows."""
    return [shared(-(-layout.size(rows) // 8), dtype=torch.int64) for _ in range(layout.ranks)]


class Exchanging:
    """A rank in a process of its own, as `together` makes them."""

    def __init__(self, rank: int, memory: list[Tensor], counters: int) -> None:
        self.rank, self._memory = rank, memory
        self.state = torch.zeros(counters, dtype=torch.int32)
        self._pauses = random.Random(rank)

    def run(self, kernel: Kernel, grid: tuple[int, int, int], *given: Tensor | int) -> None:
        """Launch a kernel, sooner or later than the other ranks."""
        from qcompile.codegen.gpu import compile as gpu_compile

        time.sleep(self._pauses.choice((0, 0, 0.003, 0.02)))
        failed = torch.zeros(1, dtype=torch.int32)
        run = gpu_compile.load(kernel)[grid]
        run(*given, self.state, failed, self.rank, self._memory[self.rank], *self._memory)


def together(memory: list[Tensor], work: Callable[[Exchanging], None]) -> None:
    """Have a process for each rank do `work`; in a process that has TRITON_INTERPRET set. Raises if one fails."""
    from triton.runtime import interpreter

    # The interpreter would copy all that a kernel was given back to where it lies, over what others have written.
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    context = multiprocessing.get_context("fork")
    every = [Exchanging(rank, memory, _COUNTERS) for rank in range(len(memory))]
    ranks = [context.Process(target=work, args=(each,)) for each in every]
    for each in ranks:
        each.start()
    end = time.monotonic() + _PATIENCE
    for each in ranks:
        each.join(max(0.0, end - time.monotonic()))
    statuses = [each.exitcode for each in ranks]
    for each in ranks:
        each.kill()
    assert statuses == [0] * len(ranks), statuses  # None: it waits for another rank
