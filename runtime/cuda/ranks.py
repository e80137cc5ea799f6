"""The other processes of a model that is divided over GPUs, as rank 0 has them started, watches and ends them.

Each process has the GPU of its rank's number among those that are visible. Rank 0 plans all steps
(runtime/cuda/plans.py), and the others repeat them (runtime/cuda/follower.py). Kernels sum over GPUs in memory that
each process opens of all others. The end of a process, or that it does not run, makes all sums return at once: its
watcher here sets a word that waiting kernels look at, and steps raise the reason as an error.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qcompile.errors import ResourceError
from qcompile.runtime.cuda.driver import Driver
from qcompile.runtime.cuda.plans import OtherRanks, PlanWriter, SharedPlan
from qcompile.runtime.ranks.crew import start
from qcompile.runtime.ranks.failure import RankFailure
from qcompile.runtime.ranks.processes import RankProcess
from qcompile.runtime.ranks.watching import watch

_PATIENCE = 3.0
"""Seconds that a process has to end by itself."""
_ANSWER_SECONDS = 300.0
"""How much longer than rank 0 another rank may take to load its weights, and then to open the model."""
_PLAN_BYTES = 64 << 20


class GpuRankSettings(NamedTuple):
    """What the process of a rank is told first, as one line of JSON."""

    root: str
    rank: int
    size: int
    """Bytes of the memory with the plan."""
    drafts: bool
    """Whether to open the drafts that all ranks compute."""
    sealed: str
    """The hash of the manifest that rank 0 has read."""
    adapters: Sequence[Sequence[str]] = ()
    """The name and the folder of each adapter of requests, and the hash of its files as rank 0 has read them."""


class FailWord:
    """A word that waiting kernels look at: not 0 if a rank has failed. In the host's memory, so that any thread can set
    it while kernels run."""

    def __init__(self, gpu: Driver) -> None:
        self._gpu = gpu
        gpu.use()
        self.address = gpu.pinned(4)
        self._word = ctypes.c_int32.from_address(self.address)
        self._word.value = 0

    def set(self) -> None:
        """Make all sums end."""
        self._word.value = 1

    def free(self) -> None:
        """Free the word, which no kernel may read any more."""
        self._gpu.free_pinned(self.address)


def check_gpus(gpu: Driver, ranks: int, root: Path) -> None:
    """Raise ResourceError unless this process sees `ranks` GPUs, each of which reaches the others' memory."""
    if platform.machine() not in ("x86_64", "AMD64"):  # the plan relies on the order in which x86 stores
        raise ResourceError(f"{root} was built for {ranks} GPUs: a host with {platform.machine()} cores runs one GPU")
    if gpu.gpus < ranks:
        visible = "one GPU is" if gpu.gpus == 1 else f"{gpu.gpus} GPUs are"
        raise ResourceError(
            f"{root} was built for {ranks} GPUs, {visible} visible (CUDA_VISIBLE_DEVICES): build it with "
            f"--tensor-parallel-size {max(gpu.gpus, 1)}"
        )
    for one, other in itertools.permutations(range(ranks), 2):
        if not gpu.reaches(one, other):
            raise ResourceError(
                f"GPU {one} cannot write to the memory of GPU {other}, as a model on {ranks} GPUs needs: choose GPUs "
                "that NVLink or one PCIe switch connects (CUDA_VISIBLE_DEVICES)"
            )


class CudaRanks:
    """The processes of ranks 1 and up, from before rank 0 loads its weights to the end.

    sealed: the hash of the manifest that rank 0 has read. drafts: whether they open drafts. adapters: the
    names, folders and hashes of adapters.

    `loaded` waits until all have loaded theirs, `join` until all can sum. Raises ResourceError if one cannot.
    """

    def __init__(
        self,
        root: Path,
        sealed: str,
        ranks: int,
        gpu: Driver,
        drafts: bool,
        adapters: Sequence[Sequence[str]] = (),
    ) -> None:
        self._memory = SharedPlan(_PLAN_BYTES)
        self._bells = [os.eventfd(0) for _ in range(1, ranks)]
        self.plans = PlanWriter(self._memory, self._bells)
        self.failed = FailWord(gpu)
        self._gpu, self._opened = gpu, list[int]()
        self.failure, self._closing = RankFailure(), False
        self._processes: list[RankProcess] = []
        try:
            for rank, bell in enumerate(self._bells, start=1):
                self._processes.append(start(rank, "cuda", [self._memory.descriptor, bell]))
                settings = GpuRankSettings(str(root.absolute()), rank, _PLAN_BYTES, drafts, sealed, adapters)
                self._processes[-1].tell(settings._asdict())
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes' numbers, from rank 1 on."""
        return [process.pid for process in self._processes]

    def loaded(self) -> int:
        """Wait until all have loaded their weights. Returns the fewest bytes of memory that a GPU has left."""
        return min(int(answer["free"]) for answer in self._answers())

    def join(self, sizes: dict[str, int], gpu: Driver, own: Sequence[int]) -> list[list[int]]:
        """Have all open the model with these `sizes`, and exchange the peer memory of each path; rank 0 has `own`.

        Returns for each path the addresses of the peer memory of all ranks.
        """
        self._tell(sizes)
        handles = [[gpu.share(address).hex() for address in own], *(answer["handles"] for answer in self._answers())]
        self._tell({"handles": handles})
        others = [[gpu.open_shared(bytes.fromhex(handle)) for handle in each] for each in handles[1:]]
        self._opened = [address for each in others for address in each]
        for _ in self._answers():
            pass
        for process in self._processes:
            threading.Thread(target=self._watch, args=(process,), name=f"rank-{process.rank}", daemon=True).start()
        return [list(of_path) for of_path in zip(own, *others, strict=True)]

    def of_path(self, path: int) -> OtherRanks:
        """These processes as the executor of a path uses them."""
        return PathRanks(self, path)

    def check(self) -> None:
        """Raise ResourceError if a rank has ended."""
        if self.failure.problem:
            raise ResourceError(self.failure.problem)

    def ask(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        """The answer of each process to a line of JSON. No step may run. Raises ResourceError if one has ended."""
        self._tell(what)
        return [process.answer(_ANSWER_SECONDS, "after it loaded") for process in self._processes]

    def _tell(self, what: dict[str, Any]) -> None:
        for process in self._processes:
            process.tell(what)

    def _answers(self) -> list[dict[str, Any]]:
        """The next line of each process. Raises ResourceError with what it says, if it has failed."""
        return [process.answer(_ANSWER_SECONDS) for process in self._processes]

    def _watch(self, process: RankProcess) -> None:
        """Note the end of a process, or that it does not run any more."""
        if problem := watch(process, self._memory.beats, lambda: self._closing):
            self._fail(problem)

    def _fail(self, problem: str) -> None:
        """End all sums, and have steps raise this, unless the model is being closed or has failed before."""
        if self.failure.note(problem):
            self._memory.fail()
            self.failed.set()

    def close(self) -> None:
        """End the processes; those that do not end within seconds are killed. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self.failure.close()
        hurry = threading.Timer(_PATIENCE, self.failed.set)  # a kernel may wait for a process that does not run
        hurry.start()
        self._gpu.use()
        self._gpu.synchronize()
        hurry.cancel()
        for address in self._opened:
            self._gpu.close_shared(address)
        if not self._memory.failed:
            self.plans.end()
        for process in self._processes:
            process.close_input()
        for process in self._processes:
            process.finish(_PATIENCE)
        self.failed.free()
        for bell in self._bells:
            os.close(bell)
        self._memory.close()


class PathRanks:
    """The processes of ranks 1 and up, as the executor of one path uses them. The first that is closed ends them."""

    def __init__(self, whole: CudaRanks, path: int) -> None:
        self._whole, self.plans, self.failure = whole, whole.plans.of(path), whole.failure

    @property
    def pids(self) -> list[int]:
        """The processes' numbers, from rank 1 on."""
        return self._whole.pids

    def check(self) -> None:
        """Raise ResourceError if a rank has ended."""
        self._whole.check()

    def close(self) -> None:
        """End the processes."""
        self._whole.close()
