"""Where programs of GEMM kernels have their tiles, and mixed weights' rows their code: read from the source."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from qcompile.codegen.triton import KernelSpec, Tile, render

LASTING = Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True)


def taken(source: str, tiles: int, high: int) -> list[tuple[int, int]]:
    """The tiles of tokens and of rows that a kernel's source gives programs (or turns), in order."""
    names: dict[str, Any] = {"tl": SimpleNamespace(constexpr=int, minimum=min)}
    found = source[source.index("BAND = ") :].split("\n\n\n")[:2]
    exec("\n".join(found).replace("@gluon.jit", ""), names)
    return [names["place"](tile, high) for tile in range(tiles)]


@pytest.mark.parametrize(
    "spec",
    [
        KernelSpec("w4_asym_g128", 4096, 4096, Tile(256, 128, 1, 1, 2, 8, 1, piece=16)),
        KernelSpec("w4_asym_g128_int8", 4096, 4096, LASTING, x_groups=True),
        KernelSpec("w4_asym_g128_int8", 4096, 4096, replace(LASTING, lasting=False, splits=2), x_groups=True),
    ],
    ids=["wide", "lasting", "apart"],
)
def test_tiles_are_taken_in_bands(spec: KernelSpec) -> None:
    """Every tile once; programs that run together have few tokens and few rows between them."""
    source = render(spec)
    band = 1024 // spec.tile.tokens
    for high in (1, 3, band, band + 1, 4 * band):
        found = taken(source, high * 32, high)
        assert sorted(found) == [(pm, pn) for pm in range(high) for pn in range(32)]
        assert len({pm for pm, _ in found[: 32 * band]}) == min(high, band)
        assert len({pn for _, pn in found[: 4 * band]}) == max(4, -(-4 * band // high))
    # Those that copy, and each group of those that multiply, ask for themselves.
    calls = source.count("= place(tile, high)") + source.count("= place(tl.program_id(1) * tl.num_programs(0) +")
    assert calls == (3 if spec.tile.piece == 128 else 1)
    few = KernelSpec("mxfp4", 4096, 4096, Tile(64, 64, 1, 1, 2, 4, 1, piece=32))
    assert "place(" not in render(few)


def test_blocks_without_rows_of_8_bits_have_no_code_for_them() -> None:
    """And where a row is stored is known before it is needed; a thread stores one of those next to each other."""
    spec = KernelSpec("mix_4_8", 4160, 4096, LASTING, width=4096, wide=448, x_groups=True)
    source = render(spec)
    for part in source.split("@gluon.jit\ndef multiply")[1:]:
        assert "tl.load(columns" not in part or part.index("tl.load(columns") < part.index("in range(GROUPS)")
    assert source.count("tl.load(columns") == 2 and "OUT = tl.constexpr(tl.BlockedLayout([1, 1], [32, 1]" in source
    assert "ws.index(slot * 2 + 0), turned" in source and "ws.index(slot * 2 + 1), turned" not in source
    assert "ep0" in source and "ep1" not in source
    many = render(replace(spec, wide=2176))
    assert "ws.index(slot * 2 + 1), turned" in many and "ep1" in many
    # Blocks 0 to 32 are the first of a program's two.
    assert "ep1" not in render(replace(spec, wide=2112))
