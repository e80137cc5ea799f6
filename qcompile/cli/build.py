"""The commands `build` and `passes`, which wait for torch."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qcompile import sample_text, texts
from qcompile.checkpoints import hub
from qcompile.cli import allocating, calibrating, console, machine, refusals
from qcompile.cli.estimate import Estimate
from qcompile.cli.options import (
    BitBudget,
    CalibrationText,
    DraftedCompilation,
    Hub,
    Inspection,
    Json,
    Model,
    Remote,
    command,
)
from qcompile.recipe_files.resolved import Resolved
from qcompile.recipes import embedding_option
from qcompile.report import stored_weights

if TYPE_CHECKING:
    from qcompile.passes.base import Pass, PassRecord
    from qcompile.pipeline import BuildReport

_NAMED_TEXTS = {Path("none"): None, Path("sample"): sample_text.FOLDER}
"""Values of `--calib` that are no files."""


@command
def build(  # parameters: the groups of its options
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="Artifact directory to write.")],
    compilation: DraftedCompilation,
    inspection: Inspection,
    calibration: CalibrationText,
    budget: BitBudget,
    access: Hub,
    allow_remote_code: Remote = False,
    json: Json = False,
) -> None:
    """Compile a model into an artifact directory.

    \b
    Example:
      qcompile build samples/pycode-26m -o out/pycode --recipe w4a8
      qcompile build samples/pycode-26m -o out/kv8 --recipe f32 --set cache.format=kv8
      qcompile build samples/pycode-26m -o out/qserve --recipe qserve --calib samples/text.jsonl
      qcompile build samples/pycode-26m -o out/auto --recipe auto --calib samples/text.jsonl --target-bits 4.4
      qcompile build samples/pycode-26m -o out/mix --recipe auto --study study.json --target-bits 5
      qcompile build samples/pycode-26m -o out/fast --recipe ml-specqd --draft samples/pycode-1m --draft lookup
      qcompile build samples/pycode-26m -o out/tuned --lora my-adapter --lora style=0.5
      qcompile build samples/pycode-26m -o out/two --recipe w8a8 --tensor-parallel-size 2
    """
    settings = compilation.settings() | embedding_option(compilation.embedding_dtype)
    settings |= allocating.options_of(budget)
    formats = compilation.recipe, compilation.target, compilation.head_dtype
    recipe = refusals.check_formats(*formats, settings, compilation.passes or ())
    allocating.check(budget, recipe, compilation.head_dtype)
    refusals.check_pass("--explain", inspection.explain, recipe)
    if calibration.calib is not None and calibration.calib not in _NAMED_TEXTS:
        texts.check(calibration.calib, tables=True)
    drafts: Sequence[str | Path] = compilation.drafts or ()
    refusals.check_models(model, compilation.drafts or ())
    refusals.check_output(output)
    with console.Progress() as progress:
        source = hub.find(model, allow_remote_code, progress=progress, **asdict(access))
        drafts = [_fetched(each, access, progress) for each in drafts]
    text = _calibration_text(calibration.calib, recipe, source)
    allocating.tell(budget, recipe, text)
    if budget.study is not None:
        recipe = allocating.mixed(budget, model, compilation.target, settings)
        recipe = recipe.changed({}, passes=compilation.passes or ())
    estimate = Estimate(machine.count_weights(source))
    with console.Progress(estimate) as progress:
        progress("import", 0, 1)
        gc.set_threshold(50_000, 20, 100)  # imports and traces are not garbage: looking for it would take 0.5 s
        given = compilation, inspection, calibration, recipe, allow_remote_code, progress
        report = _build(source, drafts, output, text, *given)
    estimate.finish()
    print_build(report, recipe.name, compilation.target, inspection.explain, json)


def _fetched(draft: str | Path, access: Hub, progress: console.Progress) -> str | Path:
    """The directory of a draft model, which is fetched if it is on the hub; `lookup` and `mtp` are none."""
    return draft if draft in refusals.NO_MODELS else hub.find(draft, token=access.token, progress=progress)


def _calibration_text(given: Path | None, recipe: Resolved, model: Path) -> Path | None:
    """The text of `--calib`, or the package's text for recipes that need one and checkpoints that can read it."""
    if given is not None:
        return _NAMED_TEXTS.get(given, given)
    text = calibrating.text_for(recipe, model)
    if text is not None:
        console.note("qcompile: --calib FILE takes a text of yours, --calib none rounds to nearest")
    return text


def _build(  # parameters: the groups of options of the command
    model: Path,
    drafts: Sequence[str | Path],
    output: Path,
    text: Path | None,
    compilation: DraftedCompilation,
    inspection: Inspection,
    calibration: CalibrationText,
    recipe: Resolved,
    allow_remote: bool,
    progress: console.Progress,
) -> BuildReport:
    """Import the compiler, and run it with the options of the command line."""
    from qcompile import pipeline
    from qcompile.calibration import CalibrationSource

    return pipeline.build(
        model,
        output,
        target=compilation.target,
        recipe=recipe,
        drafts=drafts,
        lora=compilation.lora or (),
        progress=progress,
        dump_ir=inspection.dump_ir,
        check_passes=inspection.check,
        calib=text and CalibrationSource(text, calibration.samples, calibration.length, calibration.seed),
        allow_remote=allow_remote,
    )


@command
def passes(json: Json = False) -> None:
    """List the passes in execution order, with their options and defaults.

    \b
    Example:
      qcompile passes
    """
    from qcompile.passes.extra import extra_pass
    from qcompile.passes.schedule import PASSES
    from qcompile.plugins.entries import entries

    rows = [_pass_facts(kind) for kind in PASSES]
    for name, entry in entries("qcompile.passes").items():
        rows.append(_pass_facts(extra_pass(name).kind) | {"name": name, "package": entry.package})
    if json:
        console.print_json(rows)
        return
    for row in rows:
        options = ", ".join(f"{name}={value}" for name, value in row["options"].items())
        of = f" (--pass, {row['package']})" if "package" in row else ""
        console.show(f"{row['name']:18}{options or '-'}\n{'':18}{row['summary']}{of}")


def _pass_facts(kind: type[Pass]) -> dict[str, Any]:
    """Name, options and summary of a pass."""
    summary = (kind.__doc__ or "").strip().splitlines()[0]
    return {"name": kind.name, "options": kind().options(), "summary": summary}


# ---- what `build` prints -------------------------------------------------------------------------------


def print_build(report: BuildReport, recipe: str, target: str, explain: str | None, json: bool) -> None:
    """Print the result of a build pass by pass; with `explain`, also what that pass left unchanged, and why."""
    size = sum(path.stat().st_size for path in report.path.rglob("*") if path.is_file())
    if json:
        console.print_json(
            {
                "path": str(report.path),
                "recipe": recipe,
                "target": target,
                "bits_per_weight": report.bits_per_weight,
                "passes": [_record(record) for record in report.passes],
                "drafts": {name: [_record(record) for record in records] for name, records in report.drafts.items()},
                "seconds": report.seconds,
                "bytes": size,
                "left_out": dict(report.left_out),
                "context": report.context,
                "stated_context": report.stated_context,
                "remarks": list(report.remarks),
                "stored_weights": report.stored_weights,
                "embedding": report.embedding,
            }
        )
        return
    console.show(_line(report.passes))
    for name, records in report.drafts.items():
        console.show(f"{name}: {_line(records)}")
    if explain is not None:
        console.show("\n".join(_explained(report, explain)))
    console.show(console.left_out(report.left_out) + console.remarks(report.remarks), end="")
    if report.stored_weights:
        console.show(stored_weights.sentence(report.stored_weights))
    if report.embedding:
        console.show(stored_weights.embedding_sentence(report.embedding))
    if report.stated_context is not None:
        console.show(f"context {console.context_text(report.context, report.stated_context)}")
    facts = f"{console.byte_size(size)}, {report.bits_per_weight:.2f} bits per weight"
    console.show(f"{report.path}: {facts}, built in {sum(report.seconds.values()):.1f} s")


def _record(record: PassRecord) -> dict[str, Any]:
    return {"name": record.name, "fired": record.fired, "seconds": record.seconds, "notes": list(record.notes)}


def _line(records: Sequence[PassRecord]) -> str:
    """How often each pass fired, and how many notes it made, such as on places that it left unchanged."""
    notes = [f" ({console.counted(len(record.notes), 'note')})" if record.notes else "" for record in records]
    return ", ".join(f"{record.name} {record.fired}{note}" for record, note in zip(records, notes, strict=True))


def _explained(report: BuildReport, explain: str) -> list[str]:
    """What the pass `explain` left unchanged and why, path by path."""
    lines: list[str] = []
    for path, records in {"": report.passes, **report.drafts}.items():
        for record in (record for record in records if record.name == explain):
            notes = record.notes or (
                f"{explain} fired {console.counted(record.fired, 'time')}, and left nothing alone",
            )
            lines += [f"{path}: {note}" if path else note for note in notes]
    if lines:
        return lines
    how = {"speculate": "a recipe that drafts by the model itself has it", "rules": "a recipe with rules has it"}
    return [f"{explain} did not run: {how.get(explain, f'--set {explain}.enabled=true')}"]
