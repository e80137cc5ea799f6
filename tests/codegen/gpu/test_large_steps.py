"""Steps of more than 512 rows: their kernels, their memory, and the bits of their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qcompile import pipeline
from qcompile.codegen.buffers import Buffer
from qcompile.codegen.gpu.gemm.render import compile_for
from qcompile.codegen.gpu.gemm.spec import KernelSpec
from qcompile.codegen.gpu.gemm.tiles import choose
from qcompile.codegen.gpu.launches import MOST_OUTPUTS, MOST_ROWS, most_rows
from qcompile.codegen.gpu.plan import make_plan
from qcompile.codegen.kv_layout import KVLayout
from qcompile.codegen.program import Program
from qcompile.runtime.step import Rows
from qcompile.targets import TARGETS
from tests.support.cases import first
from tests.support.graphs import decoder
from tests.support.interpreted import interpreted, needs_triton

SMALL: dict[str, Any] = {"vocab": 40, "hidden": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": 128, "layers": 1}
LONG = 520


def interpret_large_step() -> None:
    """Rows of a step of prompts and of texts that decode: the logits and the cache of steps of few rows."""
    from tests.support.gpu_machine import Machine

    torch.manual_seed(0)
    machine = Machine(decoder(**SMALL), "qserve", pages=24, max_tokens=LONG + 64)
    target, texts = machine.target, [[(7 * i + 3 * k) % 40 for i in range(LONG)] for k in range(3)]

    def step(*parts: tuple[int, int, int, int]) -> torch.Tensor:
        """The logits of a step of rows (text, begin, end, outputs)."""
        rows = [Rows(texts[k][begin:end], begin, range(10 * k, 24), outputs) for k, begin, end, outputs in parts]
        return torch.from_numpy(target.step(rows, logits=True)[1].copy())

    step((2, 0, 5, 1))
    large = step((2, 5, 6, 1), (1, 0, 30, 3), (0, 0, LONG, 20))
    cache = machine.driver.memory[target.memory.cache]
    kept = cache.clone()
    small = [step((2, 5, 6, 1)), step((1, 0, 30, 3)), step((0, LONG - 20, LONG - 17, 3)), step((0, 503, LONG, 17))]
    assert torch.equal(large, torch.cat(small)) and torch.equal(cache, kept)


def test_rows_of_large_steps_interpreted() -> None:
    interpreted(__name__, "interpret_large_step()")


@pytest.mark.parametrize("target", first(("h100",), ["a100", "h100"]))
@pytest.mark.parametrize("recipe", ["qserve", "w8a8", "w4a16", "quantspec"])
def test_memory_of_a_plan_is_for_the_steps_that_are_run(recipe: str, target: str) -> None:
    """What no count of a step scales is for the logits of few rows, or for up to 512 rows."""
    shape = SMALL | {"hidden": 1024, "ffn": 4096, "heads": 8, "vocab": 320}
    plan = make_plan(pipeline.plan(decoder(**shape), target=target, recipe=recipe).program, TARGETS[target])
    assert MOST_ROWS == 8192 and MOST_OUTPUTS == 512
    for name, size in plan.scratch.items():
        assert size.counts or size.bytes <= 8 * 512 * 2 * 4096 * 4, name
        assert "room" in size.counts or not name.endswith("by_row"), name
    for launch in plan.launches:  # whatever the number of rows, there is a kernel
        if launch.by in ("tokens", "outputs", "prompt_tokens"):
            assert launch.variants[-1].most == 0 and launch.variants[-1].code, launch.name
    assert plan.follow[0].variants[-1].most == MOST_ROWS


def test_kernels_take_as_many_rows_as_32_bits_count_the_elements_of() -> None:
    def most(stride: int, rows: Any) -> int:
        buffers = Buffer("x", "f32", stride, rows=rows), Buffer("y", "bf16", 32)
        return most_rows(Program(8, 8, buffers, (), (), KVLayout("kv16", 0, 0, 0, 64)))

    assert most(1 << 18, "outputs") == MOST_ROWS  # at most MOST_OUTPUTS
    assert most((1 << 18) - 32, "tokens") == MOST_ROWS and most(1 << 18, "tokens") == MOST_ROWS - 1
    assert most(1 << 20, "tokens") == 2047


@pytest.mark.parametrize("format", ["qoq_g128", "w8_sym_channel"])
def test_tiles_of_large_steps(format: str) -> None:
    """Of 256 tokens on sm_90, unless they would be too few; other GPUs keep what they have for 512 rows."""
    large = 1 << 20
    for n, k in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
        tile = choose(format, n, k, large, TARGETS["h100"])
        assert tile.tokens == 256 and tile.warp_specialized
        assert choose(format, n, k, 512, TARGETS["h100"]).tokens == 128
        for target in ("a100", "l40s", "b200"):
            most, few = (choose(format, n, k, rows, TARGETS[target]) for rows in (large, 512))
            assert (most.tokens, most.rows, most.warps) == (few.tokens, few.rows, few.warps) and not most.unpack_k
    for n in (512, 1024, 2048):
        assert choose(format, n, 4096, large, TARGETS["h100"]).tokens == 128


@pytest.mark.parametrize(
    ("format", "n", "k"),
    first((("qoq_g128", 4096, 4096),), [("qoq_g128", 4096, 4096), ("w8_sym_channel", 4096, 14336)]),
)
def test_shared_memory_holds_the_stages_of_large_tiles_and_their_epilogue(format: str, n: int, k: int) -> None:
    needs_triton()
    tile = choose(format, n, k, 1 << 20, TARGETS["h100"])
    compiled = compile_for(KernelSpec(format, n, k, tile, residual=True, out="f32"), 90)
    assert tile.stages >= 4 and compiled.shared_bytes <= TARGETS["h100"].shared_bytes
    assert compiled.spill_bytes <= 64 and any("m64n128k32" in one for one in compiled.matrix)
