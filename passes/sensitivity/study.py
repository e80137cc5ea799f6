"""A study of a model: the loss of each unit in each format, mixes of formats, and the recipe of one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from qcompile.calibration import CalibrationSource
from qcompile.clock import Clock, Progress
from qcompile.errors import UsageError
from qcompile.formats.activations import activation_format
from qcompile.formats.registry import weight_format
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.calibration.salience import Salience
from qcompile.passes.quantize import Quantize
from qcompile.passes.rewrite import ImportOptions, rewrite
from qcompile.passes.schedule import Schedule
from qcompile.passes.sensitivity.losses import LogitLoss, LossMeter
from qcompile.passes.sensitivity.mixed_recipes import mixed_recipe
from qcompile.passes.sensitivity.mixes import Mix, bits_of_mix, growing, size_of, within
from qcompile.passes.sensitivity.units import FormatPair, GemmUnit, units
from qcompile.recipe_files.mixes import StudiedMixes, front
from qcompile.recipe_files.resolved import Resolved
from qcompile.recipe_files.rules import Rule
from qcompile.recipes import COMPARED
from qcompile.roofline import Peaks, peaks_of
from qcompile.targets import get_target

MEASURED_MIXES = 9
"""Number of mixes of which the loss is measured, from the smallest to the best."""
MIXES = "mixes"


@dataclass(frozen=True)
class Subject:
    """What to study: a model with the passes of `recipe`, on `text`. `layers` as in rules; empty: all."""

    model: str | Path
    recipe: Resolved
    target: str
    text: CalibrationSource
    source: Mapping[str, Any]
    layers: str = ""


@dataclass(frozen=True)
class MeasuredMix:
    """A mix of formats with its loss; `expected` is the sum of the divergences of its units alone."""

    name: str
    mix: Mix
    loss: LogitLoss
    expected: float


@dataclass(frozen=True)
class Study:
    """What was measured. `losses` have each unit in each format alone, `mixes` several or all units together."""

    subject: Subject
    tokens: Tensor
    exact: LogitLoss
    losses: Mapping[tuple[GemmUnit, FormatPair], LogitLoss]
    mixes: Sequence[MeasuredMix]
    chosen: MeasuredMix | None = None

    @property
    def units(self) -> list[GemmUnit]:
        """The units in order."""
        return sorted(dict.fromkeys(unit for unit, _ in self.losses), key=lambda unit: unit.layer)

    @property
    def pairs(self) -> list[FormatPair]:
        """The formats."""
        return list(dict.fromkeys(pair for _, pair in self.losses))

    def facts(self) -> dict[str, Any]:
        """The study as one JSON document."""
        peaks = peaks_of(self.subject.target)
        sizes, losses = [size_of(mix.mix) for mix in self.mixes], [mix.loss.kl for mix in self.mixes]
        best = {id(self.mixes[place]) for place in front(sizes, losses)}
        return {
            "model": Path(self.subject.model).name,
            "recipe": self.subject.recipe.name,
            "target": self.subject.target,
            "samples": self.tokens.shape[0],
            "length": self.tokens.shape[1],
            "perplexity": self.exact.perplexity,
            "units": [unit.facts | {"formats": self._formats(unit, peaks)} for unit in self.units],
            "mixes": [_mix_facts(mix, peaks) | {"best": id(mix) in best} for mix in self.mixes],
            "chosen": _mix_facts(self.chosen, peaks) if self.chosen else None,
        }

    def _formats(self, unit: GemmUnit, peaks: Peaks) -> list[dict[str, Any]]:
        return [
            {
                "weight": pair.weight,
                "activation": pair.activation,
                "bytes": unit.bytes(pair),
                "bits": 8 * unit.bytes(pair) / unit.weights,
                "predicted_us": unit.microseconds(pair, peaks),
                "kl": loss.kl,
                "perplexity": loss.perplexity,
            }
            for (other, pair), loss in self.losses.items()
            if other == unit
        ]


def _mix_facts(measured: MeasuredMix, peaks: Peaks) -> dict[str, Any]:
    mix = measured.mix
    return {
        "name": measured.name,
        "bytes": size_of(mix),
        "bits": bits_of_mix(mix),
        "predicted_us": sum(unit.microseconds(pair, peaks) for unit, pair in mix.items()),
        "expected_kl": measured.expected,
        "kl": measured.loss.kl,
        "perplexity": measured.loss.perplexity,
        "formats": {unit.name: str(pair) for unit, pair in mix.items()},
    }


# ---- measuring -----------------------------------------------------------------------------------------


def formats_for(given: Sequence[str], recipe: Resolved, target: str) -> list[FormatPair]:
    """The formats to compare, from texts such as w4_asym_g128 or w4_asym_g128:int8, or the usual ones of `target`.

    A text without an activation format means the recipe's, if the weights have kernels for it, else the weights' first
    one. Raises UsageError for unknown formats, pairs without kernels, and formats that mark rows.
    """
    machine = get_target(target)
    usual = str(recipe.settings(machine.kind)["assign_precision"]["activation"])
    formats = []
    for weight, _, activation in (text.partition(":") for text in given or COMPARED):
        format = weight_format(weight)
        meeting = [kind.name for kind in format.activations]
        pair = FormatPair(weight, activation or (usual if usual in meeting else meeting[0]))
        if activation and activation_format(activation).name not in meeting:
            raise UsageError(f"--formats {pair}: {weight} has kernels for activations in {', '.join(meeting)}")
        if format.marks_rows:
            raise UsageError(f"--formats {weight}: its rows differ in bits; take recipe auto with --target-bits")
        if pair.has_kernels(machine):
            formats.append(pair)
        elif given:
            raise UsageError(f"--formats {pair}: target {target} has no kernels for it")
    return list(dict.fromkeys(formats))


def study(subject: Subject, pairs: Sequence[FormatPair], bits: float | None, progress: Progress) -> Study:
    """Measure `subject` in the formats `pairs`; with `bits`, also choose a mix of at most `bits` bits per weight."""
    graph, measured = _prepared(subject, progress)
    assert graph.calibration is not None
    tokens = graph.calibration.tokens
    progress("exact", 0, 1)
    meter = LossMeter(graph, tokens)
    losses = meter.each(measured, pairs, progress)
    alone = {key: loss.kl for key, loss in losses.items()}
    uniform = [(str(pair), dict.fromkeys(measured, pair)) for pair in pairs]
    wanted = [(name, mix) for name, mix in uniform if all(key in losses for key in mix.items())]
    spread = [mix for mix in _spread(growing(alone)) if mix not in [each for _, each in wanted]]
    wanted += [(f"mix {number}", mix) for number, mix in enumerate(spread, 1)]
    chosen = [("chosen", within(alone, bits))] if bits else []
    mixes = []
    for number, (name, mix) in enumerate(wanted + chosen):
        progress(MIXES, number, len(wanted + chosen))
        mixes.append(MeasuredMix(name, mix, meter.mixed(mix), sum(alone[key] for key in mix.items())))
    return Study(subject, tokens, meter.exact, losses, mixes[: len(wanted)], mixes[-1] if chosen else None)


def _prepared(subject: Subject, progress: Progress) -> tuple[Graph, list[GemmUnit]]:
    """The graph quantized in float32 throughout, after the recipe's other passes, and the units to measure."""
    if subject.recipe.rules:
        raise UsageError(f"recipe {subject.recipe.name} has rules; give one without: the result has rules of its own")
    passes = Schedule(subject.recipe, subject.target).model_passes()
    passes = passes[: [each.name for each in passes].index(Quantize.name) + 1]
    exact = {AssignPrecision.name: AssignPrecision(), Salience.name: Salience()}
    plain = tuple(exact.get(each.name, each) for each in passes)
    graphs, records = rewrite(subject.model, plain, ImportOptions(subject.source, subject.text), Clock(progress))
    assigned = graphs[[record.name for record in records].index(AssignPrecision.name)]
    linears, layers = units(graphs[-1], assigned)
    if subject.layers:
        chosen = Rule("--layers", layers=subject.layers).numbers(layers)
        linears = [unit for unit in linears if unit.layer in chosen]
    return graphs[-1], linears


def _spread(mixes: Sequence[Mix]) -> list[Mix]:
    """Some of `mixes`, evenly spaced in steps, with the first and the last."""
    last = len(mixes) - 1
    places = dict.fromkeys(round(last * each / (MEASURED_MIXES - 1)) for each in range(MEASURED_MIXES))
    return [mixes[at] for at in places]


# ---- the recipe ----------------------------------------------------------------------------------------


def recipe_for(study: Study, name: str) -> Resolved:
    """The recipe of the chosen mix."""
    assert study.chosen is not None
    divergence = f"divergence {study.chosen.loss.kl:.5f}"
    mixed = mixed_recipe(study.subject.recipe, study.subject.target, study.chosen.mix, divergence, name)
    return replace(mixed, study=StudiedMixes.of_facts(study.facts()))
