"""Launches of the calls that pass features between a model and its draft head, in memory that the runtime gives.

Features are f32 [rows, width], without padding. The rows of a head read `given[feature_rows[row]]`. The rows of decode
step n after the host's last inputs return theirs behind those of the steps before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qcompile.codegen.feature_calls import ReadFeatures, WriteFeatures
from qcompile.codegen.gpu.context import PlanContext, single_launch
from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.gpu.launches import Launch
from qcompile.codegen.gpu.operands import CountRef, GridSize, InputRef, Operands
from qcompile.codegen.gpu.rounds import PART
from qcompile.codegen.gpu.row_launches import row_launch, written_to
from qcompile.codegen.gpu.rows import RowSpec
from qcompile.errors import UnsupportedError
from qcompile.targets import has_pdl


def if_featured(launch: Launch) -> Launch:
    """The launch of a call that only features need, which runs nothing in steps that return none."""
    assert launch.by == "tokens"
    return replace(launch, by="featured")


def read_features(context: PlanContext, c: ReadFeatures) -> Iterator[Launch]:
    """The launch that takes the rows that a step is given."""
    width = context.buffer(c.out).width
    spec = written_to(context, c.out, RowSpec(width, width, 0, indexed=True))
    yield row_launch(context, spec, c.name, InputRef("given"), c.out, {"index": InputRef("feature_rows")})


def write_features(context: PlanContext, c: WriteFeatures) -> Iterator[Launch]:
    """The launch that returns a value of a step."""
    x = context.buffer(c.x)
    if x.dtype != "f32":
        raise UnsupportedError(f"GPU kernels return features in f32, not {x.dtype}")
    kernel = write_kernel(x.width, x.stride, context.capability)
    args: Operands = {"x": context.ref(c.x), "M": CountRef("tokens")}
    args |= {name: InputRef(name) for name in ("features", "counter")}
    yield single_launch(c.name, "tokens", kernel, (GridSize("tokens"), -(-x.width // PART), 1), args)


def write_kernel(width: int, stride: int, capability: int) -> Kernel:
    """The kernel that copies rows of `width` features from rows `stride` elements apart."""
    types = {"x": "*fp32", "features": "*fp32", "counter": "*i32", "M": "i32"}
    arguments, pdl = tuple(Argument(*each) for each in types.items()), has_pdl(capability)
    values = {"arguments": arguments, "width": width, "stride": stride, "part": PART, "pdl": pdl}
    return Kernel("write_features", render_template("write_features.py.jinja", **values), arguments, 4, 1, pdl)
