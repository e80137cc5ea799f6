"""Embedding tables keep the type of the checkpoint where it holds their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from qcompile import pipeline
from qcompile.codegen.calls import Embed
from tests.checkpoints.stored.test_formats import saved

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
