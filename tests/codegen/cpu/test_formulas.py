"""Kernels of formulas that models write out (formulas.h), at sizes that are no multiples of a vector."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from qcompile.codegen.calls import Combine, Elementwise, Embed, Mean
from qcompile.formats.blocks import as_blob
from tests.support.columns import Case, Columns

WIDTH, HEADS = 40, 5
SLOTS, RESULTS = 2, 3
TABLE = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(4))
WEIGHTS = torch.randn(WIDTH, RESULTS * SLOTS, generator=torch.Generator().manual_seed(5))
TOKENS = [3, 1, 39, 1, 0]
X = TABLE[TOKENS].double()
POWERS = {2.0: X**2, 0.5: X.abs() ** 0.5, -0.5: X.abs() ** -0.5, -1.0: 1 / X}
WANTED = {f"power {exponent}": value for exponent, value in POWERS.items()} | {
    "mean": X.mean(-1, keepdim=True),
    "mean of columns": X[:, 3:20].mean(-1, keepdim=True),
    "means of heads": X.unflatten(-1, (HEADS, -1)).mean(-1),
    "add_row": X + X.mean(-1, keepdim=True),
    "mix": (WEIGHTS[TOKENS].double().view(-1, RESULTS, SLOTS) @ X.view(-1, SLOTS, WIDTH // SLOTS)).flatten(1),
}
CALLS = {
    f"power {exponent}": [
        Elementwise("square", "mul", "x", "y", other="x"),
        Elementwise("root", "power", "y", "y", factor=0.5),
        Elementwise("power", "power", "x" if exponent in (2.0, -1.0) else "y", "y", factor=exponent),
    ]
    for exponent in POWERS
} | {
    "mean": [Mean("mean", "x", "one", WIDTH)],
    "mean of columns": [Mean("mean", "x", "one", 17, x_offset=3)],
    "means of heads": [Mean("means", "x", "heads", WIDTH // HEADS)],
    "add_row": [Mean("mean", "x", "one", WIDTH), Elementwise("add", "add_row", "x", "y", other="one")],
    "mix": [
        Embed("weights", "factors", "weights", "f32", WIDTH),
        Combine("mix", "x", "mixed", SLOTS, "factors", RESULTS),
    ],
}
OUT = {"mean": "one", "mean of columns": "one", "means of heads": "heads", "mix": "mixed"}


@pytest.fixture(scope="module")
def steps() -> Iterator[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Results of each of CALLS for all tokens in one step, and for the third alone."""
    embed = Embed("embed", "x", "table", "f32", WIDTH)
    cases = {name: Case([embed, *calls], OUT.get(name, "y")) for name, calls in CALLS.items()}
    widths = {"x": WIDTH, "y": WIDTH, "one": 1, "heads": HEADS, "factors": RESULTS * SLOTS}
    widths["mixed"] = RESULTS * WIDTH // SLOTS
    columns = Columns(widths, {"table": as_blob(TABLE), "weights": as_blob(WEIGHTS)}, cases, threads=2)
    yield columns.rows(TOKENS, 5), columns.rows(TOKENS[2:3], 7)
    columns.close()


@pytest.mark.parametrize("name", CALLS)
def test_rows(steps: tuple[dict[str, np.ndarray], dict[str, np.ndarray]], name: str) -> None:
    together, alone = steps
    np.testing.assert_allclose(together[name], WANTED[name], atol=2e-6, rtol=2e-6)  # roundings of float32 sums
    np.testing.assert_array_equal(together[name][2:3], alone[name])
