"""Recurrent layers: in plain modules that call qcompile's operators, and in families of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcompile import check, ops
from qcompile.checkpoints import frontend
from qcompile.errors import UnsupportedError
from qcompile.passes.base import apply
from qcompile.passes.raising import Raise
from tests.support import modules
from tests.support.cases import first
from tests.support.families import COMMON, save
from tests.support.raising import raise_module, right

HEADS, SIZE, WIDTH = 6, 4, 5
INNER = 2 * 3 * SIZE + HEADS * WIDTH
recurrence: Callable[..., Tensor] = torch.ops.qcompile.linear_recurrence
convolution: Callable[..., Tensor] = torch.ops.qcompile.causal_conv


class Layer(nn.Module):
    """Logits of one recurrent layer with a convolution before it, 3 heads of queries and keys, and 6 of values.

    `repeated` repeats queries and keys for the heads of values; `by_key` has a decay for each key feature.
    """

    def __init__(self, delta: bool = True, repeated: bool = False, by_key: bool = False) -> None:
        super().__init__()
        self.delta, self.repeated, self.by_key = delta, repeated, by_key
        self.embed, self.project = nn.Embedding(modules.VOCAB, 48), nn.Linear(48, INNER)
        self.taps, self.bias = nn.Parameter(torch.ones(INNER, 3)), nn.Parameter(torch.ones(INNER))
        self.decay = nn.Linear(48, HEADS * (SIZE if by_key else 1))
        self.gain, self.rates = nn.Linear(48, HEADS), nn.Parameter(torch.ones(HEADS))
        self.gate, self.head = nn.Linear(48, HEADS * WIDTH), nn.Linear(HEADS * WIDTH, modules.VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = F.silu(convolution(self.project(x), self.taps, self.bias)).split([12, 12, HEADS * WIDTH], -1)
        q, k, v = self.norm(q.unflatten(-1, (3, SIZE))), k.unflatten(-1, (3, SIZE)), v.unflatten(-1, (HEADS, WIDTH))
        if self.repeated:
            q, k = (each.repeat_interleave(2, 2) for each in (q, k))
        decay, rates = F.softplus(self.decay(x)), -self.rates.exp()
        decay = decay.unflatten(-1, (HEADS, SIZE)) * rates[:, None] if self.by_key else decay * rates
        y = self.recur(q, k, v, decay, self.gain(x).sigmoid())
        return self.head(y.flatten(-2) * F.silu(self.gate(x)))

    def norm(self, q: Tensor) -> Tensor:
        return q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor) -> Tensor:
        return recurrence(q, k, v, decay, None, gain, self.delta)


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("repeated", [True, False])
@pytest.mark.parametrize("by_key", [True, False])
def test_a_layer_of_a_plain_module(delta: bool, repeated: bool, by_key: bool) -> None:
    graph = right(modules.randomized(Layer(delta, repeated, by_key)))
    (node,) = graph.calls("linear_recurrence")
    given = ops.operands(node)
    assert given.q.meta["val"].shape[2:] == given.k.meta["val"].shape[2:] == (3, SIZE)  # as before they were repeated
    assert given.rates.meta["val"].shape == ((HEADS, SIZE) if by_key else (HEADS,))  # the factor of the decay
    assert given.decay.meta["val"].shape[2:] == given.rates.meta["val"].shape
    assert len(graph.calls("causal_conv")) == 1 and given.delta == delta


class Backward(Layer):
    """Computes from the last token to the first."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor) -> Tensor:
        return recurrence(q.flip(1), k.flip(1), v.flip(1), decay, None, gain).flip(1)


class OverFeatures(Layer):
    """Takes heads for tokens."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v[:, :, :3].transpose(1, 2)
        y = recurrence(q, k, v, decay[:, :3], None, None).transpose(1, 2)
        return torch.cat((y, y), 2)


class Learned(Layer):
    """The rates are features, not weights."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor) -> Tensor:
        return recurrence(q, k, v, decay, decay[0, 0], gain)


class ShortDecay(Layer):
    """The decay has a number for one head alone."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor) -> Tensor:
        return recurrence(q, k, v, decay[..., :1], None, gain)


class LearnedTaps(Layer):
    """The weight of the convolution is computed from features."""

    def norm(self, q: Tensor) -> Tensor:
        taps = q.flatten(-2).sum((0, 1))[:, None].repeat(1, 3)
        return convolution(q.flatten(-2), taps).unflatten(-1, (3, SIZE))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Backward, "flip"),
        (OverFeatures, "cannot be exported"),
        (Learned, "has a rates"),
        (ShortDecay, r"has a decay that is neither \[batch, tokens, 6\] nor \[batch, tokens, 6, 4\]"),
        (LearnedTaps, "has a weight"),
    ],
)
def test_refused(kind: type[Layer], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        raise_module(modules.randomized(kind()))


STATE_SPACE: dict[str, Any] = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 16},
}
DELTA: dict[str, Any] = {
    **{"linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"layer_types": ["linear_attention", "full_attention"], "head_dim": 16},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmo_hybrid": COMMON | DELTA,  # gated delta rule, with norms of queries and keys inside the kernel
    "mamba": {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},  # selective scan
    "bamba": COMMON | STATE_SPACE | {"attn_layer_indices": [1]},  # SSD, norms of groups after the gate
    "recurrent_gemma": {  # RG-LRU, a loop over tokens in Python
        **{"vocab_size": 97, "hidden_size": 64, "lru_width": 64, "intermediate_size": 96, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "attention_window_size": 16},
    },
    "lfm2": COMMON | {"layer_types": ["conv", "full_attention"]},  # a convolution between gates
}


@pytest.mark.parametrize("kind", first(FAMILIES.keys() - {"recurrent_gemma"}, FAMILIES))
def test_families(kind: str, tmp_path: Path) -> None:
    module = save(kind, FAMILIES[kind], tmp_path)
    graph = apply(Raise(), frontend.load(tmp_path)).graph
    assert len(graph.calls("causal_conv")) == (2 if kind in ("mamba", "recurrent_gemma") else 1)
    for batch, tokens in ((1, 9), (2, 57)):
        ids = torch.randint(0, 97, (batch, tokens), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = module(ids).logits
        assert check.max_relative_error(graph.run(ids, torch.arange(tokens).expand(batch, -1)), expected) < 1e-5


# ---- convolutions of torch --------------------------------------------------------------------------------


class Convolved(nn.Module):
    """Logits of an embedding [B, T, 48] that `curve` transforms with conv1d and the weights it is given."""

    def __init__(self, curve: Callable[[Tensor, Tensor, Tensor], Tensor], groups: int = 48) -> None:
        super().__init__()
        self.curve = curve
        self.embed, self.head = nn.Embedding(modules.VOCAB, 48), nn.Linear(48, modules.VOCAB)
        self.taps, self.bias = nn.Parameter(torch.ones(48, 48 // groups, 4)), nn.Parameter(torch.ones(48))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.curve(self.embed(ids).transpose(1, 2), self.taps, self.bias).transpose(1, 2))


CONVOLUTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cut at the length": lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=48)[..., : x.shape[-1]],
    "cut from the end": lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=48)[:, :, :-3],
    "without bias": lambda x, w, b: F.conv1d(x, w, padding=3, groups=48)[:, :, :-3],
    "zeros before it": lambda x, w, b: F.conv1d(F.pad(x, (3, 0)), w, b, groups=48),
}
OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "the last results": lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=48)[:, :, 3:],
    "results in the middle": lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=48)[:, :, 1:-2],
    "fewer zeros": lambda x, w, b: F.pad(F.conv1d(x, w, b, padding=2, groups=48)[:, :, :-1], (0, 0)),
    "zeros on both sides": lambda x, w, b: F.conv1d(F.pad(x, (2, 1)), w, b, groups=48),
    "ones before it": lambda x, w, b: F.conv1d(F.pad(x, (3, 0), value=1.0), w, b, groups=48),
    "the first token before it": lambda x, w, b: F.conv1d(F.pad(x, (3, 0), mode="replicate"), w, b, groups=48),
    "every second token": lambda x, w, b: F.conv1d(F.pad(x, (6, 0)), w, b, groups=48, dilation=2),
    "of a norm over tokens": lambda x, w, b: F.conv1d(F.pad(x - x.mean(-1, keepdim=True), (3, 0)), w, b, groups=48),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_of_torch(name: str) -> None:
    graph = right(modules.randomized(Convolved(CONVOLUTIONS[name])))
    assert len(graph.calls("causal_conv")) == 1


@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions(name: str) -> None:
    with pytest.raises(UnsupportedError):
        raise_module(modules.randomized(Convolved(OTHERS[name])))


def test_a_convolution_that_mixes_features() -> None:
    module = Convolved(lambda x, w, b: F.conv1d(F.pad(x, (3, 0)), w, b, groups=24), 24)
    with pytest.raises(UnsupportedError, match=r"conv1d|pad"):
        raise_module(modules.randomized(module))
