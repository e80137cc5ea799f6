"""Choosing gamma: the best of what was measured, 0 where drafts do not pay, and following each request."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import qcompile
from qcompile import artifact, tune
from qcompile.errors import UsageError
from qcompile.runtime.gamma import AUTO, Costs, GammaPolicy, Pace, best, observe, predicted
from qcompile.runtime.speculate import DraftState

COSTS = Costs(1, 1, 1.0, {gamma: 1.1 + 0.2 * gamma for gamma in range(1, 9)})


def request(tokens: int = 100) -> Any:
    return SimpleNamespace(tokens=[0] * tokens, drafts=DraftState())


def test_gamma_has_the_most_tokens_a_second() -> None:
    for rate in (0.1, 0.5, 0.7, 0.9, 0.99):
        speeds = {0: 1.0}
        for gamma, seconds in COSTS.rounds.items():
            speeds[gamma] = sum(rate**i for i in range(gamma + 1)) / seconds
        found = best(COSTS, rate)
        assert speeds[found] >= max(speeds.values()) / 1.03
        assert found or max(speeds.values()) < 1.03
    assert best(COSTS, 0.1) == 0 and best(COSTS, 0.99) == 8
    assert best(Costs(1, 1, 1.0, {}), 0.9) == 0


def test_a_request_that_is_not_understood_gives_up_and_tries_again() -> None:
    policy, subject = GammaPolicy((COSTS,), 0.8), request()
    assert policy.choose(subject, 1) > 0
    rounds = 0
    while policy.choose(subject, 1):
        observe(subject, 0, 1)
        rounds += 1
    assert rounds < 12
    subject.drafts.plain_tokens = 64
    assert policy.choose(subject, 1) == 1
    for _ in range(12):
        observe(subject, 4, 0)
    assert policy.choose(subject, 1) > 2


def test_drafts_that_cannot_pay_are_not_tried_again() -> None:
    policy, subject = GammaPolicy((Costs(1, 1, 1.0, {1: 2.1, 2: 3.2}),), 0.9), request()
    subject.drafts.plain_tokens = 1000
    assert policy.choose(subject, 1) == 0
    assert policy.choose(subject, 1, pace=0.5) > 0  # here rounds take half of what the table says


def test_to_begin_a_gamma_must_be_clearly_better_to_go_on_it_must_not_be_worse() -> None:
    policy, subject = GammaPolicy((Costs(1, 1, 1.0, {1: 1.77}),), 0.8), request()  # 1.8 tokens: 1.017 times as fast
    subject.drafts.plain_tokens = 5
    assert policy.choose(subject, 1) == 0
    observe(subject, 8, 2)
    assert policy.choose(subject, 1) == 1
    for _ in range(4):
        observe(subject, 0, 1)
    assert policy.choose(subject, 1) == 0


def test_the_pace_of_here_and_now_corrects_the_table() -> None:
    pace, fresh = Pace(), request()
    policy = GammaPolicy((COSTS,), 0.9)
    assert policy.choose(fresh, 1, pace.factor) > 0
    for _ in range(30):
        pace.plain(COSTS, 0.5 * COSTS.plain)
        pace.round(COSTS, 4, 1.5 * COSTS.rounds[4], 5)
    assert pace.factor == pytest.approx(3.0)
    assert policy.choose(fresh, 1, pace.factor) == 0
    assert not pace.unsure
    pace.round(COSTS, 99, 1.0, 1024)  # a gamma that the table lacks counts in tokens alone
    assert pace.unsure and pace.factor == pytest.approx(3.0)
    pace.plain(COSTS, 50.0)
    assert not pace.unsure and pace.factor < 3.0


def test_the_entry_measured_nearest_decides() -> None:
    table = tuple(Costs(batch, context, batch + context, {}) for batch in (1, 4, 16) for context in (32, 1024))
    policy = GammaPolicy(table, 0.5)
    assert policy.costs(1, 10) is table[0] and policy.costs(3, 900) is table[3] and policy.costs(99, 9) is table[4]


def test_bytes_predict_before_anything_was_measured() -> None:
    assert best(predicted(100, 30).table[0], 0.8) > 0
    assert best(predicted(100, 100).table[0], 0.8) == 0
    assert best(predicted(100, 0).table[0], 0.4) > 0


def test_tuning_is_kept_in_the_artifact(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out, prompts = tmp_path / "out", tmp_path / "prompts.jsonl"
    qcompile.build(str(tiny_checkpoint), out, recipe="qspec")
    prompts.write_text('{"prompt": "import os"}\n{"text": "def main("}\n')
    for data in (prompts, None):
        found = tune.tune(out, data, 8, 1)
        assert artifact.verify(out) == []
        assert json.loads((out / "qcompile.json").read_text())["tuned"] == found
        assert {entry["batch"] for entry in found["table"]} == {1, 4, 16} and 0 <= found["acceptance"] <= 1
        assert "times plain" in tune.as_text(found)
        assert all(seconds > 0 for entry in found["table"] for seconds in entry["rounds"].values())
    with qcompile.load(out, threads=1, gamma=AUTO) as llm:
        assert llm.engine.policy == GammaPolicy.load(found)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    prompts.write_text("[]\n")
    with pytest.raises(UsageError, match="needs lines of JSON"):
        tune.tune(out, prompts, 8, 1)


def test_an_artifact_without_drafts_cannot_be_tuned(tiny_artifact: Any) -> None:
    with pytest.raises(UsageError, match="no drafts to tune"):
        tune.tune(tiny_artifact("w4a8"), None, 8, 1)


def test_a_gamma_without_drafts_is_refused(tiny_artifact: Any) -> None:
    with pytest.raises(UsageError, match="has no drafts"):
        qcompile.load(tiny_artifact("w4a8"), gamma=4)
    qcompile.load(tiny_artifact("w4a8"), threads=1, gamma=0).close()
