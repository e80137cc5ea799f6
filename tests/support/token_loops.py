"""Modules with layers that are loops over tokens in Python, each another recurrence that is in no library."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support import modules

HEADS, SIZE, WIDTH, BLOCK = 3, 4, 5, 4


class Loop(nn.Module):
    """Logits of one recurrent layer; `recur` gets x [B, T, 48] and returns [B, T, HEADS * WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(modules.VOCAB, 48), nn.Linear(HEADS * WIDTH, modules.VOCAB)
        self.q, self.k = (nn.Linear(48, HEADS * SIZE) for _ in range(2))
        self.v, self.z = (nn.Linear(48, HEADS * WIDTH) for _ in range(2))
        self.gate, self.by_key = nn.Linear(48, HEADS), nn.Linear(48, HEADS * SIZE)
        self.rate, self.mix = nn.Parameter(torch.ones(HEADS * WIDTH)), nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.recur(self.embed(ids)))

    def recur(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Gru(Loop):
    """minGRU: h = (1 - z) h + z x, with results appended to a list."""

    def recur(self, x: Tensor) -> Tensor:
        z, v = torch.sigmoid(self.z(x)), self.v(x)
        h, out = torch.zeros_like(v[:, 0]), []
        for t in range(x.shape[1]):
            h = (1 - z[:, t]) * h + z[:, t] * v[:, t]
            out.append(h)
        return torch.stack(out, dim=1)


class Moving(Loop):
    """An exponential moving average, written as a step towards x, with linears inside the loop, and tokens first."""

    def recur(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        h, out = x.new_zeros(x.size(1), HEADS * WIDTH), []
        for t in range(x.size(0)):
            z = torch.sigmoid(self.z(x[t]))
            h = h + z * (torch.tanh(self.v(x[t])) - h)
            out += [h * F.silu(self.v(x[t]))]
        return torch.stack(out).transpose(0, 1)


class Fixed(Loop):
    """A decay that is a parameter, the state a number at first, and results written into a tensor."""

    def recur(self, x: Tensor) -> Tensor:
        v, decay = self.v(x), torch.sigmoid(self.rate)
        out, h = torch.empty_like(v), 0.0
        for t in range(v.shape[1]):
            h = decay * h + v[:, t]
            out[:, t] = h
        return out


class Matrix(Loop):
    """A matrix state without decay, by outer products and einsum, with a norm of what is read inside the loop."""

    def recur(self, x: Tensor) -> Tensor:
        batch, tokens = x.shape[:2]
        q, k = (each(x).view(batch, tokens, HEADS, SIZE) for each in (self.q, self.k))
        v = self.v(x).view(batch, tokens, HEADS, WIDTH)
        state, out = torch.zeros(batch, HEADS, SIZE, WIDTH), []
        for t in range(tokens):
            state = state + k[:, t].unsqueeze(-1) @ v[:, t].unsqueeze(-2)
            y = torch.einsum("bhk,bhkd->bhd", q[:, t], state)
            out.append(F.rms_norm(y, (WIDTH,)).reshape(batch, 1, -1))
        return torch.cat(out, 1)


class Gated(Loop):
    """A state [B, H, WIDTH, SIZE] with a decay for each key feature, read by a product of matrices."""

    def recur(self, x: Tensor) -> Tensor:
        q, k = (each(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for each in (self.q, self.k))
        v = self.v(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        decay = torch.exp(-F.softplus(self.by_key(x))).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        state = torch.zeros(x.shape[0], HEADS, WIDTH, SIZE)
        out = torch.zeros(x.shape[0], HEADS, x.shape[1], WIDTH)
        for t in range(x.shape[1]):
            state = state * decay[:, :, t].unsqueeze(2)
            state = state + v[:, :, t].unsqueeze(3) * k[:, :, t].unsqueeze(2)
            out[:, :, t] = (state @ q[:, :, t, :].unsqueeze(-1)).squeeze(-1) * 0.5
        return out.transpose(1, 2).flatten(2)


class Indexed(Loop):
    """Gated linear attention: parts of tokens that get a dimension as they are taken, and the decay as a logarithm."""

    def recur(self, x: Tensor) -> Tensor:
        q, k = (each(x).unflatten(-1, (HEADS, SIZE)) for each in (self.q, self.k))
        v, log = self.v(x).unflatten(-1, (HEADS, WIDTH)), F.logsigmoid(self.by_key(x)) / 16
        decay = torch.exp(log).unflatten(-1, (HEADS, SIZE))
        state, out = torch.zeros(x.shape[0], HEADS, SIZE, WIDTH), []
        for t in range(x.shape[1]):
            state = decay[:, t, :, :, None] * state + k[:, t, ..., None] * v[:, t, :, None]
            out.append((q[:, None, t, :, :, None].squeeze(1) * state).sum(-2))
        return torch.stack(out, 1).flatten(2)


class Delta(Loop):
    """A gated delta rule with a fixed decay for each head besides."""

    def recur(self, x: Tensor) -> Tensor:
        q, k = (each(x).unflatten(-1, (HEADS, SIZE)) for each in (self.q, self.k))
        k, v = F.rms_norm(k, (SIZE,)) * SIZE**-0.5, self.v(x).unflatten(-1, (HEADS, WIDTH))
        decay, beta = torch.sigmoid(self.gate(x)), torch.sigmoid(self.gate(x) + 1)
        state, out = torch.zeros(x.shape[0], HEADS, SIZE, WIDTH), []
        for t in range(x.shape[1]):
            state = state * decay[:, t][..., None, None] * torch.sigmoid(self.mix)
            error = v[:, t] - (state * k[:, t][..., None]).sum(-2)
            state = state + k[:, t][..., None] * (beta[:, t][..., None] * error)[..., None, :]
            out.append((state * q[:, t][..., None]).sum(-2))
        return torch.stack(out, 1).flatten(2)


class Normalized(Loop):
    """Linear attention over positive keys, divided by the sum of its weights, by the parts that unbind gives."""

    def recur(self, x: Tensor) -> Tensor:
        q, k = (torch.sigmoid(each(x).unflatten(-1, (HEADS, SIZE))) for each in (self.q, self.k))
        v = self.v(x).unflatten(-1, (HEADS, WIDTH))
        state, total = torch.zeros(x.shape[0], HEADS, SIZE, WIDTH), torch.zeros(x.shape[0], HEADS, SIZE)
        out = []
        for q_t, k_t, v_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=False):
            state = 0.9 * state + torch.einsum("bhk,bhd->bhkd", k_t, v_t)
            total = 0.9 * total + k_t
            out.append(torch.einsum("bhk,bhkd->bhd", q_t, state) / (q_t * total).sum(-1, keepdim=True))
        return torch.stack(out, 1).flatten(2)


class Blocks(Loop):
    """Linear attention by blocks of tokens, with tables of decays for the tokens of a block."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        slope, count = torch.tensor([0.5, 0.1, 0.02])[:, None, None], torch.arange(BLOCK)
        self.register_buffer("slope", slope)
        self.register_buffer("of_query", torch.exp(-slope * (count[:, None] + 1)))
        self.register_buffer("of_key", torch.exp(-slope * (BLOCK - 1 - count[:, None])))
        apart = count[:, None] - count - (1 if wrong else 0) * (count[:, None] > count)
        self.register_buffer("between", torch.exp(torch.where(apart >= 0, -slope * apart, float("-inf"))))

    def recur(self, x: Tensor) -> Tensor:
        batch, tokens = x.shape[:2]
        q, k = (each(x).view(batch, tokens, HEADS, SIZE).transpose(1, 2) for each in (self.q, self.k))
        v = self.v(x).view(batch, tokens, HEADS, WIDTH).transpose(1, 2)
        state, out = torch.zeros(batch, HEADS, SIZE, WIDTH), []
        for i in range((tokens + BLOCK - 1) // BLOCK):
            start = i * BLOCK
            end = min(start + BLOCK, tokens)
            n = end - start
            weights = q[:, :, start:end] @ k[:, :, start:end].transpose(-1, -2) * self.between[:, :n, :n]
            before = (q[:, :, start:end] * self.of_query[:, :n]) @ state
            out.append(self.within(weights, v[:, :, start:end]) + before)
            added = (k[:, :, start:end] * self.of_key[:, -n:]).transpose(-1, -2) @ v[:, :, start:end]
            state = state * torch.exp(-self.slope * n) + added
        return torch.cat(out, -2).transpose(1, 2).flatten(2)

    def within(self, weights: Tensor, v: Tensor) -> Tensor:
        """What the tokens of a block read from their own block, by weights [B, H, N, N]."""
        return weights @ v


KINDS: dict[str, type[Loop]] = {
    kind.__name__: kind for kind in (Gru, Moving, Fixed, Matrix, Gated, Indexed, Delta, Blocks, Normalized)
}
