"""The compiler as a list of stages: model -> graph -> passes -> program -> kernels -> artifact.

This is the only module that knows both passes and code generation.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Event
from typing import Any

import torch

import qcompile
from qcompile import calibration, recipes, targets
from qcompile.artifact.layout import PASSES_FILE, canonical_json
from qcompile.artifact.shards import WeightSpec
from qcompile.artifact.writer import ArtifactWriter
from qcompile.calibration import CalibrationSource
from qcompile.checkpoints import frontend, traces
from qcompile.checkpoints.hub import find
from qcompile.checkpoints.tokenizer_files import other_tokenizer, tokenizer_files
from qcompile.checkpoints.tracing import hurried
from qcompile.clock import Clock, Progress, silent
from qcompile.codegen.backend import Backend, backend_of
from qcompile.codegen.lower import lower
from qcompile.codegen.packing import PackedWeight, WeightTable
from qcompile.codegen.program import Program
from qcompile.errors import UnsupportedError, UsageError, shown
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import Pass, PassRecord, run_passes
from qcompile.passes.cache import Cache
from qcompile.passes.calibration import outliers
from qcompile.passes.calibration.calibrate import Calibrate
from qcompile.passes.calibration.salience import Salience
from qcompile.passes.center_keys import CenterKeys
from qcompile.passes.fold_norms import FoldNorms
from qcompile.passes.fuse import Fuse
from qcompile.passes.merge import Merge
from qcompile.passes.plan_memory import PlanMemory
from qcompile.passes.quantize import Quantize
from qcompile.passes.raising import Raise
from qcompile.passes.reorder import Reorder
from qcompile.passes.rotate import Rotate
from qcompile.passes.rotate_keys import RotateKeys
from qcompile.passes.smooth import Smooth
from qcompile.passes.smooth_attention import SmoothAttention
from qcompile.passes.speculate import Speculate
from qcompile.passes.split import Split
from qcompile.report import figures, ir
from qcompile.report.bits import bits_per_weight
from qcompile.report.page import PageWriter

PASSES: tuple[type[Pass], ...] = (
    Raise,
    Split,
    FoldNorms,
    Rotate,
    Smooth,
    CenterKeys,
    SmoothAttention,
    RotateKeys,
    Reorder,
    AssignPrecision,
    Merge,
    Salience,
    Quantize,
    Speculate,
    Calibrate,
    Cache,
    Fuse,
    PlanMemory,
)
"""All passes, in the order in which they run."""

MAX_STEP_TOKENS = 512
LOOKUP = "lookup"
"""A draft without a model: it proposes what followed an earlier occurrence of the text's suffix (prompt lookup)."""

LOOKUP_LEVEL = {"lookup": 8, "gamma": 7}
"""The longest suffix to look up, and the number of tokens to copy where a model would draft."""

OTHER_DRAFT = (4, 0.0)
"""Gamma and threshold of a separate draft model."""

REENCODING_DRAFT = (4, 0.4)
"""The same for a draft model with another tokenizer, whose uncertain tokens are rarely what the target says."""


@dataclass(frozen=True)
class DraftPath:
    """A draft path for the path before it, in the target's cache if it `shares_cache`; see recipes.Draft."""

    name: str
    program: Program
    graphs: list[Graph]
    passes: list[PassRecord]
    shares_cache: bool
    gamma: int
    threshold: float
    tokenizer: bytes | None = None
    """Its tokenizer.json if it differs from the target's."""
    start: int | None = None
    """The first token of its texts, if it has its own tokenizer."""


@dataclass(frozen=True)
class Plan:
    """A model after all stages but code generation. Making one reads no weights.

    `graphs` are the graphs after each pass; `files` are the artifact's small files by name; all paths share `weights`.
    """

    graphs: list[Graph]
    program: Program
    weights: list[PackedWeight]
    passes: list[PassRecord]
    bits_per_weight: float
    files: dict[str, str | bytes]
    report: bytes
    drafts: list[DraftPath]
    lookup: bool
    """Whether the last level of speculation is prompt lookup."""

    @property
    def programs(self) -> dict[str, Program]:
        """The program of each path by name, the target's first."""
        return {"model": self.program} | {draft.name: draft.program for draft in self.drafts}


@dataclass(frozen=True)
class BuildReport:
    """The artifact's path, its passes in order, seconds by stage, and bits per weight of the linears.

    `drafts` maps each draft path to its passes; those of a draft derived from the target start with `speculate`.
    """

    path: Path
    passes: tuple[PassRecord, ...]
    seconds: dict[str, float]
    bits_per_weight: float
    drafts: dict[str, tuple[PassRecord, ...]]


def build(
    model: Any,
    out: str | Path,
    *,
    target: str = "cpu",
    recipe: str = "w4a8",
    options: Mapping[str, object] | None = None,
    head_dtype: str | None = None,
    drafts: str | Path | Sequence[Any] = (),
    progress: Progress | None = None,
    dump_ir: str | Path | None = None,
    calib: CalibrationSource | str | Path | torch.Tensor | None = None,
    check_passes: bool = False,
    passes: Sequence[Pass] = (),
    **source: Any,
) -> BuildReport:
    """Compile `model` into an artifact directory `out`.

    `model` is a checkpoint directory or hub name, an nn.Module (`source` has example_inputs, (token_ids,) or
    (token_ids, positions), both int64 [batch, tokens], and max_position, the context length), an ExportedProgram with
    dynamic batch and tokens (with max_position), or a raised Graph. `options` override the recipe's settings of passes,
    {"cache.format": "kv8"}; `head_dtype` overrides the output head (int8, bf16, f32). Each of `drafts`, a checkpoint
    (of the same tokenizer unless it is the only draft) or, as the last one, `LOOKUP`, proposes tokens to the path
    before it; the recipe's own drafts come first. `dump_ir` is a folder for all graphs as text and SVG. `calib` is the
    text by which weights' codes are chosen (a file, token ids [samples, length], or a calibration.CalibrationSource).
    If interrupted, the same build resumes. `check_passes` records each pass's change of the logits and seconds, on a
    short text, in passes.json. `passes` are further passes, which run after `raise`. Raises QCompileError, without
    leaving a partial artifact, and TypeError for an argument that does not exist.
    """
    frontend.check_arguments(build, source)
    clock = Clock(progress or silent)
    machine = targets.get_target(target)
    wanted = calib if calib is None or isinstance(calib, CalibrationSource) else CalibrationSource(calib)
    kept = Path(out).absolute().parent / f".{Path(out).name}.calibration"
    request = _Request(model, recipe, options or {}, head_dtype, drafts, target, wanted, kept, check_passes, (*passes,))
    backend = backend_of(machine)
    made_by = backend.compiler()  # raises before any work if there is none
    with ArtifactWriter(out) as writer, PageWriter() as page:
        found = _plan(request, clock, source)
        drawn = page.ask(found.report)
        if dump_ir is not None:
            ways: dict[str, Plan | DraftPath] = {"": found, **{draft.name: draft for draft in found.drafts}}
            for name, way in ways.items():
                ir.dump(way.graphs, [record.name for record in way.passes], Path(dump_ir, name))
        with clock("render"):
            compile_kernels = backend.prepare(found.programs, machine, found.lookup)
        with clock("weights and kernels"):
            entries, compiled = _write_and_compile(writer, found, compile_kernels, clock)
        with clock("artifact"):
            for name, text in ({f"kernels/{machine.name}/{n}": c for n, c in compiled.items()} | found.files).items():
                writer.add_file(name, text)
            writer.add_file("report.json", found.report)
            writer.add_file("report.html", drawn())
            if check_passes:
                writer.add_unsealed(PASSES_FILE, canonical_json(_measured(found.passes)))
            manifest = _manifest(found, entries, machine, backend, made_by)
            manifest["recipe"] = {"name": recipe, "options": dict(request.options), "head_dtype": head_dtype}
            path = writer.finish(manifest)
            shutil.rmtree(kept, ignore_errors=True)
    of_drafts = {draft.name: tuple(draft.passes) for draft in found.drafts}
    return BuildReport(path, tuple(found.passes), clock.seconds, found.bits_per_weight, of_drafts)


def _write_and_compile(writer: ArtifactWriter, found: Plan, compile_kernels: Any, clock: Clock) -> tuple[Any, Any]:
    """Write the weights while kernels are compiled; returns the weights' entries and the kernels' files."""
    with ThreadPoolExecutor(1) as pool:
        kernels = pool.submit(compile_kernels, given_up := Event())
        try:
            specs = [WeightSpec(name, size) for weight in found.weights for name, size in weight.blobs]
            entries = writer.add_weights(specs, _stream(found.weights, clock.progress))
            clock.progress("kernels", 0, 1)
            return entries, kernels.result()
        finally:
            given_up.set()  # after an interrupt or a full disk, do not wait for the compiler


def plan(
    model: Any,
    *,
    target: str = "cpu",
    recipe: str = "w4a8",
    options: Mapping[str, object] | None = None,
    head_dtype: str | None = None,
    drafts: str | Path | Sequence[Any] = (),
    passes: Sequence[Pass] = (),
    **source: Any,
) -> Plan:
    """The plan that `build` would compile for the same arguments; reads no weights, writes nothing."""
    frontend.check_arguments(plan, source)
    machine, own = targets.get_target(target), tuple(passes)
    found = _plan(_Request(model, recipe, options or {}, head_dtype, drafts, target, more=own), Clock(silent), source)
    backend_of(machine).check(found.programs, machine)
    return found


@dataclass(frozen=True)
class _Request:
    """The arguments of a build; provides the passes of the target and of each draft path."""

    model: Any
    recipe: str
    options: Mapping[str, Any]
    head_dtype: str | None
    drafts: Any
    target: str
    calib: CalibrationSource | None = None
    kept: Path | None = None
    """Folder for the results of an interrupted calibration."""
    check_passes: bool = False
    more: tuple[Pass, ...] = ()  # in addition to the recipe's

    def __post_init__(self) -> None:
        for one in self.more:
            _check_extra_pass(one)
        object.__setattr__(self, "options", recipes.option_texts(self.options))
        if isinstance(self.drafts, str | Path):
            object.__setattr__(self, "drafts", (self.drafts,))

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The target's passes. Raises UsageError if an option is for a draft that the recipe does not have."""
        recipe = recipes.get_recipe(self.recipe)
        found = configure(recipe.settings(self.head_dtype), {"salience.target": self.target, **self.options})
        idle = [option for option in self.options if option.startswith(f"{Speculate.name}.")]
        if idle and not recipe.drafts:
            raise UsageError(f"option {idle[0]}: recipe {self.recipe} makes no draft of itself; take one that does")
        return found[:1] + self.more + found[1:]

    def for_draft(self, draft: Any, own_tokens: bool, known: calibration.Calibration | None) -> _Request:
        """The request for a separate `draft` model, which may have tokens of its own; `known` is the target's text."""
        text = self.calib is not None and not isinstance(self.calib.given, torch.Tensor)
        if own_tokens or (text and isinstance(draft, (str, Path))):  # token ids would mean nothing to other tokens
            return replace(self, check_passes=False, calib=self.calib if text else None)
        return replace(self, check_passes=False, calib=CalibrationSource(known.tokens) if known else None)

    def own_drafts(self) -> Iterator[tuple[recipes.Draft, tuple[Pass, ...]]]:
        """The recipe's drafts, each with the passes from `speculate` on that derive it from the quantized graph."""
        recipe = recipes.get_recipe(self.recipe)
        for draft in recipe.drafts:
            settings = draft.settings(self.head_dtype or recipe.head)
            own = configure(recipe.settings(self.head_dtype) | settings, self.options)[PASSES.index(Speculate) :]
            yield draft, tuple(made.for_draft() if isinstance(made, Cache) else made for made in own)


def _check_extra_pass(rewrite: object) -> None:
    """Raise UsageError if `rewrite` cannot run as an additional pass."""
    if not isinstance(rewrite, Pass):
        raise UsageError(f"passes must be instances of Pass, not {shown(rewrite)}")
    if rewrite.name in [kind.name for kind in PASSES]:
        raise UsageError(f"pass {rewrite.name} runs anyway: give its fields in options")
    if not rewrite.wanted:
        raise UsageError(f"pass {rewrite} is not enabled: give it with enabled=True")


def _import(
    model: Any, passes: tuple[Pass, ...], clock: Clock, source: Mapping[str, Any], request: _Request | None = None
) -> _Passed:
    checked = request is not None and request.check_passes
    first, others = passes[0], passes[1:]
    if isinstance(model, Graph) and source:
        raise UsageError(f"{next(iter(source))} is for what is imported, and a Graph is imported already")
    with clock("import"), hurried():
        place = None if checked else traces.place(model, source, str(first))
        trace = place.recall() if place else None
        graph = trace.graph if trace else model if isinstance(model, Graph) else frontend.load(model, **source)
        if request is not None and request.calib is not None:
            directory = find(model) if isinstance(model, (str, Path)) else None
            graph.calibration = calibration.open_source(
                request.calib,
                directory,
                bos=graph.info.bos_token_id,
                vocabulary=graph.info.vocab_size,
                context=graph.info.max_position,
                folder=request.kept,
                progress=clock.progress,
            )
    if graph.stage == "import":
        graphs, records = run_passes(graph, (first,), clock, checked)
        if place:
            place.keep(traces.Trace(graphs[0], records[0].fired, records[0].notes))
    else:  # from a trace, or given as a raised Graph
        graphs = [graph] if trace else []
        records = [PassRecord(first.name, first.options(), trace.fired, trace.notes, 0.0)] if trace else []
    more = run_passes(graphs[0] if graphs else graph, others, clock, checked)
    return graphs + more[0], records + more[1]


def _plan(request: _Request, clock: Clock, source: Mapping[str, Any]) -> Plan:
    model = request.model
    backend = backend_of(targets.get_target(request.target))
    graphs, records = _import(model, request.passes, clock, source, request)
    table = WeightTable(backend.packing)
    with clock("lower"):
        final = graphs[-1]
        program = backend.adapt(lower(final, table))
        bits = bits_per_weight(final)
    drafts = [replace(d, program=backend.adapt(d.program)) for d in _draft_paths(graphs, request, table, clock)]
    weights = table.weights
    with clock("describe"):
        files: dict[str, str | bytes] = {
            "graphs/model.json": graphs[0].to_json(),
            "graphs/step.json": final.to_json(),
            "graphs/program.json": program.to_json(),
            **{f"graphs/{draft.name}.json": draft.program.to_json() for draft in drafts},
            **{f"{draft.name}/tokenizer.json": draft.tokenizer for draft in drafts if draft.tokenizer},
            **(tokenizer_files(model) if isinstance(model, (str, Path)) else {}),
        }
        facts = canonical_json(_report(request, graphs, program, weights, records, drafts))
    lookup = LOOKUP in request.drafts
    return Plan(graphs, program, weights, records, bits, files, facts, drafts, lookup)


def _draft_paths(graphs: list[Graph], request: _Request, table: WeightTable, clock: Clock) -> list[DraftPath]:
    """The recipe's drafts, which share the target's weights and cache, then separate draft models."""
    quantized = [graph for graph in graphs if graph.stage == "quantize"][-1]
    target = graphs[-1].info
    paths: list[DraftPath] = []
    for draft, passes in request.own_drafts():
        made, records = run_passes(quantized, passes, clock)
        program = lower(made[-1], table)
        if not records[0].fired and not program.kv.hierarchical:
            raise UsageError(f"the draft of recipe {request.recipe} is the target itself: set other speculate options")
        paths.append(DraftPath(f"draft{len(paths) + 1}", program, made, records, True, draft.gamma, draft.threshold))
    if LOOKUP in request.drafts[:-1]:
        raise UsageError(f"{LOOKUP} must be the last draft: it can only draft for others")
    for other in (other for other in request.drafts if other != LOOKUP):
        name = f"draft{len(paths) + 1}"
        passes = configure(recipes.get_recipe(recipes.DRAFT_RECIPE).settings(), {})
        tokenizer = other_tokenizer(request.model, other)
        asked = request.for_draft(other, tokenizer is not None, quantized.calibration)
        made, records = _import(other, passes, clock, {}, asked)
        info = made[-1].info
        if tokenizer is not None and (paths or len(request.drafts) > 1):
            raise UnsupportedError(f"draft {info.name} has another tokenizer: it can only draft alone")
        if tokenizer is None and info.vocab_size != target.vocab_size:
            raise UnsupportedError(f"draft {info.name} has {info.vocab_size} tokens, the model {target.vocab_size}")
        program = lower(made[-1], table, f"{name}.")
        how = OTHER_DRAFT if tokenizer is None else REENCODING_DRAFT
        paths.append(DraftPath(name, program, made, records, False, *how, tokenizer, info.bos_token_id))
    return paths


def configure(settings: recipes.Settings, options: Mapping[str, str]) -> tuple[Pass, ...]:
    """The passes with a recipe's settings, overridden by the user's `pass.field=value` or `field=value` options.

    Raises UsageError listing the valid choices for an unknown pass or field, or a value of the wrong type.
    """
    defaults = {kind.name: {field.name: field.default for field in fields(kind)} for kind in PASSES}
    values = recipes.apply_options(settings, defaults, options)
    return tuple(kind(**values.get(kind.name, {})) for kind in PASSES)


_Passed = tuple[list[Graph], list[PassRecord]]


def _stream(weights: list[PackedWeight], progress: Progress) -> Iterator[Any]:
    """The bytes of all weights (uint8 arrays) in order, with one weight in memory at a time."""
    total = sum(size for weight in weights for _, size in weight.blobs)
    done = 0
    with torch.no_grad():
        for weight in weights:
            for (_, size), blob in zip(weight.blobs, weight.produce(), strict=True):
                yield blob.numpy()
                progress("weights", done := done + size, total)


def _manifest(
    found: Plan, entries: list[dict[str, Any]], machine: targets.Target, backend: Backend, made_by: str
) -> dict[str, Any]:
    """The manifest, except for what the writer adds. It has no times and no paths, so builds are reproducible."""
    info, folder = found.graphs[-1].info, f"kernels/{machine.name}"
    return {
        "qcompile_version": qcompile.__version__,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "compiler": made_by},
        "model": {
            "name": info.name,
            "vocab_size": info.vocab_size,
            "max_position": info.max_position,
            "bos_token_id": info.bos_token_id,
            "eos_token_ids": list(info.eos_token_ids),
            "parameters": info.parameters,
        },
        "target": machine.facts,
        "runtime": {
            "abi": backend.abi,
            "library": f"{folder}/model{backend.suffix}",
            "levels": _levels(found, entries, folder, backend.suffix),
            "weights": entries,
            "max_tokens": MAX_STEP_TOKENS,
            "vocab_size": info.vocab_size,
            "kv": _cache(found.program),
        },
        "passes": [p.facts for p in found.passes],
        "bits_per_weight": found.bits_per_weight,
        "calibration": text.describe() if (text := found.graphs[-1].calibration) else None,
    }


def _cache(program: Program) -> dict[str, Any]:
    kv = program.kv
    return {
        "format": kv.format,
        "layers": kv.layers,
        "kv_heads": kv.kv_heads,
        "head_dim": kv.head_dim,
        "page_tokens": kv.page_tokens,
        "page_bytes": kv.page_bytes,
        **({"ring_tokens": kv.ring_tokens} if kv.hierarchical else {}),
    }


def _levels(found: Plan, entries: list[dict[str, Any]], folder: str, suffix: str) -> list[dict[str, Any]]:
    """The draft levels. `weights` are indices into the list of all weights, which starts with the target's; `kv` is
    null for a path that uses the target's cache."""
    place = {entry["name"]: index for index, entry in enumerate(entries)}
    levels: list[dict[str, Any]] = [
        {
            "path": draft.name,
            "library": f"{folder}/{draft.name}{suffix}",
            "gamma": draft.gamma,
            "threshold": draft.threshold,
            "weights": [place[name] for name in draft.program.weights],
            "max_position": draft.program.max_position,
            "kv": None if draft.shares_cache else _cache(draft.program),
            "passes": [p.facts for p in draft.passes],
            **({"tokenizer": f"{draft.name}/tokenizer.json"} if draft.tokenizer else {}),
            "vocab_size": draft.program.vocab_size,
            "bos_token_id": draft.start,
        }
        for draft in found.drafts
    ]
    return levels + ([dict(LOOKUP_LEVEL)] if found.lookup else [])


def _measured(passes: list[PassRecord]) -> list[dict[str, Any]]:
    """passes.json: the facts that differ between builds."""
    return [{"name": p.name, "seconds": p.seconds, "max_relative_error": p.max_relative_error} for p in passes]


def _report(
    request: _Request,
    graphs: list[Graph],
    program: Program,
    weights: list[PackedWeight],
    records: list[PassRecord],
    drafts: list[DraftPath],
) -> dict[str, Any]:
    final = graphs[-1]
    sizes = {name: size for weight in weights for name, size in weight.blobs}
    return figures.collect(
        json.loads(program.to_json()),
        sizes,
        request.target,
        figures.figures_of(final),
        figures.wide_of(final),
        [
            figures.Draft(d.name, json.loads(d.program.to_json()), d.shares_cache, [p.facts for p in d.passes])
            for d in drafts
        ],
        model={"name": final.info.name, "parameters": final.info.parameters},
        recipe=request.recipe,
        bits_per_weight=bits_per_weight(final),
        passes=[record.facts for record in records],
        outliers=outliers.compare(graphs),
    )
