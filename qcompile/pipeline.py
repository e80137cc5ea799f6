"""The compiler as a list of stages: model -> graph -> passes -> program -> kernels -> artifact.

`build` runs all stages, `plan` those before code generation. Only this module and drafts/ know both passes and code
generation.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import torch

from qcompile import targets
from qcompile.artifact import describe, rebuilt
from qcompile.artifact.describe import KernelFiles
from qcompile.artifact.layout import PASSES_FILE, adapters_file, canonical_json
from qcompile.artifact.reader import read_checked_manifest
from qcompile.artifact.rebuilt import RebuiltKernels, check_runtime
from qcompile.artifact.shards import WeightSpec
from qcompile.artifact.step_graph import foreign_graph, read_step
from qcompile.artifact.writer import ArtifactWriter
from qcompile.calibration import CalibrationSource
from qcompile.checkpoints import frontend, remarks
from qcompile.checkpoints.hub import find
from qcompile.checkpoints.merging import addends
from qcompile.checkpoints.tokenizer_files import configuration_files, tokenizer_files
from qcompile.clock import Clock, Progress, silent
from qcompile.codegen.backend import Backend, Files
from qcompile.codegen.cpu import build as cpu_build
from qcompile.codegen.fidelity import Fidelity
from qcompile.codegen.gpu import build as gpu_build
from qcompile.codegen.lower import lower
from qcompile.codegen.packing import PackedWeight, WeightTable, stream
from qcompile.codegen.program import Program
from qcompile.codegen.rank_programs import rank_programs
from qcompile.codegen.tables import table_facts
from qcompile.drafts.paths import LOOKUP, DraftPasses, DraftPath, Drafts, draft_paths, draft_stages
from qcompile.errors import UnsupportedError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassRecord, apply
from qcompile.passes.calibration import outliers, perplexity
from qcompile.passes.lora import Lora, described
from qcompile.passes.plan_memory import PlanMemory
from qcompile.passes.rank_graphs import check_ranks, other_ranks
from qcompile.passes.rewrite import ImportOptions, rewrite
from qcompile.passes.schedule import Schedule, draft_head_passes, scheduled, separate_draft_passes
from qcompile.recipe_files.resolved import RECIPE_FILE, RecipeLike, resolve
from qcompile.report import figures, ir, stored_weights
from qcompile.report.bits import bits_per_weight
from qcompile.report.command import command
from qcompile.report.page import PageWriter

BACKENDS: Mapping[str, Backend] = {"cpu": cpu_build.BACKEND, "cuda": gpu_build.BACKEND}
"""Code generation by the kind of target."""


def backend_of(target: targets.Target) -> Backend:
    """Code generation for `target`."""
    return BACKENDS[target.kind]


@dataclass(frozen=True)
class CompilationPlan:
    """A model after all stages but code generation. Making one reads no weights.

    `graphs` are the graphs after each pass, `files` the artifact's small files by name; all paths share `weights`.
    `lookup` says whether the last draft stage is prompt lookup. `ranks` are the programs of all processes that
    run the model together, which differ in weights alone; empty if there is one. `others` are the last graphs of all of
    these processes but the first. `fidelity` has what rounding changes,
    when the weights are written.
    """

    graphs: list[Graph]
    program: Program
    weights: list[PackedWeight]
    passes: list[PassRecord]
    bits_per_weight: float
    files: Files
    report: bytes
    drafts: list[DraftPath]
    lookup: bool
    ranks: Sequence[Program] = ()
    others: Sequence[Graph] = ()
    fidelity: Fidelity = field(default_factory=Fidelity)

    @property
    def programs(self) -> dict[str, Program]:
        """The program of each path by name, the target's first."""
        return {"model": self.program} | {draft.name: draft.program for draft in self.drafts}


@dataclass(frozen=True)
class BuildReport:
    """The artifact's path, its passes in order, seconds by stage, and bits per weight of the linears.

    `drafts` maps each draft path to its passes; those of a draft derived from the target start with `speculate`.
    `left_out` has the modules of the checkpoint that no text reaches, such as a vision tower, and their bytes there.
    `context` is in tokens; `stated_context` is what the model states, if the artifact's is less. `remarks` say, a line
    each, what of the checkpoint the model does not use, or what it lacks. `stored_weights` are the linears' weights
    that the checkpoint stores in few bits, and what rounding changes of them (Fidelity.facts); None without any.
    `embedding` says what rounding changes of the table of embeddings (codegen/tables.py); None if it is not rounded.
    """

    path: Path
    passes: tuple[PassRecord, ...]
    seconds: dict[str, float]
    bits_per_weight: float
    drafts: dict[str, tuple[PassRecord, ...]]
    left_out: Mapping[str, int] = field(default_factory=dict)
    context: int = 0
    stated_context: int | None = None
    remarks: tuple[str, ...] = ()
    stored_weights: Mapping[str, Any] | None = None
    embedding: Mapping[str, Any] | None = None


def build(  # parameters: the public interface, one keyword for each option
    model: Any,
    out: str | Path,
    *,
    target: str = "cpu",
    recipe: RecipeLike = "w4a8",
    options: Mapping[str, object] | None = None,
    head_dtype: str | None = None,
    drafts: str | Path | Sequence[Any] = (),
    progress: Progress | None = None,
    dump_ir: str | Path | None = None,
    calib: CalibrationSource | str | Path | torch.Tensor | None = None,
    check_passes: bool = False,
    passes: Sequence[Pass | str] = (),
    lora: str | Path | Sequence[str | Path] = (),
    **source: Any,
) -> BuildReport:
    """Compile `model` into an artifact directory `out`.

    `model` is a checkpoint directory or hub name, an nn.Module (`source` has example_inputs, (token_ids,) or
    (token_ids, positions), both int64 [batch, tokens], and max_position, the context length), an ExportedProgram with
    dynamic batch and tokens (with max_position), or a raised Graph. `recipe` is the name of one, a TOML file, or the
    tables of such a file. `options` override its settings of passes, {"cache.format": "kv8"}; `head_dtype` overrides
    the output head (int8, bf16, f32). Each of `drafts`, a checkpoint (of the same tokenizer unless it is the only
    draft), a draft head (alone) or `LOOKUP` (last), proposes tokens to the path before it, after those of the recipe.
    `dump_ir` is a folder for all graphs as text and SVG. `calib` is the text by which weights' codes are chosen (a
    file, token ids [samples, length], or a calibration.CalibrationSource). If interrupted, the same build resumes.
    `check_passes` records each pass's change of the logits and seconds, on a short text, in passes.json. `passes` run
    after `raise`, or where their text says ("module:Class@after=rotate"). `lora` are folders of adapters in PEFT's
    format to merge into the weights, "DIR=0.5" with a factor. Raises QCompileError, without leaving a partial artifact,
    and TypeError for an argument that does not exist.
    """
    frontend.check_arguments(build, source)
    clock, machine = Clock(progress or silent), targets.get_target(target)
    text = calib if calib is None or isinstance(calib, CalibrationSource) else CalibrationSource(calib)
    kept = Path(out).absolute().parent / f".{Path(out).name}.calibration"
    schedule = scheduled(resolve(recipe, options, head_dtype), target, passes)
    importing = ImportOptions(source, text, addends(lora), kept, check_passes)
    drafting = _drafts(model, drafts, schedule)
    backend = backend_of(machine)
    compiler = backend.compiler()  # raises if there is none, before any work
    sizes = backend.most_rows, backend.most_outputs
    kernels = KernelFiles(machine.name, backend.suffix, backend.abi, compiler, *sizes)
    with ArtifactWriter(out) as writer, PageWriter() as page:
        planned = _plan(model, schedule, drafting, importing, clock)
        draw_page = page.ask(planned.report)
        if dump_ir is not None:
            _dump_graphs(planned, Path(dump_ir))
        with clock("render"):
            compile_kernels = backend.prepare(planned.programs, machine, planned.lookup)
        with clock("weights and kernels"):
            weights, compiled = _write_and_compile(writer, planned, compile_kernels, clock)
        with clock("artifact"):
            _add_files(writer, kernels.placed(compiled) | planned.files | _described(planned, draw_page()))
            if check_passes:
                writer.add_unsealed(PASSES_FILE, canonical_json([record.measured for record in planned.passes]))
            path = writer.finish(_manifest(planned, schedule, machine, kernels, weights))
            shutil.rmtree(kept, ignore_errors=True)
    return _build_report(path, planned, clock)


def _drafts(model: Any, drafts: str | Path | Sequence[Any], schedule: Schedule) -> Drafts:
    """The drafts of a build of `model`: those of the recipe, and those given."""
    target = schedule.target
    passes = DraftPasses(targets.get_target(target), separate_draft_passes(target), draft_head_passes(target))
    return Drafts.of(drafts, [*schedule.recipe_drafts()], passes, model)


def _build_report(path: Path, planned: CompilationPlan, clock: Clock) -> BuildReport:
    of_drafts = {draft.name: tuple(draft.passes) for draft in planned.drafts}
    info, bits_per_weight = planned.graphs[-1].info, planned.bits_per_weight
    facts = info.left_out, info.max_position, info.stated_position, info.remarks, planned.fidelity.facts()
    tables = table_facts(planned.program, planned.fidelity)
    return BuildReport(path, tuple(planned.passes), clock.seconds, bits_per_weight, of_drafts, *facts, tables)


def plan(  # parameters: the arguments of `build` that decide what is compiled
    model: Any,
    *,
    target: str = "cpu",
    recipe: RecipeLike = "w4a8",
    options: Mapping[str, object] | None = None,
    head_dtype: str | None = None,
    drafts: str | Path | Sequence[Any] = (),
    passes: Sequence[Pass | str] = (),
    **source: Any,
) -> CompilationPlan:
    """The plan that `build` would compile for the same arguments; reads no weights, writes nothing."""
    frontend.check_arguments(plan, source)
    machine = targets.get_target(target)
    schedule = scheduled(resolve(recipe, options, head_dtype), target, passes)
    drafting = _drafts(model, drafts, schedule)
    planned = _plan(model, schedule, drafting, ImportOptions(source), Clock(silent))
    backend_of(machine).check(planned.programs, machine)
    return planned


def rebuild(path: str | Path, progress: Progress | None = None) -> RebuiltKernels:
    """Compile the kernels of the artifact at `path` again, for `load(path, kernels=...)`, which loads none of its own.

    They come from the artifact's graph, which need not be trusted (artifact/step_graph.py), and are kept in the user's
    cache. Raises ArtifactError for an artifact that is damaged or does not fit together, UnsupportedError for one of
    which kernels are not rebuilt, ResourceError if there is no compiler.
    """
    root, clock = Path(path), Clock(progress or silent)
    manifest = read_checked_manifest(root)
    if (known := rebuilt.recall(root, manifest)) is not None:
        return known
    target = targets.recorded_target(manifest["target"])
    if target is None:
        name = manifest["target"]["name"]
        raise UnsupportedError(f"{root}: target {name} is not one of this version: build it again")
    backend, table = backend_of(target), WeightTable()
    with clock("graph"), foreign_graph(root):
        graph = apply(PlanMemory(), read_step(root, manifest)).graph
        program = backend.adapt(lower(graph, table))
        sizes = {name: size for weight in table.weights for name, size in weight.blobs}
        check_runtime(root, manifest, program.cache_facts, {name: sizes[name] for name in program.weights})
        compile_kernels = backend.prepare({"model": program}, target, False)
    with clock("kernels"):
        library = compile_kernels(None)[f"model{backend.suffix}"]
    assert isinstance(library, bytes)
    return rebuilt.remember(manifest, library)


# ---- model -> plan -----------------------------------------------------------------------------------


def _plan(model: Any, schedule: Schedule, drafts: Drafts, options: ImportOptions, clock: Clock) -> CompilationPlan:
    """All stages but code generation."""
    machine = targets.get_target(schedule.target)
    backend = backend_of(machine)
    passes = drafts.of_target(schedule.model_passes())
    check_ranks(passes, drafts.unknown_to_ranks(machine.kind), options.check_passes)
    graphs, records = rewrite(model, passes, options, clock)
    table = WeightTable(backend.packing)
    with clock("lower"):
        program = backend.adapt(lower(graphs[-1], table, fidelity=(fidelity := Fidelity())))
        bits = bits_per_weight(graphs[-1])
    paths = draft_paths(model, (graphs, records), drafts, options, table, clock, other_ranks)
    ranks = rank_programs(program, others := other_ranks(graphs, passes), table, backend.adapt)
    paths = [_adapted(path, table, backend) for path in paths]
    made = graphs, program, table.weights, records, bits
    planned = CompilationPlan(*made, {}, b"", paths, drafts.lookup, ranks, others, fidelity)
    with clock("describe"):
        kept = tokenizer_files(model) | configuration_files(model) if isinstance(model, (str, Path)) else {}
        files = _small_files(planned) | kept | {RECIPE_FILE: schedule.recipe.text()}
        if isinstance(model, (str, Path)):
            info = graphs[-1].info
            graphs[-1].info = replace(
                info, remarks=(*drafts.remarks(info.remarks), *remarks.of_files(find(model), kept))
            )
        named = Path(graphs[-1].info.name) if isinstance(model, (str, Path)) else model
        told = {"command": _command(named, schedule, drafts, options), "versions": describe.makers()}
        report = canonical_json(_report(planned, schedule) | told)
    return replace(planned, files=files, report=report)


def _adapted(path: DraftPath, table: WeightTable, backend: Backend) -> DraftPath:
    """A draft path with the programs that the target's code generation makes of its own, for all ranks."""
    program = backend.adapt(path.program)
    return replace(path, program=program, ranks=rank_programs(program, path.others, table, backend.adapt))


def _small_files(planned: CompilationPlan) -> Files:
    """Graphs and programs as JSON, and the tokenizers of drafts that have their own."""
    return {
        "graphs/model.json": planned.graphs[0].to_json(),
        "graphs/step.json": planned.graphs[-1].to_json(),
        "graphs/program.json": planned.program.to_json(),
        **{f"graphs/{draft.name}.json": draft.program.to_json() for draft in planned.drafts},
        **{name: content for draft in planned.drafts for name, content in draft.files.items()},
    }


def _described(planned: CompilationPlan, page: bytes) -> Files:
    """The report, and what the artifact says of linears that adapters of requests may change, if it has any."""
    rank = next((record.options["rank"] for record in planned.passes if record.name == Lora.name), 0)
    graphs = [planned.graphs[-1], *planned.others] if rank else []
    adapters: Files = {adapters_file(own): described(graph, rank).to_bytes() for own, graph in enumerate(graphs)}
    tables = table_facts(planned.program, planned.fidelity)
    page = stored_weights.placed(page, planned.fidelity.facts(), tables)
    return {**adapters, "report.json": planned.report, "report.html": page}


def _report(planned: CompilationPlan, schedule: Schedule) -> dict[str, Any]:
    """report.json."""
    final = planned.graphs[-1]
    return figures.collect(
        json.loads(planned.program.to_json()),
        {name: size for weight in planned.weights for name, size in weight.blobs},
        schedule.target,
        figures.figures_of(final),
        figures.wide_of(final),
        [draft.figures for draft in planned.drafts],
        model={"name": final.info.name, "parameters": final.info.parameters},
        recipe=schedule.recipe.name,
        study=schedule.recipe.study.table if schedule.recipe.study else None,
        bits_per_weight=planned.bits_per_weight,
        passes=[record.facts for record in planned.passes],
        outliers=outliers.compare(planned.graphs),
        perplexity=perplexity.compare(planned.graphs),
        calibration=final.calibration.describe() if final.calibration else None,
    )


def _command(model: Any, schedule: Schedule, drafts: Drafts, options: ImportOptions) -> str:
    """The command that makes this build again."""
    recipe, fields = schedule.recipe, schedule.options
    settings = {"recipe": recipe.name, "target": schedule.target, "head_dtype": recipe.head_dtype}
    if not recipe.is_plain:
        settings, fields = {"recipe": f"OUT/{RECIPE_FILE}", "target": schedule.target}, {}
    lookup = [LOOKUP] if drafts.lookup else []
    lora = [f"{addend.adapter.name}={addend.weight:g}" for addend in options.lora]
    heads = [drafts.head.source.argument] if drafts.head else []
    return command(model, settings, fields, [*heads, *drafts.models, *lookup], lora, options.calib)


# ---- plan -> artifact --------------------------------------------------------------------------------


def _dump_graphs(planned: CompilationPlan, folder: Path) -> None:
    """Write the graph after each pass, of the target into `folder` and of each draft into a folder of its name."""
    ir.dump(planned.graphs, [record.name for record in planned.passes], folder)
    for draft in planned.drafts:
        ir.dump(draft.graphs, [record.name for record in draft.passes], folder / draft.name)


def _write_and_compile(
    writer: ArtifactWriter, planned: CompilationPlan, compile_kernels: Callable[[Event | None], Files], clock: Clock
) -> tuple[list[dict[str, Any]], Files]:
    """Write the weights while kernels are compiled; returns the weights' entries and the kernels' files."""
    with ThreadPoolExecutor(1) as pool:
        kernels = pool.submit(compile_kernels, given_up := Event())
        try:
            specs = [WeightSpec(name, size) for weight in planned.weights for name, size in weight.blobs]
            entries = writer.add_weights(specs, stream(planned.weights, clock.progress))
            clock.progress("kernels", 0, 1)
            return entries, kernels.result()
        finally:
            given_up.set()  # after an interrupt or a full disk, do not wait for the compiler


def _add_files(writer: ArtifactWriter, files: Files) -> None:
    for name, content in files.items():
        writer.add_file(name, content)


def _manifest(
    planned: CompilationPlan,
    schedule: Schedule,
    target: targets.Target,
    kernels: KernelFiles,
    weights: list[dict[str, Any]],
) -> dict[str, Any]:
    """The manifest, except for what the writer adds. It has no times and no paths, so builds are reproducible."""
    final = planned.graphs[-1]
    drafting = draft_stages(planned.drafts, planned.lookup, kernels, weights)
    places = {entry["name"]: index for index, entry in enumerate(weights)}
    ranks = [[places[name] for name in program.weights] for program in planned.ranks]
    return describe.versions(kernels) | {
        "model": final.info.facts,
        "target": target.facts,
        "recipe": schedule.recipe.facts(),
        "runtime": describe.runtime(
            kernels, weights, drafting, final.info.vocab_size, planned.program.cache_facts, ranks
        ),
        "passes": [record.facts for record in planned.passes],
        "bits_per_weight": planned.bits_per_weight,
        "calibration": final.calibration.describe() if final.calibration else None,
        **({"stored_weights": stored} if (stored := planned.fidelity.facts()) else {}),
        **({"embedding": tables} if (tables := table_facts(planned.program, planned.fidelity)) else {}),
    }
