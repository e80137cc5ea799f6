"""Where a draft head comes from: files of its own (EAGLE-3), or the model's checkpoint (multi-token prediction)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from torch import Tensor

from qcompile.checkpoints import huggingface
from qcompile.checkpoints.hub import find
from qcompile.checkpoints.renamed import RenamedCheckpoint
from qcompile.checkpoints.stored import formats
from qcompile.checkpoints.tracing import hurried
from qcompile.clock import Clock
from qcompile.errors import UsageError
from qcompile.graph import Graph
from qcompile.heads.graph import head_graph
from qcompile.heads.mtp_files import MtpModule
from qcompile.heads.reading import HeadFile
from qcompile.passes.base import Pass, run_passes
from qcompile.passes.features import FuseFeatures, ReturnFeatures
from qcompile.passes.final_state import ReturnFinalState
from qcompile.passes.mtp import MtpSource, mtp_graph

MTP = "mtp"
"""The draft that is the checkpoint's own module for multi-token prediction."""


class HeadSource(Protocol):
    """A draft head before it is compiled."""

    @property
    def argument(self) -> str:
        """How `--draft` names it."""

    @property
    def changing(self) -> tuple[str, ...]:
        """Passes of the target that change what the head reads in a way that is not followed."""

    def target_pass(self, origin: str) -> Pass:
        """The pass by which a step of the target returns what the head reads."""

    def own_pass(self) -> Pass:
        """The pass by which a step of the head returns what it reads itself."""

    def graph(self, target: Graph, origin: str, raising: Pass, clock: Clock) -> Graph:
        """The head at stage `raise`, for the raised graph of the `target`; its weights' names begin with `origin`."""

    def tokens(self, vocabulary: int) -> Tensor | None:
        """The target's tokens that the head proposes, int32; None if they are all, in order."""


@dataclass(frozen=True)
class EagleSource:
    """A head of the EAGLE-3 type."""

    file: HeadFile
    changing: ClassVar[tuple[str, ...]] = ("reorder",)

    @property
    def argument(self) -> str:
        """The path of its files."""
        return str(self.file.path)

    def target_pass(self, origin: str) -> Pass:
        """The fused hidden states of the target."""
        return FuseFeatures(self.file, origin)

    def own_pass(self) -> Pass:
        """The residual stream of the head."""
        return ReturnFeatures()

    def graph(self, target: Graph, origin: str, raising: Pass, clock: Clock) -> Graph:
        """Written operator by operator: the files have one layout."""
        return head_graph(self.file, target, origin)

    def tokens(self, vocabulary: int) -> Tensor | None:
        """As the files say."""
        return self.file.tokens(vocabulary)


@dataclass(frozen=True)
class ModuleSource:
    """A module for multi-token prediction that a checkpoint has."""

    module: MtpModule
    argument: ClassVar[str] = MTP
    changing: ClassVar[tuple[str, ...]] = ("reorder",)

    @staticmethod
    def of(model: object) -> ModuleSource:
        """The module of the checkpoint `model`. Raises UsageError if that is none, or has no module."""
        if not isinstance(model, str | Path):
            raise UsageError(f"draft {MTP} is a part of a checkpoint, and the model is none")
        directory = find(model)
        return ModuleSource(MtpModule.find(directory, formats.open_checkpoint(directory)))

    def target_pass(self, origin: str) -> Pass:
        """The final hidden states of the target."""
        return ReturnFinalState()

    def own_pass(self) -> Pass:
        """The final hidden states of the module."""
        return ReturnFinalState()

    def graph(self, target: Graph, origin: str, raising: Pass, clock: Clock) -> Graph:
        """Cut out of the model, which is traced again with the module's layer in place of one of its own."""
        directory = self.module.directory
        stored = RenamedCheckpoint(formats.open_checkpoint(directory), self.module.layer)
        with clock("import"), hurried():
            traced = huggingface.load(directory, stored=stored)
        raised = run_passes(traced, (raising,), clock)[0][0]
        return mtp_graph(MtpSource(self.module, raised, stored), origin)

    def tokens(self, vocabulary: int) -> Tensor | None:
        """All."""
        return None
