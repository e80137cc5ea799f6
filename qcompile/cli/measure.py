"""The commands that measure an artifact: `eval`, `bench` and `tune`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from qcompile import texts
from qcompile.cli import console
from qcompile.cli.options import Artifact, Json, Loading, Speeds, command


@command
def evaluate(
    out: Artifact,
    data: Annotated[Path, typer.Option("--data", metavar="FILE", help='JSON lines with a "text" field.')],
    loading: Loading,
    max_windows: Annotated[
        int | None, typer.Option("--max-windows", min=1, metavar="N", help="Stop after N windows.")
    ] = None,
    window: Annotated[
        int, typer.Option("--window", min=2, metavar="TOKENS", help="Tokens per window, at most the context length.")
    ] = 2048,
    json: Json = False,
) -> None:
    """Measure perplexity on documents, joined and cut into non-overlapping windows.

    \b
    Example:
      qcompile eval out/pycode --data heldout.jsonl --json
    """
    texts.check(data)
    with loading.load(out, gamma=0) as llm, console.Progress() as progress:
        result = llm.perplexity(data, window, lambda done, total: progress("windows", done, total), max_windows)
    if json:
        console.print_json(asdict(result))
    else:
        windows = f"{console.counted(result.windows, 'window')} of {result.window} tokens"
        print(f"perplexity {result.perplexity:.4f} ({windows}, {result.tokens} predictions)")


@command
def bench(
    out: Artifact,
    speeds: Speeds,
    loading: Loading,
    json: Json = False,
    jsonl: Annotated[bool, typer.Option("--jsonl", help='Print one line {"test", "tok_s"} per measurement.')] = False,
) -> None:
    """Measure speed, and compare every kernel with the memory and compute limits of this machine.

    \b
    Example:
      qcompile bench out/pycode --threads 2 --tg 64 --pp 128,512 --verify 1,2,4,8
    """
    from qcompile.cli import bench as benchmark

    lengths = console.numbers("--pp", speeds.pp), console.numbers("--verify", speeds.verify)
    sizes = benchmark.Sizes(speeds.tg, *lengths, speeds.repeats)
    with loading.load(out, gamma=0) as llm, console.Progress() as progress:
        measured = benchmark.measure(llm, sizes, progress)
        if jsonl:
            for test, speed in measured.items():
                console.print_json_line({"test": test, "tok_s": speed})
            return
        result = benchmark.report(llm, out, sizes, measured, progress)
    if json:
        console.print_json(result)
    else:
        print(benchmark.as_text(result))


@command
def tune(
    out: Artifact,
    loading: Loading,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", help='JSON lines with a "prompt" or "text" field.')
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=8, metavar="N", help="Tokens per measurement.")] = 48,
    json: Json = False,
) -> None:
    """Measure cost and acceptance of drafts on this machine, and store them in the artifact for `--gamma auto`.

    \b
    Example:
      qcompile tune out/fast --data prompts.jsonl
    """
    from qcompile.cli import tune as tuning

    with console.Progress() as progress:
        table = tuning.tune(out, data, tokens, progress, **loading.arguments())
    if json:
        console.print_json(table)
    else:
        print(tuning.as_text(table))
