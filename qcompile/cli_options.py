"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Artifact = Annotated[Path, typer.Argument(metavar="OUT", help="An artifact made by `qcompile build`.")]
Remote = Annotated[bool, typer.Option("--allow-remote-code", help="Run Python code that the checkpoint brings along.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, metavar="N", help="Threads; the cores this process may use if not given."),
]
Gamma = Annotated[
    str, typer.Option("--gamma", metavar="N|auto", help="Tokens drafted at once; 0 leaves the artifact's drafts out.")
]
GpuShare = Annotated[
    float, typer.Option("--gpu-memory-utilization", metavar="SHARE", help="Most of a GPU's memory to take, up to 1.")
]
CacheBytes = Annotated[
    int | None,
    typer.Option(
        "--kv-cache-bytes",
        min=1,
        metavar="N",
        help="Memory for keys and values; else what the batch needs, at most a quarter of what is free.",
    ),
]
Drafts = Annotated[
    list[str] | None,
    typer.Option("--draft", metavar="MODEL", help="A model that drafts, or `lookup`; each drafts for the one before."),
]
Recipe = Annotated[str, typer.Option("--recipe", metavar="NAME", help="Number formats (see README).")]
Target = Annotated[str, typer.Option("--target", metavar="NAME", help="Machine to build for; `cpu` is this one.")]
Head = Annotated[str | None, typer.Option("--head-dtype", metavar="TYPE", help="Output head in int8, bf16 or f32.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PASS.FIELD=VALUE", help="Set a field of a pass; may be given several times."),
]
