"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Artifact = Annotated[Path, typer.Argument(metavar="OUT", help="Artifact directory written by `qcompile build`.")]
Remote = Annotated[bool, typer.Option("--allow-remote-code", help="Allow Python code of the checkpoint to run.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, metavar="N", help="CPU threads. Default: one per core this process may use."),
]
Gamma = Annotated[
    str, typer.Option("--gamma", metavar="N|auto", help="Tokens to draft per round, at most 15; 0 turns drafting off.")
]
GpuShare = Annotated[
    float, typer.Option("--gpu-memory-utilization", metavar="SHARE", help="Share of the GPU's memory to use, up to 1.")
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--prefix-caching/--no-prefix-caching",
        help="Whether prompts that begin like earlier ones go on from their KV cache.",
    ),
]
CacheBytes = Annotated[
    int | None,
    typer.Option(
        "--kv-cache-bytes",
        min=1,
        metavar="N",
        help="KV cache size. Default: what a full batch needs, up to a quarter of free memory (GPU: its memory share).",
    ),
]
Drafts = Annotated[
    list[str] | None,
    typer.Option(
        "--draft", metavar="MODEL", help="Draft model, or `lookup`; repeatable: each drafts for the one before."
    ),
]
Recipe = Annotated[str, typer.Option("--recipe", metavar="NAME", help="Number formats (see docs/recipes.md).")]
Target = Annotated[str, typer.Option("--target", metavar="NAME", help="Target to compile for; `cpu` is this machine.")]
Head = Annotated[
    str | None,
    typer.Option("--head-dtype", metavar="TYPE", help="Output head: int8, nested, bf16 or f32. Default: the recipe's."),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PASS.FIELD=VALUE", help="Set a field of a pass (see `qcompile passes`); repeatable."
    ),
]
