"""Folders that hold a model in another form than a checkpoint: what is there is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qcompile.checkpoints.contents import check_checkpoint
from qcompile.checkpoints.weight_files import check_weights
from qcompile.errors import UnsupportedError, UsageError
from tests.cli.test_app import Capture, code_of

CONFIG = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 8}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.gguf", "no config.json, but GGUF files .model.gguf.: give one, .*/model.gguf$"),
        ("adapter_config.json", "is an adapter: build its model with --lora"),
        ("params.json", "but params.json: a model in its makers' own layout"),
        ("model.onnx", "but model.onnx, an ONNX model"),
        ("notes.txt", "config.json is missing"),
    ],
)
def test_a_folder_of_another_form(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(UsageError, match=message):
        check_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    check_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", r"only pickled weights \(pytorch_model.bin\)"),
        ("consolidated.00.pth", "only pickled weights"),
        ("model.gguf", "weights only as GGUF .*: give that file"),
        ("tf_model.h5", "only tf_model.h5, weights of TensorFlow"),
    ],
)
def test_weights_of_another_form(tmp_path: Path, capsys: Capture, file: str, message: str) -> None:
    """`doctor` takes a configuration without weights, but not weights that `build` refuses."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["LlamaForCausalLM"]}))
    check_weights(tmp_path)
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(UnsupportedError, match=message):
        check_weights(tmp_path)
    assert code_of("doctor", tmp_path) == 3
    assert "not supported" in capsys.readouterr().out
    (tmp_path / "model.safetensors").write_bytes(b"")
    check_weights(tmp_path)
