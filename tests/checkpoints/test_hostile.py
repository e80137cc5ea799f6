"""Checkpoints that are none: one clear line each, with nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from qcompile import pipeline
from qcompile.artifact.reader import read_manifest
from qcompile.errors import ArtifactError, QCompileError
from qcompile.runtime.chat import chat_template
from tests.support.fake import listed

Spoil = Callable[[Path], object]


def pipe(name: str) -> Spoil:
    """Nobody writes to it: opening it would wait for ever."""
    return lambda model: ((model / name).unlink(missing_ok=True), os.mkfifo(model / name))


def folder(name: str) -> Spoil:
    return lambda model: ((model / name).unlink(missing_ok=True), (model / name).mkdir())


def content(name: str, text: str) -> Spoil:
    return lambda model: (model / name).write_text(text)


def setting(**values: object) -> Spoil:
    def spoil(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return spoil


HALF = b'{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
LONG = b'{"' + b"n" * 9_999 + b'":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
CASES: dict[str, tuple[Spoil, int, str]] = {
    "pipe for a configuration": (pipe("config.json"), 2, "config.json is no plain file"),
    "folder for a configuration": (folder("config.json"), 2, "config.json is no plain file"),
    "pipe for weights": (pipe("model.safetensors"), 2, "model.safetensors is no plain file"),
    "folder for weights": (folder("model.safetensors"), 2, "model.safetensors is no plain file"),
    "pipe for a tokenizer": (pipe("tokenizer.json"), 2, "tokenizer.json is no plain file"),
    "half a character in a name": (
        lambda model: (model / "model.safetensors").write_bytes(struct.pack("<Q", len(HALF)) + HALF),
        2,
        "damaged header",
    ),
    "a name of a book's length": (
        lambda model: (model / "model.safetensors").write_bytes(struct.pack("<Q", len(LONG)) + LONG),
        2,
        "with a name of 9,999 letters",
    ),
    "a type of a text model that is none": (
        setting(text_config={"model_type": ["llama"], "vocab_size": 9}),
        2,
        r"text_config\.model_type must be a name, is \['llama'\]",
    ),
    "an act that is none": (setting(hidden_act="zork"), 3, "there is no 'zork'"),
    "an epsilon that is none": (setting(rms_norm_eps=float("nan")), 2, "rms_norm_eps is nan"),
    "a tokenizer that is none": (content("tokenizer.json", "{"), 2, "tokenizer.json is not a tokenizer"),
    "settings that are none": (content("tokenizer_config.json", "{"), 2, "tokenizer_config.json is not readable JSON"),
    "settings in a list": (content("tokenizer_config.json", "[]"), 2, "where an object belongs"),
}


@pytest.mark.parametrize("case", CASES)
def test_is_refused_in_one_line(case: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    spoil, code, message = CASES[case]
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, model)
    spoil(model)
    with pytest.raises(QCompileError, match=message) as raised:
        pipeline.build(str(model), tmp_path / "out")
    assert raised.value.exit_code == code and "\n" not in str(raised.value)
    assert os.listdir(tmp_path) == ["model"]


def test_a_first_token_of_another_vocabulary_is_none(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """It would be looked up behind the end of the embedding wherever a text is to begin."""
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    setting(bos_token_id=10**6)(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
    pipeline.build(str(tmp_path / "model"), tmp_path / "out")
    assert read_manifest(tmp_path / "out")["model"]["bos_token_id"] is None


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"eos_token": "\\ud800"}'])
def test_an_artifacts_settings_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"tokenizer_config\.json"):
        chat_template(tmp_path, listed(tmp_path))
