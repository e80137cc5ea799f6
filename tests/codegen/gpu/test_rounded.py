"""Results that GEMMs and attention write in bf16 themselves, where they would only be rounded next."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qcompile.codegen.buffers import Buffer
from qcompile.codegen.calls import Call, Elementwise, Gemm, Norm, QuantizeRows, Route
from qcompile.codegen.gpu import fuse
from qcompile.codegen.gpu.plan import make_plan
from qcompile.codegen.gpu.reads import Reads
from qcompile.codegen.kv_layout import KVLayout
from qcompile.codegen.program import Program
from qcompile.runtime.step import Rows
from qcompile.targets import TARGETS
from tests.support.cases import first
from tests.support.graphs import decoder
from tests.support.interpreted import interpreted
from tests.support.lowering import gpu_program

SHAPE: dict[str, Any] = {"vocab": 40, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 256, "layers": 2}


def interpret_steps(recipe: str) -> None:
    """A prompt by itself, more of it beside what decodes, and decoding: bits of kernels that only round."""
    from tests.support.gpu_machine import HostLaunch, Machine

    split = 128 if recipe == "quantspec" else 64
    texts = [[(7 * i + 3 * k) % SHAPE["vocab"] for i in range(90)] for k in range(2)]

    def logits() -> tuple[list[torch.Tensor], list[str]]:
        torch.manual_seed(0)
        machine, launched = Machine(decoder(**SHAPE), recipe, pages=20, split=split, fine=recipe != "w4a16"), []
        HostLaunch.watch = launched.append
        pages = [range(8), range(8, 16)]
        steps = [
            [Rows(texts[0][:40], 0, pages[0], 3)],
            [Rows(texts[0][40:42], 40, pages[0], 2), Rows(texts[1][:41], 0, pages[1], 3)],
            [Rows(texts[k][at : at + 1], at, pages[k], 1) for k, at in enumerate((42, 41))],
        ]
        result = [torch.tensor(machine.target.step(step, logits=True)[1]) for step in steps]
        return result, [label for label in launched if label.startswith("rows_bf16")]

    written, apart = logits()
    assert not apart
    fuse.RULES = tuple(rule for rule in fuse.RULES if rule is not fuse.round_results)
    want, apart = logits()
    assert len(apart) == 3 * 2 * SHAPE["layers"]
    assert all(torch.equal(*pair) for pair in zip(written, want, strict=True))


@pytest.mark.parametrize("recipe", first(("w4a16",), ["bf16", "w4a16", "quantspec"]))
def test_bits_are_those_of_rounding_apart_interpreted(recipe: str) -> None:
    interpreted(__name__, f"interpret_steps({recipe!r})")


def test_no_kernel_only_rounds() -> None:
    plan = make_plan(gpu_program(decoder(**SHAPE), "w4a16")[1], TARGETS["h200"])
    assert not [name for name in plan.kernels if name.startswith("rows_bf16")]
    outs = {a.type for kernel in plan.kernels.values() if "gated" in kernel.name for a in kernel.arguments}
    assert "*fp32" not in outs


def program_of(*more: Call, width: int = 128, at: int = 512, dtype: Any = "bf16", **gemm: Any) -> Program:
    """A GEMM of 128 outputs, the rounding of its result, and `more`."""
    x, y = Buffer("x", "bf16", 128), Buffer("y", "f32", width, offset=1024)
    buffers = (x, y, Buffer("z", dtype, width, offset=at), Buffer("other", "f32", width, offset=4096))
    product = Gemm("product", "x", "bf16", 128, 128, {"codes": "w"}, out="y", **gemm)
    calls = (product, QuantizeRows("round", "y", "z"), *more)
    return Program(40, 64, buffers, calls, ("w",), KVLayout("kv16", 1, 1, 64))


def rounded(program: Program) -> str | None:
    call: Any = program.calls[0]
    return fuse.rounded_buffer(program, Reads(program), call, program.calls[1])


def test_what_is_only_rounded_is_written_so() -> None:
    assert rounded(program_of()) == "z"
    assert rounded(program_of(Norm("norm", "z", "other", "rms", None, None, 1e-5))) == "z"


@pytest.mark.parametrize(
    "program",
    [
        program_of(Elementwise("twice", "scale", "y", "other", factor=2.0)),  # the float result is read, too
        program_of(Route("route", "softmax", "y", "other", 128)),
        program_of(at=128),  # over what the GEMM reads, to which other programs still multiply
        program_of(width=256),  # padded, with zeros that no kernel would write
        program_of(dtype="q8"),
        program_of(residual="other", epilogue="add"),
    ],
)
def test_what_is_rounded_apart(program: Program) -> None:
    assert rounded(program) is None


def test_only_a_result_is_rounded() -> None:
    program = program_of()
    call: Any = program.calls[0]
    reads = Reads(program)
    assert fuse.rounded_buffer(program, reads, call, None) is None
    assert fuse.rounded_buffer(program, reads, call, QuantizeRows("round", "other", "z")) is None
