"""A context that is shorter than the model states is named by build, doctor and inspect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_app import Capture, code_of, json_of
from tests.support.families import COMMON, save

SAID = "context 32 of 64 tokens that the model states: it computes longer sequences with other values"


@pytest.fixture
def longrope(tmp_path: Path) -> Path:
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
    lengths = {"original_max_position_embeddings": 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **factors, **lengths}
    small = COMMON | {"num_hidden_layers": 1, "max_position_embeddings": 64, "rope_parameters": rope, **lengths}
    save("phi3", small, tmp_path / "model")
    return tmp_path / "model"


def test_a_shorter_context_is_named(capsys: Capture, longrope: Path, tmp_path: Path) -> None:
    code, out = code_of("doctor", longrope), capsys.readouterr().out
    if code == 3 and "replaces its tensor" in out:
        pytest.skip("phi3 of this version of transformers replaces its frequencies when it runs")
    assert code == 0 and SAID in out
    plan = json_of(capsys, "doctor", longrope)["plan"]
    assert (plan["context"], plan["stated_context"]) == (32, 64)
    assert code_of("build", longrope, "-o", tmp_path / "out", "--recipe", "f32") == 0
    assert SAID in capsys.readouterr().out
    assert code_of("inspect", tmp_path / "out") == 0
    assert SAID in capsys.readouterr().out
    manifest = json.loads((tmp_path / "out" / "qcompile.json").read_text())["model"]
    assert (manifest["max_position"], manifest["stated_position"]) == (32, 64)
    built = json_of(capsys, "build", longrope, "-o", tmp_path / "again", "--recipe", "f32")
    assert (built["context"], built["stated_context"]) == (32, 64)


def test_a_whole_context_is_not(capsys: Capture, tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert (
        json_of(capsys, "build", tiny_checkpoint, "-o", tmp_path / "out", "--recipe", "f32")["stated_context"] is None
    )
    assert code_of("inspect", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "that the model states" not in said and "note:" not in said
    assert "stated_position" not in (tmp_path / "out" / "qcompile.json").read_text()
