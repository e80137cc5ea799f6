"""Data files of tuned tiles: what they state, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qcompile.codegen.gpu.gemm import tile_table
from qcompile.codegen.gpu.gemm.spec import KernelSpec
from qcompile.codegen.gpu.gemm.tile import Tile
from qcompile.codegen.gpu.gemm.tile_table import TunedFor, entry_line, load_table, parse_table

NAMES = ("tiles_h200", "expert_tiles_h200")
ENTRY: dict[str, Any] = {
    **{"format": "bf16", "most_tokens": 32, "n": 4096, "k": 4096},
    "tile": {"tokens": 32, "rows": 64, "unroll": 1, "warps": 4, "stages": 4},
}


def table(*entries: dict[str, Any], **more: Any) -> str:
    head = {"gpu": "NVIDIA H200", "tool": "tool.py", "measured": "2026-11-26", "similar_formats": {}}
    return json.dumps({**head, "entries": entries, **more})


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_a_line_for_each_entry_as_tools_write_it(name: str) -> None:
    text = Path(tile_table.__file__).with_name(f"{name}.json").read_text(encoding="utf-8")
    entries = json.loads(text)["entries"]
    lines = [line.strip().removesuffix(",") for line in text.splitlines() if '"tile"' in line]
    written = [
        entry_line(tuned_for, tile, entry.get("us", ()), entry.get("measured_tokens", 0))
        for (tuned_for, tile), entry in zip(load_table(name).tiles.items(), entries, strict=True)
    ]
    assert lines == written


def test_each_tuned_tile_has_a_kernel_for_its_shape() -> None:
    for of, tile in load_table("tiles_h200").tiles.items():
        KernelSpec(of.format, of.n, of.k, tile, width=of.n)


def test_the_nearest_shape_is_first() -> None:
    shapes = [shape for shape, _ in load_table("tiles_h200").by_distance("mxfp4", 16, 6000, 4100)]
    assert shapes[0] == (6144, 4096) and len(shapes) == 5


def test_an_entry_states_a_tile_and_its_time() -> None:
    tile = Tile(16, 64, split_k=4, stages=6, unpack_k=128, token_halves=True)
    line = entry_line(TunedFor("mxfp4", 16, 4096, 4096), tile, [7.04], 8)
    entry = json.loads(line)
    assert entry["us"] == [7.0] and entry["measured_tokens"] == 8
    assert dict(parse_table(table(entry)).tiles) == {TunedFor("mxfp4", 16, 4096, 4096): tile}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (table(ENTRY, ENTRY), "two tiles"),
        (table(ENTRY, author="x"), "other fields, or lacks some: author"),
        (table(ENTRY | {"speed": 1}), "other fields"),
        (table({name: value for name, value in ENTRY.items() if name != "k"}), "lacks some"),
        (table(ENTRY | {"tile": ENTRY["tile"] | {"wraps": 4}}), "other fields"),
        (table(ENTRY | {"tile": {"tokens": 32, "rows": 64}}), "lacks some"),
        (table(ENTRY | {"tile": ENTRY["tile"] | {"persistent": 1}}), "another type"),
        (table(ENTRY | {"tile": ENTRY["tile"] | {"warps": "4"}}), "another type"),
        (table(ENTRY | {"n": 0}), "another type"),
        (table(ENTRY | {"us": [0.0]}), "not positive"),
        (table(ENTRY, similar_formats={"nested_8_4": ["qoq_g128"]}), "without tiles: qoq_g128"),
    ],
)
def test_malformed_tables_are_refused(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_table(text)
