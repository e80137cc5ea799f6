"""What `qcompile build` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qcompile import console

if TYPE_CHECKING:
    from qcompile.pipeline import BuildReport


def print_build(report: BuildReport, recipe: str, target: str, explain: str | None, json: bool) -> None:
    """What was built, pass by pass; with `explain`, what that pass left alone and why."""
    size = sum(path.stat().st_size for path in report.path.rglob("*") if path.is_file())
    passes = [{"name": p.name, "fired": p.fired, "seconds": p.seconds, "notes": list(p.notes)} for p in report.passes]
    if json:
        console.print_json(
            {
                "path": str(report.path),
                "recipe": recipe,
                "target": target,
                "bits_per_weight": report.bits_per_weight,
                "passes": passes,
                "seconds": report.seconds,
                "bytes": size,
            }
        )
        return
    left = [f" ({len(p.notes)} left alone)" if p.notes else "" for p in report.passes]
    print(", ".join(f"{p.name} {p.fired}{more}" for p, more in zip(report.passes, left, strict=True)))
    facts = f"{console.byte_size(size)}, {report.bits_per_weight:.2f} bits per weight"
    if explain is not None and explain not in [p.name for p in report.passes]:
        print(f"{explain} did not run: --set {explain}.enabled=true")
    for p in report.passes:
        if p.name == explain:
            print("\n".join(p.notes) or f"{p.name} left nothing alone")
    print(f"{report.path}: {facts}, built in {sum(report.seconds.values()):.1f} s")
