"""Tables of tuned tiles: the data files tiles_h200.json and expert_tiles_h200.json, read and checked.

A file states the GPU, the tool that measured it (benchmarks/gpu_tune.py or gpu_tune_experts.py) and the dates. Each
entry is one line: a kernel format, a class of M (`most_tokens`, its largest M), the shape [n, k], the fastest tile, and
the measured time in `us`, of `measured_tokens` rows where that is not the class's largest M. An entry without a time
was chosen by the time of a whole step, in which kernels overlap. The table of experts has one time for each number of
rows that the tool measures for the class.

Integer accumulators are exact with any tile, so their formats have entries of their own for M up to 8, and for 1 to 4.
Where floats add up integer sums of whole groups, the GEMV kernel sums in the same order, so those formats have such
entries too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from qcompile.codegen.gpu.gemm.tile import Tile

_ALWAYS = ("tokens", "rows", "unroll", "warps", "stages")
"""Fields of a tile that every entry states; the others only where they are not the default."""


class TunedFor(NamedTuple):
    """What a tile was tuned for: a weight [n, k] in a kernel format, and steps of up to `most_tokens` rows."""

    format: str
    most_tokens: int
    n: int
    k: int


@dataclass(frozen=True)
class TileTable:
    """Tuned tiles by what they were tuned for.

    `similar_formats` are, for formats that were not tuned (for some classes of M), those with about as many bytes a
    step. Their tiles are used.
    """

    gpu: str
    tool: str
    measured: str
    similar_formats: Mapping[str, tuple[str, ...]]
    tiles: Mapping[TunedFor, Tile]

    def sources(self, format: str) -> tuple[str, ...]:
        """The formats with tiles for `format`: itself, then similar ones."""
        return format, *self.similar_formats.get(format, ())

    def by_distance(self, format: str, most_tokens: int, n: int, k: int) -> list[tuple[tuple[int, int], Tile]]:
        """Shapes tuned for a format and class, and their tiles: the nearest to [n, k] by logarithms first."""
        own = [((of.n, of.k), tile) for of, tile in self.tiles.items() if of[:2] == (format, most_tokens)]
        return sorted(own, key=lambda each: abs(math.log(each[0][0] / n)) + abs(math.log(each[0][1] / k)))


@cache
def load_table(name: str) -> TileTable:
    """The table in the file `name`.json beside this module. ValueError naming the entry that is not well formed."""
    path = Path(__file__).with_name(f"{name}.json")
    return parse_table(path.read_text(encoding="utf-8"))


def parse_table(text: str) -> TileTable:
    """The table that a data file states. ValueError naming the entry that is not well formed."""
    data = json.loads(text)
    if unknown := data.keys() ^ {"gpu", "tool", "measured", "similar_formats", "entries"}:
        raise ValueError(f"a table of tiles has other fields, or lacks some: {', '.join(sorted(unknown))}")
    tiles: dict[TunedFor, Tile] = {}
    for entry in data["entries"]:
        tuned_for, tile = _parse_entry(entry)
        if tuned_for in tiles:
            raise ValueError(f"{tuned_for} has two tiles")
        tiles[tuned_for] = tile
    similar = {name: tuple(others) for name, others in data["similar_formats"].items()}
    known = {tuned_for.format for tuned_for in tiles}
    if missing := {other for others in similar.values() for other in others} - known:
        raise ValueError(f"similar formats without tiles: {', '.join(sorted(missing))}")
    return TileTable(data["gpu"], data["tool"], data["measured"], similar, tiles)


def _parse_entry(entry: dict[str, Any]) -> tuple[TunedFor, Tile]:
    known = {*TunedFor._fields, "tile", "us", "measured_tokens"}
    stated = entry.get("tile", {})
    types = {field.name: bool if isinstance(field.default, bool) else int for field in fields(Tile)}
    whole = entry.keys() <= known and {*TunedFor._fields, "tile"} <= entry.keys()
    if not whole or not set(_ALWAYS) <= stated.keys() <= types.keys():
        raise ValueError(f"an entry has other fields, or lacks some: {entry}")
    wrong = [name for name, value in stated.items() if type(value) is not types[name]]
    if wrong or any(type(entry[name]) is not int or entry[name] <= 0 for name in ("most_tokens", "n", "k")):
        raise ValueError(f"an entry has fields of another type: {entry}")
    if not all(us > 0 for us in entry.get("us", ())):
        raise ValueError(f"an entry has a time that is not positive: {entry}")
    return TunedFor(*(entry[name] for name in TunedFor._fields)), Tile(**stated)


def entry_line(tuned_for: TunedFor, tile: Tile, us: Iterable[float] = (), measured_tokens: int = 0) -> str:
    """An entry as it is written in a table's file, to be separated by commas."""
    defaults = {field.name: field.default for field in fields(tile) if field.default is not MISSING}
    stated = {name: value for name, value in asdict(tile).items() if name in _ALWAYS or value != defaults.get(name)}
    entry: dict[str, Any] = {**tuned_for._asdict(), "tile": stated}
    if times := [round(each, 1) for each in us]:
        entry["us"] = times
    if measured_tokens not in (0, tuned_for.most_tokens):
        entry["measured_tokens"] = measured_tokens
    return json.dumps(entry)
