"""Extrapolate the costs of a deep model from its first layers, if its layers repeat.

A decoder keeps its layers in lists. Two layers are equal if their modules have the same classes, weight shapes and
settings, apart from settings that are layer numbers. If layers repeat from some layer on, every layer or every few
layers, then models cut at different depths differ in cost by whole periods, and two such models determine the cost of
the full one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from qcompile.checkpoints.configuration import DEPTH_KEY, cut, text_config
from qcompile.checkpoints.huggingface import build

DEEP = 8
"""Number of layers from which extrapolation pays off."""

Signature = dict[str, str]
"""Every setting and weight shape of a layer, by its path within the layer."""


@dataclass(frozen=True)
class Repeats:
    """A model of `layers` layers that repeat every `period` layers, starting at layer `first`."""

    layers: int
    first: int
    period: int

    @property
    def cuts(self) -> tuple[int, int]:
        """Depths of two truncated models that differ by one period, and from the full model by whole periods."""
        left = (self.layers - self.first) % self.period
        return self.first + left + self.period, self.first + left + 2 * self.period

    def extrapolate(self, small: Any, large: Any) -> Any:
        """The full model's value, from those of the models in `cuts`: numbers grow per period, the rest must agree.

        Works inside dicts and lists; a key that only `large` has counts as 0 in `small`.
        """
        if isinstance(large, Mapping):
            return {key: self.extrapolate(small.get(key, 0), value) for key, value in large.items()}
        if isinstance(large, list):
            return [self.extrapolate(*pair) for pair in zip(small, large, strict=True)]
        if isinstance(large, int) and not isinstance(large, bool):
            return large + (large - small) * (self.layers - self.cuts[1]) // self.period
        assert small == large, (small, large)
        return large


def find(config: Any, allow_remote: bool = False) -> Repeats | None:
    """How the layers of the model of `config` repeat; None if truncation would tell nothing or save nothing."""
    layers = getattr(text_config(config), DEPTH_KEY, None)
    if not isinstance(layers, int) or layers < DEEP:
        return None
    whole = _signatures(config, layers, allow_remote)
    repeats = _repeats(whole) if whole else None
    if repeats is None or sum(repeats.cuts) > layers:
        return None
    cut_at = repeats.cuts[1]
    # The truncated model must consist of the full one's layers, whatever its configuration says about them.
    return repeats if _signatures(cut(config, cut_at), cut_at, allow_remote) == whole[:cut_at] else None


def _signatures(config: Any, layers: int, allow_remote: bool) -> list[Signature]:
    """One signature per layer of the model of `config`, over all lists of that length; empty if there are none."""
    model = build(config, allow_remote)
    stacks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == layers]
    signatures: list[Signature] = [{} for _ in range(layers if stacks else 0)]
    for number, stack in enumerate(stacks):
        described = [_describe(layer) for layer in stack]
        numbering = {
            path
            for path in described[0]
            if all(layer.get(path) == repr(index) for index, layer in enumerate(described))
        }
        for signature, layer in zip(signatures, described, strict=True):
            signature.update({f"{number}.{path}": value for path, value in layer.items() if path not in numbering})
    return signatures


def _describe(layer: nn.Module) -> Signature:
    described = {}
    for path, module in layer.named_modules():
        described[path] = type(module).__qualname__
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            described[f"{path}.{name}"] = f"{tuple(tensor.shape)} {tensor.dtype}"
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, (bool, int, float, str, tuple, list, type(None))):
                described[f"{path}.{name}"] = repr(value)
    return described


def _repeats(signatures: list[Signature]) -> Repeats | None:
    """The shortest prefix and period after which every layer equals the one a period before."""
    layers = len(signatures)
    candidates = []
    for period in range(1, layers // 4 + 1):
        first = layers - period
        while first > 0 and signatures[first - 1] == signatures[first - 1 + period]:
            first -= 1
        candidates.append(Repeats(layers, first, period))
    return min(candidates, key=lambda repeats: repeats.cuts[1], default=None)
