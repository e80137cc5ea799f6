"""Embedding tables keep the type of the checkpoint where it holds their numbers, or have 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qcompile import ops, pipeline
from qcompile.calibration import Calibration
from qcompile.codegen.calls import Embed, Gemm
from qcompile.codegen.tables import table_facts
from qcompile.formats.symmetric import W8_SYM_CHANNEL
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import apply
from qcompile.passes.calibration.calibrate import Calibrate
from qcompile.passes.merge import Merge
from qcompile.passes.quantize import Quantize
from qcompile.pipeline import CompilationPlan
from qcompile.report.stored_weights import embedding_sentence
from tests.checkpoints.stored.test_formats import saved
from tests.support.graphs import decoder, tied

TURNED = {"rotate.enabled": True, "fold_norms.enabled": True}


def test_a_table_has_the_type_of_the_checkpoint(tmp_path: Path) -> None:
    tensors = saved("llama", tmp_path / "model")
    numbers = tensors["model.embed_tokens.weight"].half()
    save_file({name: value.half() for name, value in tensors.items()}, tmp_path / "model" / "model.safetensors")
    assert _table(tmp_path / "model") == ("f16", 2 * numbers.numel())
    assert _table(tmp_path / "model", TURNED) == ("f32", 4 * numbers.numel())  # its numbers are no halves any more
    save_file({name: value.bfloat16() for name, value in tensors.items()}, tmp_path / "model" / "model.safetensors")
    assert _table(tmp_path / "model") == ("bf16", 2 * numbers.numel())


def _table(model: Path, options: Mapping[str, object] | None = None) -> tuple[str, int]:
    """The type of the model's embedding table, and its bytes without padding."""
    planned = pipeline.plan(model, recipe="w4a8", options=options)
    call = next(call for call in planned.program.calls if isinstance(call, Embed))
    sizes = {name: size for weight in planned.weights for name, size in weight.blobs}
    table = next(weight for weight in planned.weights if weight.blobs[0][0] == call.table)
    (blob,) = table.produce()
    assert blob.dtype == torch.uint8 and len(blob) == sizes[call.table]
    count = call.vocab * planned.program.buffer(call.out).width
    width = {"f32": 4, "bf16": 2, "f16": 2}[call.table_dtype]
    assert 0 <= sizes[call.table] - width * count < 64
    return call.table_dtype, width * count


INT8 = {"assign_precision.embedding": "int8"}


def test_a_table_of_8_bits_is_stored_once_with_a_tied_head() -> None:
    """Also where text calibrates: the head's codes are the table's."""
    planned = _planned(tied(decoder(hidden=64)))
    embed, head = _embed(planned), next(call for call in planned.program.calls if call.name == planned.program.head)
    assert isinstance(head, Gemm) and head.weights == {"codes": embed.table, "scale": embed.row_scale}
    assert embed.given == 1.0  # prompts may be given as embeddings
    assert table_facts(planned.program, planned.fidelity) is None  # nothing is written yet
    for weight in planned.weights:
        list(weight.produce())
    numbers = decoder(hidden=64).weights["embed"]
    moved = W8_SYM_CHANNEL.dequantize(W8_SYM_CHANNEL.quantize(numbers), 64) - numbers
    facts = table_facts(planned.program, planned.fidelity)
    assert facts is not None and (facts["bits"], facts["shared"]) == (8, True)
    assert facts["error"] == pytest.approx(float(moved.norm() / numbers.norm()), rel=1e-5)
    assert "stored once with the output head; rounding moves it by" in embedding_sentence(facts)


@pytest.mark.parametrize(("made", "head"), [(lambda graph: tied(graph), "f32"), (lambda graph: graph, "int8")])
def test_a_table_of_8_bits_is_its_own_where_the_head_differs(made: Callable[[Graph], Graph], head: str) -> None:
    planned = _planned(made(decoder(hidden=64)), head)
    embed = _embed(planned)
    users = [call for call in planned.program.calls if isinstance(call, Gemm) and embed.table in call.weights.values()]
    assert embed.table_dtype == "i8" and users == []
    for weight in planned.weights:
        list(weight.produce())
    facts = table_facts(planned.program, planned.fidelity)
    assert facts is not None and not facts["shared"] and "head" not in embedding_sentence(facts)


def test_calibration_leaves_a_head_that_the_table_shares() -> None:
    graph = tied(decoder(hidden=64, ffn=96))
    for rewrite in (AssignPrecision("w4_asym_g128", "int8", "w8_sym_channel", "int8", "int8"), Merge(), Quantize()):
        graph = apply(rewrite, graph).graph
    graph.calibration = Calibration(torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(1)))
    result = apply(Calibrate(), graph)
    assert result.fired == len(graph.calls("quantize_weight")) - 1
    (table,) = result.graph.calls("dequantize")
    assert ops.operand(ops.operand(table, "weight"), "codes") is None


def _planned(graph: Graph, head: str = "int8") -> CompilationPlan:
    return pipeline.plan(graph, recipe="w4a8", options=INT8, head_dtype=head)


def _embed(planned: CompilationPlan) -> Embed:
    return next(call for call in planned.program.calls if isinstance(call, Embed))
