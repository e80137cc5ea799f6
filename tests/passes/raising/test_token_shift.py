"""Tokens that read the token before them: a convolution, however the code moves them; near misses are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcompile.errors import UnsupportedError
from tests.support import modules
from tests.support.raising import raise_module, right

Shift = Callable[[Tensor], Tensor]


class Shifted(nn.Module):
    """Logits of x beside what `shift` makes of it."""

    def __init__(self, shift: Shift) -> None:
        super().__init__()
        self.shift = shift
        self.embed, self.head = nn.Embedding(modules.VOCAB, 48), nn.Linear(48, modules.VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(torch.sigmoid(x) * self.shift(x))


PADDED: dict[str, tuple[Shift, int]] = {
    "module": (nn.ZeroPad2d((0, 0, 1, -1)), 1),
    "two tokens": (lambda x: F.pad(x, (0, 0, 2, -2)), 2),
    "cut afterwards": (lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1], 1),
    "cut by length": (lambda x: F.pad(x, (0, 0, 1, 0))[:, : x.shape[1]], 1),
    "heads": (lambda x: F.pad(x.unflatten(-1, (6, 8)), (0, 0, 0, 0, 1, -1)).flatten(2), 1),
    "scaled": (lambda x: F.pad(2 * x, (0, 0, 1, -1)), 1),
}


@pytest.mark.parametrize("name", PADDED)
def test_zeros_before_all_but_the_last_tokens_are_a_convolution(name: str) -> None:
    shift, before = PADDED[name]
    graph = right(modules.randomized(Shifted(shift)))
    (node,) = graph.calls("causal_conv")
    assert node.args[1].meta["val"].shape == (48, before + 1)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "shift",
    [
        lambda x: F.pad(x, (0, 0, -1, 1)),
        lambda x: F.pad(x, (0, 0, 1, -1), value=1.0),
        lambda x: F.pad(x, (0, 0, 1, 0))[:, 1:] * x,
        lambda x: F.pad(x, (1, -1, 1, -1)),
        lambda x: F.pad(x, (0, 0, 1, -1), mode="replicate"),
    ],
)
def test_other_pads_are_refused(shift: Shift) -> None:
    with pytest.raises(UnsupportedError, match=r"node (replication_)?pad"):
        raise_module(modules.randomized(Shifted(shift)))


def test_a_part_of_a_single_token_is_refused_with_another_way_to_write_it() -> None:
    with pytest.raises(UnsupportedError, match=r"such as x\[:, :-1\], is a single token.*pad\(x, \(0, 0, 1, -1\)\)"):
        raise_module(modules.randomized(Shifted(lambda x: F.pad(x[:, :-1], (0, 0, 1, 0)))))
