"""Prompts given as embeddings on a GPU, interpreted: the bits of tokens, alone, beside others, and in parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qcompile.codegen.gpu.rows import GIVEN, RowSpec
from qcompile.formats.symmetric import W8_SYM_CHANNEL
from tests.support.graphs import decoder
from tests.support.interpreted import interpreted

SMALL: dict[str, Any] = {"vocab": 40, "hidden": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": 64, "layers": 1}
TEXTS = [[5, 9, 11], [7], [(7 * i) % 40 for i in range(19)]]


def interpret_rows() -> None:
    """Given rows and those of a table packed as a GEMM's weight, each with their own factor."""
    from qcompile.codegen.gpu.compile import load
    from qcompile.codegen.gpu.gemm.pack import pack_gpu

    generator = torch.Generator().manual_seed(2)
    parts = W8_SYM_CHANNEL.quantize(torch.randn(70, 200, generator=generator))
    given = torch.randn(3, 200, generator=generator)
    packed = pack_gpu(parts, "w8_sym_channel")
    ids = torch.tensor([GIVEN + 2, 69, GIVEN, -1, 33], dtype=torch.int32)
    spec = RowSpec(200, 256, 200, "i8", indexed=True, factor=1.5, given=0.25)
    result, address = torch.zeros(5, 200), torch.tensor([given.data_ptr()]).view(torch.int32)
    load(spec.kernel(80))[5, 1, 1](packed["w"], result, ids, address, packed["w_scale"])
    table = W8_SYM_CHANNEL.dequantize(parts, 200) * 1.5
    assert torch.equal(result, torch.stack((given[2] * 0.25, table[69], given[0] * 0.25, table[0], table[33])))


def test_rows_interpreted() -> None:
    interpreted(__name__, "interpret_rows()")


def interpret_prompts(recipe: str, gamma: int) -> None:
    """Greedy tokens and logits of prompts given in both ways, by an engine with steps of few rows."""
    from qcompile.runtime.sampling.params import SamplingParams
    from tests.support.embeds import step_with_both
    from tests.support.gpu_machine import Machine

    graph = decoder(**SMALL | {"hidden": 256 if recipe == "nested" else 128})
    machine = Machine(graph, recipe, pages=9, max_tokens=21)
    table, params = graph.weights["embed"].float(), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert machine.target.embed_width == table.shape[1]

    def tokens(embedded: bool) -> list[list[int]]:
        engine = machine.engine(gamma)
        engine.scheduler.max_tokens = 8
        requests = [
            engine.add([0] * len(text), params, 0, table[text].numpy()) if embedded else engine.add(text, params)
            for text in TEXTS
        ]
        return machine.run(engine, requests)

    assert tokens(True) == tokens(False)
    ids = TEXTS[2][:7]
    assert step_with_both(SimpleNamespace(engine=machine.engine()), ids, table[ids].numpy())


@pytest.mark.parametrize(("recipe", "gamma"), [("bf16", 0), pytest.param("nested", 2, marks=pytest.mark.exhaustive)])
def test_prompts_interpreted(recipe: str, gamma: int) -> None:
    interpreted(__name__, f"interpret_prompts({recipe!r}, {gamma})")
