"""What the controller does call by call, with made-up times: what it remembers, what trials cost, when it changes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from qcompile.runtime.outputs import SpeculationMetrics
from qcompile.runtime.request import SequenceState, SpeculationState
from qcompile.runtime.speculation import costs, measurements
from qcompile.runtime.speculation.controller import DraftLag, GammaController
from qcompile.runtime.speculation.costs import RoundCosts, SpeculationPrior, best_gamma, expected_tokens
from qcompile.runtime.speculation.explained import explained
from qcompile.runtime.speculation.latency import LatencyModel
from qcompile.runtime.speculation.measurements import GammaChoice, Measurements

COSTS = RoundCosts(1, 1, 1.0, {gamma: 1.1 + 0.2 * gamma for gamma in range(1, 9)})


def request(tokens: int = 100) -> Any:
    return SimpleNamespace(sequence=SequenceState([0] * tokens), drafts=SpeculationState())


def controller_of(gains: dict[int, float], acceptance: float = 0.5) -> tuple[GammaController, Any, Measurements]:
    """One that expects these gains (logarithms) of rounds after four plain steps, and the request at hand."""
    rounds = {gamma: expected_tokens(acceptance, gamma) / math.exp(gain) for gamma, gain in gains.items()}
    controller, subject = GammaController(SpeculationPrior((RoundCosts(1, 1, 1.0, rounds),), acceptance)), request()
    controller.note_steps([subject], False, 4, 4.0)
    return controller, subject, controller.measurements([subject], False)


def test_no_acceptance_is_certain() -> None:
    """Of drafts that are always kept a round would have tokens without end."""
    controller, sure = GammaController(SpeculationPrior((COSTS,), 1.0)), request()
    sure.drafts.kept = 1e6
    assert controller.rate(sure) == costs.MAX_ACCEPTANCE
    controller.note_steps([sure], False, 4, 4.0)
    assert controller.choose([sure], False).gamma == 8 and best_gamma(COSTS, 1.0) == 8
    assert controller.each([sure, sure], 8) == [8, 8]


def test_batches_are_near_by_their_ratio() -> None:
    table = tuple(RoundCosts(batch, 1, float(batch), {}) for batch in (1, 16))
    policy = SpeculationPrior(table, 0.5)
    assert [policy.costs(batch, 1).batch for batch in (1, 3, 5, 8, 16, 100)] == [1, 1, 16, 16, 16, 16]


def test_what_is_known_is_of_as_many_requests_in_calls_of_the_same_kind() -> None:
    controller, subject = GammaController(SpeculationPrior((COSTS,), 0.5)), request()
    result = {n: controller.measurements([subject] * n, True) for n in range(1, 17)}
    apart = [[1], [2], [3], [4], [5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15], [16]]
    for group in apart:
        assert len({id(result[n]) for n in group}) == 1
    assert len({id(measured) for measured in result.values()}) == len(apart)
    single = controller.measurements([subject], False)
    assert single not in result.values() and single is controller.measurements([subject], False)


def test_the_table_is_read_anew_where_requests_become_more_or_longer() -> None:
    table = tuple(RoundCosts(n, at, n + at / 1000, {2: 1.0}) for n in (5, 7) for at in (16, 1600))
    controller = GammaController(SpeculationPrior(table, 0.5))
    first = controller.measurements([request(16)] * 5, True)
    assert first.costs is table[0]
    assert controller.measurements([request(16)] * 7, True).costs is table[2]
    assert controller.measurements([request(1600)] * 7, True).costs is table[3]
    assert controller.measurements([request(1), request(808), *[request(2)] * 3], True) is first
    assert first.costs.context == 808  # the longest counts


def test_plain_steps_make_what_drafts_did_count_less() -> None:
    controller, subject = GammaController(SpeculationPrior((COSTS,), 0.5)), request()
    subject.drafts.kept, subject.drafts.missed = 8.0, 4.0
    controller.note_steps([subject, request()], True, 48, 48.0)
    assert (subject.drafts.kept, subject.drafts.missed) == (pytest.approx(4.0), pytest.approx(2.0))


@pytest.mark.parametrize(("drafts", "fade"), [(64, 0.875), (256, 0.5), (512, 0.0), (2048, 0.0)])
def test_requests_that_ended_fade_as_drafts_come(drafts: int, fade: float) -> None:
    """512 drafts leave nothing of those before."""
    controller, ended = (
        GammaController(SpeculationPrior((COSTS,), 0.25)),
        SpeculationMetrics(),
    )  # 16 kept of 64, before the first
    for _ in range(drafts):
        ended.count(1, 1)
    controller.note_finished(ended)
    assert controller.acceptance == pytest.approx((fade * 16 + drafts) / (fade * 64 + drafts))


def test_drafts_behind_the_first_that_missed_were_not_tried() -> None:
    controller, ended = GammaController(SpeculationPrior((COSTS,), 0.25)), SpeculationMetrics()
    for kept in [4] * 100 + [1] * 56:
        ended.count(4, kept)
    controller.note_finished(ended)
    assert controller.acceptance == pytest.approx(456 / 512)


def test_what_a_call_takes_is_not_its_steps() -> None:
    call = measurements._CALL_OVERHEAD
    table = SpeculationPrior((RoundCosts(1, 1, 1e-3, {2: 2e-3}),), 0.5)
    for whole, more in ((True, call), (False, 0.0)):
        controller, subject = GammaController(table), request()
        measured = controller.measurements([subject], whole)
        controller.note_steps([subject], whole, 4, 4e-3 + more)
        for _ in range(2):  # of the first nothing is learned
            controller.note_rounds([subject], whole, 2, 4, 8e-3 + more, 4.0)
        assert measured.tried
        assert measured.latency.plain == pytest.approx(0.0, abs=1e-9) == measured.latency.rounds(2)
    assert measurements.net_seconds(call, True) == call / 2  # the clock of a short call is not believed that far
    assert measurements.net_seconds(0.0, True) == measurements.net_seconds(0.0, False) > 0


def test_a_plain_trial_is_paid_for() -> None:
    """Four steps amid rounds that are twice as fast lose two steps; a hundredth of the time goes into the budget."""
    controller, subject, measured = controller_of({2: 0.5})
    measured.gamma, measured.gain, measured.budget, lost = 2, 2.0, 2.5, controller.lost
    controller.note_steps([subject], False, 4, 4.0)
    assert measured.budget == pytest.approx(2.5 - 2.0 + 0.04) and controller.lost - lost == pytest.approx(2.0)
    measured.gamma = 0
    controller.note_steps([subject], False, 4, 4.0)  # as ever: no trial
    assert measured.budget == pytest.approx(0.58) and controller.lost - lost == pytest.approx(2.0)


def test_a_trial_of_rounds_is_paid_for() -> None:
    """Rounds in use that are too slow are a loss, but no trial's."""
    controller, subject, measured = controller_of({2: 0.5, 4: 0.5})
    controller.note_rounds([subject], False, 2, 1, 1.0, 2.0)  # the first of all
    for gamma, paid in ((4, 1.5), (2, 0.0)):
        measured.gamma, measured.budget, plain, lost = 2, 2.5, measured.plain, controller.lost
        controller.note_rounds([subject], False, gamma, 1, 3.5 * plain, 2.0)
        loss = 1.5 * plain
        assert controller.lost - lost == pytest.approx(loss)
        assert measured.budget == pytest.approx(2.5 - paid * plain + 0.035 * plain)


def test_what_precedes_a_trial_of_rounds_is_owed() -> None:
    """Filling the drafts' caches before a trial is lost; before rounds in use it belongs to them.

    No trial follows until the share for trials has paid it, whatever the kind of work.
    """
    controller, subject, measured = controller_of({2: 0.5, 3: 0.4})
    measured.gamma, measured.tried, lost, controller.owed = 2, True, controller.lost, 0.0
    controller.note_catch_up([subject], False, 2, 1.0)
    assert controller.owed == 0 and controller.lost == lost
    controller.note_catch_up([subject], False, 3, 1.0)
    assert controller.owed == 1.0 and controller.lost == lost + 1.0
    measured.gamma, measured.tried, measured.latency = 0, False, LatencyModel({2: 2.0, 3: 2.0})
    controller.note_steps([subject] * 4, True, 50, 50.0)
    assert controller.owed == pytest.approx(0.5) and controller.choose([subject], False).gamma == 0
    controller.note_steps([subject] * 4, True, 50, 50.1)
    assert -0.01 < controller.owed <= 0.0 and controller.choose([subject], False).gamma == 2


def test_trials_of_rounds_wait_until_what_they_fill_is_saved_up() -> None:
    """Before any was filled, a row is taken to take a 64th of a step."""
    controller, subject, measured = controller_of({2: -0.1})
    assert controller.owed == pytest.approx(-0.04)
    for seconds, rows, gamma in ((0.0, 3, 0), (0.0, 2, 2), (0.01, 4, 2), (0.01, 5, 0)):
        controller._row_seconds, measured.budget = seconds, 10.0
        assert controller.choose([subject], False, DraftLag(rows, 100)).gamma == gamma
    controller.note_steps([subject] * 4, True, 1000, 1000.0)
    assert controller.owed == -1.0  # the most


def test_rounds_begin_where_they_save_what_filling_takes() -> None:
    """Rounds that are 1.1 times as fast save 0.09 of a second a token: 100 rows of 0.01 s need 11 tokens."""
    controller, subject, measured = controller_of({2: math.log(1.1)})
    measured.tried = True
    controller.choose([subject], False, DraftLag(100, 20))
    measured.gamma = 2
    controller.note_catch_up([subject], False, 2, 1.0)
    for left, gamma in ((10, 0), (12, 2)):
        measured.gamma = 0
        assert controller.choose([subject], False, DraftLag(100, left)).gamma == gamma
        (facts,) = explained(controller)
        assert ("filling the drafts' caches" in facts.reason) == (gamma == 0) and "1.10 times as fast" in facts.reason


def test_the_purse_holds_three_steps_and_owes_no_more() -> None:
    measured = Measurements(COSTS, (1, 0), LatencyModel(COSTS.rounds), plain=2.0)
    measured.save(1e6)
    assert measured.budget == 6.0
    measured.budget -= 1e6
    measured.save(100.0)
    assert measured.budget == -5.0


@pytest.mark.parametrize(("gain", "before", "after"), [(0.015, 0, 0), (0.025, 0, 2), (0.005, 2, 2), (-0.005, 2, 0)])
def test_rounds_begin_where_they_are_clearly_faster_and_end_where_they_are_slower(
    gain: float, before: int, after: int
) -> None:
    controller, subject, measured = controller_of({2: gain})
    measured.gamma = before
    controller.choose([subject], False)
    assert measured.gamma == after


@pytest.mark.parametrize(("other", "before", "result"), [(0.515, 2, 2), (0.525, 2, 4), (0.515, 0, 4)])
def test_another_gamma_is_taken_where_it_is_clearly_better(other: float, before: int, result: int) -> None:
    controller, subject, measured = controller_of({2: 0.5, 4: other})
    measured.gamma = before
    choice = controller.choose([subject], False)
    assert choice.gamma == measured.gamma == result
    assert measured.gain == pytest.approx(math.exp(0.5 if result == 2 else other))


@pytest.mark.parametrize(("round_takes", "most"), [(1.7, 7), (5.0, 2), (30.0, 1)])
def test_the_first_rounds_are_few(round_takes: float, most: int) -> None:
    """Rounds may be far slower than they were: those of one call take twelve plain steps as far as is known."""
    controller = GammaController(SpeculationPrior((RoundCosts(1, 1, 1.0, {64: round_takes}),), 0.98))
    subject = request()
    controller.note_steps([subject], False, 4, 4.0)
    assert controller.choose([subject], False) == (64, most)
    controller.note_rounds([subject], False, 64, most, most * round_takes, 40.0)
    assert controller.choose([subject], False) == (64, None)


def trial(
    tried: bool, budget: float, deviation: float = 0.0, cost: float = 3.0, tokens: float = 2.0
) -> GammaChoice | None:
    """What is tried of rounds of two drafts amid plain steps of a second."""
    measured: Any = SimpleNamespace(
        deviation=lambda gamma: deviation, cost=lambda gamma: cost, tried=tried, plain=1.0, budget=budget
    )
    return Measurements.rounds_trial(measured, {2: tokens}, {2: math.log(tokens / cost)})


def test_rounds_are_tried_once_whatever_is_expected_as_soon_as_they_are_paid() -> None:
    """A round loses a step; four are few."""
    assert trial(tried=False, budget=0.9) is None
    result = [trial(tried=False, budget=budget) for budget in (1.0, 1.9, 2.5, 3.0)]
    assert result == [(2, 1), (2, 1), (2, 2), (2, 3)]
    assert trial(tried=False, budget=100.0) == (2, 4)
    assert trial(tried=False, budget=0.0, cost=1.9) == (2, 6)  # nothing to lose


def test_rounds_are_tried_again_where_they_may_be_clearly_faster_and_nothing_is_owed() -> None:
    behind = math.log(3 / 2)
    assert trial(tried=True, budget=100.0, deviation=behind + 0.01) is None
    assert trial(tried=True, budget=0.0, deviation=behind + 0.03) == (2, 4)
    hoped = 2 * (2.0 - 3.0 * math.exp(-behind - 0.5))  # of two rounds
    assert trial(tried=True, budget=0.01 - hoped, deviation=behind + 0.5) == (2, 4)
    assert trial(tried=True, budget=-0.01 - hoped, deviation=behind + 0.5) is None


def test_of_what_cannot_be_paid_the_next_best_is_tried() -> None:
    measured: Any = SimpleNamespace(
        deviation=lambda gamma: 0.0, cost={2: 2.0, 4: 5.0}.__getitem__, tried=False, plain=1.0, budget=0.5
    )
    gains = {2: math.log(1.6 / 2.0), 4: math.log(4.1 / 5.0)}
    assert Measurements.rounds_trial(measured, {2: 1.6, 4: 4.1}, gains) == (2, 1)
    measured.budget = 1.0
    assert Measurements.rounds_trial(measured, {2: 1.6, 4: 4.1}, gains) == (4, 1)


@pytest.mark.parametrize(
    ("deviation", "gain", "age", "budget", "tried"),
    [
        (0.2, 0.1, 24, 3.0, True),
        (0.2, 0.1, 23, 3.0, False),  # too soon
        (0.2, 0.1, 24, 2.9, False),  # six steps that lose half a step each
        (0.2, 0.3, 24, 3.0, False),  # no deviation that rounds are faster
        (0.4, 0.9, 24, -3.0, True),  # nothing is known any more
        (0.4, 0.9, 23, 3.0, False),
    ],
)
def test_plain_steps_amid_rounds(deviation: float, gain: float, age: int, budget: float, tried: bool) -> None:
    measured: Any = SimpleNamespace(
        deviation=lambda gamma: deviation,
        gamma=2,
        plain=1.0,
        gain=2.0,
        plain_age=age,
        budget=budget,
        plain_trial_steps=6,
    )
    assert Measurements.plain_trial(measured, gain) == ((0, 6) if tried else None)


def test_a_trial_of_short_plain_steps_has_more_of_them() -> None:
    """A call of less than 3 ms is mostly its own overhead."""
    measured = Measurements(COSTS, (1, 0), LatencyModel(COSTS.rounds))
    assert measured.plain_trial_steps == 6  # before any was measured
    for seconds, steps in ((1e-4, 30), (1e-3, 6)):
        measured.plain = seconds
        assert measured.plain_trial_steps == steps


@pytest.mark.parametrize("seconds", [1e-4, 1.0, 1e3])
def test_the_first_steps_tell_the_unit_of_the_tables_times(seconds: float) -> None:
    """Costs that are predicted from bytes have none. What was measured later was nearly all taken for outliers."""
    controller, subject = GammaController(SpeculationPrior.predicted(8, 1)), request()
    for _ in range(2):
        controller.note_steps([subject], False, 12, 12 * seconds)
        controller.note_rounds([subject], False, 2, 10, 10 * 1.5 * seconds, 20.0)
    measured = controller.measurements([subject], False)
    assert measured.plain == pytest.approx(seconds, rel=0.02)
    assert measured.cost(2) == pytest.approx(1.5, rel=0.05) and measured.deviation(2) < 0.2


@pytest.mark.parametrize(
    ("age", "deviation", "result"),
    [(48, 0.13, (4, None)), (47, 0.13, None), (48, 0.11, None), (1000, 0.0, None)],
)
def test_another_gamma_is_looked_at_where_it_may_be_clearly_better(
    age: int, deviation: float, result: tuple[int, None] | None
) -> None:
    latency = SimpleNamespace(difference_deviation=lambda gamma, other: 0.0 if gamma == other else deviation)
    measured: Any = SimpleNamespace(look_age=age, gamma=2, latency=latency)
    assert Measurements.gamma_trial(measured, {2: 0.5, 4: 0.4}) == result
    assert measured.look_age == (0 if result else age)


def test_looks_and_plain_trials_are_as_far_apart_as_their_tokens() -> None:
    controller, subject, measured = controller_of({2: 0.5, 4: 0.5})
    assert (measured.look_age, measured.plain_age) == (4, 0)
    for _ in range(2):
        controller.note_rounds([subject], False, 2, 5, 5.0, 10.0)
    assert (measured.look_age, measured.plain_age) == (14, 10)  # of the very first rounds nothing counts
    controller.note_steps([subject], False, 3, 3.0)
    assert (measured.look_age, measured.plain_age) == (17, 0)


@pytest.mark.parametrize(("moved", "more"), [(0.3, 0.25), (-0.3, 0.25), (0.04, 0.0)])
def test_what_moved_since_rounds_were_compared_is_doubted(moved: float, more: float) -> None:
    latency: Any = SimpleNamespace(deviation=lambda gamma: 0.1, plain=0.7 + moved)
    assert Measurements(COSTS, (1, 0), latency, compared=0.7).deviation(2) == pytest.approx(0.1 + more)


def test_steps_and_rounds_are_compared_where_one_follows_the_other() -> None:
    measured = Measurements(COSTS, (1, 0), LatencyModel(COSTS.rounds))
    seen = []
    for number, work in enumerate("ssrrss"):
        before = measured.compared
        if work == "s":
            measured.note_steps(4, 4.0 * (1.1 + number / 100))
        else:
            measured.note_rounds(2, 2, 2 * 1.5 * 1.3, 3.0)
        seen.append(measured.compared != before)
        assert not seen[-1] or measured.compared == measured.latency.plain
    assert seen == [True, True, True, False, True, False]  # before the first rounds, the last steps count


def test_what_came_before_counts_less_with_each_call() -> None:
    subject = request()
    for kept, missed in ((10, 5), (0, 0), (1, 2)):
        subject.drafts.observe(kept, missed)
    assert (subject.drafts.kept, subject.drafts.missed) == (pytest.approx(9.1), pytest.approx(6.05))


def test_several_requests_go_by_what_is_kept_of_theirs_on_average() -> None:
    """Where half of the drafts of one are kept, as the controller expects, and all of the other's."""
    rounds = {2: 2.0}  # 1.75 tokens at a half, 2.3 at three quarters, 3 at all
    for others, result in ((0, 2), (1, 2), (3, 0)):
        controller = GammaController(SpeculationPrior((RoundCosts(1, 1, 1.0, rounds),), 0.5))
        requests = [request() for _ in range(1 + others)]
        controller.note_steps(requests, False, 4, 4.0)
        requests[0].drafts.kept = 1e6
        controller.choose(requests, False)
        assert controller.measurements(requests, False).gamma == result


def test_no_call_is_believed_to_yield_far_more_or_less() -> None:
    """A twentieth of the way to at most three measured what acceptance tells, or to a third of it."""
    for tokens, towards in ((100.0, 3.0), (0.01, 1 / 3), (3.5, 2.0)):
        controller, subject, measured = controller_of({2: 0.0})  # 1.75 tokens are expected
        for _ in range(2):
            controller.note_rounds([subject], False, 2, 1, 1.75, tokens)
        assert measured.yields == pytest.approx(1 + 0.05 * (towards - 1))


def test_rounds_of_another_gamma_than_the_tables_tell_nothing() -> None:
    """A caller may ask for more drafts than were ever measured."""
    controller, subject, measured = controller_of({2: 0.5})
    for _ in range(3):
        controller.note_rounds([subject], False, 9, 1, 5.0, 3.0)
    assert not measured.tried and measured.latency.rounds(2) == 0.0 and controller.choose([subject], False).gamma == 2


def test_why_nothing_drafts_is_told_before_and_after_a_trial() -> None:
    """One draft is expected to be half as fast, and is 0.9 times as fast."""
    controller, _, measured = controller_of({1: math.log(0.5)})
    (facts,) = explained(controller)
    assert (facts.batch, facts.gamma, facts.gain, facts.measured) == (1, 0, None, {})
    assert facts.expected[1] == pytest.approx(0.5) and "0.50 times as fast, by what is expected" in facts.reason
    measured.tried, measured.yields = True, 1.8
    (facts,) = explained(controller)
    assert facts.measured[1] == pytest.approx(0.9) and "plain decoding, as rounds of 1 drafts would" in facts.reason
    assert "0.90 times as fast, by what was measured" in facts.json["reason"]


def test_the_gamma_in_use_and_its_gain_are_told_by_batch() -> None:
    controller, subject, measured = controller_of({1: math.log(1.5), 2: math.log(1.2)})
    measured.gamma = 1
    controller.note_steps([subject] * 4, True, 4, 4.0)
    first, second = explained(controller)
    assert (first.batch, first.gamma, second.batch, second.gamma) == (1, 1, 4, 0)
    assert "rounds of 1 drafts decode 1.50 times as fast" in first.reason and first.context == 96
    measured.tried = True
    assert explained(controller)[0].gain == pytest.approx(1.5)
