"""Lora: prepare linears for adapters that requests choose when the artifact runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.artifact import adapted
from qcompile.errors import PassError, UsageError
from qcompile.formats.registry import weight_format
from qcompile.graph import Graph
from qcompile.passes.adapted_linears import WeightStep, WeightTerm, terms_of, weights_read
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.plan_memory import behind_take_rows

MOST_RANK = 512


@dataclass(frozen=True)
class Lora(Pass):
    """Puts lora_shrink and lora_expand around each gemm with a weight made of known weights of the checkpoint.

    `rank` is the largest rank of an adapter; 0 leaves the graph as it is. A gemm that ends in a gate stores gate and up
    first, and gate_rows joins them (on a CPU, only where a row has an adapter). Adapters cannot change the output head,
    experts, and linears that compute only the rows with requested logits. Nor can they change a weight that another
    operator reads. The notes name all these weights.
    """

    name: ClassVar[str] = "lora"
    requires: ClassVar[tuple[str, ...]] = ("cache",)
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank <= MOST_RANK:
            raise UsageError(f"lora.rank={self.rank} must be from 0 to {MOST_RANK}")

    @property
    def wanted(self) -> bool:
        return self.rank > 0

    def for_draft(self) -> Lora:
        """The pass for a draft: drafts have no adapters."""
        return Lora()

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        outputs = behind_take_rows(graph)
        number = 0
        for node in graph.calls("gemm"):
            if node not in outputs and isinstance(terms := _known_terms(node), list):
                _insert(graph, node, number, self.rank * len(terms))
                number += 1
        refused = refusals(graph)
        return PassResult(graph, number, tuple(f"{weight}: {reason}" for weight, reason in refused.items()))


def _known_terms(gemm: fx.Node) -> list[WeightTerm] | PassError:
    """The terms of a gemm's weight, or why they are not known."""
    try:
        return terms_of(gemm)
    except PassError as error:
        return error


def _shape(gemm: fx.Node) -> tuple[int, int]:
    """[N, K] of the weight of a gemm."""
    given = ops.operands(gemm)
    return weight_format(given.format).shape(given.weight.meta["val"])


def _insert(graph: Graph, node: fx.Node, number: int, ranks: int) -> None:
    """Let rows' adapters change the gemm `node`; the ranks of its terms add up to `ranks`."""
    given = ops.named(node)
    users, kind = list(node.users), ops.GATED.get(given["epilogue"])
    gemm = node
    with graph.fx.inserting_before(node):  # the barrier after the gemm is then one after lora_shrink, too
        shrunk = graph.call("lora_shrink", given["x"], site=number, ranks=ranks)
    with graph.fx.inserting_after(node):
        if kind is not None:
            whole = given | {"epilogue": "store", "width": _shape(node)[0]}
            gemm = graph.call("gemm", **whole)
            gemm.meta["precision"] = node.meta.get("precision")
    with graph.fx.inserting_after(gemm):
        result = graph.call("lora_expand", gemm, shrunk, site=number)
    if kind is not None:
        with graph.fx.inserting_after(result):
            result = graph.call("gate_rows", result, kind=kind, width=given["width"])
    for user in users:
        user.replace_input_with(node, result)
    if kind is not None:
        graph.fx.erase_node(node)


# ---- what adapters may change ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AdaptedLinear:
    """A linear that adapters may change: the node of its gemm, and the weights of the checkpoint in its weight."""

    gemm: fx.Node
    terms: list[WeightTerm]


def sites(graph: Graph) -> list[AdaptedLinear]:
    """The linears that adapters may change, in the order of their numbers."""
    expands = sorted(graph.calls("lora_expand"), key=lambda node: int(ops.operand(node, "site")))
    gemms: list[Any] = [ops.operand(node, "y") for node in expands]
    return [AdaptedLinear(gemm, terms_of(gemm)) for gemm in gemms]


def refusals(graph: Graph) -> dict[str, str]:
    """Weights of linears that adapters may not change, and why."""
    linears = sites(graph)
    known = {site.gemm: site.terms for site in linears}
    refused: dict[str, str] = {}
    for node in graph.calls("gemm", "expert_gemm"):
        if node not in known:
            terms = _known_terms(node) if ops.name_of(node.target) == "gemm" else None
            names = {term.weight for term in terms} if isinstance(terms, list) else weights_read(graph, node)
            refused |= dict.fromkeys(sorted(names), _why_not(node, terms))
    for weight, reader in _other_readers(graph, known):
        refused.setdefault(weight, f"{ops.name_of(reader.target)} ({reader.name}) reads it too")
    for weight, ranges in _row_ranges(linears).items():
        ends = sorted(ranges)
        if any(first[1] > second[0] for first, second in pairwise(ends)):
            refused[weight] = "several linears share it"
    return refused


def _why_not(node: fx.Node, terms: list[WeightTerm] | PassError | None) -> str:
    if terms is None:
        return "it belongs to experts"
    return terms.reason if isinstance(terms, PassError) else "only rows with requested logits compute it"


def _other_readers(graph: Graph, known: dict[fx.Node, list[WeightTerm]]) -> Iterator[tuple[str, fx.Node]]:
    """Weights of adapted linears that another operator reads, or the linear itself in another place than its weight."""
    own = {term.weight for terms in known.values() for term in terms}
    for node in graph.nodes:
        if node.op != "call_function" or graph.is_weight(node) or ops.name_of(node.target) in (None, "expert_gemm"):
            continue
        if ops.name_of(node.target) == "gemm" and node not in known:
            continue
        read = weights_read(graph, node, but="weight" if node in known else "")
        yield from ((weight, node) for weight in sorted(read & own))


def _row_ranges(linears: list[AdaptedLinear]) -> dict[str, list[tuple[float, float]]]:
    """The rows of each weight that linears use: all, or a slice taken before any other change of the outputs."""
    ranges: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for term in (term for site in linears for term in site.terms):
        rows = term.outputs[0].rows if term.outputs else None
        ranges[term.weight].append(rows or (0, float("inf")))
    return ranges


# ---- the artifact's file --------------------------------------------------------------------------------


def described(graph: Graph, rank: int) -> adapted.Adapted:
    """What the artifact says of its adapted linears. Computes the vectors by which passes have changed weights."""
    vectors: dict[str, Tensor] = {}
    names: dict[fx.Node, str] = {}
    cache: dict[fx.Node, Tensor] = {}

    def change(step: WeightStep) -> adapted.FactorChange:
        if step.vector is not None and step.vector not in names:
            names[step.vector] = f"{len(names)}"
            vectors[names[step.vector]] = graph.evaluate(step.vector, cache)
        return adapted.FactorChange(step.op, dict(step.numbers), None if step.vector is None else names[step.vector])

    def term(each: WeightTerm) -> adapted.AdaptedWeight:
        rows, columns = graph.weights.entries[each.weight].shape
        sides = (tuple(change(step) for step in side) for side in (each.inputs, each.outputs))
        return adapted.AdaptedWeight(each.weight, (rows, columns), *sides)

    descriptions = []
    for site in sites(graph):
        n, k = _shape(site.gemm)
        x: fx.Node = ops.operand(site.gemm, "x")
        factors = "f32" if x.meta["val"][0].dtype == torch.float32 else "bf16"
        descriptions.append(adapted.Site(site.gemm.name, k, n, factors, tuple(map(term, site.terms))))
    return adapted.Adapted(rank, tuple(descriptions), refusals(graph), vectors)
