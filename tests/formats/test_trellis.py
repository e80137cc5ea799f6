"""Trellis-coded weights: the code, its packing, and the search for paths, in C++ and in torch."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qcompile.errors import ResourceError
from qcompile.formats import native, trellis_search
from qcompile.formats.registry import weight_format
from qcompile.formats.trellis_code import (
    SEQUENCE,
    STATE_BITS,
    from_sequences,
    in_sequences,
    packed_symbols,
    spread_of_values,
    state_values,
    unpacked_states,
)
from qcompile.formats.trellis_search import cheapest_paths, paths_in_torch

BITS = (2, 3, 4)
UNIFORM = {2: 0.1188, 3: 0.03744, 4: 0.01154}
"""What the best uniform codes lose of a Gaussian weight (Max 1960)."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem(count: int = 24) -> tuple[Tensor, Tensor]:
    """Targets, and weights of which some are 0, as those of outputs that pad a sequence are."""
    weights = torch.rand(count, SEQUENCE, generator=torch.Generator().manual_seed(1))
    weights[:3, 5:30] = 0
    return random(count, SEQUENCE) * spread_of_values(), weights


@pytest.mark.parametrize("bits", BITS)
def test_paths_in_cpp_and_in_torch_are_the_same(bits: int) -> None:
    targets, weights = problem()
    assert trellis_search._native() is not None
    fast = cheapest_paths(state_values(), bits, targets, weights)
    assert torch.equal(fast, paths_in_torch(state_values(), bits, targets, weights))


@pytest.mark.parametrize("bits", BITS)
def test_states_of_a_path_overlap_around_the_sequence_and_fit_the_packed_bits(bits: int) -> None:
    states = cheapest_paths(state_values(), bits, *problem()).long()
    assert torch.equal(states >> bits, states.roll(-1, 1) & 2 ** (STATE_BITS - bits) - 1)
    packed = packed_symbols(states, bits)
    assert packed.shape == (24, SEQUENCE // 8 * bits) and torch.equal(unpacked_states(packed, bits), states)
    stream = [int(packed[0, bit // 8]) >> bit % 8 & 1 for bit in range(SEQUENCE * bits)]
    window = sum(stream[(7 * bits + bit) % len(stream)] << bit for bit in range(STATE_BITS))
    assert window == states[0, 7]


def test_short_paths_cost_little_more_than_the_cheapest_of_all() -> None:
    values = random(16, seed=3)
    codes = torch.tensor(list(itertools.product(range(4), repeat=6)))
    every = values[codes | codes.roll(-1, 1) << 2]  # all 4,096 paths of 6 places with states of 4 bits
    targets = random(200, 6, seed=4)
    least = (every[None] - targets[:, None]).square().sum(2).amin(1)
    cost = (values[paths_in_torch(values, 2, targets, torch.ones(200, 6)).long()] - targets).square().sum(1)
    assert (cost >= least * 0.9999).all() and cost.sum() < 1.05 * least.sum()
    assert (cost <= least * 1.0001).float().mean() > 0.8


@pytest.mark.parametrize(("bits", "most"), [(2, 0.076), (3, 0.0198), (4, 0.0053)])  # measured: 0.0740, 0.0193, 0.0051
def test_gaussian_weights_lose_at_most_two_thirds_of_what_uniform_codes_lose(bits: int, most: float) -> None:
    w, format = random(256, 256) * 0.02, weight_format(f"w{bits}_trellis_g128")
    lost = (format.dequantize(format.quantize(w), 256) - w).square().mean() / w.square().mean()
    assert lost < most < 0.66 * UNIFORM[bits]


@pytest.mark.parametrize("shape", [(64, 128), (40, 200), (1, 32), (130, 96)])
def test_rounding_gives_what_its_parts_stand_for(shape: tuple[int, int]) -> None:
    w, format = random(*shape), weight_format("w3_trellis_g128")
    grid = format.fit(w, 1.0)
    values = grid.round(w)
    assert torch.equal(format.dequantize(grid.parts(values, w), shape[1]), values)
    step, none = grid.step[:, 0], torch.zeros(shape[0])
    moved = grid.nearest_of_input(3, w[:, 3] * 1.1, step, none, none, none)
    assert torch.equal(format.dequantize(grid.parts(values, w), shape[1])[:, 3], moved)


def test_places_of_outputs_in_sequences() -> None:
    rows = torch.arange(70)
    placed = in_sequences(rows)
    assert placed[0, :5].tolist() == [0, 16, 32, 48, 1] and placed[1, :5].tolist() == [64, 0, 0, 0, 65]
    assert torch.equal(from_sequences(placed, 70), rows)


def test_without_a_compiler_torch_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = cheapest_paths(state_values(), 2, *problem(4))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("QCOMPILE_CACHE", str(tmp_path))
    for remembered in (native.find, trellis_search._native):
        remembered.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"torch searches for trellis codes, .*: no C\+\+ compiler found"):
            assert trellis_search._native() is None
        assert torch.equal(cheapest_paths(state_values(), 2, *problem(4)), expected)
    finally:
        for remembered in (native.find, trellis_search._native):
            remembered.cache_clear()


def test_faults_of_the_compiler_are_said_in_one_line(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text("int x = ;\n")
    with pytest.raises(ResourceError, match=r"could not compile wrong.cpp: .*error") as caught:
        native.library(source)
    assert "\n" not in str(caught.value)
