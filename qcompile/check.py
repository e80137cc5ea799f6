"""Checks of what each stage's graph may contain, and of whether two graphs are equivalent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.formats.kv import PAGE_TOKENS
from qcompile.graph import Graph


class CheckError(AssertionError):
    """A graph violates the contract of its stage: a bug in the pass that produced it."""


def check(graph: Graph, after: str = "") -> None:
    """Raise CheckError unless `graph` satisfies the contract of its stage. `after` names the last pass."""
    where = f"after {after}: " if after else ""
    if graph.stage not in ("import", *ops.STAGES):
        raise CheckError(f"{where}stage {graph.stage} is unknown")
    graph.fx.lint()
    allowed = None if graph.stage == "import" else ops.allowed(graph.stage)  # `import` has any ATen operator
    if sum(node.op == "output" for node in graph.fx.nodes) != 1:
        raise CheckError(f"{where}a graph has one output")
    for node in graph.fx.nodes:
        problem = _problem(graph, node, allowed)
        if problem:
            raise CheckError(f"{where}node {node.name}: {problem}")


def _problem(graph: Graph, node: fx.Node, allowed: frozenset[str] | None) -> str | None:
    if node.op == "get_attr":
        return None if str(node.target) in graph.weights else f"weight {node.target} is not in the store"
    if node.op in ("placeholder", "output") or allowed is None:
        return None
    name = ops.name_of(node.target)
    is_item = getattr(node.target, "__name__", "") == "getitem"
    if node.op != "call_function" or (name not in allowed and not is_item):
        return f"{node.target} may not appear at stage {graph.stage}"
    if node.kwargs:
        return "operators take positional arguments only"
    return None if "val" in node.meta else "its shape was not inferred"


def max_relative_error(a: Tensor, b: Tensor) -> float:
    """max |a - b| / max |b| in float64; 0 for equal tensors, infinity for other shapes or non-finite values."""
    a, b = a.double(), b.double()
    if a.shape != b.shape or not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("inf")
    return ((a - b).abs().max() / b.abs().max().clamp_min(torch.finfo(torch.float64).tiny)).item()


def equivalent(a: Graph, b: Graph, inputs: Sequence[Tensor], dtype: torch.dtype | None = torch.float64) -> float:
    """Run both graphs on `inputs` with weights cast to `dtype`; returns the max relative error of a against b."""
    return max_relative_error(*(_first(graph.run(*inputs, dtype=dtype)) for graph in (a, b)))


def _first(value: Tensor | Sequence[Tensor]) -> Tensor:
    return value if isinstance(value, Tensor) else value[0]


def sample(graph: Graph, tokens: int = 16) -> Tensor:
    """Logits [tokens, vocab] of one fixed sequence in float32, from the reference bodies of a graph at any stage.

    If the model's context is shorter than `tokens`, it limits their number.
    """
    tokens = min(tokens, graph.info.max_position)
    ids = torch.randint(0, graph.info.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0))
    places = torch.arange(tokens)
    if graph.stage == "cache":
        inputs = _step_inputs(graph, ids, places)
    else:
        inputs = [ids[None], places[None]][: len(graph.inputs)]
    with torch.no_grad():
        logits = _first(graph.run(*inputs, dtype=torch.float32))
    return logits.reshape(tokens, -1)


def _step_inputs(graph: Graph, ids: Tensor, places: Tensor) -> list[Tensor]:
    """The inputs of a step over one sequence from its start, with an empty cache and empty states."""
    shapes = {str(node.target): node.meta["val"].shape for node in graph.inputs}
    layers = shapes["step_cache"]  # [layers, 2, slots, Hk, D]
    tokens = len(ids)
    pages = -(-tokens // PAGE_TOKENS)
    cache = torch.zeros(*layers[:2], pages * PAGE_TOKENS, *layers[3:])
    one = torch.zeros(tokens, dtype=torch.int64)
    inputs = [ids, places, one, torch.arange(pages)[None], places, cache]
    if "step_states" in shapes:
        inputs += [one[:1], torch.tensor([tokens]), torch.zeros(1, shapes["step_states"][1])]
    return inputs
