"""Where programs of GEMM kernels have their tiles, and mixed weights' rows their code: read from the source."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from qcompile.codegen.gpu.gemm.render import render
from qcompile.codegen.gpu.gemm.spec import KernelSpec
from qcompile.codegen.gpu.gemm.tile import Tile
from qcompile.targets import TUNED_ON

PERSISTENT = Tile(128, 128, 1, 1, 1, 8, 6, unpack_k=128, persistent=True)


def functions(source: str, first: str, *names: str) -> dict[str, Any]:
    """What a kernel's source says from `first` on, and its functions `names`, for plain numbers."""
    known = SimpleNamespace(constexpr=int, minimum=min, maximum=max, where=lambda c, a, b: a if c else b)
    result: dict[str, Any] = {"tl": known, "TOKENS": 256, "PROGRAMS": TUNED_ON.multiprocessors}
    blocks = source.split("\n\n\n")
    constants = source[source.index(first) :].split("\n\n\n")[0] if first else ""
    defined = [block for block in blocks if any(f"def {name}(" in block for name in names)]
    exec("\n".join((constants, *defined)).replace("@gluon.jit", ""), result)
    return result


def taken(source: str, tiles: int, token_tiles: int) -> list[tuple[int, int]]:
    """The (pm, pn) of the tiles in the order of a kernel's source."""
    tile_coords = functions(source, "GROUP_M = ", "tile_coords")["tile_coords"]
    return [tile_coords(tile, token_tiles) for tile in range(tiles)]


@pytest.mark.parametrize(
    "spec",
    [
        KernelSpec("w4_asym_g128", 4096, 4096, Tile(256, 128, 1, 1, 2, 8, 1, unpack_k=16)),
        KernelSpec("w4_asym_g128_int8", 4096, 4096, PERSISTENT, x_groups=True),
        KernelSpec("w4_asym_g128_int8", 4096, 4096, replace(PERSISTENT, persistent=False, split_k=2), x_groups=True),
    ],
    ids=["overlapped", "persistent", "warp_specialized"],
)
def test_tiles_are_taken_in_groups(spec: KernelSpec) -> None:
    """Every tile once; programs that run together have few tokens and few rows between them."""
    source = render(spec)
    group = 1024 // spec.tile.tokens
    for token_tiles in (1, 3, group, group + 1, 4 * group):
        result = taken(source, token_tiles * 32, token_tiles)
        assert sorted(result) == [(pm, pn) for pm in range(token_tiles) for pn in range(32)]
        assert len({pm for pm, _ in result[: 32 * group]}) == min(token_tiles, group)
        assert len({pn for _, pn in result[: 4 * group]}) == max(4, -(-4 * group // token_tiles))
    # Those that copy, and each group of those that multiply, ask for themselves.
    calls = source.count("= tile_coords(tile, token_tiles)") + source.count(
        "= tile_coords(tl.program_id(1) * tl.num_programs(0) +"
    )
    assert calls == (3 if spec.tile.unpack_k == 128 else 1)
    few = KernelSpec("mxfp4", 4096, 4096, Tile(64, 64, 1, 1, 2, 4, 1, unpack_k=32))
    assert "tile_coords(" not in render(few)


def test_blocks_without_rows_of_8_bits_have_no_code_for_them() -> None:
    """And where a row is stored is known before it is needed; a thread stores one of those next to each other."""
    spec = KernelSpec("mix_4_8", 4160, 4096, PERSISTENT, width=4096, wide=448, x_groups=True)
    source = render(spec)
    for part in source.split("@gluon.jit\ndef consumer")[1:]:
        assert "tl.load(columns" not in part or part.index("tl.load(columns") < part.index("in range(GROUPS)")
    assert (
        source.count("tl.load(columns") == 2 and "OUT_LAYOUT = tl.constexpr(tl.BlockedLayout([1, 1], [32, 1]" in source
    )
    assert "ws.index(stage * 2 + 0), x_t" in source and "ws.index(stage * 2 + 1), x_t" not in source
    assert "ep0" in source and "ep1" not in source
    many = render(replace(spec, wide=2176))
    assert "ws.index(stage * 2 + 1), x_t" in many and "ep1" in many
    # Blocks 0 to 32 are the first of a program's two.
    assert "ep1" not in render(replace(spec, wide=2112))


@pytest.mark.parametrize("n", [28672, 14336, 4096])
def test_the_last_tiles_are_halved_where_they_leave_most_programs_without_one(n: int) -> None:
    """Every token and row once; a program has whole tiles, then half of one at most."""
    persistent = Tile(256, 128, 1, 1, 1, 8, 1, unpack_k=16, persistent=True)
    named = functions(
        render(KernelSpec("w4_asym_g128", n, 4096, persistent)),
        "GROUP_M = ",
        "tile_coords",
        "item_counts",
        "item_coords",
    )
    for token_tiles in (1, 2, 3, 4, 5, 9):
        whole, halved = named["item_counts"](token_tiles)
        rest = token_tiles * n // 128 % TUNED_ON.multiprocessors
        assert halved == (2 * rest if rest <= TUNED_ON.multiprocessors // 2 else 0)
        assert not halved or (whole % TUNED_ON.multiprocessors == 0 and halved <= TUNED_ON.multiprocessors)
        result = [
            (*named["item_coords"](item, whole, token_tiles), 256 if item < whole else 128)
            for item in range(whole + halved)
        ]
        cells = sorted((pn, first + more) for first, pn, size in result for more in range(0, size, 128))
        assert cells == [(pn, 128 * half) for pn in range(n // 128) for half in range(2 * token_tiles)]


@pytest.mark.parametrize("gated", ["", "silu"])
def test_what_a_thread_has_of_rows_is_stored_together(gated: str) -> None:
    """Pairs of rows, or a gate and its up: rows g and g + 8 of 16, as the tensor cores have them, are a thread's."""
    options = {"gated": gated, "width": 2000} if gated else {}
    for tile in (Tile(256, 128, 1, 1, 1, 8, 1, unpack_k=16), Tile(128, 256, 1, 1, 1, 8, 1, unpack_k=32)):
        source = render(KernelSpec("w4_asym_g128", 4096, 4096, tile, **options))
        permuted_row = functions(source, "", "permuted_row")["permuted_row"]
        rows = [permuted_row(row) for row in range(tile.rows)]
        assert sorted(rows) == list(range(tile.rows))
        for row in range(tile.rows):
            if row % 16 < 8:
                assert rows[row + 8] - rows[row] == (16 if gated else 1)
        # The layout in which they are stored says the same, bit by bit.
        text = source[source.index("\nOUT_LAYOUT = ") :].split("DistributedLinearLayout(")[1].split("\n")[0]
        items, lanes, warps, *_ = eval(f"[{text.removesuffix(')')}]")
        bits = [lanes[2], lanes[3], lanes[4], items[0], *warps, *(item for item in items[1:] if item[0])]
        assert [bit[0] for bit in bits] == [permuted_row(2**i) for i in range(len(bits))]
