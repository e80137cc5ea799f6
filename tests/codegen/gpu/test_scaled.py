"""Queries that are multiplied by position and by feature, on GPUs: whole steps interpreted, kernels compiled."""

from __future__ import annotations

import pytest
import torch

from qcompile.codegen.gpu.append import AppendSpec
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.codegen.gpu.plan import make_plan
from qcompile.targets import TARGETS
from tests.passes.raising.test_scaled import scaled
from tests.support.compiled import Record
from tests.support.graphs import step_inputs
from tests.support.interpreted import interpreted
from tests.support.lowering import gpu_program
from tests.support.raising import raise_module
from tests.support.tiny import Chunk


def interpret_step(format: str, turn: str) -> None:
    """Rows of a step as the reference, and bit for bit as they are alone."""
    from tests.support.gpu_interpreter import Interpreter

    options = {"cache.format": format, "rotate_keys.enabled": turn}
    graph, program, blobs = gpu_program(raise_module(scaled(size=64)), "bf16", options)
    ids = torch.randint(0, 11, (1, 19), generator=torch.Generator().manual_seed(2))
    inputs = step_inputs(ids, None, graph)
    want = graph.run(*inputs)[0]
    machine = Interpreter(program, make_plan(program, TARGETS["h200"], split=32, inline_asm=False), blobs, rows=64)
    pages = inputs[3].tolist()[0]
    first, result = (machine.step([Chunk(ids[0, a:b].tolist(), a, pages)])[0] for a, b in ((0, 15), (15, 19)))
    alone = machine.step([Chunk(ids[0, -1:].tolist(), 18, pages)])[0]
    assert torch.equal(alone, result[-1:])
    result = torch.cat((first, result))
    assert ((result.double() - want).norm() / want.norm()).item() < 0.01  # keys and values in bf16, or codes of 8 bits


def test_steps_interpreted() -> None:
    interpreted(__name__, "interpret_step('kv16', 'false')", "interpret_step('kv8', 'true')")


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_kernels_compile(capability: int, compiled: Record) -> None:
    one = AppendSpec(GpuKV("kv4", 2, 48), 4, 8 * 48, 0, 4 * 48, 6 * 48, 16, times=("query_table", "query_weight"))
    many = AppendSpec(GpuKV("kv16", 1, 128), 3, 640, 0, 384, 512, 128, hadamard=128, tokens=4, times=("query_table",))
    for spec in (one, many):
        compiled(spec.kernel(capability), capability)
