"""Studies that `qcompile sensitivity --json` has saved: measured once, they give recipes of any size."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qcompile.errors import UsageError
from qcompile.formats.activations import activation_format
from qcompile.formats.registry import weight_format
from qcompile.passes.sensitivity.mixed_recipes import mixed_recipe
from qcompile.passes.sensitivity.mixes import within
from qcompile.passes.sensitivity.units import FormatPair, GemmUnit
from qcompile.recipe_files.mixes import StudiedMixes
from qcompile.recipe_files.resolved import Resolved


@dataclass(frozen=True)
class SavedStudy:
    """What a file says: `facts` as `Study.facts` has them, and the divergence of each unit in each format."""

    facts: Mapping[str, Any]
    losses: Mapping[tuple[GemmUnit, FormatPair], float]

    def recipe(self, recipe: Resolved, bits: float, name: str) -> Resolved:
        """`recipe`, which was studied, with the mix of at most `bits` bits per weight. Raises UsageError."""
        mix = within(self.losses, bits)
        expected = sum(self.losses[key] for key in mix.items())
        mixed = mixed_recipe(recipe, self.facts["target"], mix, f"sum of divergences {expected:.5f}", name)
        return replace(mixed, study=StudiedMixes.of_facts(self.facts))

    def require(self, **studied: str) -> None:
        """Raise UsageError unless the study is of these: model, recipe and target, by name."""
        for name, value in studied.items():
            if self.facts[name] != value:
                raise UsageError(f"--study: it is of {name} {self.facts[name]}, not of {value}")


def read_study(path: Path) -> SavedStudy:
    """The study in a file that `qcompile sensitivity --json` wrote. Raises UsageError."""
    try:
        facts = json.loads(path.read_bytes(), parse_constant=_refuse)
        losses = dict(each for unit in facts["units"] for each in _losses(unit))
        if not losses or not all(isinstance(facts[name], str) for name in ("model", "recipe", "target")):
            raise ValueError("it names no model, recipe, target or linears")
        _check_numbers(facts, "perplexity", "samples", "length")
        for mix in (*facts["mixes"], *([facts["chosen"]] if facts["chosen"] else [])):
            _check_numbers(mix, "bits", "bytes", "predicted_us", "expected_kl", "kl", "perplexity")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is no study that qcompile sensitivity --json wrote: {why}") from error
    return SavedStudy(facts, losses)


def _losses(unit: Mapping[str, Any]) -> list[tuple[tuple[GemmUnit, FormatPair], float]]:
    """The divergences of one unit. Raises ValueError, KeyError, TypeError for what is no unit."""
    names, roles = tuple(unit["names"]), tuple(unit["roles"])
    sizes = unit["layer"], unit["outputs"], unit["inputs"]
    if not all(isinstance(text, str) for text in (*names, *roles)) or not all(type(size) is int for size in sizes):
        raise ValueError(f"linear {names} is not described by names and whole numbers")
    for each in unit["formats"]:
        _check_numbers(each, "bytes", "bits", "predicted_us", "kl", "perplexity")
    made = GemmUnit(unit["name"], sizes[0], roles, names, *sizes[1:])
    return [((made, _pair(each)), each["kl"]) for each in unit["formats"]]


def _pair(given: Mapping[str, Any]) -> FormatPair:
    return FormatPair(weight_format(given["weight"]).name, activation_format(given["activation"]).name)


def _check_numbers(given: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError, KeyError for a field that is missing or no number."""
    for name in names:
        value = given[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} {value!r} is no number")


def _refuse(constant: str) -> None:
    raise ValueError(f"it has {constant}")
