"""What a checkpoint has that its model does not use, and what it lacks: build, doctor and inspect say so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.test_app import Capture, code_of, json_of

REMARKS = [
    "2 stored tensors (268 bytes) belong to no weight of the model: 'lost.bias' for example",
    "bos_token_id 1000000 is outside the vocabulary of 8192 tokens, and is ignored",
    "eos_token_id -5 is outside the vocabulary of 8192 tokens, and is ignored",
    "eos_token_id 8192 is outside the vocabulary of 8192 tokens, and is ignored",
    "model.safetensors is read, and the files that model.safetensors.index.json names are not",
    "the checkpoint has no tokenizer: prompts must be token numbers, and replies are",
]


@pytest.fixture
def odd(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint with all of that. A layer's norm is stored that no layer has."""
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, model)
    (model / "tokenizer.json").unlink()
    tensors = load_file(model / "model.safetensors")
    lost = {"lost.bias": torch.ones(3), "model.layers.2.input_layernorm.weight": torch.ones(64)}
    save_file(tensors | lost, model / "model.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    ends = {"bos_token_id": 10**6, "eos_token_id": [0, -5, 8192]}
    (model / "generation_config.json").write_text(json.dumps(ends))
    return model


def test_what_is_not_used_is_said(capsys: Capture, odd: Path, tmp_path: Path) -> None:
    assert json_of(capsys, "doctor", odd)["plan"]["remarks"] == REMARKS
    assert code_of("build", odd, "-o", tmp_path / "out", "--recipe", "f32") == 0
    said = [f"note: {remark}" for remark in REMARKS]
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")] == said
    assert code_of("inspect", tmp_path / "out") == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")] == said
    model = json.loads((tmp_path / "out" / "qcompile.json").read_text())["model"]
    assert (model["bos_token_id"], model["eos_token_ids"]) == (None, [0])


def test_a_file_that_the_manifest_does_not_list_is_said(capsys: Capture, tiny_artifact: object, tmp_path: Path) -> None:
    shutil.copytree(tiny_artifact("w4a8"), tmp_path / "out")  # type: ignore[operator]
    ask = ("run", tmp_path / "out", "--prompt", "x", "--max-tokens", "1")
    assert code_of(*ask) == 0 and "manifest" not in capsys.readouterr().err
    for name in ("b.txt", "a.txt"):
        (tmp_path / "out" / name).touch()
    assert code_of(*ask) == 0
    assert "out has files that its manifest does not list: a.txt and 1 more" in capsys.readouterr().err
