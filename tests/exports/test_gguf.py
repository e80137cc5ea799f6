"""Artifacts written as GGUF files: the gguf package and our own reader find in them what the artifacts hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qcompile import check, pipeline
from qcompile.artifact.layout import CONFIG_FILE
from qcompile.checkpoints.hub import find
from qcompile.checkpoints.stored import formats
from qcompile.codegen.cpu import compiler
from qcompile.errors import ResourceError, UnsupportedError, UsageError
from qcompile.exports import checkpoint, gguf_tokenizer
from qcompile.exports.gguf_blocks import BLOCKS
from qcompile.exports.source import ArtifactSource, open_artifact
from tests.exports.test_checkpoint import SAMPLE, by_numbers, logits, save_model

gguf: Any = pytest.importorskip("gguf")
CLOSE = 2.0**-10
"""Of the largest weight: scales are rounded to float16, in Q4_1 also the least weight of a group."""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with 4-bit linears and an 8-bit head, with kernels that are not compiled."""
    model = save_model(tmp_path_factory.mktemp("model"), vocab_size=8192)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "compile", lambda source, target, given_up: b"")
        pipeline.build(model, model / "out", recipe="w4a16", options={"cache.format": "kv32"})
    return model / "out"


@pytest.fixture(scope="module")
def source(artifact: Path) -> ArtifactSource:
    return open_artifact(artifact)


@pytest.fixture(scope="module")
def file(artifact: Path) -> Path:
    out = artifact.parent / "new" / "model.gguf"
    written = checkpoint.write(artifact, out, "gguf")
    assert (written.rounded, written.floats) == (15, 6)
    return out


def test_a_file_holds_the_codes_of_the_artifact(source: ArtifactSource, file: Path) -> None:
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for ours, theirs in (("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        parts = source.tensors.parts(f"model.layers.1.{ours}.weight")
        blocks = torch.from_numpy(np.array(stored[f"blk.1.{theirs}.weight"].data)).view(len(parts["codes"]), -1, 20)
        assert torch.equal(torch.cat((blocks[..., 4:] & 15, blocks[..., 4:] >> 4), -1).flatten(1), parts["codes"])
    head = stored["output.weight"]
    blocks = torch.from_numpy(np.array(head.data)).view(8192, -1, 34)
    codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    assert torch.equal(codes, source.tensors.parts("lm_head.weight")["codes"])


def test_a_file_is_read_back(source: ArtifactSource, file: Path) -> None:
    """By our reader of GGUF, which brings rows of heads into transformers' order again."""
    folder = find(file)
    stored = formats.open_checkpoint(folder)
    result = {name: stored.load(name) for name in stored}
    for name in source.tensors.rows:
        expected = source.tensors.floats(name)
        assert float((result[name] - expected).abs().max()) <= CLOSE * float(expected.abs().max()), name
    made = by_numbers(folder, result)
    assert check.max_relative_error(made, logits(source.root)) < 2e-2  # the limit for other engines; it is 4e-3
    assert json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_theta"] == 10000.0


def test_tokenizers_are_named_by_how_they_split(tmp_path: Path) -> None:
    document = json.loads((SAMPLE / "tokenizer.json").read_text())

    def facts(**changes: Any) -> dict[str, Any]:
        (tmp_path / "tokenizer.json").write_text(json.dumps(document | changes))
        return gguf_tokenizer.tokenizer_facts(tmp_path, 8200)

    result = facts()
    assert result["pre"] == "smaug-bpe" and len(result["tokens"]) == len(result["token_type"]) == 8200
    assert result["tokens"][0] == "<|endoftext|>" and result["token_type"][0] == gguf_tokenizer.CONTROL
    assert result["token_type"][8199] == gguf_tokenizer.UNUSED and " " in result["merges"][0]
    assert facts(model=document["model"] | {"ignore_merges": True})["pre"] == "llama-bpe"
    assert facts(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "use_regex": True})["pre"] == "gpt-2"
    with pytest.raises(UnsupportedError, match="has token 8191, and the model 8000"):
        gguf_tokenizer.tokenizer_facts(tmp_path, 8000)
    for changes, reason in (
        ({"pre_tokenizer": {"type": "Whitespace"}}, "no name for how"),
        ({"model": document["model"] | {"byte_fallback": True}}, "byte-level BPE"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            facts(**changes)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_what_the_package_reads(kind: Any) -> None:
    w = torch.randn(7, 128, generator=torch.Generator().manual_seed(3))
    parts = kind.named(kind.quantize(w))
    block = getattr(gguf.GGMLQuantizationType, BLOCKS[kind].name)
    result: Tensor = torch.from_numpy(gguf.dequantize(BLOCKS[kind].encode(parts).numpy(), block))
    expected = kind.dequantize(list(parts.values()), 128)
    assert float((result - expected).abs().max()) <= CLOSE * float(expected.abs().max())


def test_scales_outside_float16_are_refused() -> None:
    (kind, *_), w = BLOCKS, torch.full((2, 128), 1e-9)
    with pytest.raises(UnsupportedError, match="too large or too small for the float16"):
        BLOCKS[kind].encode(kind.named(kind.quantize(w)))


def test_what_a_file_cannot_hold_is_named(
    artifact: Path, source: ArtifactSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "model.gguf"
    for change, reason in (
        ({"model_type": "phi3"}, "for the model types llama"),
        ({"hidden_act": "gelu"}, "not written for hidden_act gelu"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "not written for rope_type linear"),
    ):
        for name, value in change.items():
            with monkeypatch.context() as patch, pytest.raises(UnsupportedError, match=reason):
                patch.setattr(source.settings, name, value)
                patch.setattr(checkpoint, "open_artifact", lambda root: source)
                checkpoint.write(artifact, out, "gguf")
    with pytest.raises(UsageError, match="is a folder"):
        checkpoint.write(artifact, tmp_path, "gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ResourceError, match=r"pip install 'qcompile\[gguf\]'"):
        checkpoint.write(artifact, out, "gguf")
    assert list(tmp_path.iterdir()) == [] and (artifact / CONFIG_FILE).is_file()
