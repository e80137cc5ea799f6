"""C++ statements of the calls that pass features between a model and its draft head."""

from __future__ import annotations

from qcompile.codegen.cpu.cpp import ident, rows_kind
from qcompile.codegen.cpu.lora_statements import Writing
from qcompile.codegen.feature_calls import ReadFeatures, WriteFeatures


def read_features(statements: Writing, call: ReadFeatures, _: int) -> list[str]:
    """The features that the runtime gives, split over the threads by rows."""
    width = statements.program.buffer(call.out).width
    return [f"read_features({statements.mine(call.out)}, m.features_given, {width}, {ident(call.out)});"]


def write_features(statements: Writing, call: WriteFeatures, _: int) -> list[str]:
    """The features that the runtime wants, split over the threads by rows."""
    x = statements.program.buffer(call.x)
    rows = f"s.mine({rows_kind(x)}, false)"
    return [f"get_rows({rows}, {ident(call.x)}, {x.width}, m.features);"]
