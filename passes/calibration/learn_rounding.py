"""Learn rounding: move the codes and scales that calibration chose toward the logits of the float model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.calibration import Calibration, Kept
from qcompile.errors import PassError, ResourceError, UsageError
from qcompile.formats.rounding import Parts
from qcompile.formats.weight import Grid
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.calibration.adam import Adam
from qcompile.passes.calibration.calibrate import format_of
from qcompile.passes.calibration.learned import LearnedWeight
from qcompile.passes.calibration.student import Student, Teacher, without_gradient
from qcompile.system.free_memory import available_memory

_JUDGED = 16
"""One of as many samples does not teach, but judges the result."""

STEP_TOKENS = 1024
"""Tokens of a step, from whole samples, at least one. Gradients of fewer are mostly noise."""

_WEIGHT_BYTES = 30
"""Memory for each weight that learns: it in floats, its code, bounds, offset, gradient, and Adam's two means."""

_KEPT = 8
"""How often the state is kept in a run, so that an interrupted one resumes."""


@dataclass(frozen=True)
class LearnRounding(Pass):
    """Moves codes and group scales by the gradient of the divergence from the float model's logits (`enabled`).

    Each of `steps` steps reads about STEP_TOKENS of the calibration text and moves all weights of which `calibrate`
    chose the codes: offsets of codes, in codes, by about `rate`, and factors of scales by about `scale_rate` (Adam;
    both decay to 0). Some samples only judge: where the result diverges no less on them, codes stay, with a note.
    Needs about 30 bytes of memory for each weight; raises ResourceError if fewer are left. Of codes that depend on each
    other (trellis codes) only the scales move. Weights in formats without a grid of integers stay as they are, and so
    does a model with experts.

    Sources: Cheng et al. 2023 (SignRound: learned offsets of codes); Chen et al. 2024 (EfficientQAT: learned scales).
    `fired` counts weights.
    """

    name: ClassVar[str] = "learn_rounding"
    requires: ClassVar[tuple[str, ...]] = ("quantize",)
    enabled: bool = False
    steps: int = 128
    rate: float = 0.002
    scale_rate: float = 0.001

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"learn_rounding.steps={self.steps}: write 1 or more")
        for name in ("rate", "scale_rate"):
            if not 0 <= getattr(self, name) <= 0.1:
                raise UsageError(f"learn_rounding.{name}={getattr(self, name)} must be from 0 to 0.1")

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        calibrated = _calibrated(graph)
        targets = {weight: grid for weight, grid in calibrated.items() if grid is not None}
        for weight in calibrated:
            weight.meta["learned"] = True  # a draft that shares the weight must not move it
        refusal = _refusal(graph, len(targets))
        if refusal or graph.calibration is None:
            return PassResult(graph, 0, (refusal,))
        left = len(calibrated) - len(targets)
        notes = [f"{left} weights are in formats without integer grids of their own: they stay as calibrated"]
        parts, more = _Lesson(self, graph, graph.calibration, targets).parts()
        for weight, chosen in zip(targets, parts, strict=False):
            _put(graph, weight, chosen)
        return PassResult(graph, len(parts), tuple(notes[: bool(left)] + more))


def _calibrated(graph: Graph) -> dict[fx.Node, Grid | None]:
    """Weights with codes that calibration chose and nothing has moved, and their grids, None without an integer one."""
    weights: dict[fx.Node, Grid | None] = {}
    for gemm in graph.calls("gemm"):
        weight: fx.Node = ops.operand(gemm, "weight")
        if "calibrated" in weight.meta and "learned" not in weight.meta:
            format = format_of(weight)
            assert format is not None
            weights[weight] = format.grid_of(graph.evaluate(weight))
    return weights


def _refusal(graph: Graph, targets: int) -> str:
    """Why nothing can be learned, or an empty text."""
    if graph.calibration is None:
        return "no calibration text was given: nothing is learned (--calib FILE)"
    node = without_gradient(graph)
    if node is not None:
        return f"node {node.name}: gradients do not pass {ops.name_of(node.target)}: codes stay as calibrated"
    if not targets:
        return "no weight has codes on an integer grid that calibration chose"
    if len(graph.calibration.tokens) < 2:
        return "one sample of text cannot both teach and judge: codes stay as calibrated"
    return ""


def _put(graph: Graph, weight: fx.Node, parts: Parts) -> None:
    """Make the graph read these parts of a weight, in the place of calibration's."""
    names = [str(node.target) for node in list(ops.named(weight).values())[1:] if isinstance(node, fx.Node)]
    chosen = {name.rpartition(".")[2]: name for name in names}
    format = format_of(weight)
    assert format is not None
    for role, part in format.named(parts).items():
        if role in chosen:
            graph.weights.add(chosen[role], part.shape, part.dtype, _reader(part))


def _reader(part: Tensor) -> Callable[[], Tensor]:
    return lambda: part


class _Lesson:
    """One run of the pass."""

    def __init__(
        self, options: LearnRounding, graph: Graph, calibration: Calibration, targets: dict[fx.Node, Grid]
    ) -> None:
        self.options, self.graph, self.calibration, self.targets = options, graph, calibration, targets
        judging = max(1, len(calibration.tokens) // _JUDGED)
        self._judged = range(len(calibration.tokens) - judging, len(calibration.tokens))
        self._seen = len(calibration.tokens) - judging
        self._key = f"learned-{calibration.fingerprint(graph.content(), str(options))}"

    def parts(self) -> tuple[list[Parts], list[str]]:
        """Parts of all targets, and notes; no parts if calibration's are no worse."""
        kept = self.calibration.kept(self._key)
        if kept is None:
            kept = self._learn()
            self.calibration.keep(self._key, kept)
        flat = iter(kept.tensors)
        parts = [[next(flat) for _ in grid.format.roles] for grid in self.targets.values()] if kept.tensors else []
        return parts, list(kept.notes)

    def _learn(self) -> Kept:
        self._check_memory()
        teacher = Teacher(self.graph, self.calibration.tokens)
        wide = {weight: self.graph.evaluate(ops.operand(weight, "w")) for weight in self.targets}
        learned = {weight: self._weight(weight, w) for weight, w in wide.items()}
        student = Student(self.graph, learned)
        before = self._divergence(student, teacher)
        adam = Adam(
            [parameter for weight in learned.values() for parameter in weight.parameters],
            [rate for weight in learned.values() for rate in self._rates(weight)],
            self.options.steps,
            max(1, self.options.steps // 16),
        )
        self._resume(adam)
        for samples in self._order()[adam.done :]:
            self._loss(student, teacher, samples).backward()
            adam.step()
            self.calibration.progress(self.options.name, adam.done, self.options.steps + 1)
            if adam.done % max(1, self.options.steps // _KEPT) == 0:
                self.calibration.keep(f"{self._key}-state", _state(adam))
        after = self._divergence(student, teacher)
        figures = {"divergence_before": before, "divergence": min(before, after)}
        if not after < before:
            return Kept([], figures, ("what was learned diverges no less on other text: codes stay as calibrated",))
        parts = [part for weight, w in wide.items() for part in learned[weight].parts(w)]
        return Kept(parts, figures, (f"divergence from the float model {before:.4g} -> {after:.4g} nats a token",))

    def _rates(self, weight: LearnedWeight) -> tuple[float, float]:
        """Rates of the offsets and the factors of a weight."""
        return 0.0 if weight.holds_codes else self.options.rate, self.options.scale_rate

    def _check_memory(self) -> None:
        sizes = [ops.operand(weight, "w").meta["val"].numel() for weight in self.targets]
        needed, free = _WEIGHT_BYTES * sum(sizes), available_memory()
        if needed > free:
            raise ResourceError(
                f"learn_rounding needs {needed:,} bytes of memory for {sum(sizes):,} weights, {free:,} are available: "
                "build on a machine with more memory, or without learn_rounding"
            )

    def _weight(self, weight: fx.Node, w: Tensor) -> LearnedWeight:
        grid = self.targets[weight]
        return LearnedWeight(w, grid.format.dequantize(self.graph.evaluate(weight), w.shape[1]), grid)

    def _order(self) -> list[list[int]]:
        """The samples of each step: all that teach, in an order of their own, again and again."""
        each = max(1, STEP_TOKENS // self.calibration.tokens.shape[1])
        generator = torch.Generator().manual_seed(0)
        rounds = -(-self.options.steps * each // self._seen)
        order = torch.cat([torch.randperm(self._seen, generator=generator) for _ in range(rounds)]).tolist()
        return [order[start : start + each] for start in range(0, self.options.steps * each, each)]

    def _loss(self, student: Student, teacher: Teacher, samples: Sequence[int]) -> Tensor:
        """Mean divergence of the student's logits from the teacher's on some samples, in nats a token."""
        given = student.logits(self.calibration.tokens[list(samples)]).log_softmax(-1).flatten(0, 1)
        with torch.no_grad():
            wanted = teacher.logits(samples).log_softmax(-1).flatten(0, 1)
        loss = torch.nn.functional.kl_div(given, wanted, reduction="batchmean", log_target=True)
        if not bool(torch.isfinite(loss)):
            result: Any = self.graph.output.args[0]
            raise PassError(self.options.name, result.name, "logits on the calibration text are not finite")
        return loss

    @torch.no_grad()
    def _divergence(self, student: Student, teacher: Teacher) -> float:
        """Mean divergence on the samples that judge."""
        return sum(float(self._loss(student, teacher, [sample])) for sample in self._judged) / len(self._judged)

    @torch.no_grad()
    def _resume(self, adam: Adam) -> None:
        """Go on from a kept state, if there is one."""
        kept = self.calibration.kept(f"{self._key}-state")
        if kept is not None:
            for tensor, value in zip((*adam.parameters, *adam.state), kept.tensors, strict=True):
                tensor.copy_(value)
            adam.done = int(kept.figures["done"])


def _state(adam: Adam) -> Kept:
    tensors = [tensor.detach() for tensor in (*adam.parameters, *adam.state)]
    return Kept(tensors, {"done": float(adam.done)})
