"""Calibrate: choose the codes of quantized weights by the error of their layer's output on real text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from safetensors import safe_open
from torch import Tensor, fx

from qcompile import ops
from qcompile.calibration import Calibration, Kept
from qcompile.errors import PassError, UsageError
from qcompile.formats.activations import activation_format, dequantize_activation
from qcompile.formats.mixed import MIX_4_8
from qcompile.formats.registry import weight_format
from qcompile.formats.rounding import Parts
from qcompile.formats.weight import WeightFormat
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.calibration import gptq
from qcompile.passes.calibration.origin import Origin, restoring
from qcompile.passes.calibration.sweep import Sweep


@dataclass(frozen=True)
class Calibrate(Pass):
    """Rounds weights by clipping (`clip`) and GPTQ (`gptq`) on the calibration text, layer by layer.

    A layer's inputs are computed through the already rounded layers before it, with quantized activations. With
    `restore`, its weights are first moved so that on these inputs they approximate, as far as a linear can, what the
    float layer computes from its own inputs; later layers then compensate for errors of earlier ones. `damping` is
    relative to the mean second moment of the layer's inputs. `descent` is the maximum number of coordinate-descent
    sweeps over GPTQ's codes. Each expert is rounded separately, on the tokens routed to it. Without calibration text
    weights are rounded to nearest, and a note says so. In a draft path, what it shares with the target is rounded
    already: only weights of its own are left, and the text runs through the draft.

    Sources: Frantar et al. 2022 (GPTQ, with activation order and static groups); QServe B.2.4 (clipping); Arai and
    Ichikawa 2025 (QEP: `restore`). `fired` counts weights.
    """

    name: ClassVar[str] = "calibrate"
    requires: ClassVar[tuple[str, ...]] = ("quantize",)
    enabled: bool = True
    clip: bool = True
    gptq: bool = True
    damping: float = 0.01
    descent: int = 0
    restore: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.damping <= 1:
            raise UsageError(f"calibrate.damping={self.damping} must be above 0 and at most 1")
        if self.descent < 0:
            raise UsageError(f"calibrate.descent={self.descent}: write 0 or more")

    def run(self, graph: Graph) -> PassResult:
        targets = _targets(graph)
        if graph.calibration is None or not targets or not (self.clip or self.gptq):
            missing = "no calibration text was given: weights are rounded to nearest (--calib FILE)"
            return PassResult(graph, 0, (missing,) if targets and graph.calibration is None else ())
        graph.calibration.check_vocabulary(graph.info.vocab_size)
        graph = graph.clone()
        assert graph.calibration is not None
        work = _Work(self, graph, graph.calibration, _targets(graph))
        return PassResult(graph, *work.run())


def _targets(graph: Graph) -> dict[fx.Node, fx.Node]:
    """Weights (quantize_* nodes) that need a choice of codes, each with its first gemm, in graph order."""
    targets: dict[fx.Node, fx.Node] = {}
    for gemm in graph.calls("gemm", "expert_gemm"):
        weight: fx.Node = ops.operand(gemm, "weight")
        if ops.name_of(weight.target) == "upper_nibble":
            weight = ops.operand(weight, "weight")
        format = format_of(weight)
        if any(ops.name_of(user.target) == "dequantize" for user in weight.users):
            continue  # tokens have rows of it as embeddings, which no output of the linear may move
        if format and format.calibrated and ops.operand(weight, "codes") is None:  # else codes were chosen already
            targets.setdefault(weight, gemm)
    return targets


def format_of(weight: fx.Node) -> WeightFormat | None:
    """The format that a node rounds a weight to; None if it is not a rounding."""
    kind = ops.name_of(weight.target)
    if kind == "quantize_mixed":
        return MIX_4_8
    return weight_format(ops.operand(weight, "format")) if kind == "quantize_weight" else None


def _format(target: fx.Node) -> WeightFormat:
    """The format of one of `_targets`."""
    format = format_of(target)
    assert format is not None
    return format


_Moments = tuple[Tensor, Tensor | None]
"""Second moments of a linear's inputs, and the matrix its weight is multiplied by before rounding (None: none)."""


@dataclass
class _Work:
    """One run of the pass, one weight at a time. Results are kept under a key of everything they depend on."""

    options: Calibrate
    graph: Graph
    calibration: Calibration
    targets: dict[fx.Node, fx.Node]
    notes: list[str] = field(default_factory=list)
    _done: int = 0

    def run(self) -> tuple[int, tuple[str, ...]]:
        fingerprint = self.calibration.fingerprint(self.graph.content(), str(self.options))
        keys = {weight: f"{number:05}-{fingerprint}" for number, weight in enumerate(self.targets)}
        kept = {weight: self.calibration.kept(key) for weight, key in keys.items()}
        sizes = [ops.operand(weight, "w").meta["val"].numel() for weight in self.targets]
        total = sum(sizes) * len(self.calibration.tokens)
        sweep = Sweep(self.graph, self.calibration.tokens, self._progress(total))
        origin = Origin(self.graph, self.calibration.tokens) if self.options.restore else None
        moments: dict[fx.Node, _Moments] = {}
        missing = [weight for weight in self.targets if kept[weight] is None]
        for weight, gemm in self.targets.items():
            loaded = kept[weight]
            if missing and self._before(weight, missing[-1]):
                sweep.advance(gemm)
                if origin:
                    origin.advance(gemm)
            if loaded is None:
                loaded = self._choose(weight, gemm, sweep, origin, moments, keys[weight])
            self._put(weight, loaded, keys[weight])
        return len(self.targets), tuple(self.notes)

    def _before(self, weight: fx.Node, last: fx.Node) -> bool:
        """Whether the sweep must reach `weight`. It stops at `last`, the last weight without a kept result."""
        order = list(self.targets)
        return order.index(weight) <= order.index(last)

    def _progress(self, total: int) -> Callable[[int], None]:
        def work(amount: int) -> None:
            self._done += amount
            self.calibration.progress("calibrate", min(self._done, total - 1), total)

        return work

    # ---- one weight ------------------------------------------------------------------------------

    def _choose(
        self,
        weight: fx.Node,
        gemm: fx.Node,
        sweep: Sweep,
        origin: Origin | None,
        moments: dict[fx.Node, _Moments],
        key: str,
    ) -> Kept:
        format = _format(weight)
        wide = self.graph.evaluate(ops.operand(weight, "wide")) if format.marks_rows else None
        value = self.graph.evaluate(ops.operand(weight, "w"))
        options = self.options
        how = format.rounding(wide)
        choices = []
        try:
            for w, hessian in self._inputs(gemm, value, sweep, origin, moments):
                tokens = self.calibration.tokens.numel()
                choices.append(
                    gptq.choose(
                        w,
                        hessian,
                        how,
                        clip=options.clip,
                        gptq=options.gptq,
                        damping=options.damping,
                        descent=options.descent,
                        tokens=tokens,
                    )
                )
        except ValueError as error:
            raise PassError("calibrate", gemm.name, str(error)) from error
        parts = [torch.cat(part) for part in zip(*(choice.parts for choice in choices), strict=True)]
        figures = {
            "error_nearest": sum(choice.error_nearest for choice in choices) / len(choices),
            "error": sum(choice.error for choice in choices) / len(choices),
        }
        notes = dict.fromkeys(f"{gemm.name}: {note}" for choice in choices for note in choice.notes)
        result = Kept(parts, figures, tuple(notes))
        self.calibration.keep(key, result)
        return result

    def _inputs(
        self,
        gemm: fx.Node,
        value: Tensor,
        sweep: Sweep,
        origin: Origin | None,
        moments: dict[fx.Node, _Moments],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The weight to round [N, K] and the second moments of its inputs; for experts, one pair per expert.

        `restore` moves neither experts, which see few tokens, nor two-plane (nested) weights. The two planes together
        are an 8-bit weight behind equally accurate layers, which must not compensate for errors of the upper plane.
        """
        given = ops.operands(gemm)
        source = given.x
        if ops.name_of(gemm.target) == "expert_gemm":
            pairs = zip(sweep.values(source), sweep.values(given.index), strict=True)
            inputs = [(_rounded(x.float(), given.activation, given.group), chosen) for x, chosen in pairs]
            yield from zip(value.chunk(given.experts), expert_moments(inputs, given.experts), strict=True)
            return
        if source not in moments:
            moments.clear()  # keep the moments of one layer only
            moments[source] = self._moments(gemm, sweep.values(source), origin)
        hessian, back = moments[source]
        yield value if back is None else value.float() @ back, hessian

    def _moments(self, gemm: fx.Node, values: list[Parts], origin: Origin | None) -> _Moments:
        if origin is None or weight_format(ops.operand(gemm, "format")).upper:
            return second_moments(values), None
        return second_moments(values), restoring(values, origin.values(gemm), self.options.damping)

    def _put(self, weight: fx.Node, loaded: Kept, key: str) -> None:
        """Make the graph read these parts, and record their error on the node."""
        parts, figures, notes = loaded
        self.notes += notes
        nodes = []
        for index, (role, part) in enumerate(zip(_format(weight).roles, parts, strict=True)):
            name = f"{weight.name}.{role}"
            self.graph.weights.add(name, part.shape, part.dtype, self._loader(part, key, index))
            nodes.append(name)
        if _format(weight).marks_rows:
            nodes.pop()  # the marks of wide rows are an argument already
        chosen = list(ops.named(weight))[2:]  # behind w, and its format or its marks
        ops.set_operands(
            weight, **{name: self.graph.weight(stored) for name, stored in zip(chosen, nodes, strict=False)}
        )
        weight.meta["calibrated"] = figures

    def _loader(self, part: Tensor, key: str, index: int) -> Callable[[], Tensor]:
        """A function that reads the part on demand: from the results folder if there is one, else from memory."""
        path = self.calibration.path(key)
        if path is None:
            return lambda: part

        def load() -> Tensor:
            with safe_open(path, "pt") as file:
                kept: Tensor = file.get_tensor(str(index))
            return kept

        return load


def second_moments(values: list[Parts]) -> Tensor:
    """E[x xᵀ], f32 [K, K], of a linear's inputs over all samples, each given as the parts of an activation."""
    total: Tensor | None = None
    count = 0
    for parts in values:
        x = dequantize_activation(parts).flatten(0, -2).float()  # [tokens, K]
        count += x.shape[0]
        total = x.T @ x if total is None else total.addmm_(x.T, x)
    assert total is not None
    return total / count


def _rounded(x: Tensor, kind: str, group: int) -> Tensor:
    return dequantize_activation(activation_format(kind).quantize(x, group))


def expert_moments(inputs: list[tuple[Tensor, Tensor]], experts: int) -> Iterator[Tensor]:
    """E[x xᵀ], f32 [K, K], of the inputs routed to each expert.

    Each of `inputs` is one sample: x [..., K], or [..., k, K] with one row per slot, and the expert index [..., k].
    For experts with few tokens, the mean moments over all experts are mixed in with the weight of K tokens.
    """
    rows = [x if x.dim() == index.dim() + 1 else x.unsqueeze(-2).expand(*index.shape, -1) for x, index in inputs]
    width = rows[0].shape[-1]
    count = sum(index.numel() for _, index in inputs)
    shared = sum((x.flatten(0, -2).T @ x.flatten(0, -2) for x in rows), torch.zeros(width, width)) / count
    for expert in range(experts):
        reached = torch.cat([x[index == expert] for x, (_, index) in zip(rows, inputs, strict=True)])
        yield (reached.T @ reached + width * shared) / (len(reached) + width)
