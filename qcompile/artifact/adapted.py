"""The file of an artifact that says how adapters change its linears, ADAPTERS_FILE of artifact/layout.py.

A site is a linear that adapters may change. Its weight is the sum of terms: weights of the checkpoint after changes of
their inputs and of their outputs, which passes have made. An adapter's A of such a weight goes through the changes of
the inputs, and its B through those of the outputs. Each rank of a divided model has a file of its own. There the last
change takes the rank's part: A is divided where the linear's inputs are, and B where its outputs are. The file is
safetensors with the changes' vectors, and the rest as JSON in its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from qcompile import ops


@dataclass(frozen=True)
class FactorChange:
    """An operator on a weight, with its numbers, and the name of its vector if it has one.

    `op` is one of ops/weights.py, `take_spans`, or `place` (rows at `start` of `total`).
    """

    op: str
    numbers: Mapping[str, int | bool | Sequence[int]]
    vector: str | None = None

    def apply(self, w: Tensor, vectors: Mapping[str, Tensor]) -> Tensor:
        """`w` after the change. `w` is a float64 matrix; the axis that changes has the weight's size."""
        numbers: Any = self.numbers
        if self.op == "place":
            placed = w.new_zeros(numbers["total"], w.shape[1])
            placed[numbers["start"] : numbers["start"] + len(w)] = w
            return placed
        if self.op == "interleave":
            pair = (w, torch.zeros_like(w)) if numbers["first"] else (torch.zeros_like(w), w)
            return _reference("interleave_rows", *pair, numbers["block"])
        if self.op == "slice_rows":
            return _reference("slice_rows", w, numbers["start"], numbers["stop"])
        if self.op == "take_spans":
            return _reference("take_spans", w, list(numbers["spans"]), numbers["axis"])
        given = () if self.vector is None else (vectors[self.vector],)
        rest = (numbers["inverse"],) if "inverse" in numbers else ()
        return _reference(self.op, w, *given, numbers["axis"], *rest)


def _reference(name: str, *args: Any) -> Tensor:
    result: Tensor = ops.reference(name)(*args)
    return result


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight [N, K] of the checkpoint in a site, and the changes of its inputs and outputs."""

    weight: str
    shape: tuple[int, int]
    inputs: tuple[FactorChange, ...]
    outputs: tuple[FactorChange, ...]


@dataclass(frozen=True)
class Site:
    """A linear that adapters may change: n outputs of k inputs. `factors`: the type of A and B, f32 or bf16."""

    name: str
    k: int
    n: int
    factors: str
    terms: tuple[AdaptedWeight, ...]


@dataclass(frozen=True)
class Adapted:
    """All sites of an artifact in the order of their numbers. `rank`: the largest rank of an adapter.

    `refused` are weights of linears that adapters may not change, and why.
    """

    rank: int
    sites: tuple[Site, ...]
    refused: Mapping[str, str]
    vectors: Mapping[str, Tensor]

    def to_bytes(self) -> bytes:
        """The file."""
        facts = {"rank": self.rank, "sites": [asdict(site) for site in self.sites], "refused": dict(self.refused)}
        vectors = {name: value.contiguous() for name, value in self.vectors.items()}
        return save(vectors, {"adapted": json.dumps(facts, sort_keys=True)})

    @staticmethod
    def from_bytes(content: bytes) -> Adapted:
        """What `to_bytes` wrote; its hash has been checked."""
        length = int.from_bytes(content[:8], "little")
        facts = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["adapted"])
        return Adapted(facts["rank"], tuple(map(_site, facts["sites"])), facts["refused"], load(content))


def _site(facts: dict[str, Any]) -> Site:
    terms = tuple(
        AdaptedWeight(
            term["weight"],
            tuple(term["shape"]),
            *(tuple(FactorChange(**change) for change in term[side]) for side in ("inputs", "outputs")),
        )
        for term in facts["terms"]
    )
    return Site(**facts | {"terms": terms})
