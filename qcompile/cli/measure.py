"""The commands that measure an artifact: `eval`, `bench` and `tune`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from qcompile import texts
from qcompile.artifact.layout import SIGNATURE
from qcompile.cli import console, launching
from qcompile.cli.models import artifact_to_load, opened
from qcompile.cli.options import (
    Adapting,
    Artifact,
    Building,
    DraftedLoading,
    Json,
    Loading,
    LoadTest,
    Source,
    Speeds,
    changed,
    command,
)
from qcompile.errors import ResourceError, UsageError


@command
def evaluate(
    out: Source,
    data: Annotated[Path, typer.Option("--data", metavar="FILE", help='JSON lines with a "text" field.')],
    building: Building,
    loading: Loading,
    adapting: Adapting,
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
      qcompile eval out/pycode --data samples/heldout.jsonl --json
    """
    texts.check(data, tables=True)
    adapter, more = adapting.chosen(), {"lora": adapting.named(), "gamma": 0}
    with opened(out, building, loading, **more) as (llm, _), console.Progress() as progress:
        done = partial(progress, "windows")
        result = llm.perplexity(data, window, done, max_windows, lora=adapter)
    if json:
        console.print_json(asdict(result))
    else:
        windows = f"{console.counted(result.windows, 'window')} of {result.window} tokens"
        console.show(f"perplexity {result.perplexity:.4f} ({windows}, {result.tokens} predictions)")


@command
def bench(
    out: Annotated[
        str, typer.Argument(metavar="MODEL|OUT|URL", help="Model or artifact, or with --serve a server's URL.")
    ],
    speeds: Speeds,
    load: LoadTest,
    building: Building,
    loading: DraftedLoading,
    adapting: Adapting,
    json: Json = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help='Print one line {"test", "tok_s"} per measurement, or per level.')
    ] = False,
) -> None:
    """Measure speed, what drafts gain, and every kernel against the memory and compute limits of this machine.

    With --serve, measure a server while many clients ask at once.

    \b
    Example:
      qcompile bench out/pycode --threads 2 --tg 64 --pp 128,512 --verify 1,2,4,8
      qcompile bench --serve out/pycode --concurrency 1,4,16 --slo ttft=200ms,itl=50ms
      qcompile bench --serve http://127.0.0.1:8000 --rate 1,2,4 --plot load.svg
    """
    _check_kind(load, speeds, out)
    adapter = adapting.chosen()
    if load.serve:
        try:
            from qcompile.cli.load_test import command as load_test
        except ModuleNotFoundError as error:
            raise ResourceError(f"--serve needs {error.name}: pip install 'qcompile[bench]'") from error
        load_test.check(out, load, loading, building, adapting)  # before anything is built
        if not load_test.is_url(out):
            launching.check_alone("--serve", loading.tensor_parallel_size)
            out = str(artifact_to_load(out, building, loading).path)
        load_test.run(out, load, loading, adapting, json, jsonl)
        return
    from qcompile.cli import bench as benchmark
    from qcompile.cli import bench_drafts

    lengths = console.numbers("--pp", speeds.pp), console.numbers("--verify", speeds.verify)
    sizes = benchmark.Sizes(speeds.tg, *lengths, speeds.repeats, adapter)
    with opened(out, building, loading, lora=adapting.named()) as (llm, artifact), console.Progress() as progress:
        measured = benchmark.measure(llm, sizes, progress)
        drafts = bench_drafts.measure(llm, load.prompts, sizes, progress)
        if drafts:
            measured[f"drafted{sizes.tg}"] = drafts["drafted_tokens_per_second"]
        if jsonl:
            for test, speed in measured.items():
                console.print_json_line({"test": test, "tok_s": speed})
            return
        result = benchmark.report(llm, artifact.path, sizes, measured, progress)
    if drafts:
        result["drafts"] = drafts
    if json:
        console.print_json(result)
        return
    console.show(benchmark.as_text(result))
    if drafts:
        console.show(f"\n{bench_drafts.as_text(drafts)}")


def _check_kind(load: LoadTest, speeds: Speeds, out: str) -> None:
    """Raise UsageError for options of the other kind of measurement."""
    if load.serve:
        wrong, why = changed(speeds), "is not measured with --serve"
    else:
        wrong, why = changed(load, "api_key", "prompts"), "needs --serve"
        if "://" in out:
            raise UsageError(f"{out} is a server's URL: measure it with --serve")
    if wrong:
        raise UsageError(f"--{wrong.replace('_', '-')} {why}")


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
      qcompile tune out/fast --data samples/prompts.jsonl
    """
    from qcompile.cli import tune as tuning

    with console.Progress() as progress:
        table = tuning.tune(out, data, tokens, progress, **loading.arguments())
    if (out / SIGNATURE).exists():
        console.note(f"qcompile: the signature of {out} was of the artifact before this: sign it again")
    if json:
        console.print_json(table)
    else:
        console.show(tuning.as_text(table))
