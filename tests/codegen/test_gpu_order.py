"""Where programs of GEMM kernels have their tiles, and mixed weights' rows their code: read from the source."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from qcompile.codegen.triton import MULTIPROCESSORS, KernelSpec, Tile, render

LASTING = Tile(128, 128, 1, 1, 1, 8, 6, piece=128, lasting=True)


def functions(source: str, first: str, *names: str) -> dict[str, Any]:
    """What a kernel's source says from `first` on, and its functions `names`, for plain numbers."""
    known = SimpleNamespace(constexpr=int, minimum=min, maximum=max, where=lambda c, a, b: a if c else b)
    found: dict[str, Any] = {"tl": known, "TOKENS": 256, "PROGRAMS": MULTIPROCESSORS}
    blocks = source.split("\n\n\n")
    constants = source[source.index(first) :].split("\n\n\n")[0] if first else ""
    defined = [block for block in blocks if any(f"def {name}(" in block for name in names)]
    exec("\n".join((constants, *defined)).replace("@gluon.jit", ""), found)
    return found


def taken(source: str, tiles: int, high: int) -> list[tuple[int, int]]:
    """The tiles of tokens and of rows that a kernel's source gives programs (or turns), in order."""
    place = functions(source, "BAND = ", "place")["place"]
    return [place(tile, high) for tile in range(tiles)]


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


@pytest.mark.parametrize("n", [28672, 14336, 4096])
def test_the_last_tiles_are_halved_where_they_leave_most_programs_without_one(n: int) -> None:
    """Every token and row once; a program has whole tiles, then half of one at most."""
    lasting = Tile(256, 128, 1, 1, 1, 8, 1, piece=16, lasting=True)
    named = functions(render(KernelSpec("w4_asym_g128", n, 4096, lasting)), "BAND = ", "place", "items_of", "part")
    for high in (1, 2, 3, 4, 5, 9):
        whole, halved = named["items_of"](high)
        rest = high * n // 128 % MULTIPROCESSORS
        assert halved == (2 * rest if rest <= MULTIPROCESSORS // 2 else 0)
        assert not halved or (whole % MULTIPROCESSORS == 0 and halved <= MULTIPROCESSORS)
        found = [(*named["part"](item, whole, high), 256 if item < whole else 128) for item in range(whole + halved)]
        cells = sorted((pn, first + more) for first, pn, size in found for more in range(0, size, 128))
        assert cells == [(pn, 128 * half) for pn in range(n // 128) for half in range(2 * high)]


@pytest.mark.parametrize("gated", ["", "silu"])
def test_what_a_thread_has_of_rows_is_stored_together(gated: str) -> None:
    """Pairs of rows, or a gate and its up: rows g and g + 8 of 16, as the tensor cores have them, are a thread's."""
    options = {"gated": gated, "width": 2000} if gated else {}
    for tile in (Tile(256, 128, 1, 1, 1, 8, 1, piece=16), Tile(128, 256, 1, 1, 1, 8, 1, piece=32)):
        source = render(KernelSpec("w4_asym_g128", 4096, 4096, tile, **options))
        row_of = functions(source, "", "row_of")["row_of"]
        rows = [row_of(row) for row in range(tile.rows)]
        assert sorted(rows) == list(range(tile.rows))
        for row in range(tile.rows):
            if row % 16 < 8:
                assert rows[row + 8] - rows[row] == (16 if gated else 1)
        # The layout in which they are stored says the same, bit by bit.
        text = source[source.index("\nOUT = ") :].split("DistributedLinearLayout(")[1].split("\n")[0]
        items, lanes, warps, *_ = eval(f"[{text.removesuffix(')')}]")
        bits = [lanes[2], lanes[3], lanes[4], items[0], *warps, *(item for item in items[1:] if item[0])]
        assert [bit[0] for bit in bits] == [row_of(2**i) for i in range(len(bits))]
