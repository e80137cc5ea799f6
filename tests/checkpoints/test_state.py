"""Modules that keep Python state: refused where a trace would freeze it, compiled where it changes nothing."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qcompile import check
from qcompile.checkpoints import frontend, state
from qcompile.errors import UnsupportedError
from qcompile.graph import Graph
from qcompile.passes.base import apply
from qcompile.passes.raising import Raise
from tests.support import modules

IDS = torch.randint(0, modules.VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
Use = Callable[[Any, Tensor], Tensor]


class Box:
    """A plain object."""

    count = 0


class Stateful(nn.Module):
    """A head over an embedding that `use` changes; it may read and write the attribute `kept`, and that of a child."""

    runs = 0

    def __init__(self, use: Use, kept: Any = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(modules.VOCAB, 16), nn.Linear(16, modules.VOCAB)
        self.child = nn.Identity()
        self.use, self.kept, self.child.kept = use, kept, kept
        modules.randomized(self)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.use(self, self.embed(ids)))


def load(module: nn.Module) -> Graph:
    return apply(Raise(), frontend.load(module, example_inputs=(IDS,), max_position=64)).graph


def put(owner: Any, value: Any) -> Any:
    owner.kept = value
    return value


def counted(owner: Any) -> int:
    return put(owner, owner.kept + 1)


def averaged(m: Any, x: Tensor) -> Tensor:
    m.kept[0] = m.kept[0] * 0.9 + x * 0.1
    return m.kept[0]


class Runs(Stateful):
    """Counts over all of its class."""

    def forward(self, ids: Tensor) -> Tensor:
        type(self).runs += 1
        return super().forward(ids) * type(self).runs


CHANGES: dict[str, tuple[Use, Any, str]] = {
    "a number": (lambda m, x: x * counted(m), 1, "changes its kept each time"),
    "a number used from the second run on": (lambda m, x: x * (m.kept, counted(m))[0], 1, "changes its kept each time"),
    "a number that counts later": (lambda m, x: x * (2 if counted(m) > 9 else 1), 0, "changes its kept each time"),
    "a number of a child": (lambda m, x: x * counted(m.child), 1, r"changes its child\.kept each time"),
    "a position": (lambda m, x: x + put(m, m.kept + x.shape[1]), 0, "changes its kept each time"),
    "a switch": (lambda m, x: x * put(m, -m.kept), 1.0, "changes its kept each time"),
    "a list": (lambda m, x: (m.kept.append(2.0), x * sum(m.kept))[1], [1.0], "changes its kept each time"),
    "a dictionary": (
        lambda m, x: (m.kept.update(n=m.kept["n"] + 1), x * m.kept["n"])[1],
        {"n": 0},
        r"changes its kept\['n'\] each time",
    ),
    "an object": (lambda m, x: (setattr(m.kept, "count", m.kept.count + 1), x * m.kept.count)[1], Box(), "changes its"),
    "hidden states kept": (lambda m, x: (m.kept.append(x), x)[1], [], "changes its kept each time"),
    "the mode": (lambda m, x: x * (2 if m.train(not m.training).training else 1), None, "changes its training each"),
    "an average": (averaged, [torch.zeros(16)], r"changes its kept\[0\] when it runs, and then computes something"),
    "another first run": (
        lambda m, x: x * (2 if m.kept else put(m, True)),
        False,
        "changes its kept when it runs, and then computes something else",
    ),
    "the last hidden state": (
        lambda m, x: (x if m.kept is None else x + m.kept, put(m, x))[0],
        None,
        "changes its kept when it runs, and then computes something else",
    ),
    "a parameter": (
        lambda m, x: (setattr(m.head, "bias", nn.Parameter(m.head.bias * 2)), x)[1],
        None,
        r"replaces its tensor head\.bias",
    ),
    "an iterator": (lambda m, x: x * next(m.kept), iter([1.0, 2.0, 3.0, 4.0]), "computes something else each time"),
    "random numbers": (lambda m, x: x * m.kept.random(), random.Random(0), "computes something else each time"),
    "a counter that cannot be copied": (lambda m, x: x * next(m.kept), (n for n in range(9)), "cannot be copied"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_state_that_changes_is_refused(case: str) -> None:
    use, kept, message = CHANGES[case]
    with pytest.raises(UnsupportedError, match=message) as caught:
        load(Stateful(use, kept))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [True, False])
def test_a_tensor_that_is_written_to_is_refused_and_stays(read: bool) -> None:
    count = torch.ones(16)
    with pytest.raises(UnsupportedError):
        load(Stateful(lambda m, x: (m.kept.add_(1.0), x * m.kept if read else x)[1], count))
    assert torch.equal(count, torch.ones(16))


def test_a_number_of_the_class_is_state() -> None:
    with pytest.raises(UnsupportedError, match="changes its runs each time"):
        load(Runs(lambda m, x: x))


numbers: Iterator[float] = itertools.cycle((1.0, 1.5, 2.0))


def test_a_number_from_elsewhere_is_noticed() -> None:
    with pytest.raises(
        UnsupportedError, match="computes something else each time it runs: it draws at random or keeps"
    ):
        load(Stateful(lambda m, x: x * next(numbers)))


def caught(x: Tensor) -> float:
    try:
        return float(x.sum() > 0)
    except RuntimeError:  # of the trace
        return 2.0


@pytest.mark.parametrize(
    ("branch", "sizes"),
    [
        (lambda x: x if x.shape[0] * x.shape[1] == 1 else x * 2, "1 x 1"),
        (lambda x: x if x.shape[0] == 1 and x.shape[1] > 1 else x * 2, "1 x 5"),
        (lambda x: x if x.shape[0] > 1 and x.shape[1] == 1 else x * 2, "3 x 1"),
        (lambda x: (x * 2).add_(1.0 if x.shape[1] == 1 else 0.0), "1 x 1"),
        (lambda x: x * caught(x), "1 x 1"),
    ],
)
def test_a_branch_that_the_trace_does_not_take_is_noticed(branch: Any, sizes: str) -> None:
    with pytest.raises(UnsupportedError, match=f"computes something else for {sizes} tokens than its trace"):
        load(Stateful(lambda m, x: branch(x)))


def test_branches_that_compute_the_same_are_compiled() -> None:
    load(Stateful(lambda m, x: x * 2 if x.shape[1] == 1 else x + x))


def test_tables_kept_elsewhere_are_whole_afterwards() -> None:
    """Made within a trace, they would be without values when the module runs again."""
    table = functools.cache(lambda: torch.linspace(1.0, 2.0, 16))
    module = Stateful(lambda m, x: x * table())
    graph = load(module)
    assert check.max_relative_error(graph.run(IDS, torch.arange(7).expand_as(IDS)), module(IDS)) < 1e-5


def test_a_table_as_long_as_the_first_text_is_refused() -> None:
    tables: list[Tensor] = []

    def use(m: Any, x: Tensor) -> Tensor:
        tables.extend([] if tables else [torch.full((x.shape[1], 1), 2.0)])
        return x * tables[0][: x.shape[1]]

    with pytest.raises(UnsupportedError, match="does not take any batch and number of tokens"):
        load(Stateful(use))


UNCHANGED: dict[str, tuple[Use, Any]] = {
    "a number that is read": (lambda m, x: x * m.kept, 3),
    "NaN": (lambda m, x: x, float("nan")),
    "a warning given once": (lambda m, x: (put(m, True), x)[1], False),
    "a number computed once": (lambda m, x: x * (m.kept or put(m, 2.0)), None),
    "a table made once": (lambda m, x: x * (put(m, torch.full((16,), 2.0)) if m.kept is None else m.kept), None),
    "constants made each time": (lambda m, x: (put(m, 1), x * torch.tensor([0.5, 2.0]).repeat(8))[1], 0),
    "the length seen last": (lambda m, x: (put(m, x.shape[1]), x)[1], None),
    "hidden states kept till the next run": (lambda m, x: (put(m, [x, x * 2]), x)[1], None),
    "a map kept till the next run, of a child": (lambda m, x: (put(m.child, x * 2), x)[1], None),
    "added in place, while a map is kept": (lambda m, x: (put(m, x * 2), (x * 2).add_(1.0))[1], None),
    "a number set and reset": (lambda m, x: (x * put(m, m.kept + 1), put(m, m.kept - 1))[0], 1),
    "a tensor that is replaced by the same": (lambda m, x: x * put(m, m.embed.weight[3] * 2), torch.zeros(16)),
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_state_that_settles_is_compiled(case: str) -> None:
    module = Stateful(*UNCHANGED[case])
    graph = load(module)
    with torch.no_grad():
        for ids in (IDS, IDS[:1, :1], IDS):
            assert (
                check.max_relative_error(graph.run(ids, torch.arange(ids.shape[1]).expand_as(ids)), module(ids)) < 1e-5
            )


def test_what_a_module_keeps_is_found() -> None:
    module = Stateful(lambda m, x: x, {"a": [1, (2.0, "b")], 3: {4}})
    module.child.kept = Box()
    module.child.kept.itself = module.child.kept  # circles end
    result = state.collect(module)
    assert result["kept['a'][1][0]"] == 2.0 and result["kept['a']"] == 2 and result["kept[3]"] == 1
    assert result["runs"] == 0 and not any("weight" in path or path.startswith("child.kept.itself") for path in result)


def export(module: nn.Module) -> Any:
    return torch.export.export(module, (IDS,), strict=False)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (lambda m, x: x * 2.0, lambda m, x: x * 2.0, True),
        (lambda m, x: x * 2.0, lambda m, x: x * 3.0, False),
        (lambda m, x: x * 2.0, lambda m, x: (x + 1, x * 2.0)[1], True),
        (
            lambda m, x: x * torch.tensor([1.0, 2.0]).repeat(8),
            lambda m, x: x * torch.tensor([1.0, 3.0]).repeat(8),
            False,
        ),
        (lambda m, x: x * m.head.weight[0], lambda m, x: x * m.embed.weight[0], False),
        (lambda m, x: (x * 2).add_(1.0), lambda m, x: (x * 2).add_(2.0), False),
        (lambda m, x: ((y := x * 2), y.add_(1.0), y)[2], lambda m, x: x * 2, False),
    ],
)
def test_programs_are_compared_by_what_they_compute(one: Use, other: Use, same: bool) -> None:
    assert state.alike(export(Stateful(one)), export(Stateful(other))) == same


def test_programs_that_index_inside_of_vmap_are_compared() -> None:
    """A trace of it holds specifications of trees besides graphs."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    def looked_up(factor: float) -> Use:
        table = torch.arange(16.0)

        def use(module: Any, x: Tensor) -> Tensor:
            with TransformGetItemToIndex():
                return x * torch.vmap(lambda place: table[place] * factor)(torch.arange(16))

        return use

    one, same, other = (export(Stateful(looked_up(factor))) for factor in (2.0, 2.0, 3.0))
    assert any(node.op == "get_attr" for node in one.graph.nodes)
    assert state.alike(one, same) and not state.alike(one, other)
