"""From a model to its graph after every pass: import it or recall its trace, open its calibration text, run passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from qcompile.calibration import Calibration, CalibrationSource, open_source
from qcompile.checkpoints import frontend, traces
from qcompile.checkpoints.adapters import check_merged
from qcompile.checkpoints.hub import find
from qcompile.checkpoints.merging import Addend, merge
from qcompile.checkpoints.tokenizer_files import load_tokenizer
from qcompile.checkpoints.tracing import hurried
from qcompile.clock import Clock, Progress
from qcompile.errors import UsageError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassRecord, run_passes

Rewritten = tuple[list[Graph], list[PassRecord]]
"""The graph after each pass, and the record of each pass."""


@dataclass(frozen=True)
class ImportOptions:
    """How to import a model: `source` are arguments of frontend.load, `calib` is the text to calibrate on.

    `lora` are adapters to merge into its weights. `kept` is the folder for the results of an interrupted calibration.
    `check_passes` measures how far each pass moves the logits.
    """

    source: Mapping[str, Any] = field(default_factory=dict)
    calib: CalibrationSource | None = None
    lora: Sequence[Addend] = ()
    kept: Path | None = None
    check_passes: bool = False


def rewrite(model: Any, passes: tuple[Pass, ...], options: ImportOptions, clock: Clock) -> Rewritten:
    """Import `model` and run `passes`, of which the first is `raise`. A trace in the user's cache replaces both.

    `model` may also be a raised Graph; then `raise` does not run. Raises QCompileError.
    """
    first, others = passes[0], passes[1:]
    if isinstance(model, Graph) and options.source:
        raise UsageError(f"{next(iter(options.source))} is for what is imported, and a Graph is imported already")
    with clock("import"), hurried():
        if isinstance(model, (str, Path)):
            directory = find(model, bool(options.source.get("allow_remote")))
            check_merged(directory, (addend.adapter for addend in options.lora))
        place = None if options.check_passes else traces.place(model, options.source, str(first))
        trace = place.recall() if place else None
        graph = trace.graph if trace else model if isinstance(model, Graph) else frontend.load(model, **options.source)
        graph = merge(graph, options.lora)
        if options.calib is not None:
            graph.calibration = _opened(options.calib, model, graph, options.kept, clock.progress)
    if graph.stage == "import":
        graphs, records = run_passes(graph, (first,), clock, options.check_passes)
        if place and not options.lora:
            place.keep(traces.Trace(graphs[0], records[0].fired, records[0].notes))
    else:  # from a trace, or given as a raised Graph
        graphs = [graph] if trace else []
        records = [PassRecord(first.name, first.options(), trace.fired, trace.notes, 0.0)] if trace else []
    more = run_passes(graphs[0] if graphs else graph, others, clock, options.check_passes)
    return graphs + more[0], records + more[1]


def _opened(text: CalibrationSource, model: Any, graph: Graph, kept: Path | None, progress: Progress) -> Calibration:
    """The calibration text, in the tokens of the checkpoint `model`; `graph` is the model's graph."""
    return open_source(
        text,
        load_tokenizer(model) if isinstance(model, (str, Path)) and not isinstance(text.given, Tensor) else None,
        bos=graph.info.bos_token_id,
        vocabulary=graph.info.vocab_size,
        context=graph.info.max_position,
        folder=kept,
        progress=progress,
    )
