"""First-order effect of changes in linears' outputs on the model's loss, by block-wise backpropagation.

The graph is cut wherever a single value is live: in a decoder, the residual stream between blocks. The forward pass
keeps that value at the cuts; the backward pass reruns each stretch with gradients, from the last to the first. Memory
holds the weights and activations of one stretch for one sample, plus the values at the cuts. If those are too many,
the forward pass keeps only some, and the backward pass recomputes those in between (Chen et al. 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.graph import Graph
from qcompile.ops.epilogues import gate
from qcompile.passes.calibration import gptq, memory
from qcompile.passes.calibration.sweep import Shelf

KEPT_BYTES = 2 << 30
"""Maximum size of the values at cuts; it limits how many samples are processed together."""

Deltas = Mapping[fx.Node, Callable[[Tensor, Tensor | None], Tensor]]
Values = dict[fx.Node, Any]


def stretches(graph: Graph) -> list[list[fx.Node]]:
    """The graph's activation nodes in order, cut wherever a single value (besides inputs) is read later."""
    nodes = [node for node in graph.nodes if node.op == "call_function" and not graph.is_weight(node)]
    last = {source: index for index, node in enumerate(nodes) for source in node.all_input_nodes}
    last |= dict.fromkeys(graph.output.all_input_nodes, len(nodes))
    stretched: list[list[fx.Node]] = [[]]
    alive: set[fx.Node] = set()
    for index, node in enumerate(nodes):
        stretched[-1].append(node)
        alive = {value for value in (*alive, node) if last.get(value, -1) > index}
        if alive == {node} and index + 1 < len(nodes):
            stretched.append([])
    return _joined(stretched)


def _joined(parts: list[list[fx.Node]]) -> list[list[fx.Node]]:
    """Join stretches without a linear with the next one."""
    joined: list[list[fx.Node]] = []
    waiting: list[fx.Node] = []
    for part in parts:
        waiting = waiting + part
        if any(ops.name_of(node.target) in LINEARS for node in part):
            joined.append(waiting)
            waiting = []
    return [*joined, waiting] if waiting else joined


LINEARS = ("linear", "gated_linear")


def first_order(
    graph: Graph, tokens: Tensor, deltas: Deltas, work: Callable[[], None], seen: int = 0
) -> dict[fx.Node, Tensor]:
    """For each linear in `deltas` and each sample, the first-order effect of its output features' changes on the loss.

    graph: in floating point, over whole sequences; tokens int64 [samples, length]. `deltas[linear](weight, moments)` is
    the change of its weight [N, K]; moments [K, K] are E[x xᵀ] of its inputs on `seen` samples, shrunk by gptq.trusted,
    or None if `seen` is 0. The result f32 [samples, N] holds gᵀ (c' - c) of MixLLM's equation 4 for every output
    feature c, where g is the gradient of the sample's mean next-token loss. `work` is called after each stretch of a
    sample.
    """
    parts = stretches(graph)
    width = max(part[-1].meta["val"].shape[-1] for part in parts[:-1]) if len(parts) > 1 else 1
    each, together = _plan(len(parts), 4 * width * tokens.shape[1], len(tokens))
    runs = [parts[start : start + each] for start in range(0, len(parts), each)]
    results = {node: torch.empty(len(tokens), ops.operand(node, "weight").meta["val"].shape[0]) for node in deltas}
    for start in range(0, len(tokens), together):
        batch = slice(start, start + together)
        rows = {node: result[batch] for node, result in results.items()}
        _Batch(graph, runs, tokens[batch], deltas, rows, work, seen).run()
    return results


def _plan(parts: int, cut_bytes: int, samples: int) -> tuple[int, int]:
    """Number of stretches between kept cuts, and number of samples processed together.

    If the cuts of all `parts` stretches and samples, of `cut_bytes` each, fit in memory, all are kept. Otherwise cuts
    are about the square root of `parts` apart, which minimizes memory, and samples are split into equal batches.
    """
    if parts * cut_bytes * samples <= KEPT_BYTES:
        return parts, samples
    each = math.ceil(math.sqrt(parts))
    fitting = max(1, KEPT_BYTES // (cut_bytes * (each + math.ceil(parts / each))))
    return each, math.ceil(samples / math.ceil(samples / fitting))


_Cut = tuple[fx.Node, Shelf] | None
"""The live value at a cut for all samples; None at the graph's entry."""


def _at(cut: _Cut, sample: int) -> Values:
    return {cut[0]: cut[1].get(sample)} if cut else {}


class _Batch:
    """The forward and backward pass of a batch of samples."""

    def __init__(
        self,
        graph: Graph,
        runs: list[list[list[fx.Node]]],
        tokens: Tensor,
        deltas: Deltas,
        results: dict[fx.Node, Tensor],
        work: Callable[[], None],
        seen: int,
    ) -> None:
        self.graph, self.runs, self.tokens, self.deltas, self.results = graph, runs, tokens, deltas, results
        self.work, self.seen = work, seen
        self.weights: Values = {}
        self.positions = torch.arange(tokens.shape[1])[None]

    def run(self) -> None:
        starts: list[_Cut] = [None]
        for run in self.runs[:-1]:
            starts.append(starts[-1])
            for part in run:
                starts[-1] = self._forward(part, starts[-1])
        slopes: Shelf | None = None
        for run in reversed(self.runs):
            cuts = [starts.pop()]
            for part in run[:-1]:
                cuts.append(self._forward(part, cuts[-1]))
            for part in reversed(run):
                slopes = self._backward(part, cuts.pop(), slopes)

    @torch.no_grad()
    def _forward(self, part: list[fx.Node], entry: _Cut) -> _Cut:
        """The values of all samples at the end of a stretch."""
        self.weights = {}
        shelf: Shelf | None = None
        for i in range(len(self.tokens)):
            value = self._stretch(part, i, _at(entry, i), None)[0]
            shelf = shelf or Shelf(value, len(self.tokens), [])
            shelf.put(i, value)
        assert shelf is not None
        memory.give_back()
        return part[-1], shelf

    def _backward(self, part: list[fx.Node], entry: _Cut, slopes: Shelf | None) -> Shelf | None:
        """Gradients of all samples at a stretch's entry, given those at its end, which may be overwritten."""
        self.weights = {}
        changes = self._changes(part, [_at(entry, i) for i in range(min(self.seen, len(self.tokens)))])
        shelf: Shelf | None = None
        for i in range(len(self.tokens)):
            slope = self._back(part, i, _at(entry, i), slopes.get(i) if slopes else None, changes)
            if slope is not None:
                shelf = shelf or Shelf(slope, len(self.tokens), list(slopes.parts) if slopes else [])
                shelf.put(i, slope)
            self.work()
        memory.give_back()
        return shelf

    @torch.no_grad()
    def _changes(self, part: list[fx.Node], entries: list[Values]) -> dict[fx.Node, Tensor]:
        """The changes of the weights of a stretch, with moments measured on the samples of `entries`."""
        linears = [node for node in part if node in self.deltas]
        squares: dict[Any, Tensor] = {}  # keyed by the value that linears read
        for i, entry in enumerate(entries if linears else []):
            _, outputs = self._stretch(part, i, entry, linears)
            for source, x in {ops.operand(node, "x"): outputs[node][0].flatten(0, -2) for node in linears}.items():
                squares[source] = x.T @ x if source not in squares else squares[source].addmm_(x.T, x)
        count = len(entries) * self.tokens.shape[1]
        changes = {}
        for node in linears:
            moments = gptq.trusted(squares[ops.operand(node, "x")] / count, count) if squares else None
            changes[node] = self.deltas[node](self._weight(ops.operand(node, "weight")), moments)
        return changes

    def _back(
        self, part: list[fx.Node], sample: int, entry: Values, gradient: Tensor | None, changes: dict[fx.Node, Tensor]
    ) -> Tensor | None:
        """The gradient of the loss at the stretch's entry, given that at its end; records the effects of `changes`."""
        entry = {node: value.detach().requires_grad_() for node, value in entry.items()}
        outputs: dict[fx.Node, tuple[Tensor, Tensor]] = {}
        with torch.enable_grad():
            end, outputs = self._stretch(part, sample, entry, changes)
            if gradient is None:
                end = torch.nn.functional.cross_entropy(end[0, :-1].float(), self.tokens[sample, 1:])
            wanted: list[Tensor] = [*entry.values(), *(y for _, y in outputs.values())]
            gradients = torch.autograd.grad(end, wanted, gradient) if wanted else ()
        with torch.no_grad():
            for (node, (x, _)), slope in zip(outputs.items(), gradients[len(entry) :], strict=True):
                moved = torch.nn.functional.linear(x, changes[node])  # [1, tokens, N]
                self.results[node][sample] = (moved * slope).sum((0, 1))
        return gradients[0] if entry else None

    def _stretch(
        self, part: list[fx.Node], sample: int, entry: Values, watched: Any
    ) -> tuple[Tensor, dict[fx.Node, tuple[Tensor, Tensor]]]:
        """Run a stretch for one sample; returns its last value, and (input, output) of the linears in `watched`."""
        values: Values = dict(zip(self.graph.inputs, (self.tokens[sample][None], self.positions), strict=False))
        values |= entry
        outputs: dict[fx.Node, tuple[Tensor, Tensor]] = {}
        for node in part:
            given = fx.node.map_arg(ops.named(node), lambda n: values[n] if n in values else self._weight(n))
            kind = str(ops.name_of(node.target))
            if kind not in LINEARS:
                values[node] = ops.reference(kind)(**given)
                continue
            x = given["x"]
            y = torch.nn.functional.linear(x, given["weight"], given["bias"])
            if watched and node in watched:
                if not y.requires_grad:  # no earlier value has gradients: it reads the embedding
                    y.requires_grad_()
                outputs[node] = (x.detach(), y)
            values[node] = y if kind == "linear" else gate(y, given["kind"], given["width"])
        return values[part[-1]], outputs

    def _weight(self, node: Any) -> Any:
        if node not in self.weights:
            self.weights[node] = self.graph.evaluate(node)
        return self.weights[node]
