"""Variations that write in place, into parts, through views, or into buffers; and odd types of weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.variations.decoder import HIDDEN, Part, Table

TABLE = Table()
add = TABLE.add


def start(change: Part) -> dict[str, Part]:
    """`change` of the embedding and its own 32 numbers."""
    return {"start": lambda m, i, p: change(m.embed(i) * 1.5, m.last)}


def viewed(view: Part) -> dict[str, Part]:
    """Half of the features doubled, or all, by writing into a view, while the viewed tensor is read afterwards."""

    def change(x: Tensor, w: Tensor) -> Tensor:
        view(x).mul_(2.0)
        return x

    return start(change)


def elsewhere(change: Part) -> dict[str, Part]:
    """What `change` returns is not used, only what it wrote into x."""

    def both(x: Tensor, w: Tensor) -> Tensor:
        change(x, w)
        return x

    return start(both)


VIEWS: dict[str, Part] = {
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(-1, HIDDEN),
    "reshape_as": lambda x: x.reshape_as(x),
    "movedim": lambda x: x.movedim(1, 2),
    "moveaxis": lambda x: x.moveaxis(1, 2),
    "ravel": lambda x: x.ravel(),
    "swapdims": lambda x: x.swapdims(1, 2),
    "mT": lambda x: x.mT,
    "mH": lambda x: x.mH,
    "adjoint": lambda x: x.adjoint(),
    "diagonal": lambda x: x[..., None, :].diagonal(0, -2, -1),
    "unfold": lambda x: x.unfold(2, 4, 4),
    "as_strided": lambda x: x.as_strided(x.shape, x.stride()),
    "complex": lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2))),
    "real part": lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2))).real,
    "unsafe_chunk": lambda x: x.unsafe_chunk(2, -1)[0],
    "tensor_split": lambda x: x.tensor_split(2, -1)[0],
    "hsplit": lambda x: x.hsplit(1)[0],
    "dsplit": lambda x: x.dsplit(2)[0],
    "einsum": lambda x: torch.einsum("btd->bdt", x),
    "atleast": torch.atleast_3d,
    "positive": lambda x: +x,
    "broadcast": lambda x: torch.broadcast_tensors(x, x)[1],
    "sum to its size": lambda x: x.sum_to_size(x.shape),
    "dropout": lambda x: F.dropout(x, 0.1, False),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.1, False),
    "half": lambda x: x[..., :16],
    "every second": lambda x: x[..., ::2],
    "one": lambda x: x[..., 3],
    "narrow": lambda x: x.narrow(-1, 4, 8),
    "same type": lambda x: x.to(torch.float32),
    "contiguous": lambda x: x.contiguous(),
    "squeezed": lambda x: x[:, None].squeeze(1),
    "type_as": lambda x: x.type_as(x),
    "permuted": lambda x: x.permute(2, 0, 1),
    "unbound": lambda x: x.unbind(-1)[2],
    "real": lambda x: x.real,
    "detached": lambda x: x.detach(),
}
for name, view in VIEWS.items():
    itself = name in ("same type", "contiguous", "type_as")  # which the trace does not show
    add("agrees" if itself else "refused", f"written through {name}", **viewed(view))
add("agrees", "written into a copy", **viewed(lambda x: x.clone()))
add("refused", "written into another type", **viewed(lambda x: x.double()))
add("agrees", "written before another reads", **start(lambda x, w: x.mul_(2.0)))
add("agrees", "written through a view that alone is read", **start(lambda x, w: x.view(-1).mul_(2.0).view(x.shape)))
add("agrees", "written, and the original read", **start(lambda x, w: x.relu_() + x))
add("agrees", "written after it was read", **start(lambda x, w: (x + 1) * 0 + x.mul_(2) + x))
add("refused", "halves exchanged in place", **elsewhere(lambda x, w: x[..., :16].copy_(x[..., 16:])))
add("refused", "one feature set", **elsewhere(lambda x, w: x[..., 3].fill_(2.0)))
add("refused", "first token set", **elsewhere(lambda x, w: x[:, 0].fill_(2.0)))
add("refused", "features set by index", **elsewhere(lambda x, w: x.index_fill_(-1, torch.tensor([1, 2]), 1.0)))
add("refused", "features set by booleans", **elsewhere(lambda x, w: x.masked_fill_(w > 1, 0.0)))
add(
    "refused",
    "sorted in place",
    **start(lambda x, w: torch.sort(x, -1, out=(torch.empty_like(x), torch.empty(x.shape, dtype=torch.int64)))[0]),
)
add("agrees", "written by out", **start(lambda x, w: torch.mul(x, 2.0, out=torch.empty_like(x))))
add("agrees", "written by out into another", **elsewhere(lambda x, w: torch.mul(x, 2.0, out=x)))
add("refused", "written by out into a part", **elsewhere(lambda x, w: torch.mul(x[..., :16], 2.0, out=x[..., :16])))
add("refused", "added in place to a part", **elsewhere(lambda x, w: x[..., :16].add_(w[:16])))
add(
    "refused",
    "scattered in place",
    **elsewhere(lambda x, w: x.scatter_(-1, torch.zeros_like(x, dtype=torch.int64), 2.0)),
)
add("refused", "a weight written over", **start(lambda x, w: x * w.mul_(2.0)))
add("refused", "a weight's view written over", **start(lambda x, w: x * w.view(4, 8).mul_(2.0).view(-1)))
add("refused", "a weight written over behind", **start(lambda x, w: x * w + w.add_(1.0)))
add("agrees", "a weight's copy written over", **start(lambda x, w: x * w.clone().mul_(2.0)))
add(
    "agrees",
    "new memory filled",
    **start(lambda x, w: filled(x, lambda y: (y[..., :16].copy_(x[..., 16:]), y[..., 16:].copy_(x[..., :16])))),
)
add(
    "refused",
    "new memory filled twice",
    **start(lambda x, w: filled(x, lambda y: (y.copy_(x), y[..., 16:].copy_(x[..., :16])))),
)
add("refused", "new memory filled in part", **start(lambda x, w: filled(x, lambda y: y[..., :16].copy_(x[..., 16:]))))
add(
    "refused",
    "new memory filled and scaled",
    **start(lambda x, w: filled(x, lambda y: (y.copy_(x), y[..., 16:].mul_(2)))),
)
add(
    "refused",
    "zeros filled in part",
    **start(lambda x, w: filled(x, lambda y: (y.zero_(), y[..., :16].copy_(x[..., 16:])))),
)
add(
    "agrees",
    "new memory filled by slices of slices",
    **start(lambda x, w: filled(x, lambda y: (y[..., :16].copy_(x[..., 16:]), y[..., 16:32].copy_(x[..., :16])))),
)
add(
    "refused",
    "new memory filled by every second",
    **start(lambda x, w: filled(x, lambda y: (y[..., ::2].copy_(x[..., 16:]), y[..., 1::2].copy_(x[..., :16])))),
)
add(
    "refused",
    "new memory filled along tokens",
    **start(lambda x, w: filled(x, lambda y: (y[:, :1].copy_(x[:, :1]), y[:, 1:].copy_(x[:, 1:])))),
)

for name, unwritten in {
    "empty": lambda x, w: torch.empty(HIDDEN),
    "empty_like": lambda x, w: torch.empty_like(w),
    "empty_strided": lambda x, w: torch.empty_strided((HIDDEN,), (1,)),
    "new_empty": lambda x, w: x.new_empty(HIDDEN),
    "resize": lambda x, w: torch.empty(0).resize_(HIDDEN),
    "Tensor": lambda x, w: torch.Tensor(HIDDEN),
    "empty times 0": lambda x, w: torch.empty(HIDDEN) * 0 + 1,
    "part of empty": lambda x, w: filled(w, lambda y: y[:16].fill_(2.0)),
}.items():
    add("refused", f"new memory read: {name}", **start(lambda x, w, f=unwritten: x * f(x, w)))
for name, written in {
    "fill": lambda x, w: torch.empty(HIDDEN).fill_(2.0),
    "zero": lambda x, w: torch.empty(HIDDEN).zero_() + 1,
    "copy": lambda x, w: torch.empty_like(w).copy_(w),
    "out": lambda x, w: torch.mul(w, 2.0, out=torch.empty(HIDDEN)),
    "fill of a view": lambda x, w: torch.empty(4, 8).view(HIDDEN).fill_(2.0),
    "nothing": lambda x, w: torch.cat([torch.empty(0), w]),
    "its shape alone": lambda x, w: torch.ones_like(torch.empty(HIDDEN)),
}.items():
    add("agrees", f"new memory written by {name}", **start(lambda x, w, f=written: x * f(x, w)))


def filled(x: Tensor, write: Part) -> Tensor:
    y = torch.empty_like(x)
    write(y)
    return y


# ---- state -----------------------------------------------------------------------------------------------


def kept(write: Part) -> dict[str, Any]:
    """A buffer of 32 numbers that `write` reads or changes; what it returns is multiplied."""
    return {
        "start": lambda m, i, p: m.embed(i) * write(m, m.embed(i)),
        "prepare": lambda m: m.register_buffer("kept", torch.linspace(0.5, 1.5, HIDDEN)),
    }


def numbered(read: Part) -> dict[str, Any]:
    """A number that grows by one in each run; what `read` makes of it is multiplied."""

    def started(m: Any, ids: Tensor, places: Tensor) -> Tensor:
        m.count += 1
        return m.embed(ids) * read(m)

    return {"start": started, "prepare": lambda m: setattr(m, "count", 0)}


add("agrees", "a buffer read", **kept(lambda m, x: m.kept))
add("refused", "a buffer changed", **kept(lambda m, x: m.kept.add_(1.0)))
add("refused", "a buffer changed and not read", **kept(lambda m, x: (m.kept.add_(1.0), x)[1]))
add("refused", "a buffer replaced", **kept(lambda m, x: replaced(m, m.kept + 1.0)))
add("refused", "a buffer replaced by a mean", **kept(lambda m, x: replaced(m, x.mean((0, 1)))))
add("refused", "a buffer counted up", **kept(lambda m, x: (m.kept[0].add_(1), m.kept[0])[1]))


add("refused", "a number counted up", **numbered(lambda m: m.count))
add("refused", "a number counted up and not read", **numbered(lambda m: 1))
add("refused", "a number counted up and read later", **numbered(lambda m: 2 if m.count > 99 else 1))


def replaced(m: Any, value: Tensor) -> Tensor:
    before = m.kept
    m.kept = value
    return before


# ---- types and names -------------------------------------------------------------------------------------


def buffers(m: nn.Module) -> None:
    m.register_buffer("flags", torch.arange(HIDDEN) % 3 == 0)
    m.register_buffer("numbers", torch.arange(HIDDEN) - 9)
    m.register_buffer("small", (torch.arange(HIDDEN) * 9 % 256).to(torch.uint8))
    m.register_buffer("wide", torch.linspace(0.5, 1.5, HIDDEN, dtype=torch.float64))
    m.register_buffer("halves", torch.linspace(0.5, 1.5, HIDDEN, dtype=torch.float16))


for kind in ("flags", "numbers", "small", "halves"):
    add("agrees", f"times {kind}", prepare=buffers, start=lambda m, i, p, n=kind: m.embed(i) * getattr(m, n))
    add("agrees", f"plus {kind}", prepare=buffers, start=lambda m, i, p, n=kind: m.embed(i) + getattr(m, n))
    add(
        "agrees",
        f"linear of {kind}",
        prepare=buffers,
        start=lambda m, i, p, n=kind: F.linear(m.embed(i), torch.diag(getattr(m, n)).float() * 0.1),
    )
add("agrees", "times an item", start=lambda m, i, p: m.embed(i) * m.last[3].item())
add("agrees", "plus an item", start=lambda m, i, p: m.embed(i) + m.last.tolist()[3])
add("agrees", "times bytes that overflow", prepare=buffers, start=lambda m, i, p: m.embed(i) * (m.small * 2))
add("refused", "index of the best feature", start=lambda m, i, p: m.embed(i) * m.embed(i).topk(2, -1)[1][..., :1])
add(
    "refused",
    "indices of the best features",
    start=lambda m, i, p: torch.cat([m.embed(i).topk(8, -1)[1].float()] * 4, -1),
)
add(
    "refused",
    "indices of the best features, halved",
    start=lambda m, i, p: torch.cat([m.embed(i).topk(8, -1)[1] / 2] * 4, -1),
)
add("agrees", "best features", start=lambda m, i, p: torch.cat([m.embed(i).topk(8, -1)[0]] * 4, -1))
add(
    "refused",
    "best features, unsorted",
    start=lambda m, i, p: m.embed(i) * m.embed(i).topk(8, -1, sorted=False)[0].sum(-1, keepdim=True),
)
add(
    "agrees",
    "a submodule called constant",
    start=lambda m, i, p: m.embed(i) * torch.full((HIDDEN,), 2.0),
    prepare=lambda m: named(m, "full"),
)


def named(m: Any, name: str) -> None:
    m.constant = nn.Module()
    setattr(m.constant, name, nn.Parameter(torch.full((HIDDEN,), 5.0)))
    start = m.parts["start"]
    m.parts["start"] = lambda m, i, p: start(m, i, p) + getattr(m.constant, name)


# ---- randomness ------------------------------------------------------------------------------------------

for kind in ("rand", "randn"):
    add("refused", f"{kind} of features", **start(lambda x, w, f=kind: x * getattr(torch, f)(HIDDEN)))
add("refused", "uniform noise in place", **start(lambda x, w: x * torch.empty(HIDDEN).uniform_()))
add("refused", "normal noise", **start(lambda x, w: x * torch.normal(w, 1.0)))
add("refused", "bernoulli of weights", **start(lambda x, w: x * torch.bernoulli(w.clamp(0, 1))))
add("refused", "multinomial", **start(lambda x, w: x * torch.multinomial(w.abs(), HIDDEN)))
add("refused", "random integers", **start(lambda x, w: x * torch.randint(0, 9, (HIDDEN,))))
