"""Loops over chosen experts, run once for all pairs: the same results, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qcompile.checkpoints.expert_loops import ExpertLoops
from qcompile.errors import UnsupportedError

EXPERTS, CHOSEN, WIDTH, INNER, TOKENS = 5, 2, 8, 6, 11
MAKE = torch.Generator().manual_seed(0)
UP, GATE, DOWN = (torch.randn(EXPERTS, INNER, WIDTH, generator=MAKE) for _ in range(3))

Body = Callable[[Tensor, Tensor], Tensor]
"""Results of rows of one expert, of the rows and the expert's number."""


def loop(body: Body, x: Tensor, index: Tensor, factor: Tensor, start: Tensor | None = None, extra: int = 0) -> Tensor:
    """A loop over the experts that some token chose, as models write it."""
    total = torch.zeros_like(x) if start is None else start.clone()
    mask = F.one_hot(index, num_classes=EXPERTS + extra).permute(2, 1, 0)
    for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        expert = expert[0]
        slot, token = torch.where(mask[expert])
        total.index_add_(0, token, body(x[token], expert) * factor[token, slot, None])
    return total * 1


def both(body: Body, **more: Tensor | int) -> tuple[Tensor, Tensor]:
    """The loop's result, and that of the loop run for all pairs."""
    x = torch.randn(TOKENS, WIDTH, generator=MAKE)
    factor, index = torch.randn(TOKENS, EXPERTS, generator=MAKE).softmax(-1).topk(CHOSEN)
    wanted = loop(body, x, index, factor, **more)  # type: ignore[arg-type]
    with ExpertLoops():
        return wanted, loop(body, x, index, factor, **more)  # type: ignore[arg-type]


BODIES: dict[str, Body] = {
    "linear": lambda x, e: F.linear(F.silu(F.linear(x, GATE[e])), DOWN.mT.contiguous()[e]),
    "transposed": lambda x, e: x.matmul(GATE[e].T).relu().matmul(DOWN[e]),
    "gated": lambda x, e: (F.gelu(x @ GATE[e].T) * (x @ UP[e].t())) @ DOWN[e],
    "transposed twice": lambda x, e: F.linear(x, GATE[e].T.T) @ DOWN[e],
    "the same weight both ways": lambda x, e: x.matmul(UP[e].T).matmul(UP[e]),
    "chunks": lambda x, e: torch.mul(*F.linear(x, torch.cat((UP, GATE), 1)[e]).chunk(2, dim=-1)) @ DOWN[e],
    "casts": lambda x, e: (x.to(torch.float64).to(x.dtype) @ UP[e].T).type_as(x) @ DOWN[e],
    "reshaped": lambda x, e: (x @ UP[e].T).view(-1, INNER) @ DOWN[e],
}


@pytest.mark.parametrize("kind", BODIES)
def test_the_same_results(kind: str) -> None:
    wanted, result = both(BODIES[kind])
    assert torch.allclose(result, wanted, atol=1e-5)


def test_what_the_results_are_added_to() -> None:
    wanted, result = both(BODIES["linear"], start=torch.ones(TOKENS, WIDTH), extra=1)
    assert torch.allclose(result, wanted, atol=1e-5)


def changed(write: Callable[[Tensor], object], times: int = 1) -> tuple[Tensor, Tensor]:
    """The result of loops that add to zeros to which `write` has written, and that of the same for all pairs."""
    x = torch.randn(TOKENS, WIDTH, generator=MAKE)
    factor, index = torch.randn(TOKENS, EXPERTS, generator=MAKE).softmax(-1).topk(CHOSEN)

    def run() -> Tensor:
        total = torch.zeros_like(x)
        write(total)
        mask = F.one_hot(index, num_classes=EXPERTS).permute(2, 1, 0)
        for _ in range(times):
            for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
                slot, token = torch.where(mask[expert[0]])
                total.index_add_(
                    0, token, F.linear(x[token], GATE[expert[0]]) @ UP[expert[0]] * factor[token, slot, None]
                )
        return total * 1

    wanted = run()
    with ExpertLoops():
        return wanted, run()


WRITES: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda total: total.add_(1.0),
    "to a part": lambda total: total[:, 0].fill_(1.0),
    "by item": lambda total: total.__setitem__((slice(None), 0), 1.0),
    "by an operator": lambda total: total.__iadd__(1.0),
    "by out": lambda total: torch.add(total, 1.0, out=total),
}


@pytest.mark.parametrize("way", WRITES)
def test_zeros_that_are_changed_before_the_loop(way: str) -> None:
    wanted, result = changed(WRITES[way])
    assert torch.allclose(result, wanted, atol=1e-5)


def test_several_loops_that_add_to_one_tensor() -> None:
    wanted, result = changed(lambda total: None, times=3)
    assert torch.allclose(result, wanted, atol=1e-5)


def test_a_sum_that_is_read_through_another_view_is_refused() -> None:
    x = torch.randn(TOKENS, WIDTH, generator=MAKE)
    factor, index = torch.randn(TOKENS, EXPERTS, generator=MAKE).softmax(-1).topk(CHOSEN)
    whole = torch.ones(1, TOKENS, WIDTH)
    with ExpertLoops(), pytest.raises(UnsupportedError, match="read through another view"):
        mask = F.one_hot(index, num_classes=EXPERTS).permute(2, 1, 0)
        total = whole.view(TOKENS, WIDTH)
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[expert[0]])
            total.index_add_(0, token, (x[token] @ GATE[expert[0]].T) @ UP[expert[0]] * factor[token, slot, None])
        whole.sum()


def numbered(body: NumberedBody, x: Tensor, index: Tensor, factor: Tensor, at_all: bool = True) -> Tensor:
    """A loop that asks for the number of its expert."""
    total = torch.zeros_like(x)
    mask = F.one_hot(index, num_classes=EXPERTS).permute(2, 1, 0)
    for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero(as_tuple=False):
        number = int(hit.item())
        slot, token = torch.where(mask[number].squeeze(0))
        if token.numel() == 0:
            continue
        y = body(x[token], number)
        if y is not None:
            total.index_add_(0, token, (y * factor[token, slot, None]).to(x.dtype))
        if not at_all and number == 3:
            break
    return total * 1


def skipping(skips: Callable[[Tensor], Any], x: Tensor, index: Tensor, factor: Tensor) -> Tensor:
    """A loop that skips an expert by its number, which it takes out of the loop's variable."""
    total = torch.zeros_like(x)
    mask = F.one_hot(index, num_classes=EXPERTS + 1).permute(2, 1, 0)
    for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        expert = expert[0]
        if skips(expert):
            continue
        slot, token = torch.where(mask[expert])
        total.index_add_(0, token, F.linear(x[token], GATE[expert]) @ UP[expert] * factor[token, slot, None])
    return total * 1


@pytest.mark.parametrize(
    "skips",
    [lambda e: e == EXPERTS, lambda e: e == 2, lambda e: e != 1 and e > 0, lambda e: e >= 3, lambda e: e < 1 or e > 3],
)
def test_numbers_that_are_compared(skips: Callable[[Tensor], Any]) -> None:
    x = torch.randn(TOKENS, WIDTH, generator=MAKE)
    factor, index = torch.randn(TOKENS, EXPERTS, generator=MAKE).softmax(-1).topk(CHOSEN)
    wanted = skipping(skips, x, index, factor)
    with ExpertLoops():
        assert torch.allclose(skipping(skips, x, index, factor), wanted, atol=1e-5)


def test_a_comparison_with_a_tensor_is_refused() -> None:
    x, index = torch.randn(TOKENS, WIDTH, generator=MAKE), torch.arange(TOKENS * CHOSEN).view(-1, CHOSEN) % EXPERTS
    with ExpertLoops(), pytest.raises(UnsupportedError, match="a loop over experts uses"):
        skipping(lambda e: e == torch.tensor(2), x, index, index.float())


NumberedBody = Callable[[Tensor, int], Tensor | None]
FEW = DOWN[:3]
NUMBERED: dict[str, NumberedBody] = {
    "all alike": lambda x, e: F.linear(x, GATE[e]) @ DOWN[e],
    "the token itself": lambda x, e: F.silu(x @ UP[e].T) @ FEW[e] if e < 3 else x,
    "nothing": lambda x, e: x @ GATE[e].T @ GATE[e] if e in (1, 4) else None,
    "three kinds": lambda x, e: x * 2.0 if e == 0 else x if e > 2 else x @ UP[e].T @ GATE[e],
    "a number of its own": lambda x, e: x * float(e),
    "one that has weights elsewhere": lambda x, e: x @ GATE[e].T @ (GATE[2] if e == 2 else GATE[e]),
}


def compared(body: NumberedBody, **more: bool) -> tuple[Tensor, Tensor]:
    """The loop's result, and that of the loop run for all pairs."""
    x = torch.randn(TOKENS, WIDTH, generator=MAKE)
    factor, index = torch.randn(TOKENS, EXPERTS, generator=MAKE).softmax(-1).topk(CHOSEN)
    wanted = numbered(body, x, index, factor)
    with ExpertLoops():
        return wanted, numbered(body, x, index, factor, **more)


@pytest.mark.parametrize("kind", NUMBERED)
def test_experts_that_differ(kind: str) -> None:
    wanted, result = compared(NUMBERED[kind])
    assert torch.allclose(result, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        lambda x, e: x + x.sum(0) if e == 3 else x,
        lambda x, e: x @ GATE[0].T @ UP[e],  # one weight for all, which is that of the first
        lambda x, e: F.linear(x, GATE[e - 1 if e else 0]) @ DOWN[e],
        lambda x, e: x.clone().mul_(2.0),
    ],
)
def test_numbered_experts_that_are_refused(body: NumberedBody) -> None:
    with pytest.raises(UnsupportedError, match="a loop over experts"):
        compared(body)


def test_other_modes_may_ask_what_a_loop_goes_through() -> None:
    """As the mode for loops over tokens does, through which each unbind passes."""

    class Asks(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") == "unbind":
                assert args[0].shape == (1, 1)
            return func(*args, **kwargs or {})

    x, index = torch.randn(TOKENS, WIDTH, generator=MAKE), torch.arange(TOKENS * CHOSEN).view(-1, CHOSEN) % EXPERTS
    with ExpertLoops(), Asks():
        numbered(NUMBERED["the token itself"], x, index, index.float())


def test_a_loop_that_ends_early_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="ends before"):
        compared(NUMBERED["all alike"], at_all=False)


MIXING: dict[str, Body] = {
    "sum over rows": lambda x, e: x + x.sum(0),
    "softmax over rows": lambda x, e: x.softmax(0),
    "sorted rows": lambda x, e: x.sort(0).values,
    "chunks of rows": lambda x, e: torch.cat(x.chunk(2, dim=0)),
    "rows read as another shape": lambda x, e: x.view(-1, WIDTH // 2).relu().view(-1, WIDTH),
    "one weight for all": lambda x, e: F.linear(x, GATE[0]) @ DOWN[e],
    "the shape": lambda x, e: x / x.shape[0],
    "the size": lambda x, e: x / x.size(0),
    "the number of rows": lambda x, e: x * torch.ones_like(x).sum(),
}


@pytest.mark.parametrize("kind", MIXING)
def test_what_mixes_rows_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedError, match="loop over experts"):
        both(MIXING[kind])


def test_other_uses_of_masks_are_left_alone() -> None:
    index = torch.tensor([[0, 2], [1, 3]])
    with ExpertLoops():
        mask = F.one_hot(index, num_classes=5)
        assert torch.equal(mask.float().sum(1), F.one_hot(index, num_classes=5).float().sum(1))
        assert mask.permute(2, 1, 0).sum(dim=(-1, -2)).tolist() == [1, 1, 1, 1, 0]
        assert mask.permute(0, 2, 1)[1].tolist() == F.one_hot(index[1], num_classes=5).T.tolist()
