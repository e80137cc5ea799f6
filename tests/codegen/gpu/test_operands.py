"""Operands and grid sizes of launches, and how launch plans state them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qcompile.artifact.abi import GPU_ABI
from qcompile.codegen.gpu import operands
from qcompile.codegen.gpu.kernel import Argument, Kernel
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.codegen.gpu.launches import Launch, LaunchPlan, Variant
from qcompile.codegen.gpu.operands import GridSize, grid_size
from qcompile.codegen.kv_layout import KVLayout
from qcompile.codegen.program import Program
from qcompile.runtime.cuda import counts as cuda_counts
from qcompile.targets import TARGETS

JSON = [
    (operands.ActivationRef("tokens", 96), {"kind": "activation", "rows": "tokens", "bytes_per_row": 96}),
    (
        operands.ActivationRef("outputs", 0, 8),
        {"kind": "activation", "rows": "outputs", "bytes_per_row": 0, "column_bytes": 8},
    ),
    (operands.WeightRef("w"), {"kind": "weight", "name": "w"}),
    (operands.InputRef("positions"), {"kind": "input", "name": "positions"}),
    (operands.InputRef("table", ("a", "b")), {"kind": "input", "name": "table", "past": ["a", "b"]}),
    (operands.ScratchRef("sums", 64, ("tokens",)), {"kind": "scratch", "name": "sums"}),
    (operands.CacheRef(3), {"kind": "cache", "layer": 3}),
    (operands.SlotsRef(), {"kind": "slots"}),
    (operands.CountRef("tokens"), {"kind": "count", "name": "tokens"}),
    (operands.NumberRef(7), {"kind": "number", "value": 7}),
    (operands.DraftRef("decoded"), {"kind": "draft", "name": "decoded"}),
    (operands.StateRef("last"), {"kind": "state", "name": "last"}),
    (operands.PeerRef(), {"kind": "peer"}),
    (operands.PeerRef(3), {"kind": "peer", "of": 3}),
    (operands.RankRef(), {"kind": "rank"}),
]


@pytest.mark.parametrize(("operand", "want"), JSON, ids=lambda value: getattr(value, "kind", ""))
def test_json_of_operands(operand: operands.Operand, want: dict[str, Any]) -> None:
    assert json.loads(json.dumps(operand.to_json())) == want


def test_every_kind_of_operand_is_tested() -> None:
    bases = operands.Operand, operands.NamedOperand
    kinds = {kind for base in bases for kind in base.__subclasses__() if kind not in bases}
    assert {type(operand) for operand, _ in JSON} == kinds


@pytest.mark.parametrize(
    ("size", "want"),
    [(5, 5), (GridSize("rows"), 40), (GridSize("rows", 16), 3), (GridSize("rows", 16, 2, 7), 13)],
)
def test_the_runtime_finds_the_same_grid_sizes(size: operands.Size, want: int) -> None:
    assert grid_size(size, {"rows": 40}) == want
    text = size if isinstance(size, int) else size.to_json()
    assert cuda_counts.grid({"grid": {"x": text, "y": 1, "z": text}}, {"rows": 40}) == [want, 1, want]


def test_json_of_a_plan() -> None:
    kernel = Kernel("add", "source", (Argument("x", "*fp32"), Argument("M", "i32")))
    args: operands.Operands = {"M": operands.CountRef("tokens"), "unused": operands.WeightRef("w")}
    few = Variant(None, (0, 0, 0), {}, 4)
    many = Variant(kernel, (GridSize("tokens"), 1, 1), args | {"x": operands.ScratchRef("s", 8, ("tokens",))})
    more = Variant(kernel, (1, 1, 1), args | {"x": operands.ScratchRef("s", 16, ("tokens",))})
    launches = (Launch("a", "tokens", (few, many)), Launch("b", "outputs", (more,)))
    program = Program(40, 64, (), (), ("w",), KVLayout("kv16", 2, 1, 64))
    plan = LaunchPlan(TARGETS["h200"], (GpuKV("kv16", 1, 64), GpuKV("kv16", 2, 32)), 128, launches)
    data = json.loads(plan.to_json({kernel.label: {"threads": 128}}, program, {"memory_gb_s": 3.0}))
    assert (
        data["abi"] == GPU_ABI and data["peaks"] == {"memory_gb_s": 3.0} and data["layer_page_bytes"] == [16384, 16384]
    )
    assert data["kernels"] == {kernel.label: {"threads": 128, "arguments": ["x", "M"]}}
    assert data["scratch"] == {"s": {"bytes": 16, "counts": ["tokens"]}}  # the larger size
    first = {"kernel": "", "grid": {"x": 0, "y": 0, "z": 0}, "args": {}, "most": 4}
    second = {
        "kernel": kernel.label,
        "grid": {"x": {"count": "tokens"}, "y": 1, "z": 1},
        "args": {"x": {"kind": "scratch", "name": "s"}, "M": {"kind": "count", "name": "tokens"}},
        "most": 0,
    }
    assert data["launches"][0] == {"name": "a", "by": "tokens", "variants": [first, second]}
