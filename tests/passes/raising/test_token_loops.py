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


def changed_by_out(self: OneByOne, v: Tensor) -> Tensor:
    h = torch.zeros(v.shape[0], HEADS * WIDTH)
    torch.add(h, 1.0, out=h)
    return h


def by_flag(self: OneByOne, h: Tensor, z: Tensor, v: Tensor, t: Any) -> Tensor:
    new = z[:, t] * h + v[:, t]
    kept = new[:, :1]
    F.relu(new, inplace=True)
    return new + kept


@torch.library.custom_op("qcompile_tests::mul", mutates_args=())
def other_product(a: Tensor, b: Tensor) -> Tensor:
    """An operator of another library, with a name that torch has too."""
    return a * b * b


@other_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.empty_like(a)


def of_another_library(self: OneByOne, h: Tensor, z: Tensor, v: Tensor, t: Any) -> Tensor:
    return torch.ops.qcompile_tests.mul(h, z[:, t]) + v[:, t]  # type: ignore[no-any-return]


def first_is_other(self: OneByOne, h: Tensor, z: Tensor, v: Tensor, t: Any) -> Tensor:
    return v[:, t] if t == 0 else z[:, t] * h + v[:, t]


def before(self: OneByOne, h: Tensor, z: Tensor, v: Tensor, t: Any) -> Tensor:
    return z[:, t] * h + v[:, t - 1]


def stops(self: OneByOne, x: Tensor) -> Any:
    for t in range(x.shape[1]):
        yield t
        break


def other_at(number: int) -> Any:
    """A step that differs for the token `number`, by the results so far."""

    def step(self: OneByOne, h: Tensor, z: Tensor, v: Tensor, t: Any) -> Tensor:
        is_there = self.out[number - 2 :] and not self.out[number - 1 :]
        return z[:, t] * h + (2 * v[:, t] if is_there else v[:, t])

    return step


def by_length(self: OneByOne, h: Tensor, z: Tensor, v: Tensor, t: Any) -> Tensor:
    return z[:, t] * h + (v[:, t] if len(self.out) != 1000 else 2 * v[:, t])


def counted(self: OneByOne, x: Tensor) -> Any:
    count = 0
    for t in range(x.shape[1]):
        count += 1
        yield t
    assert count


def by_attribute(self: OneByOne, x: Tensor) -> Tensor:
    z, v = torch.sigmoid(self.z(x)), self.v(x)
    self.seen: Any = {"tokens": 0}  # type: ignore[assignment]
    h, out = torch.zeros_like(v[:, 0]), torch.empty_like(v)
    for t in range(x.shape[1]):
        self.seen["tokens"] += 1
        h = z[:, t] * h + (v[:, t] if self.seen["tokens"] != 1000 else 2 * v[:, t])
        out[:, t] = h
    return out


def by_enumerate(self: OneByOne, x: Tensor) -> Tensor:
    z, v = torch.sigmoid(self.z(x)), self.v(x)
    h, out = torch.zeros_like(v[:, 0]), []
    for i, (z_t, v_t) in enumerate(zip(z.unbind(1), v.unbind(1), strict=True)):
        h = z_t * h + (v_t if i != 1000 else 2 * v_t)
        out.append(h)
    return torch.stack(out, 1)


def through_a_view(self: OneByOne, x: Tensor) -> Tensor:
    z, v = torch.sigmoid(self.z(x)), self.v(x)
    h, out = torch.zeros_like(v[:, 0]), torch.zeros_like(v)
    view = out.unflatten(-1, (HEADS, WIDTH))
    for t in range(x.shape[1]):
        h = z[:, t] * h + v[:, t]
        out[:, t] = h
    return view.flatten(2)


def view_inside(self: OneByOne, x: Tensor) -> Tensor:
    z, v = torch.sigmoid(self.z(x)), self.v(x)
    h, out = torch.zeros_like(v[:, 0]), torch.zeros_like(v)
    view = out.unflatten(-1, (HEADS, WIDTH))
    for t in range(x.shape[1]):
        h = z[:, t] * h + v[:, t] + view[:, t].flatten(1)
        out[:, t] = h
    return out


REFUSED: dict[str, tuple[type[Loop], str]] = {
    "changed zeros": (kind(start=changed), "does not start from torch.zeros"),
    "changed by out": (kind(start=changed_by_out), "does not start from torch.zeros"),
    "through a view": (kind(recur=through_a_view), "read through another view"),
    "a view inside": (kind(recur=view_inside), "reads a tensor into which it writes"),
    "by a flag": (kind(step=by_flag), "changes a tensor in place by relu"),
    "another library": (kind(step=of_another_library), "not update linearly, because of qcompile_tests.mul"),
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
    "fifth": (kind(step=other_at(5)), "treats tokens differently"),
    "twentieth": (kind(step=other_at(20)), "treats tokens differently"),
    "length": (kind(step=by_length), "counts its tokens by the length of a list"),
    "counted": (kind(over=counted), "changes the number count for each token"),
    "attribute": (kind(recur=by_attribute), r"changes the number self\.seen\['tokens'\] for each token"),
    "enumerate": (kind(recur=by_enumerate), "changes the number i for each token"),
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


class Mixed(Blocks):
    """Values of other sequences are added within a block."""

    def within(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v + (v.roll(1, 0) - v)


class Undefined(Blocks):
    """The results are no numbers."""

    def within(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v + (-1 - v * v).log()


@pytest.mark.parametrize("wrong", [Wrong, Mixed, Undefined])
def test_a_loop_over_blocks_that_is_another_function_is_refused(
    wrong: type[Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcompile.checkpoints.eager.require_same", lambda *_: None)  # which transformers' models lack
    graph = raise_module(modules.randomized(wrong()))
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
