"""`bench --serve` from the command line: its options as a plan, and what it prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from qcompile.artifact.layout import MANIFEST
from qcompile.cli import console, plot_files
from qcompile.cli.load_test import plot, server
from qcompile.cli.load_test.campaign import Plan, measure
from qcompile.cli.load_test.figures import limits
from qcompile.cli.load_test.level import Level
from qcompile.cli.load_test.text import as_text
from qcompile.cli.load_test.workload import Lengths
from qcompile.cli.options import Adapting, Building, DraftedLoading, LoadTest, changed
from qcompile.errors import UsageError

_LEVELS = "1,4,16"
_SERVED_BATCH = 16
"""The batch of `serve` by default; a larger one is started for more clients."""
_WAITING = 100_000
"""Samples that may wait at a server that this command starts: none shall be refused."""


def plan(options: LoadTest) -> Plan:
    """What to measure. Raises UsageError that names the option."""
    rates = _rates(options.rate)
    clients = console.numbers("--concurrency", options.concurrency or ("" if rates else _LEVELS))
    common = options.seconds, options.requests
    levels = [Level(*common, concurrency=each) for each in clients]
    levels += [Level(*common, rate=each, seed=options.seed) for each in rates]
    if options.plot is not None:
        plot_files.check(options.plot)
    if options.prompts is not None and options.shared_prefix:
        raise UsageError("--shared-prefix needs prompts of --input-tokens: a file of prompts has its own")
    return Plan(
        tuple(levels),
        Lengths.of("--input-tokens", options.input_tokens),
        Lengths.of("--output-tokens", options.output_tokens),
        options.shared_prefix,
        options.prompts,
        options.chat,
        options.warmup,
        limits(options.slo),
        options.timeout,
        options.seed,
    )


def _rates(text: str) -> tuple[float, ...]:
    """`0.5,2` as numbers of requests per second."""
    try:
        rates = tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        raise UsageError(f"--rate {text}: write requests per second with commas between, as 0.5,2") from None
    if not all(0 < rate <= 1e6 for rate in rates):
        raise UsageError(f"--rate {text}: rates must be above 0, and at most a million")
    return rates


def is_url(out: str) -> bool:
    """Whether `bench --serve` is given a running server."""
    return re.match(r"[a-z]+://", out) is not None


def check(out: str, options: LoadTest, loading: DraftedLoading, building: Building, adapting: Adapting) -> None:
    """Raise UsageError for options that are wrong, or do not belong to what is measured: a server or a model."""
    plan(options)
    if is_url(out):
        server.root_of(out)
        if unused := building.given():
            raise UsageError(f"{unused} is for models: a server that runs has its own")
        if (wrong := changed(loading) or changed(adapting)) is not None:
            raise UsageError(f"--{wrong.replace('_', '-')} is for an artifact: a server that runs has its own options")
    elif building.rebuild and (Path(out) / MANIFEST).is_file():
        raise UsageError("--rebuild: start `qcompile serve --rebuild` of the artifact first, and give bench its URL")
    elif options.model is not None:
        raise UsageError("--model is for a server that runs: an artifact has one model")


def run(out: str, options: LoadTest, loading: DraftedLoading, adapting: Adapting, json: bool, jsonl: bool) -> None:
    """Measure the server at a URL, or one that is started for an artifact, and print the report."""
    asked = plan(options)
    with console.Progress() as progress:
        progress("starting", 0, 1)
        with _server(out, asked, options, loading, adapting) as (url, model):
            report = measure(
                asked,
                url,
                model,
                options.api_key if is_url(out) else None,
                progress,
                console.print_json_line if jsonl else lambda level: None,
            )
    if options.plot is not None:
        plot.draw(report, options.plot)
    if json:
        console.print_json(report)
    elif not jsonl:
        print(as_text(report))


@contextmanager
def _server(
    out: str, asked: Plan, options: LoadTest, loading: DraftedLoading, adapting: Adapting
) -> Iterator[tuple[str, str | None]]:
    """The root of the server, and its model's name if it is given."""
    if is_url(out):
        yield server.root_of(out), options.model
        return
    with server.started(out, _serve_options(asked, loading, adapting)) as ready:
        yield ready["url"], adapting.chosen() or ready["model"]


def _serve_options(asked: Plan, loading: DraftedLoading, adapting: Adapting) -> Sequence[str]:
    """Options of `serve` for the server that is started."""
    batch = max(_SERVED_BATCH, *(level.concurrency for level in asked.levels))
    given: list[Any] = ["--max-batch", batch, "--max-waiting", _WAITING]
    for option in fields(loading):
        value = getattr(loading, option.name)
        if value != option.default:
            given += [f"--{option.name.replace('_', '-')}", value]
    for adapter in adapting.lora or ():
        given += ["--lora", adapter]
    return [str(part) for part in given]
