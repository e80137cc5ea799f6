"""Speculate: add a draft path, which runs the same weights at other precisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.errors import PassError, UsageError
from qcompile.formats.activations import ACTIVATIONS, activation_format
from qcompile.formats.registry import WEIGHT_FORMATS, weight_format
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult

SAME = "same"
GEMMS = ("gemm", "expert_gemm")
FORMATS = tuple(format.name for format in WEIGHT_FORMATS.values() if not format.marks_rows)
"""Weight formats of drafts. Formats with marked rows are missing: rows are marked for the target, before rounding."""
TOKENS = 128
"""Maximum number of tokens on which sensitivity is measured."""


@dataclass(frozen=True)
class Speculate(Pass):
    """A draft path: `weight` and `activation` of every linear, `head` and `head_activation` of the output head.

    `same` keeps what the target path has, so both share packed weights (QSpec 3.1). A format rounds the original
    weights once more (ML-SpecQD 3.1, direct cast). With `enabled`, the pass runs once for every draft path of the
    recipe, on the graph that `quantize` returned. Experts change like linears; routers keep their precision.

    The `sensitive` linears whose change alone moves the logits most take `sensitive_weight` and
    `sensitive_activation` instead (QuantSpec 5: layers that keep 8 bits), and are listed in the notes. The logits are
    those of the first calibration sample, or of fixed random tokens without calibration text.
    """

    name: ClassVar[str] = "speculate"
    requires: ClassVar[tuple[str, ...]] = ("quantize",)
    enabled: bool = False
    weight: str = SAME
    activation: str = SAME
    head: str = SAME
    head_activation: str = SAME
    sensitive: int = 0
    sensitive_weight: str = SAME
    sensitive_activation: str = SAME

    def __post_init__(self) -> None:
        if self.sensitive < 0:
            raise UsageError(f"speculate.sensitive={self.sensitive}: write how many linears, 0 or more")
        for format in (self.weight, self.head, self.sensitive_weight):
            if format != SAME and format not in FORMATS:
                raise UsageError(f"no draft has weight format {format}; there are same, {', '.join(FORMATS)}")
        known = sorted(ACTIVATIONS)
        for activation in (self.activation, self.head_activation, self.sensitive_activation):
            if activation not in (SAME, *known):
                raise UsageError(f"activation type {activation} is unknown; there are same, {', '.join(known)}")

    def run(self, graph: Graph) -> PassResult:
        kept = self._most_sensitive(graph) if self.sensitive else []
        graph = graph.clone()
        heads = head_gemms(graph)
        activations: dict[tuple[Any, ...], fx.Node] = {}
        fired = 0
        for node in _draftable(graph):
            wanted = (self.head, self.head_activation) if node in heads else (self.weight, self.activation)
            if node.name in kept:
                wanted = self.sensitive_weight, self.sensitive_activation
            fired += _change(graph, node, *wanted, activations)
        graph.erase_dead()
        notes = tuple(f"{name} is among the most sensitive: {self.sensitive_weight} in the draft" for name in kept)
        return PassResult(graph, fired, notes)

    def _most_sensitive(self, graph: Graph) -> list[str]:
        """The gemms, heads excepted, whose change alone moves the logits most, most sensitive first."""
        before, heads = _logits(graph), {node.name for node in head_gemms(graph)}
        moved: dict[str, float] = {}
        for name in [node.name for node in _draftable(graph) if node.name not in heads]:
            alone = graph.clone()
            node = next(node for node in alone.calls(*GEMMS) if node.name == name)
            if _change(alone, node, self.weight, self.activation, {}):
                moved[name] = float((_logits(alone) - before).square().mean())
        return sorted(moved, key=lambda name: moved[name], reverse=True)[: self.sensitive]


def _logits(graph: Graph) -> Tensor:
    """Logits [1, tokens, vocab] of one text in float32, computed by the operators' reference bodies."""
    if graph.calibration is not None:
        ids = graph.calibration.tokens[:1, :TOKENS]
    else:
        drawn = torch.Generator().manual_seed(0)
        ids = torch.randint(0, graph.info.vocab_size, (1, min(TOKENS, graph.info.max_position)), generator=drawn)
    inputs = [ids, torch.arange(ids.shape[1])[None]][: len(graph.inputs)]
    with torch.no_grad():
        found: Tensor = graph.run(*inputs, dtype=torch.float32)
    return found


def head_gemms(graph: Graph) -> set[fx.Node]:
    """Gemms whose results reach the output without passing through another gemm: they produce the logits."""
    return _gemms_before(graph, [graph.output])


def _draftable(graph: Graph) -> list[fx.Node]:
    """All gemms but routers: a draft that chose other experts than the target would compute another model."""
    routers = _gemms_before(graph, graph.calls("top_k"))
    return [node for node in graph.calls(*GEMMS) if node not in routers]


def _gemms_before(graph: Graph, nodes: list[fx.Node]) -> set[fx.Node]:
    """Gemms whose results reach one of `nodes` without passing through another gemm."""
    found: set[fx.Node] = set()
    frontier = [source for node in nodes for source in node.all_input_nodes]
    while frontier:
        node = frontier.pop()
        if ops.name_of(node.target) in GEMMS:
            found.add(node)
        elif not graph.is_weight(node):
            frontier += node.all_input_nodes
    return found


def _change(
    graph: Graph, node: fx.Node, weight: str, activation: str, activations: dict[tuple[Any, ...], fx.Node]
) -> bool:
    """Change the precisions of one gemm; returns whether anything changed."""
    experts = ops.name_of(node.target) == "expert_gemm"
    packed, format = ops.operand(node, "weight"), ops.operand(node, "format")
    if experts:  # expert_gemm quantizes its inputs itself
        x, dtype, group = (ops.operand(node, name) for name in ("x", "activation", "group"))
    else:
        x, dtype, group = (ops.operand(ops.operand(node, "x"), name) for name in ("x", "kind", "group"))
    new_dtype = dtype if activation == SAME else activation
    wanted, kind = weight_format(format if weight == SAME else weight), activation_format(new_dtype)
    if kind not in wanted.activations:
        message = f"weights in {wanted.name} do not meet activations in {new_dtype}"
        raise PassError(Speculate.name, node.name, message)
    new_packed, new_format = (packed, format) if weight == SAME else _weight(graph, packed, weight)
    new_group = kind.sum_group(weight_format(new_format).sum_group, packed.meta["val"][0].shape[1])
    changed = new_packed is not packed or (new_dtype, new_group) != (dtype, group)
    if experts:
        ops.set_operands(node, activation=new_dtype, group=new_group)
    else:
        ops.set_operands(node, x=_quantized(graph, ops.operand(node, "x"), (x, new_dtype, new_group), activations))
    ops.set_operands(node, weight=new_packed, format=new_format)
    node.meta["precision"] = {"weight": new_format, "activation": new_dtype}
    return changed


def _quantized(
    graph: Graph, present: fx.Node, key: tuple[Any, ...], activations: dict[tuple[Any, ...], fx.Node]
) -> fx.Node:
    """The quantized activation for `key` (value, dtype, group): `present` if it matches, else one shared node."""
    if key == present.args:
        return present
    if key not in activations:
        with graph.fx.inserting_after(key[0]):
            activations[key] = graph.call("quantize_activation", *key)
    return activations[key]


def _weight(graph: Graph, packed: Any, format: str) -> tuple[fx.Node, str]:
    """The weight behind `packed` in `format`, and the format its gemm reads; a stored weight is reused."""
    rounded = ops.operand(packed, "weight") if ops.name_of(packed.target) == "upper_nibble" else packed
    wanted = weight_format(format)
    if ops.operand(rounded, "format") != wanted.stored_as.name:
        rounded = graph.call_weight("quantize_weight", ops.operand(rounded, "w"), wanted.stored_as.name)
    if wanted.is_part:
        rounded = graph.call_weight("upper_nibble", rounded)
    return rounded, wanted.read_as.name
