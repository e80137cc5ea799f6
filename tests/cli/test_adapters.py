"""Adapters of `run`, `chat`, `eval` and `bench`: the one that is chosen is that of all prompts."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import qcompile
from qcompile.cli.load_test.command import _serve_options, plan
from qcompile.cli.options import Adapting, DraftedLoading, LoadTest
from qcompile.errors import UsageError
from qcompile.runtime.lora.table import AdapterTable
from tests.cli.test_app import Capture, json_of, refusal
from tests.runtime.test_lora import artifact, odd

__all__ = ["artifact", "odd"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
BOTH = ("all", "some")


def loras(odd: Path, *names: str) -> list[str]:
    return [part for name in names for part in ("--lora", f"{name}={odd / name}")]


def test_run_and_chat(capsys: Capture, monkeypatch: pytest.MonkeyPatch, artifact: Path, odd: Path) -> None:
    with qcompile.load(artifact, threads=1, gamma=0, lora={name: odd / name for name in BOTH}) as llm:
        wanted = [llm.generate("ab", lora=name, **GREEDY)[0].outputs[0].token_ids for name in (None, *BOTH)]
    assert wanted[0] != wanted[1] != wanted[2]
    asked = ("run", artifact, "--prompt", "ab", "--threads", 1, "--gamma", 0, "--max-tokens", 12)
    assert json_of(capsys, *asked)["token_ids"] == wanted[0]
    assert json_of(capsys, *asked, *loras(odd, "all"))["token_ids"] == wanted[1]
    assert json_of(capsys, *asked, *loras(odd, *BOTH), "--adapter", "some")["token_ids"] == wanted[2]
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n"))
    how = ("--temperature", 0, "--top-p", 1, "--max-tokens", 12, "--gamma", 0)
    said = json_of(capsys, "chat", artifact, *how, *loras(odd, "some"))["token_ids"]
    with qcompile.load(artifact, threads=1, gamma=0, lora={"some": odd / "some"}) as llm:
        assert said == llm.generate("ab\n", lora="some", **GREEDY)[0].outputs[0].token_ids


def test_eval(capsys: Capture, artifact: Path, odd: Path, tmp_path: Path) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text(json.dumps({"text": "abc" * 30}))
    asked = ("eval", artifact, "--data", data, "--window", 20, "--max-windows", 2)
    result = json_of(capsys, *asked, *loras(odd, "all"))["nll"]
    with qcompile.load(artifact, gamma=0, lora={"all": odd / "all"}) as llm:
        assert result == llm.perplexity(data, 20, max_windows=2, lora="all").nll
    assert result != json_of(capsys, *asked)["nll"]


def test_bench(capsys: Capture, monkeypatch: pytest.MonkeyPatch, artifact: Path, odd: Path) -> None:
    marked: list[str | None] = []
    mark = AdapterTable.mark
    monkeypatch.setattr(AdapterTable, "mark", lambda self, page, name: [marked.append(name), mark(self, page, name)][1])
    json_of(capsys, "bench", artifact, "--tg", 2, "--pp", 4, "--repeats", 1, *loras(odd, *BOTH), "--adapter", "some")
    assert set(marked) == {"some"}
    served = Adapting([f"some={odd}"], None)
    assert _serve_options(plan(LoadTest()), DraftedLoading(), served)[-2:] == ["--lora", f"some={odd}"]


def test_what_is_refused(capsys: Capture) -> None:
    for arguments, said in (
        (["--lora", "a=x", "--lora", "b=y"], "--lora names a, b: choose one by --adapter"),
        (["--lora", "a=x", "--adapter", "b"], "--adapter b: --lora names no such adapter: it names a"),
        (["--adapter", "b"], "--adapter b: --lora names no such adapter: give it as --lora NAME=DIR"),
        (["--lora", "x"], "--lora x: write NAME=DIR"),
    ):
        assert said in refusal(capsys, 2, "run", "nowhere", "--prompt", "x", *arguments)
    with pytest.raises(UsageError, match="two adapters with this name"):
        Adapting(["a=x", "a=y"]).chosen()
    assert "--lora is for an artifact" in refusal(capsys, 2, "bench", "--serve", "http://127.0.0.1:1", "--lora", "a=x")
