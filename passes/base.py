"""The base class of passes, and how the pipeline runs them: check `requires`, run the pass, check `ensures`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from qcompile import check
from qcompile.clock import Clock, silent
from qcompile.graph import Graph
from qcompile.passes.decisions import changed_decisions


@dataclass(frozen=True)
class PassResult:
    """The rewritten graph, how often the rewrite fired, and one line per place it left alone, with the reason."""

    graph: Graph
    fired: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pass(ABC):
    """A rewrite of a graph. Its fields are its options; it prints as `name{field=value, ...}`.

    `run` must not modify its argument: it rewrites a clone. `requires` lists the stages the pass accepts (empty: all);
    `ensures` is the stage of its result (None: unchanged). `apply` checks both.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[str | None] = None

    @abstractmethod
    def run(self, graph: Graph) -> PassResult:
        """Rewrite `graph`. Raises PassError with the node and the reason when a side condition does not hold."""

    @property
    def wanted(self) -> bool:
        """Whether the pipeline runs this pass. Optional passes have a field `enabled` that decides."""
        return bool(self.options().get("enabled", True))

    def options(self) -> dict[str, Any]:
        """The options by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options().items())
        return f"{self.name}{{{options}}}" if options else self.name


def apply(rewrite: Pass, graph: Graph) -> PassResult:
    """Run `rewrite` and check the graph before and after. A failed check is a compiler bug: raises check.CheckError."""
    if rewrite.requires and graph.stage not in rewrite.requires:
        wanted = " or ".join(rewrite.requires)
        raise check.CheckError(f"{rewrite.name} runs on a graph at stage {wanted}, not {graph.stage}")
    result = rewrite.run(graph)
    result.graph.calibration = graph.calibration
    told = (*result.notes, *changed_decisions(graph, result.graph, result.notes))
    result = replace(result, notes=told)
    if rewrite.ensures is not None:
        result.graph.stage = rewrite.ensures
    check.check(result.graph, after=rewrite.name)
    return result


@dataclass(frozen=True)
class PassRecord:
    """What a pass did: its options, how often it fired, what it left alone, and its time in seconds.

    `max_relative_error` is how far the pass moved the logits of a short text, or None if that was not measured.
    """

    name: str
    options: dict[str, Any]
    fired: int
    notes: tuple[str, ...]
    seconds: float
    max_relative_error: float | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The part of the record that is the same in every build of the model."""
        return {"name": self.name, "options": self.options, "fired": self.fired, "notes": list(self.notes)}

    @property
    def measured(self) -> dict[str, Any]:
        """The part of the record that differs between builds, as passes.json has it."""
        return {"name": self.name, "seconds": self.seconds, "max_relative_error": self.max_relative_error}


def run_passes(
    graph: Graph, passes: tuple[Pass, ...], clock: Clock | None = None, check_passes: bool = False
) -> tuple[list[Graph], list[PassRecord]]:
    """Run the enabled passes in order, with checks. Returns the graph after each pass, and a record of each."""
    clock = clock or Clock(silent)
    graphs, records = [], []
    logits = check.sample(graph) if check_passes else None
    for rewrite in passes:
        if not rewrite.wanted:
            continue
        already = clock.seconds.get(rewrite.name, 0.0)
        with clock(rewrite.name):
            result = apply(rewrite, graph)
        graph = result.graph
        graphs.append(graph)
        error = None
        if logits is not None:
            before, logits = logits, check.sample(graph)
            error = check.max_relative_error(logits, before)
        seconds = clock.seconds[rewrite.name] - already
        records.append(PassRecord(rewrite.name, rewrite.options(), result.fired, result.notes, seconds, error))
    return graphs, records
