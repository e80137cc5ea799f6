"""Loops over tokens in Python: as recurrences if they are proved to be, else refused by name."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable
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
from tests.support.cases import first
from tests.support.families import COMMON
from tests.support.raising import raise_module, right
from tests.support.token_loops import HEADS, KINDS, SIZE, WIDTH, Blocks, Loop

LOGGER = logging.getLogger(__name__)


@pytest.mark.parametrize("name", KINDS)
def test_a_recurrence_that_is_in_no_library(name: str) -> None:
    graph = right(modules.randomized(KINDS[name]()))
    *others, node = sorted(graph.calls("linear_recurrence"), key=lambda call: ops.operand(call, "v").meta["val"].shape)
    assert len(others) == (name == "Normalized")
    given = ops.operands(node)
    matrix = name in ("Matrix", "Gated", "Indexed", "Delta", "Blocks", "Normalized")
    assert given.v.meta["val"].shape[2:] == ((HEADS, WIDTH) if matrix else (HEADS * WIDTH, 1))
    assert given.k.meta["val"].shape[2:] == ((HEADS, SIZE) if matrix else (1, 1))
    assert given.delta == (name == "Delta")
    assert (given.rates is not None) == (name in ("Fixed", "Matrix", "Blocks", "Normalized"))


class OneByOne(Loop):
    """h = z h + v, with `step`, which a subclass replaces, for each token."""

    def recur(self, x: Tensor) -> Tensor:
        z, v = torch.sigmoid(self.z(x)), self.v(x)
        h, out = self.start(v), []
        for t in self.over(x):
            h = self.step(h, z, v, t)
            out.append(h)
        return self.result(h, out)

    def over(self, x: Tensor) -> Any:
        return range(x.shape[1])

    def start(self, v: Tensor) -> Tensor:
        return torch.zeros(v.shape[0], HEADS * WIDTH)

    def step(self, h: Tensor, z: Tensor, v: Tensor, t: Any) -> Tensor:
        return z[:, t] * h + v[:, t]

    def result(self, h: Tensor, out: list[Tensor]) -> Tensor:
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


def reading(reads: Callable[[list[Tensor]], Any]) -> Any:
    """A loop that does something else where `reads` is true of the list of the results so far."""

    def recur(self: OneByOne, x: Tensor) -> Tensor:
        z, v = torch.sigmoid(self.z(x)), self.v(x)
        h, out = torch.zeros_like(v[:, 0]), []
        for t in range(x.shape[1]):
            h = z[:, t] * h + (2 * v[:, t] if reads(out) else v[:, t])
            out.append(h)
        return torch.stack(out, 1)

    return recur


def kept_by(change: Callable[[OneByOne, list[Tensor]], list[Tensor]]) -> Any:
    """A loop that appends to a list that `change` makes known to other code."""

    def recur(self: OneByOne, x: Tensor) -> Tensor:
        z, v = torch.sigmoid(self.z(x)), self.v(x)
        h = torch.zeros_like(v[:, 0])
        held: Any = []
        out = change(self, held)
        for t in range(x.shape[1]):
            h = self.step(h, z, v, t)
            out.append(h)
        return torch.stack(out, 1)

    return recur


def on_self(self: OneByOne, held: list[Tensor]) -> list[Tensor]:
    self.out = held  # type: ignore[assignment]
    return held


def counting(count: Callable[[OneByOne], float]) -> Any:
    """A step that does something else where `count` says so."""

    def step(self: OneByOne, h: Tensor, z: Tensor, v: Tensor, t: Any) -> Tensor:
        return z[:, t] * h + (2 * v[:, t] if count(self) == 1000 else v[:, t])

    return step


SEEN: dict[str, int] = {"tokens": 0}
COUNTER, ITEMS = itertools.count(), iter([0] * 5000)


def in_a_dictionary(_: OneByOne) -> int:
    SEEN["tokens"] += 1
    return SEEN["tokens"]


def in_a_default(_: OneByOne, held: list[int] = [0]) -> int:  # noqa: B006
    held[0] += 1
    return held[0]


def in_a_class(_: OneByOne) -> int:
    Slotted.total += 1
    return Slotted.total


class Slotted:
    """A counter without a dictionary."""

    __slots__ = ("count",)
    total = 0

    def __init__(self) -> None:
        self.count = 0


def in_a_closure() -> Any:
    count, slotted = 0, Slotted()

    def inner(_: OneByOne) -> int:
        nonlocal count
        count += 1
        return count

    def outer(_: OneByOne) -> int:
        slotted.count += 1
        return slotted.count

    return inner, outer


def by_tensor(self: OneByOne, x: Tensor) -> Tensor:
    z, v = torch.sigmoid(self.z(x)), self.v(x)
    h, out, count = torch.zeros_like(v[:, 0]), [], torch.zeros((), dtype=torch.int64)
    for t in range(x.shape[1]):
        count = count + 1
        h = z[:, t] * h + (2 * v[:, t] if count.item() == 1000 else v[:, t])
        out.append(h)
    return torch.stack(out, 1)


def through(parts: Callable[[OneByOne, Tensor], Any]) -> Any:
    """A loop over `parts`, of which each is a token's part of the values."""

    def recur(self: OneByOne, x: Tensor) -> Tensor:
        v = self.v(x)
        h, out = torch.zeros_like(v[:, 0]), []
        for v_t in parts(self, v):
            h = 0.5 * h + v_t
            out.append(h)
        return torch.stack(out, 1)

    return recur


def with_a_list(self: OneByOne, v: Tensor) -> Any:
    return (v_t for v_t, _ in zip(v.unbind(1), [0] * 30, strict=False))


def zipped(self: OneByOne, x: Tensor) -> Tensor:
    v = self.v(x)
    h, out = torch.zeros_like(v[:, 0]), []
    for v_t, factor in zip(v.unbind(1), [0.5] * 30, strict=False):
        h = factor * h + v_t
        out.append(h)
    return torch.stack(out, 1)


def counted_outside(self: OneByOne, x: Tensor) -> Tensor:
    z, v = torch.sigmoid(self.z(x)), self.v(x)
    h, out, n = torch.zeros_like(v[:, 0]), [], 0
    for t in through_a_generator(x):
        n = n + 1
        h = z[:, t] * h + (2 * v[:, t] if n == 1000 else v[:, t])
        out.append(h)
    return torch.stack(out, 1)


def through_a_generator(x: Tensor) -> Any:
    yield from range(x.shape[1])


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
    "a list of features": (
        kind(step=lambda self, h, z, v, t: z[:, t] * h + v[:, t, [*range(HEADS * WIDTH)]]),
        "by a list or a tensor at once",
    ),
    "first": (kind(step=first_is_other), "treats tokens differently"),
    "fifth": (kind(recur=reading(lambda out: out[4:])), "does more with the list out"),
    "thousandth": (kind(recur=reading(lambda out: out[999:])), "does more with the list out"),
    "length": (kind(recur=reading(lambda out: len(out) == 1000)), "does more with the list out"),
    "list of self": (kind(recur=kept_by(on_self)), r"keeps its results in \w+(\.out)?, where other code"),
    "list of two names": (kind(recur=kept_by(lambda self, held: held)), "keeps its results in"),
    "dictionary": (kind(step=counting(in_a_dictionary)), r"changes the number .*SEEN\['tokens'\] for each token"),
    "default": (kind(step=counting(in_a_default)), r"changes the number .*\[0\] for each token"),
    "class": (kind(step=counting(in_a_class)), r"changes the number .*Slotted.total for each token"),
    "closure": (kind(step=counting(in_a_closure()[0])), "changes the number .*count for each token"),
    "slots": (kind(step=counting(in_a_closure()[1])), "changes the number .*count for each token"),
    "iterator": (kind(step=counting(lambda _: next(COUNTER))), r"changes the number .*COUNTER \(an iterator\)"),
    "iterator of a list": (kind(step=counting(lambda _: next(ITEMS))), r"changes the number .*ITEMS \(an iterator\)"),
    "tensor": (kind(recur=by_tensor), "reads values of a tensor by item"),
    "counted by its caller": (kind(recur=counted_outside), "changes the number n for each token"),
    "with a list": (kind(recur=zipped), "iterates over tokens together with something else"),
    "with a list, within": (kind(recur=through(with_a_list)), "iterates over tokens together with something else"),
    "the first ones": (
        kind(recur=through(lambda self, v: itertools.islice(v.unbind(1), 1000))),
        "iterates over tokens by islice",
    ),
    "counted": (kind(over=counted), "changes the number count for each token"),
    "attribute": (kind(recur=by_attribute), r"changes the number self\.seen\['tokens'\] for each token"),
    "enumerate": (kind(recur=by_enumerate), "changes the number i for each token"),
    "before": (kind(step=before), "reads other tokens than its own"),
    "last": (kind(result=lambda self, h, out: h[:, None].expand(-1, 7, -1) * torch.stack(out, 1)), "leaves a value"),
    "reversed": (kind(result=lambda self, h, out: torch.stack(out[::-1], 1)), "leaves a value"),
    "missing": (kind(result=lambda self, h, out: torch.stack(out[1:], 1)), "leaves a value"),
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


FIRST = (
    *("changed zeros", "through a view", "a view inside", "another library", "tanh", "in place", "first", "length"),
    *(
        "list of self",
        "closure",
        "iterator",
        "tensor",
        "with a list",
        "counted",
        "before",
        "reversed",
        "stops",
        "skips",
    ),
    *("no decay that is known", "negative", "over sequences", "number"),
)
"""Some of each reason."""


@pytest.mark.parametrize("name", first(FIRST, REFUSED))
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


@pytest.mark.parametrize("wrong", first((Mixed,), [Wrong, Mixed, Undefined]))
def test_a_loop_over_blocks_that_is_another_function_is_refused(
    wrong: type[Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcompile.checkpoints.eager.require_same", lambda *_: None)  # which transformers' models lack
    graph = raise_module(modules.randomized(wrong()))
    (node,) = graph.calls("linear_recurrence")
    with pytest.raises(UnsupportedError, match=r"the loop over tokens in Blocks.recur \(line \d+\) is over blocks"):
        graph.weights[str(ops.operand(node, "rates").target)]


@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrong", [False, True])
def test_tables_of_blocks_may_be_rounded_as_a_checkpoint_stores_them(
    short: torch.dtype, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcompile.checkpoints.eager.require_same", lambda *_: None)  # which transformers' models lack
    module = modules.randomized(Blocks(wrong))
    for table in module.buffers():
        table.copy_(table.to(short))
    graph = raise_module(module)
    (node,) = graph.calls("linear_recurrence")
    with pytest.raises(UnsupportedError, match="is over blocks") if wrong else contextlib.nullcontext():
        graph.weights[str(ops.operand(node, "rates").target)]


def test_tables_of_blocks_of_which_one_is_exact_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcompile.checkpoints.eager.require_same", lambda *_: None)
    module = modules.randomized(Blocks())
    module.of_query.copy_(module.of_query.bfloat16())  # type: ignore[operator, union-attr]
    graph = raise_module(module)
    (node,) = graph.calls("linear_recurrence")
    with pytest.raises(UnsupportedError, match="is over blocks"):
        graph.weights[str(ops.operand(node, "rates").target)]


def helped(self: OneByOne, x: Tensor) -> Tensor:
    """What does not change may decide what a loop does."""
    parts = tuple(each(x) for each in (self.z, self.v))
    h, out, sizes = torch.zeros_like(parts[1][:, 0]), [], {"parts": len(parts)}
    for z_t, v_t in zip(*(part.unbind(1) for part in parts), strict=True):
        seen = [z_t, v_t]
        decay = torch.sigmoid(seen[0]) if len(seen) == sizes["parts"] and self.training is False else z_t
        h = decay * h + (v_t if next(iter(sizes)) == "parts" else -v_t)
        LOGGER.debug("one more token")
        out += [h]
    return torch.stack(out, 1)


@pytest.mark.parametrize(
    "changed", [OneByOne, kind(recur=helped), kind(recur=through(lambda self, v: map(torch.neg, v.unbind(1))))]
)
def test_the_loop_without_a_change_is_right(changed: type[OneByOne]) -> None:
    before = sys.getprofile()
    right(modules.randomized(changed()))
    assert sys.getprofile() is before


def test_a_refusal_names_the_loop_and_the_operator() -> None:
    with pytest.raises(
        UnsupportedError, match=r"the loop over tokens in OneByOne.over \(line \d+\) .*linear_recurrence"
    ):
        raise_module(modules.randomized(REFUSED["tanh"][0]()))
