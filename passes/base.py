"""What a pass is, and how the pipeline runs one: check what it requires, run it, check what it ensures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from qcompile import check
from qcompile.graph import Graph


@dataclass(frozen=True)
class PassResult:
    """The rewritten graph, how often the rewrite happened, and what was left alone and why, one line each."""

    graph: Graph
    fired: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pass(ABC):
    """A rewrite of a graph. Its fields are its options; it prints as `name{field=value, ...}`.

    `run` leaves its argument as it was (rewrite a clone). `requires` are the stages it accepts, all when
    empty; `ensures` is the stage of its result, None when it keeps the stage. Both are checked by `apply`.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[str | None] = None

    @abstractmethod
    def run(self, graph: Graph) -> PassResult:
        """Rewrite `graph`. Raises PassError, naming node and reason, where a side condition fails."""

    @property
    def wanted(self) -> bool:
        """Whether the pipeline runs this pass; optional passes have a field `enabled` that says so."""
        return bool(self.options().get("enabled", True))

    def options(self) -> dict[str, Any]:
        """The options by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options().items())
        return f"{self.name}{{{options}}}" if options else self.name


def apply(rewrite: Pass, graph: Graph) -> PassResult:
    """Run `rewrite` between its checks. A failed check is a bug of ours and raises check.CheckError."""
    if rewrite.requires and graph.stage not in rewrite.requires:
        wanted = " or ".join(rewrite.requires)
        raise check.CheckError(f"{rewrite.name} runs on a graph at stage {wanted}, not {graph.stage}")
    result = rewrite.run(graph)
    result.graph.calibration = graph.calibration
    if rewrite.ensures is not None:
        result.graph.stage = rewrite.ensures
    check.check(result.graph, after=rewrite.name)
    return result
