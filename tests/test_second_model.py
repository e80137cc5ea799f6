"""Which numbers benchmarks/second_model.py leaves alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import second_model


def test_a_family_measured_alone_leaves_the_others_and_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, kept, old = tmp_path / "out.json", {"model": "pycode-1m", "float": 1.0}, {"model": "qwen3-1m", "float": 2.0}
    there = second_model.machine() | {"device": "that one", "date": "2020-02-02"}
    head = there | {"provenance": "as it came", "windows": 64, "steps": 300}
    before = head | {"divergence": {"qwen3-1m": 0.1, "qwen2-1m": 0.2}, "rows": [old, kept]}
    out.write_text(json.dumps(before))
    new = {"model": "qwen3-1m", "float": 3.0}
    monkeypatch.setattr(second_model, "make", lambda *given: 0.5)
    monkeypatch.setattr(second_model, "measured", lambda *given: iter([new]))
    asked = ["second_model.py", "heldout.jsonl", "--calib", "calib.jsonl", "--families", "qwen3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", asked)
    second_model.main()
    result = json.loads(out.read_text())
    assert result.pop("measured_apart")["qwen3-1m"].keys() >= {"device", "date", "commit"}
    assert result == before | {"divergence": {"qwen3-1m": 0.5, "qwen2-1m": 0.2}, "rows": [kept, new]}
