"""Speculation from the command line: build, tune, run, inspect."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from qcompile.__main__ import main
from qcompile.cli import console
from qcompile.cli.build import print_build
from qcompile.passes.base import PassRecord
from qcompile.pipeline import BuildReport

RATES = {"acceptance_rate", "tokens_per_round", "drafted_per_round", "accepted_per_position"}
FIELDS = RATES | {"gamma", "draft_seconds", "verify_seconds"}


def code_of(*arguments: object) -> int:
    """Exit code of `qcompile ARGUMENTS`, in this process."""
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    return int(exit.value.code or 0)


def test_from_build_to_run(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcompile.cli.tune.REPEATS", 1)
    monkeypatch.setattr("qcompile.cli.tune.MOST_REPEATS", 1)  # else it measures for seconds
    monkeypatch.setattr("qcompile.cli.tune._LONG", 32)  # one context

    def json_of(*arguments: object) -> Any:
        assert code_of(*arguments, "--json") == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    out = tmp_path / "out"
    built = json_of("build", tiny_checkpoint, "-o", out, "--recipe", "qspec", "--draft", "lookup")
    passes = ["speculate", "calibrate", "cache", "fuse", "plan_memory"]
    assert [entry["name"] for entry in built["drafts"]["draft1"]] == passes
    drafts = json_of("inspect", out)["drafts"]
    assert [draft["kind"] for draft in drafts] == ["draft1", "lookup"]
    assert drafts[0]["passes"][0]["options"]["activation"] == "int8"
    made = [entry for entry in json_of("inspect", out, "--passes") if entry["name"] == "speculate"]
    assert [(entry["path"], entry["fired"]) for entry in made] == [("draft1", built["drafts"]["draft1"][0]["fired"])]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": "longer than the context " * 500}) + "\n")
    json_of("tune", out, "--tokens", 8, "--threads", 1, "--data", prompts)
    tuned = json_of("tune", out, "--tokens", 8, "--threads", 1)
    assert json_of("inspect", out)["tuned"] == tuned and code_of("verify", out) == 0
    capsys.readouterr()
    run = ("run", out, "--prompt", "def main(", "--max-tokens", 20, "--threads", 1)
    plain, drafted, auto = (json_of(*run, "--gamma", gamma) for gamma in (0, 3, "auto"))
    assert plain["token_ids"] == drafted["token_ids"] == auto["token_ids"]
    assert not FIELDS & plain.keys() and drafted.keys() >= FIELDS and drafted["gamma"] <= 3
    assert 0 < drafted["drafted_per_round"] <= 3
    (told,) = auto["auto"]
    assert "auto" not in drafted and told["batch"] == 1 and "times as fast" in told["reason"]
    first = json_of("run", out, "--prompt", "def main(", "--max-tokens", 1, "--gamma", 3)
    assert first["rounds"] == 0 and first["acceptance_rate"] is None and first["accepted_per_position"] == []
    prompts.write_text('{"prompt": "def main("}\n{"prompt": [5, 6]}\n')
    sizes = ("--tg", 16, "--pp", 4, "--repeats", 1, "--threads", 1, "--prompts", prompts)
    result = json_of("bench", out, *sizes, "--gamma", 2)
    assert result["drafts"]["tokens"] == 2 * 16 and result["drafts"]["rounds"] > 0 and result["drafts"]["gamma"] == 2
    speeds = result["drafts"]["drafted_tokens_per_second"], result["drafts"]["plain_tokens_per_second"]
    assert result["drafts"]["gain"] == speeds[0] / speeds[1] and result["tests"]["drafted16"] == speeds[0]
    assert 0 < result["drafts"]["acceptance_rate"] <= 1 <= result["drafts"]["tokens_per_round"] <= 3
    assert "drafts" not in json_of("bench", out, *sizes, "--gamma", 0)
    assert code_of("bench", out, *sizes) == 0
    assert "drafts (gamma auto): " in capsys.readouterr().out
    prompts.write_text('{"messages": [{}]}\n')
    assert code_of("bench", out, *sizes) == 2 and "they are for --serve" in capsys.readouterr().err
    assert code_of(*run, "--gamma", "3") == 0
    assert "tokens a round" in capsys.readouterr().err
    assert code_of("inspect", out) == 0
    text = capsys.readouterr().out
    assert "draft1 (shared cache), lookup" in text and "passes of draft1\n  speculate" in text
    assert code_of("inspect", out, "--passes") == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines[0].index("options")
    assert any(line.startswith("draft1: speculate") and line[at:].startswith("activation=int8") for line in lines)


def test_inspect_counts_the_cache_of_a_draft(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert code_of("build", tiny_checkpoint, "-o", out, "--recipe", "w4a8", "--draft", tiny_checkpoint) == 0
    assert "\ndraft1: raise " in capsys.readouterr().out
    assert code_of("inspect", out, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    own = result["drafts"][0]["kv_per_token"]
    assert own > 0
    assert result["sizes"]["kv_per_token"] == result["kv"]["page_bytes"] // result["kv"]["page_tokens"] + own
    report = json.loads((out / "report.json").read_text())
    assert report["kv_bytes_per_token"] == result["sizes"]["kv_per_token"]
    assert [(draft["name"], draft["shares_cache"]) for draft in report["drafts"]] == [("draft1", False)]
    assert code_of("inspect", out) == 0
    assert f"draft1 (own cache, {console.byte_size(own)} per token)" in capsys.readouterr().out


def test_explain_speaks_of_every_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def explained(*notes: str, name: str = "speculate") -> str:
        target = PassRecord("cache", {}, 1, ("target's",), 0.0)
        drafting = PassRecord(name, {}, 1, notes, 0.0), PassRecord("cache", {}, 1, ("draft's",), 0.0)
        print_build(BuildReport(tmp_path, (target,), {}, 4.0, {"draft1": drafting}), "qspec", "cpu", "speculate", False)
        return capsys.readouterr().out

    assert "\ndraft1: node x: why\n" in explained("node x: why")
    assert "\ndraft1: speculate fired 1 time, and left nothing alone\n" in explained()
    assert "--set" not in explained(name="fuse")  # nothing of that kind would help


@pytest.mark.parametrize("gamma", ["16", "-1", "many"])
def test_malformed_gamma_is_refused(gamma: str, tiny_artifact: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("run", tiny_artifact("w4a8"), "--prompt", "x", "--gamma", gamma) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_lookup_must_be_last(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafts = ("--draft", "lookup", "--draft", tiny_checkpoint)
    assert code_of("build", tiny_checkpoint, "-o", tmp_path / "out", "--recipe", "bf16", *drafts) == 2
    assert "must be the last draft" in capsys.readouterr().err


def test_what_cannot_be_tuned_is_refused_before_it_is_measured(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, data = tmp_path / "out", tmp_path / "prompts.jsonl"
    assert code_of("build", tiny_checkpoint, "-o", out, "--recipe", "qspec") == 0
    capsys.readouterr()
    data.write_text("\n")
    for arguments, message in (
        (("--data", data), "prompts.jsonl is empty"),
        (("--tokens", 100_000), "do not fit the context"),
    ):
        assert code_of("tune", out, *arguments) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))  # a read-only mount
    assert code_of("tune", out) == 5
    assert "cannot be written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
