"""A small decoder with replaceable parts: each can become a function of the module and of what the part reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, HIDDEN, HEADS, KV_HEADS, SIZE, INNER, LONGEST = 61, 32, 4, 2, 8, 40, 64
Part = Callable[..., Any]


@dataclass(frozen=True)
class Variation:
    """One odd decoder: the parts that it replaces, what is right for it, and how many inputs it takes.

    `right` is `agrees` (the compiled model must give torch's logits) or `refused` (importing or raising it must fail
    with a message of one line).
    """

    name: str
    right: str
    parts: dict[str, Part]
    takes: int = 1
    prepare: Callable[[nn.Module], Any] | None = None
    layers: int = 1

    def module(self) -> nn.Module:
        """The decoder, with random weights."""
        module = Decoder(dict(self.parts), self.layers)
        draw_weights(module)
        if self.prepare is not None:
            self.prepare(module)
        return module.eval()


@dataclass
class Table:
    """Variations in the order in which they were added."""

    variations: list[Variation] = field(default_factory=list)

    def add(
        self, right: str, name: str, /, *, takes: int = 1, prepare: Any = None, layers: int = 1, **parts: Part
    ) -> None:
        """Add one; `parts` are methods of Decoder and Layer by name."""
        self.variations.append(Variation(name, right, parts, takes, prepare, layers))


def draw_weights(module: nn.Module) -> None:
    """Every parameter random, with scales that keep activations near 1, biases and norms included."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.4
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + (parameter.dim() == 1))


class Replaceable(nn.Module):
    """A module with some of its methods replaced by functions with the same arguments."""

    def __init__(self, parts: dict[str, Part]) -> None:
        super().__init__()
        self.parts = parts

    def part(self, name: str, *args: Any) -> Any:
        """What the part `name` makes of `args`."""
        result = self.parts.get(name)
        return result(self, *args) if result is not None else getattr(self, name)(*args)


class Layer(Replaceable):
    """Norm, attention with grouped keys and rotary embedding, residual; norm, gated MLP, residual."""

    def __init__(self, parts: dict[str, Part], index: int) -> None:
        super().__init__(parts)
        self.index = index
        self.first, self.second, self.third = (nn.Parameter(torch.ones(HIDDEN)) for _ in range(3))
        self.q, self.o = nn.Linear(HIDDEN, HEADS * SIZE), nn.Linear(HEADS * SIZE, HIDDEN)
        self.k, self.v = nn.Linear(HIDDEN, KV_HEADS * SIZE), nn.Linear(HIDDEN, KV_HEADS * SIZE, bias=False)
        self.gate, self.up = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN)
        self.by_size, self.by_head = nn.Parameter(torch.ones(SIZE)), nn.Parameter(torch.ones(HEADS))
        self.by_inner = nn.Parameter(torch.ones(INNER))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.part("block", x, places)

    def block(self, x: Tensor, places: Tensor) -> Tensor:
        x = x + self.part("mix", self.part("norm", x, self.first), places)
        return x + self.part("mlp", self.part("norm", x, self.second))

    def norm(self, x: Tensor, scale: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), scale, 1e-5)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return q, k, v

    def mix(self, x: Tensor, places: Tensor) -> Tensor:
        q, k, v = self.part("heads", x)
        q, k, v = self.part("rope", q, k, v, places)
        k, v = self.part("grouped", k), self.part("grouped", v)
        y = self.part("attend", q, k, v, places)
        return self.o(self.part("merge", y))

    def rope(self, q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = self.part("angles", places)
        return self.part("turn", q, cos, sin), self.part("turn", k, cos, sin), v

    def angles(self, places: Tensor) -> tuple[Tensor, Tensor]:
        angle = places.float()[..., None] * self.part("frequencies")
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()

    def frequencies(self) -> Tensor:
        return 100.0 ** -(torch.arange(0, SIZE, 2) / SIZE)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def grouped(self, k: Tensor) -> Tensor:
        return k.repeat_interleave(HEADS // KV_HEADS, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def merge(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).flatten(2)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.part("act", self.gate(x), self.up(x)))

    def act(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class Decoder(Replaceable):
    """Token embedding, layers, norm, head."""

    def __init__(self, parts: dict[str, Part], layers: int) -> None:
        super().__init__(parts)
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.learned = nn.Embedding(2 * LONGEST, HIDDEN)
        self.layers = nn.ModuleList(Layer(parts, index) for index in range(layers))
        self.last, self.by_vocab = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.ones(VOCAB))

    def forward(self, *inputs: Tensor) -> Any:
        places = inputs[1][:, None] if len(inputs) > 1 else torch.arange(inputs[0].shape[1])
        return self.part("whole", inputs[0], places)

    def whole(self, ids: Tensor, places: Tensor) -> Any:
        x = self.part("start", ids, places)
        x = self.part("through", x, places)
        return self.part("end", x)

    def start(self, ids: Tensor, places: Tensor) -> Tensor:
        return self.embed(ids)

    def through(self, x: Tensor, places: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, places)
        return x

    def end(self, x: Tensor) -> Any:
        return self.head(F.rms_norm(x, (HIDDEN,), self.last, 1e-5))
