"""Programs: the buffers that each kind of call reads and writes, and constants that C++ headers repeat."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from qcompile.codegen.calls import (
    AllGather,
    AllReduce,
    Attention,
    Call,
    Combine,
    Elementwise,
    Embed,
    EveryExpert,
    ExpertGemm,
    Gather,
    Gemm,
    Hadamard,
    Logits,
    Mean,
    Norm,
    NormHeads,
    QuantizeRows,
    RopeAppend,
    RopeHeads,
    Route,
    TakeRows,
)
from qcompile.codegen.cpu import render
from qcompile.formats.kv import HIER_GROUP, PAGE_TOKENS, RING_GROUPS

CALLS: list[tuple[Call, tuple[str, ...], tuple[str, ...]]] = [
    (Embed("c", "out", "table", "f32", 8), (), ("out",)),
    (Norm("c", "rms", "x", "out", 1e-5, weight="w", bias="b"), ("x",), ("out",)),
    (NormHeads("c", "rms", "x", 0, 2, 8, 1e-5, weight="w"), ("x",), ("x",)),
    (QuantizeRows("c", "x", "out"), ("x",), ("out",)),
    (Hadamard("c", "x", "out", 8, "core", 1), ("x",), ("out",)),
    (Gemm("c", "x", "bf16", 8, 8, {"w": "w"}, out="out", bias="b"), ("x",), ("out",)),
    (Gemm("c", "x", "bf16", 8, 8, {"w": "w"}, "add", "out", residual="r"), ("x", "r"), ("out",)),
    (Gemm("c", "x", "bf16", 8, 8, {"w": "w"}, "logits"), ("x",), ()),
    (RopeAppend("c", "qkv", 0, 8, 16, 1, 1, 8, 0, inv_freq="f", center="z"), ("qkv",), ("qkv",)),
    (RopeHeads("c", "x", 8, 1, 8, inv_freq="f", center="z"), ("x",), ("x",)),
    (Gather("c", ("a", "b", "a"), (0, 0, 4), (4, 4, 4), "out", "index"), ("a", "b"), ("out",)),
    (Attention("c", "q", 0, "out", 1, 1, 8, 1.0, 0, sinks="s", key_bias="k", center="z"), ("q",), ("out",)),
    (TakeRows("c", "x", "out"), ("x",), ("out",)),
    (Elementwise("c", "add", "x", "out", other="y"), ("x", "y"), ("out",)),
    (Elementwise("c", "mul", "x", "x", weight="w"), ("x",), ("x",)),
    (Route("c", "softmax", "x", "out", 8), ("x",), ("out",)),
    (Route("c", "pick", "x", "out", 8, index="i"), ("x", "i"), ("out",)),
    (EveryExpert("c", "out", 8), (), ("out",)),
    (
        ExpertGemm("c", "x", "i", "out", "bf16", "bf16", 0, 8, 8, 8, 2, 1, 1, {"w": "w"}, {"w": 8}, bias="b"),
        ("x", "i"),
        ("out",),
    ),
    (Combine("c", "x", "out", 2), ("x",), ("out",)),
    (Combine("c", "x", "out", 2, scores="s"), ("x", "s"), ("out",)),
    (Mean("c", "x", "out", 8), ("x",), ("out",)),
    (AllGather("c", "x", 2, 8), ("x",), ()),
    (AllReduce("c", "x", "out", 2), ("x",), ("out",)),
    (Combine("c", "x", "out", 2, "w", 3), ("x", "w"), ("out",)),
    (Logits("c", "x"), ("x",), ()),
]


@pytest.mark.parametrize(("call", "reads", "writes"), CALLS, ids=lambda value: getattr(value, "kernel", ""))
def test_buffers_of_a_call(call: Call, reads: tuple[str, ...], writes: tuple[str, ...]) -> None:
    assert (call.reads, call.writes) == (reads, writes)


def test_every_kind_of_call_is_tested_and_names_its_own_fields() -> None:
    kinds = set(Call.__subclasses__())
    kinds = {kind for kind in kinds if kind.__module__ == Call.__module__}
    assert {type(call) for call, *_ in CALLS} == kinds
    for kind in kinds:
        assert {*kind.read_fields, *kind.write_fields} <= {f.name for f in fields(kind)}, kind


def test_headers_repeat_the_constants_of_the_cache() -> None:
    """C++ headers are compiled without being rendered, so the headers have numbers of their own."""
    text = (Path(render.__file__).parent / "templates" / "kv.h").read_text(encoding="utf-8")
    result: dict[str, Any] = dict(re.findall(r"^constexpr int (k\w+) = ([^;]+);", text, re.MULTILINE))
    assert result["kPage"] == str(PAGE_TOKENS) and result["kHierGroup"] == str(HIER_GROUP)
    assert result["kRingPages"] == f"{RING_GROUPS} * kHierGroup / kPage"
