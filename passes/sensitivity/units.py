"""Units: the linears of a model that one kernel multiplies, such as query, key and value, and so have one format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from qcompile import ops
from qcompile.errors import UnsupportedError
from qcompile.formats.activations import activation_format
from qcompile.formats.registry import gpu_kernel_for, is_row_major, weight_format
from qcompile.graph import Graph
from qcompile.passes.gemm_precision import changeable_gemms
from qcompile.passes.roles import sites, weight_names
from qcompile.roofline import Peaks, predicted_us
from qcompile.targets import Target


@dataclass(frozen=True, order=True)
class FormatPair:
    """A weight format and an activation format, by name."""

    weight: str
    activation: str

    def __str__(self) -> str:
        return f"{self.weight}:{self.activation}"

    def has_kernels(self, target: Target) -> bool:
        """Whether `target` multiplies in these formats."""
        if target.kind == "cpu" or is_row_major(self.weight, self.activation):
            return True
        try:
            gpu_kernel_for(self.weight, self.activation)
        except UnsupportedError:
            return False
        return True


@dataclass(frozen=True)
class GemmUnit:
    """A gemm of the quantized graph, by its node's name, with the linears that it was made of.

    `names` are names of weights in the checkpoint, one of each linear. The weight is [outputs, inputs], of all experts
    together, of which a token reads `share`.
    """

    node: str
    layer: int
    roles: tuple[str, ...]
    names: tuple[str, ...]
    outputs: int
    inputs: int
    experts: bool = False
    share: float = 1.0

    @property
    def name(self) -> str:
        """The unit's name, such as layer0_query_key_value."""
        return f"layer{self.layer}_{'_'.join(self.roles)}"

    @property
    def weights(self) -> int:
        """The number of weights."""
        return self.outputs * self.inputs

    @property
    def facts(self) -> dict[str, Any]:
        """The unit in a report."""
        facts = {"name": self.name, "layer": self.layer, "roles": list(self.roles), "names": list(self.names)}
        return facts | {"outputs": self.outputs, "inputs": self.inputs}

    def takes(self, pair: FormatPair) -> bool:
        """Whether it can have these formats: not all have kernels for experts."""
        return weight_format(pair.weight).serves_experts or not self.experts

    def bytes(self, pair: FormatPair) -> int:
        """Bytes of its packed weight, with scales and zero points."""
        return sum(weight_format(pair.weight).packed_bytes(self.outputs, self.inputs).values())

    def microseconds(self, pair: FormatPair, peaks: Peaks) -> float:
        """Predicted time for one token, by the roofline."""
        kind = activation_format(pair.activation)
        math = "int8" if kind.is_integer else pair.activation
        return predicted_us(self.share * self.bytes(pair), 2.0 * self.share * self.weights, peaks, math)


def units(quantized: Graph, assigned: Graph) -> tuple[list[GemmUnit], int]:
    """The units of a graph in order, and its number of layers. `assigned` is the graph before `merge`.

    Routers of experts are no units: they stay in float32.
    """
    linears, layers = sites(assigned)
    listed = []
    for gemm in changeable_gemms(quantized):
        names = set(weight_names(quantized, gemm))
        parts = [site for site in linears if site.names and names.issuperset(site.names)]
        if not parts:
            raise UnsupportedError(f"node {gemm.name}: no linear of the model has its weights {', '.join(names)}")
        roles = _distinct(role for site in parts for role in site.roles)
        outputs, inputs = weight_format(ops.operand(gemm, "format")).shape(ops.operand(gemm, "weight").meta["val"])
        of_experts = ops.name_of(gemm.target) == "expert_gemm"
        share = _share(gemm) if of_experts else 1.0
        named = _distinct(site.names[0] for site in parts)
        listed.append(GemmUnit(gemm.name, parts[0].layer, roles, named, outputs, inputs, of_experts, share))
    return listed, layers


def _share(gemm: fx.Node) -> float:
    """The share of the experts that a token is given to."""
    index, experts = ops.operand(gemm, "index"), ops.operand(gemm, "experts")
    return min(1.0, float(index.meta["val"].shape[-1]) / experts)


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
