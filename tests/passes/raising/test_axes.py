"""Rotary embeddings with a position for each axis of an image: for text they are equal, and copies change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support import modules
from tests.support.raising import Attend, right, used


class Axes:
    """Attention with angles from three axes: parts of those of `source` are copied over those of the first.

    `factor` multiplies what is copied, and `stretch` the positions of the second and the third axis.
    """

    def __init__(self, source: int = 1, factor: float = 1.0, stretch: float = 1.0) -> None:
        self.source, self.factor, self.stretch = source, factor, stretch

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).expand(3, *ids.shape)[..., None].float()
        places = torch.cat([places[:1], places[1:] * self.stretch])
        angles = places * torch.tensor([1.0, 0.5, 0.25, 0.125])  # [3, B, T, 4]
        first = angles[0]
        first[..., 1:4:2] = angles[self.source, ..., 1:4:2] * self.factor
        cos, sin = (table.repeat(1, 1, 2)[:, None] for table in (first.cos(), first.sin()))

        def rotate(x: Tensor) -> Tensor:
            return x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin

        return F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)


@pytest.mark.parametrize("source", [0, 1, 2])
def test_equal_axes(source: int) -> None:
    assert used(right(modules.randomized(Attend(Axes(source)))))["rope"] == 2


@pytest.mark.parametrize("other", [{"factor": 2.0}, {"stretch": 0.5}])
def test_other_angles_are_those_of_the_table(other: dict[str, float]) -> None:
    assert used(right(modules.randomized(Attend(Axes(**other)))))["rope"] == 2
