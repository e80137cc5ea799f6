"""What `qcompile build` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qcompile.cli import console

if TYPE_CHECKING:
    from qcompile.pipeline import BuildReport, PassRecord


def print_build(report: BuildReport, recipe: str, target: str, explain: str | None, json: bool) -> None:
    """What was built, pass by pass; with `explain`, what that pass left alone and why."""
    size = sum(path.stat().st_size for path in report.path.rglob("*") if path.is_file())
    if json:
        console.print_json(
            {
                "path": str(report.path),
                "recipe": recipe,
                "target": target,
                "bits_per_weight": report.bits_per_weight,
                "passes": [_told(record) for record in report.passes],
                "drafts": {name: [_told(record) for record in records] for name, records in report.drafts.items()},
                "seconds": report.seconds,
                "bytes": size,
            }
        )
        return
    print(_line(report.passes))
    for name, records in report.drafts.items():
        print(f"{name}: {_line(records)}")
    if explain is not None:
        print("\n".join(_explained(report, explain)))
    facts = f"{console.byte_size(size)}, {report.bits_per_weight:.2f} bits per weight"
    print(f"{report.path}: {facts}, built in {sum(report.seconds.values()):.1f} s")


def _told(record: PassRecord) -> dict[str, Any]:
    return {"name": record.name, "fired": record.fired, "seconds": record.seconds, "notes": list(record.notes)}


def _line(records: Sequence[PassRecord]) -> str:
    """How often each pass fired, and how many things it left alone."""
    return ", ".join(f"{p.name} {p.fired}" + (f" ({len(p.notes)} left alone)" if p.notes else "") for p in records)


def _explained(report: BuildReport, explain: str) -> list[str]:
    """What the pass left alone and why, path by path."""
    lines: list[str] = []
    for path, records in {"": report.passes, **report.drafts}.items():
        for record in (record for record in records if record.name == explain):
            notes = record.notes or (f"{explain} left nothing alone",)
            lines += [f"{path}: {note}" if path else note for note in notes]
    if lines:
        return lines
    how = (
        "a recipe that drafts by the model itself has it" if explain == "speculate" else f"--set {explain}.enabled=true"
    )
    return [f"{explain} did not run: {how}"]
