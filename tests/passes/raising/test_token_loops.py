"""Loops over tokens in Python: as recurrences if they are proved to be, else refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qcompile import check, ops
from qcompile.checkpoints import frontend
from qcompile.errors import UnsupportedError
from qcompile.passes.base import apply
from qcompile.passes.raising import Raise
from tests.support import modules
from tests.support.families import COMMON
from tests.support.raising import raise_module, right
from tests.support.token_loops import HEADS, KINDS, SIZE, WIDTH, Blocks, Loop


@pytest.mark.parametrize("name", KINDS)
def test_a_recurrence_that_is_in_no_library(name: str) -> None:
    graph = right(modules.randomized(KINDS[name]()))
    *others, node = sorted(graph.calls("linear_recurrence"), key=lambda call: ops.operand(call, "v").meta["val"].shape)
    assert len(others) == (name == "Normalized")
    given = ops.operands(node)
    matrix = name in ("Matrix", "Gated", "Delta", "Blocks", "Normalized")
    assert given.v.meta["val"].shape[2:] == ((HEADS, WIDTH) if matrix else (HEADS * WIDTH, 1))
    assert given.k.meta["val"].shape[2:] == ((HEADS, SIZE) if matrix else (1, 1))
    assert given.delta == (name == "Delta")
    assert (given.rates is not None) == (name in ("Fixed", "Matrix", "Blocks", "Normalized"))


class OneByOne(Loop):
    """h = z h + v, with `step`, which a subclass replaces, for each token."""

    def recur(self, x: Tensor) -> Tensor:
        self.out: list[Tensor] = []
        z, v = torch.sigmoid(self.z(x)), self.v(x)
        h = self.start(v)
        for t in self.over(x):
            h = self.step(h, z, v, t)
            self.out.append(h)
        return self.result(h)

    def over(self, x: Tensor) -> Any:
        return range(x.shape[1])

    def start(self, v: Tensor) -> Tensor:
        return torch.zeros(v.shape[0], HEADS * WIDTH)

    def step(self, h: Tensor, z: Tensor, v: Tensor, t: Any) -> Tensor:
        return z[:, t] * h + v[:, t]

    def result(self, h: Tensor) -> Tensor:
        out, self.out = self.out, []
        return torch.stack(out, 1)


def kind(**methods: Any) -> type[OneByOne]:
    return type("Changed", (OneByOne,), methods)


def started(self: OneByOne, v: Tensor) -> Tensor:
    return torch.ones(v.shape[0], HEADS * WIDTH)


def changed(self: OneByOne, v: Tensor) -> Tensor:
    h = torch.zeros(v.shape[0], HEADS * WIDTH)
    h[:, 0] = 1.0
    return h


def in_place(self: OneByOne, h: Tensor, z: Tensor, v: Tensor, t: Any) -> Tensor:
    h *= z[:, t]
    return h + v[:, t]


def first_is_other(self: OneByOne, h: Tensor, z: Tensor, v: Tensor, t: Any) -> Tensor:
    return v[:, t] if t == 0 else z[:, t] * h + v[:, t]


def before(self: OneByOne, h: Tensor, z: Tensor, v: Tensor, t: Any) -> Tensor:
    return z[:, t] * h + v[:, t - 1]


def stops(self: OneByOne, x: Tensor) -> Any:
    for t in range(x.shape[1]):
        yield t
        break


REFUSED: dict[str, tuple[type[Loop], str]] = {
    "changed zeros": (kind(start=changed), "does not start from torch.zeros"),
    "single part": (kind(over=lambda self, x: [x.unbind(1)[0]]), "takes single parts"),
    "tanh": (
        kind(step=lambda self, h, z, v, t: torch.tanh(z[:, t] * h + v[:, t])),
        "not update linearly, because of tanh",
    ),
    "square": (kind(step=lambda self, h, z, v, t: z[:, t] * h * h + v[:, t]), "not update linearly, because of"),
    "norm": (kind(step=lambda self, h, z, v, t: F.normalize(h, dim=-1) + v[:, t]), "not update linearly"),
    "started": (kind(start=started), "does not start from torch.zeros"),
    "in place": (kind(step=in_place), "in place by mul_"),
    "first": (kind(step=first_is_other), "treats tokens differently"),
    "before": (kind(step=before), "reads other tokens than its own"),
    "last": (kind(result=lambda self, h: h[:, None].expand(-1, 7, -1) * torch.stack(self.out, 1)), "leaves a value"),
    "reversed": (kind(result=lambda self, h: torch.stack(self.out[::-1], 1)), "leaves a value"),
    "missing": (kind(result=lambda self, h: torch.stack(self.out[1:], 1)), "leaves a value"),
    "stops": (kind(over=stops), "may end before the last token"),
    "skips": (kind(over=lambda self, x: range(1, x.shape[1])), "any batch and number of tokens"),
    "backwards": (kind(over=lambda self, x: range(x.shape[1] - 1, -1, -1)), "any batch and number of tokens"),
    "no decay that is known": (kind(step=lambda self, h, z, v, t: v[:, t] * h + z[:, t]), "needs a decay that is exp"),
    "negative": (kind(step=lambda self, h, z, v, t: -z[:, t] * h + v[:, t]), "not positive"),
    "over sequences": (kind(step=lambda self, h, z, v, t: z[:, t] * h + v[:, t].cumsum(0)), "5 tokens than its trace"),
    "of all tokens": (kind(step=lambda self, h, z, v, t: z[:, t] * h + v.sum(1)), "all sequences or tokens at once"),
    "over features": (
        kind(step=lambda self, h, z, v, t: z[:, t] * h + h.flip(1)),
        "not update linearly, because of flip",
    ),
    "number": (kind(step=lambda self, h, z, v, t: z[:, t] * h + t * v[:, t]), "computes with the number of a token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changed, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        raise_module(modules.randomized(changed()))


def test_lightning_attention_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = COMMON | {
        **{"layer_types": ["linear_attention", "full_attention"], "block_size": 8, "head_dim": 16},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
    }
    module: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("minimax", **settings), dtype=torch.float32)
    module.eval().save_pretrained(tmp_path)
    graph = apply(Raise(), frontend.load(tmp_path)).graph
    ids = torch.randint(0, 97, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = module(ids, use_cache=False).logits
    assert check.max_relative_error(graph.run(ids, torch.arange(48).expand(2, -1)), expected) < 1e-5
    assert len(graph.calls("linear_recurrence")) == 1


class Wrong(Blocks):
    """One table has another distance between tokens than the others, which shows from the second token on."""

    def __init__(self) -> None:
        super().__init__(wrong=True)


def test_a_loop_over_blocks_with_tables_that_disagree_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcompile.checkpoints.eager.require_same", lambda *_: None)  # which transformers' models lack
    graph = raise_module(modules.randomized(Wrong()))
    (node,) = graph.calls("linear_recurrence")
    with pytest.raises(UnsupportedError, match="a loop over blocks of tokens does not compute the recurrence"):
        graph.weights[str(ops.operand(node, "rates").target)]


def test_the_loop_without_a_change_is_right() -> None:
    right(modules.randomized(OneByOne()))


def test_a_refusal_names_the_loop_and_the_operator() -> None:
    with pytest.raises(
        UnsupportedError, match=r"the loop over tokens in OneByOne.over \(line \d+\) .*linear_recurrence"
    ):
        raise_module(modules.randomized(REFUSED["tanh"][0]()))
