"""Decoders that no library knows, through the whole compiler: a plain module, and an ExportedProgram of another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qcompile
from qcompile import check, pipeline
from qcompile.checkpoints import frontend
from qcompile.errors import UnsupportedError, UsageError
from qcompile.passes.base import apply
from qcompile.passes.raising import Raise
from tests.support import modules
from tests.support.cases import first
from tests.support.programs import dynamic_size

LONGEST = 64
ALIKE = 1e-5
"""Sums of float32 in another order; random weights make logits of about 1."""


def text(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, modules.VOCAB, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    return ids, torch.arange(tokens).expand(2, tokens)


def exported(module: nn.Module, *inputs: torch.Tensor) -> torch.export.ExportedProgram:
    sizes = {0: dynamic_size("b"), 1: dynamic_size("t", max=LONGEST - 1)}
    return torch.export.export(module, inputs, dynamic_shapes=tuple(sizes for _ in inputs))


def matches(model: Any, module: nn.Module, takes: int, folder: Path, **source: Any) -> None:
    """Build `model` in float32; one pass, and steps of 5 tokens, must give the logits of `module`."""
    qcompile.build(model, folder / "out", recipe="f32", max_position=LONGEST, **source)
    with qcompile.load(folder / "out") as llm, torch.no_grad():
        for tokens in (1, 9, 48):
            expected = module(*text(tokens)[:takes])
            assert check.max_relative_error(llm.logits(text(tokens)[0]), expected) < ALIKE
            assert check.max_relative_error(llm.logits(text(tokens)[0], chunk=5), expected) < ALIKE


def test_a_module_of_our_own_design(tmp_path: Path) -> None:
    module = modules.randomized(modules.Modern())
    matches(module, module, 2, tmp_path, example_inputs=text(7))


def test_an_exported_program_of_another(tmp_path: Path) -> None:
    module = modules.randomized(modules.Classic())
    matches(exported(module, text(7)[0]), module, 1, tmp_path)


def test_a_stored_mask_may_be_infinite(tmp_path: Path) -> None:
    module = modules.randomized(modules.AddedMask())
    matches(module, module, 1, tmp_path, example_inputs=text(7)[:1])


class TwoInputs(nn.Module):
    """Logits of token ids, multiplied by a second input if that is `read`."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.plain, self.read = modules.randomized(modules.Plain(layers=1)), read

    def forward(self, ids: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.plain(ids)
        return logits * (other[..., None] >= 0) if self.read else logits


@pytest.mark.parametrize(
    "made", first((torch.ones_like,), [torch.ones_like, torch.zeros_like, lambda ids: torch.arange(1, 8).expand(2, 7)])
)
def test_a_second_input_that_is_no_positions_is_refused(made: Any) -> None:
    ids, message = text(7)[0], "the second of example_inputs must be the positions 0, 1, 2"
    with pytest.raises(UsageError, match=message):
        frontend.load(TwoInputs(True), example_inputs=(ids, made(ids)), max_position=LONGEST)
    with pytest.raises(UsageError, match=message):
        frontend.load(exported(TwoInputs(True), ids, made(ids)), max_position=LONGEST)
    frontend.load(TwoInputs(True), example_inputs=text(7), max_position=LONGEST)
    frontend.load(exported(TwoInputs(True), *text(7)), max_position=LONGEST)
    frontend.load(
        TwoInputs(False), example_inputs=(ids, made(ids)), max_position=LONGEST
    )  # which reads its shape alone


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_second_input_of_another_type_is_refused(dtype: torch.dtype) -> None:
    program = exported(TwoInputs(True), text(7)[0], torch.ones(2, 7, dtype=dtype))
    program._example_inputs = None  # as of one that was stored without
    with pytest.raises(UnsupportedError, match="a model must take token ids int64"):
        apply(Raise(), frontend.load(program, max_position=LONGEST))


class Branching(modules.Plain):
    """Plain, with a function `branch` that may change the logits by the number of tokens."""

    def __init__(self, branch: Callable[[Any], Any]) -> None:
        super().__init__(layers=1)
        self.branch = branch

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = super().forward(ids)
        return logits * 2 if self.branch(ids.shape[1]) else logits


AUTO = torch.export.Dim.AUTO
RANGES: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "longer ones": (
        lambda t: t > 5,
        dynamic_size("t", min=6, max=63),
        "takes at least 6 tokens; export it for any number",
    ),
    "shorter ones": (
        lambda t: t < 33,
        dynamic_size("t", max=32),
        "takes at most 32 tokens; give a max_position of at most 33",
    ),
    "longer ones, automatic": (lambda t: t > 5, AUTO, "takes at least 6 tokens"),
    "shorter ones, automatic": (lambda t: t < 33, AUTO, "takes at most 32 tokens"),
    "all but one": (lambda t: t != 17, AUTO, "does not take 17 tokens"),
    "multiples": (lambda t: t % 7 == 0, AUTO, "does not take 2 tokens"),
}


@pytest.mark.parametrize("case", RANGES)
def test_a_program_of_some_lengths_alone_is_refused(case: str) -> None:
    branch, tokens, message = RANGES[case]
    batch = AUTO if tokens is AUTO else dynamic_size("b")
    sizes: Any = ({0: batch, 1: tokens},)
    program = torch.export.export(modules.randomized(Branching(branch)), text(7)[:1], dynamic_shapes=sizes)
    with pytest.raises(UnsupportedError, match=message):
        frontend.load(program, max_position=LONGEST)


@pytest.mark.parametrize(
    "sizes", [{0: AUTO, 1: AUTO}, {0: dynamic_size("b", min=2), 1: dynamic_size("t", min=2, max=LONGEST)}]
)
def test_a_program_of_any_lengths_is_compiled(sizes: Any) -> None:
    module = modules.randomized(Branching(lambda t: True))
    program = torch.export.export(module, text(7)[:1], dynamic_shapes=(sizes,))
    graph = apply(Raise(), frontend.load(program, max_position=LONGEST)).graph
    for tokens in (1, LONGEST):
        assert check.max_relative_error(graph.run(*text(tokens)), module(text(tokens)[0])) < ALIKE


WEIGHT = "layers.0.q.weight"
REPLACED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shorter": (lambda w: w[:8], r"weight layers\.0\.q\.weight has shape \[8, 48\], the model needs \[48, 48\]"),
    "a row, which would broadcast": (lambda w: w[:1], r"has shape \[1, 48\], the model needs"),
    "whole numbers": (lambda w: w.to(torch.int8), r"is of type torch\.int8, the model needs torch\.float32"),
    "without values": (lambda w: w.to("meta"), "is sparse or has no values"),
    "sparse": (lambda w: w.to_sparse(), "is sparse or has no values"),
    "an array": (lambda w: w.numpy(), "of the exported program is no tensor, but ndarray"),
}


@pytest.mark.parametrize("case", REPLACED)
def test_weights_of_a_program_that_were_replaced_by_others_are_refused(case: str) -> None:
    change, message = REPLACED[case]
    program = exported(modules.randomized(modules.Plain(layers=1)), text(7)[0])
    program.state_dict[WEIGHT] = change(program.state_dict[WEIGHT].detach())
    with pytest.raises(UsageError, match=message):
        frontend.load(program, max_position=LONGEST)


def test_a_weight_that_is_missing_from_a_program_is_named() -> None:
    program = exported(modules.randomized(modules.Plain(layers=1)), text(7)[0])
    del program.state_dict[WEIGHT]
    with pytest.raises(UsageError, match=r"state_dict has no layers\.0\.q\.weight, which its graph reads"):
        frontend.load(program, max_position=LONGEST)


class Tied(modules.Plain):
    """Plain, with a head in a module of its own that has the embedding's weight, and with scaled embeddings."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.head = nn.Linear(modules.HIDDEN, modules.VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.factors = torch.linspace(0.5, 1.5, modules.HIDDEN)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.factors
        return self.head(modules.rms(x, self.scale))


@pytest.mark.parametrize(
    "names", [("embed.weight",), ("head.weight",), ("scale",), ("factors",), ("embed.weight", "scale")]
)
def test_weights_of_a_program_that_were_replaced_are_the_ones_compiled(names: tuple[str, ...]) -> None:
    program = exported(modules.randomized(Tied()), text(7)[0])
    for name in names:
        for held in (program.state_dict, program.constants):
            if name in held:
                value = held[name].detach() * 2 + 1
                held[name] = nn.Parameter(value) if held is program.state_dict else value
    graph = apply(Raise(), frontend.load(program, max_position=LONGEST)).graph
    assert check.max_relative_error(graph.run(*text(9)), program.module()(text(9)[0])) < ALIKE


@pytest.mark.parametrize("alone", first((True,), [False, True]))
def test_heads_are_in_groups_or_have_no_dimension(alone: bool, tmp_path: Path) -> None:
    module = modules.randomized(modules.Grouped(alone))
    matches(module, module, 1, tmp_path, example_inputs=text(7)[:1])


def test_a_mask_is_no_number_nowhere_and_weights_are_finite() -> None:
    module: Any = modules.randomized(modules.AddedMask())
    ids = text(7)[:1]
    graph = frontend.load(module, example_inputs=ids, max_position=LONGEST)
    name = "layers.0.mask"
    assert graph.weights.mask(name).isneginf().sum() == LONGEST * (LONGEST - 1) // 2
    with pytest.raises(UsageError, match=f"weight {name} holds NaN or infinite values"):
        graph.weights[name]  # were it anything but a mask
    module.layers[0].mask[..., 3, 4] = float("nan")
    with pytest.raises(UsageError, match=f"weight {name} holds NaN"):
        pipeline.plan(module, example_inputs=ids, max_position=LONGEST)
