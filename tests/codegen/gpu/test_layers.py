"""Attention layers that differ, share keys or see chunks, on a GPU: Triton's interpreter against the graph itself."""

from __future__ import annotations

import pytest
import torch

from qcompile.codegen.gpu.plan import make_plan
from qcompile.errors import PassError
from qcompile.targets import TARGETS
from tests.support.cases import first
from tests.support.graphs import step_inputs
from tests.support.interpreted import interpreted
from tests.support.layers import MIXED, Layer, layered
from tests.support.lowering import gpu_program
from tests.support.tiny import Chunk

LARGER = {"hidden": 128, "vocab": 64}
ERRORS = {"kv16": 0.02, "kv8": 0.03}
"""Relative errors of logits by cache: values rounded to bf16, and 8-bit codes that round differently."""


LARGE = (Layer(heads=2, kv_heads=1, head_dim=256, window=40), Layer(heads=2, kv_heads=1, head_dim=512))
"""Layers with heads of up to 256 features, which are in one program, and of more."""


def interpret_layers(format: str, layers: tuple[Layer, ...] = MIXED) -> None:
    """A prompt, then steps of one row and of several: near the reference, and the same bits in any step."""
    from tests.support.gpu_interpreter import Interpreter

    graph, program, blobs = gpu_program(layered(layers, **LARGER), "bf16", {"cache.format": format})
    ids = torch.randint(0, LARGER["vocab"], (1, 75), generator=torch.Generator().manual_seed(2))
    inputs = step_inputs(ids, None, graph)
    wanted, pages = graph.run(*inputs)[0], inputs[3].tolist()[0]
    plan = make_plan(program, TARGETS["h200"], split=32, inline_asm=False)
    own = [layer for layer in layers if layer.shared is None]
    assert [(kv.heads, kv.dim) for kv in plan.kvs] == [(layer.kv_heads, layer.head_dim) for layer in own]
    machine = Interpreter(program, plan, blobs, rows=128)
    machine.fill([Chunk(ids[0, :70].tolist(), 0, pages)])
    several, _ = machine.step([Chunk(ids[0, 70:].tolist(), 70, pages)])
    error = ((several.double() - wanted[70:]).norm() / wanted[70:].norm()).item()
    assert error < ERRORS[format], error
    for machine.fine in (0, 100):
        machine.forget()
        machine.step([Chunk(ids[0, 70:74].tolist(), 70, pages)])
        one, _ = machine.step([Chunk(ids[0, 74:].tolist(), 74, pages)])
        assert torch.equal(one, several[-1:])


@pytest.mark.parametrize("format", first(("kv8",), ["kv16", "kv8"]))
def test_layers_that_differ_interpreted(format: str) -> None:
    interpreted(__name__, f"interpret_layers({format!r})")


@pytest.mark.parametrize("format", first(("kv16",), ["kv16", "kv8"]))
def test_layers_with_large_heads_interpreted(format: str) -> None:
    interpreted(__name__, f"interpret_layers({format!r}, LARGE)")


def interpret_chunks() -> None:
    """Chunks shorter and longer than splits, in programs of many rows, of few, of splits and of leaves."""
    from tests.support.gpu_interpreter import Interpreter

    layers = (Layer(chunk=24, head_dim=32), Layer(chunk=150, head_dim=32, window=90))
    graph, program, blobs = gpu_program(layered(layers, **LARGER), "bf16", {"cache.format": "kv16"})
    ids = torch.randint(0, LARGER["vocab"], (1, 170), generator=torch.Generator().manual_seed(2))
    inputs = step_inputs(ids, None, graph)
    wanted, pages = graph.run(*inputs)[0], inputs[3].tolist()[0]
    machine = Interpreter(program, make_plan(program, TARGETS["h200"], split=64, inline_asm=False), blobs, rows=192)
    for machine.fine in (0, 100):
        machine.forget()
        result = [
            machine.step([Chunk(ids[0, a:b].tolist(), a, pages)])[0] for a, b in ((0, 146), (146, 166), (166, 170))
        ]
        error = ((torch.cat(result).double() - wanted).norm() / wanted.norm()).item()
        assert error < ERRORS["kv16"], error


def test_chunks_interpreted() -> None:
    interpreted(__name__, "interpret_chunks()")


def test_a_hierarchical_cache_has_no_layers_that_share_keys() -> None:
    _, program, _ = gpu_program(layered((Layer(), Layer(shared=0))), "bf16", {"cache.format": "kv_hier"})
    with pytest.raises(PassError, match="must follow the append of its layer, and only once"):
        make_plan(program, TARGETS["h200"])
