"""The commands `cache list`, `cache remove` and `cache path`: what builds have left in the user's cache."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from qcompile.artifact import kept
from qcompile.cli import console
from qcompile.cli.options import Json, command
from qcompile.errors import UsageError, suggestion
from qcompile.user_cache import cache_dir

_DAY = 86_400


@command
def path(json: Json = False) -> None:
    """Print the folder of the cache.

    \b
    Example:
      du -sh $(qcompile cache path)
    """
    if json:
        console.print_json({"path": str(cache_dir())})
    else:
        print(cache_dir())


@command
def list_(json: Json = False) -> None:
    """List the artifacts that commands have built from models, the last used first, and the size of the rest.

    \b
    Example:
      qcompile cache list
    """
    entries = [_entry(place) for place in kept.places()]
    rest = kept.folder_bytes(cache_dir()) - sum(entry["bytes"] for entry in entries)
    if json:
        console.print_json({"path": str(cache_dir()), "artifacts": entries, "kernels_and_traces_bytes": max(rest, 0)})
        return
    rows = [
        [
            entry["name"],
            str(entry["about"].get("recipe", "")) if entry["ready"] else "(being built)",
            str(entry["about"].get("target", "")),
            console.byte_size(entry["bytes"]),
            _ago(entry["last_used"]),
        ]
        for entry in entries
    ]
    console.show(
        console.table(["artifact", "recipe", "target", "size", "used"], rows, words=("recipe", "target", "used"))
    )
    print(f"kernels and traces, for quicker builds: {console.byte_size(max(rest, 0))}")


@command
def remove(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Artifacts or models, by their names in `cache list`."),
    ] = None,
    unused: Annotated[
        int | None, typer.Option("--unused", min=0, metavar="DAYS", help="Remove what was not used for DAYS days.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove everything, kernels and traces of models as well.")
    ] = False,
    json: Json = False,
) -> None:
    """Delete artifacts from the cache. They are built again when they are needed.

    \b
    Example:
      qcompile cache remove pycode-26m
      qcompile cache remove --unused 30
    """
    if sum(map(bool, (names, unused is not None, everything))) != 1:
        raise UsageError("say what to remove: names as `qcompile cache list` shows them, --unused DAYS, or --all")
    chosen = kept.places() if everything else _chosen(names or (), unused)
    sizes = {place: place.bytes for place in chosen}
    removed = [place for place in chosen if place.remove()]
    for place in (place for place in chosen if place not in removed):
        console.log(f"qcompile: {place.folder.name} is being built, so it stays")
    freed = sum(sizes[place] for place in removed)
    if everything:
        freed += _remove_rest()
    if json:
        console.print_json({"removed": [place.folder.name for place in removed], "bytes": freed})
    else:
        print(f"{console.counted(len(removed), 'artifact')} removed, {console.byte_size(freed)}")


def _chosen(names: list[str] | tuple[()], unused: int | None) -> list[kept.KeptArtifact]:
    """The artifacts with these names, or those that were not used for `unused` days. UsageError for unknown names."""
    there = kept.places()
    if unused is not None:
        return [place for place in there if place.last_used <= time.time() - unused * _DAY]
    known = {name for place in there for name in _names(place)}
    for name in names:
        if name not in known:
            raise UsageError(f"the cache has no {name}{suggestion(name, known)}")
    return [place for place in there if _names(place) & set(names)]


def _names(place: kept.KeptArtifact) -> set[str]:
    """The names by which an artifact may be removed: its own, and its model's."""
    return {place.folder.name, str(place.about.get("model", place.folder.name))}


def _entry(place: kept.KeptArtifact) -> dict[str, Any]:
    """What `cache list --json` says of an artifact."""
    return {
        "name": place.folder.name,
        "path": str(place.artifact),
        "about": place.about,
        "ready": place.ready,
        "bytes": place.bytes,
        "last_used": place.last_used,
    }


def _remove_rest() -> int:
    """Delete kernels, traces and hashes; returns their bytes. What cannot be deleted stays."""
    before = kept.folder_bytes(cache_dir())
    for entry in _rest():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with suppress(OSError):
                entry.unlink()
    return before - kept.folder_bytes(cache_dir())


def _rest() -> list[Path]:
    """The entries of the cache that are not artifacts, by the names that they have."""
    try:
        entries = list(cache_dir().iterdir())
    except OSError:
        return []
    return [
        entry
        for entry in entries
        if entry.name in ("traces", "identities", "durations") or entry.suffix in (".so", ".json")
    ]


def _ago(moment: float) -> str:
    """`today`, `3 days ago`."""
    days = int((time.time() - moment) // _DAY)
    return "today" if days < 1 else f"{console.counted(days, 'day')} ago"
