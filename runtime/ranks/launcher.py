"""What the environment says of the processes that a launcher has started together: torchrun, or srun of SLURM."""

from __future__ import annotations

import os
from dataclasses import dataclass

from qcompile.errors import UnsupportedError, UsageError


@dataclass(frozen=True)
class LaunchedRank:
    """One of `size` processes, number `rank` of them, which `launcher` has started.

    run: a text that only the processes of one start have. local: how many of them run on this machine, at most.
    """

    launcher: str
    rank: int
    size: int
    run: str
    local: int

    @property
    def text(self) -> str:
        """`torchrun started 2 ranks`."""
        return f"{self.launcher} started {self.size} ranks"

    def other_size(self, what: object, built: int) -> str:
        """That `what` was built for another number of processes, and what to do."""
        instead = f"build it with --tensor-parallel-size {self.size}"
        if built == 1:
            alone = "let every rank run it alone with --tensor-parallel-size 1"
            return f"{self.text}, and {what} was built for one process: {instead}, or {alone}"
        return f"{self.text}, and {what} was built for {built} processes: start {built}, or {instead}"

    def check_machine(self) -> None:
        """Raise UnsupportedError if the processes run on several machines."""
        if self.local < self.size:
            raise UnsupportedError(
                f"{self.text} on several machines: the ranks of a model share memory, so start them on one machine"
            )


def launched() -> LaunchedRank | None:
    """This process among those that a launcher has started; None if it was started alone. Raises UsageError."""
    given = os.environ
    known: LaunchedRank | None = None
    if "TORCHELASTIC_RUN_ID" in given and "WORLD_SIZE" in given:
        run = _values("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
        size = _number("WORLD_SIZE")
        local = _number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in given else size
        known = LaunchedRank("torchrun", _number("RANK"), size, run, local)
    elif {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"} <= given.keys():
        size = _number("SLURM_STEP_NUM_TASKS")
        machines = _number("SLURM_STEP_NUM_NODES") if "SLURM_STEP_NUM_NODES" in given else 1
        run = _values("SLURM_JOB_ID", "SLURM_STEP_ID")
        known = LaunchedRank("srun", _number("SLURM_PROCID"), size, run, size if machines == 1 else 1)
    if known is None or known.size == 1:
        return None
    if not 0 <= known.rank < known.size:
        raise UsageError(f"{known.text}, and rank {known.rank} is none of them: start the processes by its command")
    return known


def _values(*names: str) -> str:
    return "\n".join(f"{name}={os.environ.get(name, '')}" for name in names)


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    if not (value.isascii() and value.isdigit() and len(value) < 8):
        raise UsageError(f"{name} is {value!r} and not a number: start the processes by torchrun or srun, which set it")
    return int(value)
