"""Keys and values assembled from features of several linears: concatenated, copied into new memory, padded, rotated."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcompile import check
from qcompile.checkpoints import frontend
from qcompile.errors import UnsupportedError
from qcompile.passes.base import apply
from qcompile.passes.raising import Raise
from tests.support import modules
from tests.support.cases import first
from tests.support.programs import dynamic_size
from tests.support.raising import LONGEST, inputs, raise_module, used

HEADS, PLAIN, ROTATED, NARROW, HIDDEN = 3, 8, 4, 6, 24
Rotate = Callable[[Tensor, Tensor], Tensor]
Join = Callable[[Tensor, Tensor], Tensor]


def by_halves(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def by_pairs(x: Tensor, angle: Tensor) -> Tensor:
    """Rotates adjacent pairs, with the result in halves."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def times(x: Tensor, rotations: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * rotations.to(numbers.device)).flatten(3).type_as(x)


def as_complex(x: Tensor, angle: Tensor) -> Tensor:
    return times(x, torch.polar(torch.ones_like(angle), angle) * 1.0)


def as_larger_complex(x: Tensor, angle: Tensor) -> Tensor:
    return times(x, torch.polar(torch.full_like(angle, 2.0), angle))


def joined(k: Tensor, rotated: Tensor) -> Tensor:
    return torch.cat((k, rotated.expand(-1, HEADS, -1, -1)), -1)


def copied(k: Tensor, rotated: Tensor) -> Tensor:
    made = k.new_empty(*k.shape[:-1], PLAIN + ROTATED)
    made[..., PLAIN:].copy_(rotated.expand(-1, HEADS, -1, -1))
    made[..., :PLAIN].copy_(k)
    return made


class Latent(nn.Module):
    """Attention with plain features before rotated ones in queries and keys; keys share these; values are narrower."""

    def __init__(self, rotate: Rotate = by_halves, join: Join = joined, padded: bool = False) -> None:
        super().__init__()
        self.rotate, self.join, self.padded = rotate, join, padded
        self.embed, self.down = nn.Embedding(modules.VOCAB, HIDDEN), nn.Linear(HIDDEN, 20 + ROTATED)
        self.q, self.kv = nn.Linear(HIDDEN, HEADS * (PLAIN + ROTATED)), nn.Linear(20, HEADS * (PLAIN + NARROW))
        self.scale, self.o = nn.Parameter(torch.ones(20)), nn.Linear(HEADS * NARROW, HIDDEN)
        self.head = nn.Linear(HIDDEN, modules.VOCAB)
        self.register_buffer("freq", 10.0 ** -torch.arange(ROTATED // 2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        batch, tokens = ids.shape
        angle = torch.outer(torch.arange(tokens, device=ids.device).float(), self.freq)[None, None]
        x = self.embed(ids)
        low, rotated = self.down(x).split([20, ROTATED], -1)
        q, last = self.q(x).view(batch, tokens, HEADS, -1).transpose(1, 2).split([PLAIN, ROTATED], -1)
        kv = self.kv(modules.rms(low, self.scale)).view(batch, tokens, HEADS, -1).transpose(1, 2)
        k, v = kv.split([PLAIN, NARROW], -1)
        rotated = self.rotate(rotated.view(batch, 1, tokens, ROTATED), angle)
        queries = torch.cat((q, self.rotate(last, angle)), -1)
        if self.padded:
            v = F.pad(v, (0, PLAIN + ROTATED - NARROW))
        y = F.scaled_dot_product_attention(queries, self.join(k, rotated), v, is_causal=True)
        return self.head(x + self.o(y[..., :NARROW].transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(
    "style",
    [
        {},
        pytest.param({"join": copied, "rotate": by_pairs}, marks=pytest.mark.exhaustive),
        {"rotate": as_complex, "padded": True},
    ],
    ids=["joined", "copied, pairs", "complex, padded"],
)
def test_same_logits(style: dict[str, object]) -> None:
    module = modules.randomized(Latent(**style))  # type: ignore[arg-type]
    graph = frontend.load(module, example_inputs=inputs()[:1], max_position=LONGEST)
    sizes = {0: dynamic_size("b"), 1: dynamic_size("t", max=LONGEST)}
    program = torch.export.export(module, inputs()[:1], dynamic_shapes=(sizes,)).run_decompositions()
    ids, positions = inputs()
    with torch.no_grad():
        wanted, exact = module(ids), copy.deepcopy(module).double()(ids)
    for source in (graph, frontend.load(program, max_position=LONGEST)):
        raised = apply(Raise(), source).graph
        assert used(raised)["rope"] == 2 and used(raised)["gather_features"] == (3 if "padded" in style else 1)
        assert check.max_relative_error(raised.run(ids, positions), wanted) < 3e-6
        assert check.max_relative_error(raised.run(ids, positions, dtype=torch.float64), exact) < 1e-6


def test_no_source_has_more_than_is_taken() -> None:
    """Rotated features come first in heads: queries by permuting a linear's rows, keys by the gather's index."""
    graph = raise_module(modules.randomized(Latent(join=copied)))
    (keys,) = graph.calls("gather_features")
    assert [source.meta["val"].shape[-1] for source in keys.args[0]] == [HEADS * PLAIN, ROTATED]
    index = graph.evaluate(keys.args[1]).view(HEADS, -1)
    assert torch.equal(index[:, :ROTATED], HEADS * PLAIN + torch.arange(ROTATED).expand(HEADS, -1))
    assert torch.equal(index[:, ROTATED:].flatten(), torch.arange(HEADS * PLAIN))
    assert graph.calls("attention")[0].meta["val"].shape[2:] == (HEADS, NARROW)


# ---- refusals ------------------------------------------------------------------------------------------


def with_a_gap(k: Tensor, rotated: Tensor) -> Tensor:
    made = k.new_empty(*k.shape[:-1], PLAIN + ROTATED)
    made[..., :PLAIN].copy_(k)
    made[..., PLAIN + 1 :].copy_(rotated[..., 1:].expand(-1, HEADS, -1, -1))
    return made


def twice(k: Tensor, rotated: Tensor) -> Tensor:
    made = k.new_empty(*k.shape[:-1], PLAIN + ROTATED)
    made[..., PLAIN:].copy_(rotated.expand(-1, HEADS, -1, -1))
    made[..., : PLAIN + 1].copy_(F.pad(k, (0, 1)))
    return made


def afterwards(k: Tensor, rotated: Tensor) -> Tensor:
    made = copied(k, rotated)
    made[..., :PLAIN].copy_(k.flip(-1))
    return made


def in_part_of_a_view(k: Tensor, rotated: Tensor) -> Tensor:
    made = k.new_empty(*k.shape[:-1], PLAIN + ROTATED)
    part = made[..., :PLAIN]
    part.copy_(k)
    made[..., PLAIN:].copy_(rotated.expand(-1, HEADS, -1, -1))
    part.mul_(2.0)
    return made


def read_early(k: Tensor, rotated: Tensor) -> Tensor:
    made = k.new_empty(*k.shape[:-1], PLAIN + ROTATED)
    made[..., :PLAIN].copy_(k)
    early = made * 1.0
    made[..., PLAIN:].copy_(rotated.expand(-1, HEADS, -1, -1))
    return early


@pytest.mark.parametrize(
    "join", first((with_a_gap, twice, read_early), [with_a_gap, twice, afterwards, in_part_of_a_view, read_early])
)
def test_memory_that_is_not_filled_once_is_refused(join: Join) -> None:
    with pytest.raises(UnsupportedError):
        raise_module(modules.randomized(Latent(join=join)))


def test_other_complex_numbers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="complex"):
        raise_module(modules.randomized(Latent(rotate=as_larger_complex)))


def test_keys_rotated_elsewhere_than_queries_are_refused() -> None:
    def ahead(k: Tensor, rotated: Tensor) -> Tensor:
        return torch.cat((rotated.expand(-1, HEADS, -1, -1), k), -1)

    with pytest.raises(UnsupportedError, match="no rotary embedding"):
        raise_module(modules.randomized(Latent(join=ahead)))
