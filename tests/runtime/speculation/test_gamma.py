"""Choosing gamma: the best of what was measured, 0 where drafts do not pay, and following each request."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import qcompile
from qcompile.artifact import reader
from qcompile.cli import tune
from qcompile.errors import UsageError
from qcompile.runtime.cpu import load
from qcompile.runtime.engine import timing
from qcompile.runtime.options import AUTO
from qcompile.runtime.outputs import SpeculationMetrics
from qcompile.runtime.request import SequenceState, SpeculationState
from qcompile.runtime.speculation import measurements
from qcompile.runtime.speculation.controller import GammaController
from qcompile.runtime.speculation.costs import RoundCosts, SpeculationPrior, best_gamma, expected_tokens

COSTS = RoundCosts(1, 1, 1.0, {gamma: 1.1 + 0.2 * gamma for gamma in range(1, 9)})
STEPS_PER_CALL = 7


def request(tokens: int = 100) -> Any:
    return SimpleNamespace(sequence=SequenceState([0] * tokens), drafts=SpeculationState())


class Machine:
    """Requests of 127 tokens, one after the other, where steps and rounds take what the test says.

    A round of gamma drafts takes `base + slope * gamma` plain steps, a draft is kept with probability `rate`, and every
    call takes up to `noise` of its time longer; one in ten is `held_up`: it takes that many plain steps more.
    """

    def __init__(
        self, prior: SpeculationPrior, base: float, slope: float, noise: float = 0.0, held_up: float = 0.0
    ) -> None:
        self.controller = GammaController(prior)
        self.base, self.slope, self.noise, self.held_up = base, slope, noise, held_up
        self.draw = random.Random(3)
        self.plain = 1.0
        self.used: list[int] = []

    def best(self, rate: float) -> float:
        """Tokens a plain step's time, of the gamma that brings most, or of plain decoding."""
        return max(1.0, *(expected_tokens(rate, g) / (self.base + self.slope * g) for g in COSTS.rounds))

    def answer(self, rate: float, tokens: int = 127) -> float:
        """Time of one request, in plain steps."""
        subject, total = request(), 0.0
        end = len(subject.sequence.tokens) + tokens
        while (left := end - len(subject.sequence.tokens)) > 0:
            gamma, most = self.controller.choose([subject], True)
            self.used.append(gamma)
            slower = 1 + self.noise * self.draw.random()
            self.late = self.held_up * (self.draw.random() < 0.1)
            count = (
                min(most or STEPS_PER_CALL, STEPS_PER_CALL, left)
                if not gamma
                else max(1, min(most or STEPS_PER_CALL, 2))
            )
            if gamma:
                gained, kept, missed = 0, 0, 0
                for _ in range(count):
                    stays = next((i for i in range(gamma) if self.draw.random() >= rate), gamma)
                    kept, missed, gained = kept + stays, missed + (stays < gamma), gained + stays + 1
                    subject.drafts.metrics.count(gamma, stays)
                seconds = count * (self.base + self.slope * gamma) * self.plain * slower + self.late
                subject.drafts.observe(kept, missed)
                self.controller.note_rounds([subject], True, gamma, count, seconds, gained)
            else:
                gained, seconds = count, count * self.plain * slower + self.late
                self.controller.note_steps([subject], True, count, seconds)
            subject.sequence.tokens += [0] * gained
            total += (seconds - self.late) / self.plain * min(1.0, left / gained)
        self.controller.note_finished(subject.drafts.metrics)
        return total


def test_best_has_the_most_tokens_a_second() -> None:
    for rate in (0.1, 0.5, 0.7, 0.9, 0.99):
        speeds = {0: 1.0}
        for gamma, seconds in COSTS.rounds.items():
            speeds[gamma] = sum(rate**i for i in range(gamma + 1)) / seconds
        result = best_gamma(COSTS, rate)
        assert speeds[result] >= max(speeds.values()) / 1.03
        assert result or max(speeds.values()) < 1.03
    assert best_gamma(COSTS, 0.1) == 0 and best_gamma(COSTS, 0.99) == 8
    assert best_gamma(RoundCosts(1, 1, 1.0, {}), 0.9) == 0


WRONG = RoundCosts(1, 1, 1.0, {gamma: 2.0 + 2.0 * gamma for gamma in range(1, 9)})
"""A table that says that drafts cannot pay; COSTS says they do."""


@pytest.mark.parametrize("table", [COSTS, WRONG])
@pytest.mark.parametrize(("base", "slope"), [(1.1, 1.0), (1.05, 0.95), (2.0, 2.0), (5.0, 5.0)])
def test_where_drafts_do_not_pay_trials_cost_little(table: RoundCosts, base: float, slope: float) -> None:
    """Whatever the table says; rounds of ten times a plain step are the worst there."""
    machine = Machine(SpeculationPrior((table,), 0.9), base, slope, noise=0.1)
    times = [machine.answer(0.93) / 1.05 / 127 for _ in range(60)]
    assert statistics.mean(times[5:]) < 1.03
    assert statistics.mean(times[20:]) < (1.01 if base < 2 else 1.03)  # tried ever more rarely
    assert sorted(times[5:])[-3] < 1.1
    assert any(machine.used)


@pytest.mark.parametrize(("base", "slope"), [(1.1, 1.0), (2.0, 2.0)])
def test_what_trials_lost_is_counted(base: float, slope: float) -> None:
    """On a machine that never wavers it is all that an answer takes longer than by plain decoding."""
    machine = Machine(SpeculationPrior((COSTS,), 0.9), base, slope)
    shares = []
    for _ in range(40):
        before = machine.controller.seconds, machine.controller.lost
        over = machine.answer(0.93) - 127
        lost, seconds = machine.controller.lost - before[1], machine.controller.seconds - before[0]
        assert lost == pytest.approx(over, abs=2.0)  # rounds may go past the answer's end
        shares.append(lost / seconds)
    assert max(shares[1:]) < 0.05 and 0 < statistics.mean(shares) < 0.02


@pytest.mark.parametrize("table", [COSTS, WRONG])
@pytest.mark.parametrize(("base", "slope", "rate"), [(1.1, 0.2, 0.93), (1.1, 0.4, 0.9), (1.3, 0.5, 0.93)])
def test_where_drafts_pay_the_best_is_found(table: RoundCosts, base: float, slope: float, rate: float) -> None:
    machine = Machine(SpeculationPrior((table,), 0.5), base, slope, noise=0.2)
    times = [machine.answer(rate) for _ in range(80)]
    assert statistics.mean(times[60:]) < 1.1 * 1.2 * 127 / machine.best(rate)


@pytest.mark.parametrize(("base", "slope"), [(1.03, 0.73), (0.98, 1.06), (1.0, 1.65), (1.15, 0.3)])
@pytest.mark.parametrize("acceptance", [0.7, 0.95])
def test_calls_that_are_held_up_lead_nowhere(base: float, slope: float, acceptance: float) -> None:
    """As nested weights' rounds on cores that share a cache (1.2x) and on such that do not (0.9x), four requests at
    once (0.6x), MXFP4 drafts of bf16 (2x): of what is held up itself, which is the same for all, nothing is counted."""
    machine = Machine(SpeculationPrior((COSTS,), acceptance), base, slope, noise=0.1, held_up=4.0)
    times = [machine.answer(0.96) for _ in range(120)]
    result, least = statistics.mean(times[20:]) / 1.05, 127 / machine.best(0.96)
    assert result < (1.08 if least < 127 else 1.04) * least


@pytest.mark.parametrize("seconds", [0.0, 1e-12])
def test_calls_that_take_no_time_are_no_error(seconds: float) -> None:
    controller, subject = GammaController(SpeculationPrior((COSTS,), 0.9)), request()
    for _ in range(200):
        gamma, _ = controller.choose([subject], True)
        if gamma:
            controller.note_rounds([subject], True, gamma, 1, seconds, 1.0)
        else:
            controller.note_steps([subject], True, 1, seconds)
        subject.sequence.tokens.append(0)
    assert math.isfinite(controller.measurements([subject], True).plain)


def test_plain_steps_are_tried_where_rounds_are_as_fast() -> None:
    rounds = {"deviation": lambda gamma: 1.0, "gamma": 4, "gain": 1.0}
    measured: Any = SimpleNamespace(plain=1.0, plain_age=100, budget=0.5, plain_trial_steps=6, **rounds)
    assert measurements.Measurements.plain_trial(measured, 0.0) == (0, 6)


def test_a_machine_that_changes_its_pace_is_followed() -> None:
    """Rounds become slow, and fast again; and all of it at half the speed, which is no reason to change."""
    machine = Machine(SpeculationPrior((COSTS,), 0.9), 1.1, 0.2, noise=0.1)
    for _ in range(10):
        machine.answer(0.93)
    machine.base, machine.slope = 4.4, 0.8
    first, later = machine.answer(0.93), [machine.answer(0.93) for _ in range(20)]
    assert first < 1.4 * 127 and max(later[1:]) < 1.12 * 127
    machine.base, machine.slope = 1.1, 0.2
    assert [machine.answer(0.93) for _ in range(30)][-1] < 70
    machine.plain, machine.used = 2.0, []
    assert machine.answer(0.93) < 70
    assert machine.used.count(0) <= 3


def test_a_request_that_is_not_understood_gives_up_and_tries_again() -> None:
    machine = Machine(SpeculationPrior((COSTS,), 0.9), 1.1, 0.2)
    for _ in range(5):
        machine.answer(0.93)
    machine.used = []
    assert machine.answer(0.02) < 1.15 * 127
    assert machine.used[0] > 0 and machine.used.count(0) > len(machine.used) / 2
    assert machine.answer(0.93) < 80


def test_several_requests_draft_as_far_as_each_is_understood() -> None:
    controller, good, bad = GammaController(SpeculationPrior((COSTS,), 0.9)), request(), request()
    assert controller.choose([good, bad], True) == (0, None)  # nothing is known of two at once
    controller.note_steps([good, bad], True, 4, 4.0)
    good.drafts.observe(90, 2)
    gamma = controller.choose([good, bad], True).gamma
    assert gamma >= 4 and controller.each([good, bad], gamma) == [gamma, gamma]
    for _ in range(9):
        bad.drafts.observe(0, 3)
    assert controller.each([good, bad], gamma) == [gamma, 1]
    assert controller.each([bad], gamma) == [gamma]
    assert controller.rate(bad) < 0.3 < controller.acceptance < controller.rate(good)


def test_rounds_that_yield_more_than_acceptance_tells_are_worth_more() -> None:
    """Lookups: tokens come that were not asked for by gamma."""
    controller, subject = GammaController(SpeculationPrior((RoundCosts(1, 1, 1.0, {1: 2.0, 2: 3.0}),), 0.5)), request()
    controller.note_steps([subject], True, 4, 4.0)
    assert controller.choose([subject], True).gamma == 0
    for _ in range(40):
        controller.note_rounds([subject], True, 2, 1, 3.0, 6)
    controller.note_steps([subject], True, 4, 4.0)
    assert controller.choose([subject], True).gamma > 0


def test_the_number_of_requests_measured_nearest_decides_and_contexts_lie_between() -> None:
    table = tuple(RoundCosts(n, context, n + context, {2: 3.0 * context}) for n in (1, 4, 16) for context in (32, 1024))
    prior = SpeculationPrior(table, 0.5)
    assert prior.costs(1, 10) is table[0] and prior.costs(99, 9) is table[4]
    assert prior.costs(3, 1024) is table[3] and prior.costs(3, 5000) is table[3] and prior.costs(3, 32) is table[2]
    assert prior.costs(3, 280) == RoundCosts(4, 280, 284.0, {2: 840.0})


def test_bytes_predict_before_anything_was_measured() -> None:
    assert best_gamma(SpeculationPrior.predicted(100, 30).table[0], 0.8) > 0
    assert best_gamma(SpeculationPrior.predicted(100, 100).table[0], 0.8) == 0
    assert best_gamma(SpeculationPrior.predicted(100, 0).table[0], 0.4) > 0


def test_tuning_is_kept_in_the_artifact(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "REPEATS", 1)
    monkeypatch.setattr(tune, "MOST_REPEATS", 1)  # else it measures for seconds
    out, prompts = tmp_path / "out", tmp_path / "prompts.jsonl"
    qcompile.build(str(tiny_checkpoint), out, recipe="qspec")
    prompts.write_text('{"prompt": "import os"}\n{"text": "def main("}\n')
    for data, longest in ((prompts, 1024), (None, 32)):
        monkeypatch.setattr(tune, "_LONG", longest)
        result = tune.tune(out, data, 8, threads=1)
        assert reader.verify(out) == []
        assert json.loads((out / "qcompile.json").read_text())["tuned"] == result
        assert {entry["batch"] for entry in result["table"]} == {1, 4, 16} and 0 <= result["acceptance"] <= 1
        assert "times plain" in tune.as_text(result)
        assert all(seconds > 0 for entry in result["table"] for seconds in entry["rounds"].values())
    with qcompile.load(out, threads=1, gamma=AUTO) as llm:
        assert llm.engine.speculation.controller
        assert llm.engine.speculation.controller.prior == SpeculationPrior.load(result)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    prompts.write_text("[]\n")
    with pytest.raises(UsageError, match="line 1: not a JSON object"):
        tune.tune(out, prompts, 8, threads=1)


def test_tuning_computes_each_prompt_once(tiny_artifact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go back, and on from there as they did before."""
    monkeypatch.setattr(timing, "_MOST_CALL_SECONDS", 0.0)  # else one call of so small a model reaches the end
    out = tiny_artifact("qspec")
    with qcompile.load(out, threads=1, gamma=AUTO, max_batch=4) as llm:
        group = tune._Group(llm, [[1, 2, 3, 4], [7] * 30, [5]], 12)
        texts = []
        for gamma in (0, 3, 0, 8):
            assert group.run(gamma) > 0
            texts.append([list(request.sequence.tokens) for request in group.requests])
        for versions in zip(*texts, strict=True):
            shortest = min(map(len, versions))
            assert all(version[:shortest] == versions[0][:shortest] for version in versions)
        assert group.ended == []
        total = SpeculationMetrics()
        group.end(total)
        assert sum(total.drafted) > 0 and llm.engine.pool.used == 0


def test_rounds_of_one_call_are_timed_by_themselves(tiny_artifact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a call makes all rounds, those of other gammas before it do not count."""
    with qcompile.load(tiny_artifact("qspec"), threads=1, gamma=AUTO) as llm:
        for calls in (llm.engine.runner.timer.steps, llm.engine.runner.timer.rounds):
            monkeypatch.setattr(calls, "count", lambda batch: 128)
        group = tune._Group(llm, [[1, 2, 3]], 12)
        metrics = group.requests[0].drafts.metrics
        metrics.verify_seconds, metrics.rounds = 1e4, 10
        assert 0 < group.run(4) < 100
        group.end(SpeculationMetrics())


def test_batches_that_the_cache_does_not_hold_are_not_measured(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that wait for others would take no time, and what was measured could not be loaded."""
    qcompile.build(str(tiny_checkpoint), tmp_path / "out", recipe="qspec")
    page = json.loads((tmp_path / "out" / "qcompile.json").read_text())["runtime"]["kv"]["page_bytes"]
    monkeypatch.setattr(load, "available_memory", lambda: 4 * 14 * page)
    result = tune.tune(tmp_path / "out", None, 8, threads=1)["table"]  # of 2 and of 3 pages each
    assert [(entry["batch"], entry["context"]) for entry in result] == [(1, 32), (1, 92), (4, 32)]
    with qcompile.load(tmp_path / "out", threads=1) as llm:
        assert llm.engine.pool.total == 14


def test_an_artifact_without_drafts_cannot_be_tuned(tiny_artifact: Any) -> None:
    with pytest.raises(UsageError, match="no drafts to tune"):
        tune.tune(tiny_artifact("w4a8"), None, 8, threads=1)


def test_a_gamma_without_drafts_is_refused(tiny_artifact: Any) -> None:
    with pytest.raises(UsageError, match="has no drafts"):
        qcompile.load(tiny_artifact("w4a8"), gamma=4)
    for allowed in (0, "auto", AUTO):
        qcompile.load(tiny_artifact("w4a8"), threads=1, gamma=allowed).close()
    for wrong, message in (("some", 'a whole number or "auto"'), (-2, 'or "auto", not -2'), (None, "not None")):
        with pytest.raises(UsageError, match=message):
            qcompile.load(tiny_artifact("w4a8"), gamma=wrong)  # type: ignore[arg-type]
    for share in (0, 1.5, "all", None):
        with pytest.raises(UsageError, match="gpu_memory_utilization must be above 0 and at most 1"):
            qcompile.load(tiny_artifact("w4a8"), gpu_memory_utilization=share)  # type: ignore[arg-type]
