"""Draft heads change the speed and nothing else, and draft what the same head drafts in torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qcompile
from qcompile import SamplingParams
from qcompile.cli import inspect
from qcompile.runtime.cpu.executor import Executor
from qcompile.runtime.cpu.heads import LibraryHeadSpeculator
from qcompile.runtime.llm import LLM
from qcompile.runtime.options import AUTO
from qcompile.runtime.outputs import SpeculationMetrics
from qcompile.runtime.speculation.heads import HeadSpeculator
from qcompile.runtime.step import Rows
from tests.conftest import MadeOnce
from tests.support.calls import fix_calls
from tests.support.cases import first
from tests.support.heads import PROPOSED, SHAPE, save_head, save_target, torch_shortfalls

PROMPTS = ["def main(", "import os\n\n\nclass Reader:\n", "x", "# " + "word " * 90, "for i in range(10):\n    "]
TOKENS = 32
DRAWN = {"temperature": 0.7, "top_p": 0.9, "seed": 5}
PENALTIES = {"repetition_penalty": 0.3, "frequency_penalty": 0.2}


@pytest.fixture(scope="module")
def target(made_once: MadeOnce) -> Path:
    return made_once("head-target", save_target)


@pytest.fixture(scope="module")
def head(made_once: MadeOnce, target: Path) -> Path:
    return made_once("head", lambda path: save_head(target, path))


@pytest.fixture(scope="module")
def artifact(made_once: MadeOnce, target: Path, head: Path) -> Path:
    """The target and the head without rounding, so that drafts are those of torch."""

    def build(path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("qcompile.recipes.HEAD_RECIPE", "f32")
            patch.setattr("qcompile.passes.features.PRECISION", "f32")
            qcompile.build(str(target), path, recipe="f32", drafts=str(head))

    return made_once("head-artifact", build)


@pytest.fixture(scope="module")
def plain(artifact: Path) -> Iterator[LLM]:
    with qcompile.load(artifact, threads=1, gamma=0, prefix_caching=False) as llm:
        yield llm


def generate(
    llm: LLM, prompts: list[str] = PROMPTS, **options: object
) -> tuple[list[list[int]], list[SpeculationMetrics]]:
    """Tokens of each prompt, and what was drafted for it."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, **options})  # type: ignore[arg-type]
    outputs = llm.generate(prompts, params)
    llm.engine.check()
    assert llm.engine.pool.used == 0
    return [o.outputs[0].token_ids for o in outputs], [o.speculation for o in outputs if o.speculation]


def test_tokens_are_the_targets_own(artifact: Path, plain: LLM) -> None:
    """Every gamma and auto, alone and together, drawn and with penalties; some drafts are accepted, some rejected.

    The prompt of one token has no hidden states when its first round begins.
    """
    wanted, drawn, changed = (generate(plain, **options)[0] for options in ({}, DRAWN, PENALTIES))
    with qcompile.load(artifact, threads=1, gamma=1) as llm:
        for gamma in (1, 2, 3, 4, AUTO):
            llm.engine.speculation.gamma = gamma
            tokens, metrics = generate(llm, PROMPTS[:3])
            assert tokens == wanted[:3], gamma
            if gamma in (1, 4):
                accepted, drafted = (sum(sum(getattr(one, n)) for one in metrics) for n in ("accepted", "drafted"))
                assert 0.1 * drafted < accepted < 0.9 * drafted
            if gamma in (2, AUTO):
                assert generate(llm)[0] == wanted
                assert generate(llm, PROMPTS[:1])[0] == wanted[:1]
            if gamma in (3, AUTO):
                assert generate(llm, **DRAWN)[0] == drawn, gamma
                assert generate(llm, **PENALTIES)[0] == changed, gamma


def test_drafts_are_those_of_torch(artifact: Path, target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features come from the right layers and rows, and entries of the head's cache from the target's features.

    That holds after a prompt, after rounds that rejected drafts, and after plain steps of one call.
    """
    made: list[tuple[list[int], list[int]]] = []
    draft = HeadSpeculator._draft

    def noted(self: HeadSpeculator, texts: Sequence[Any], *rest: Any) -> float:
        seconds = draft(self, texts, *rest)
        made.extend((text.tokens(0), text.drafts) for text in texts)
        return seconds

    monkeypatch.setattr(HeadSpeculator, "_draft", noted)
    shortfalls = torch_shortfalls(target, head)
    with qcompile.load(artifact, threads=1, gamma=3, prefix_caching=False) as llm:
        engine = llm.engine
        steer_by_host(llm)
        fix_calls(engine, 2)
        assert engine.tokenizer
        request = engine.add(engine.tokenizer.encode(PROMPTS[1]).ids, SamplingParams(temperature=0, max_tokens=90))
        for gamma in (3, 3, 0, 3, 0, 0, 4):
            engine.speculation.gamma = gamma
            engine.step()
        engine.cancel(request)
    assert len(made) == 6
    for tokens, drafts in made:
        assert not any(shortfalls(tokens, drafts))


def steer_by_host(llm: LLM) -> None:
    """Let the host run rounds, step by step."""
    drafter = llm.engine.speculation.drafter
    assert isinstance(drafter, LibraryHeadSpeculator)
    llm.engine.speculation.drafter = HeadSpeculator(drafter._target, drafter._head, 3, drafter._tokens)


@pytest.mark.parametrize("gamma", first((3,), [1, 3, 8]))
def test_rounds_by_the_host_are_those_of_the_library(gamma: int, artifact: Path) -> None:
    """What was drafted and kept at every place, greedily and drawn, in calls of several rounds, and after prompts."""
    result = []
    for by_host in (False, True):
        with qcompile.load(artifact, threads=1, gamma=gamma, prefix_caching=False) as llm:
            if by_host:
                steer_by_host(llm)
            fix_calls(llm.engine, 4)
            made = [generate(llm), generate(llm, **DRAWN)]
            result.append([(tokens, [(one.drafted, one.accepted) for one in each]) for tokens, each in made])
    assert result[0] == result[1]
    for _, counts in result[0]:
        assert sum(sum(accepted) for _, accepted in counts) > 10


def test_plain_steps_need_no_features(artifact: Path, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """After many tokens without drafts the target computes no features; later drafts are nearly as good as ever."""
    turned: list[bool] = []
    turn = Executor.return_features
    monkeypatch.setattr(Executor, "return_features", lambda self, on: (turned.append(on), turn(self, on))[1])
    wanted, _ = generate(plain, PROMPTS[:3], max_tokens=140)
    accepted = []
    for rest_after in (16, 1000):
        monkeypatch.setattr("qcompile.runtime.speculation.heads._REST_AFTER", rest_after)
        with qcompile.load(artifact, threads=1, gamma=3, prefix_caching=False) as llm:
            engine = llm.engine
            fix_calls(engine, 4)
            assert engine.tokenizer
            prompts = [engine.tokenizer.encode(prompt).ids for prompt in PROMPTS[:3]]
            requests = [engine.add(prompt, SamplingParams(temperature=0, max_tokens=140)) for prompt in prompts]
            for gamma in [3] * 4 + [0] * 20 + [3] * 40:
                engine.speculation.gamma = gamma
                engine.step()
            tokens = [request.sequence.tokens[len(each) :] for request, each in zip(requests, prompts, strict=True)]
            assert tokens == wanted and not engine.busy
            accepted.append(sum(sum(request.drafts.metrics.accepted) for request in requests))
        assert turned.count(False) == turned.count(True) == (16 if rest_after == 16 else 0)
        turned.clear()
    source = (artifact / "kernels" / "cpu" / "model.cpp").read_text()
    assert source.count("if (m.features) {") == len(SHAPE.layers) + 1
    assert accepted[0] > 0.9 * accepted[1] > 40


def test_a_lookup_proposes_before_the_head(target: Path, head: Path, tmp_path: Path, plain: LLM) -> None:
    """Where the text repeats itself, without changing a token; the head then computes the rows that it lacks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qcompile.recipes.HEAD_RECIPE", "f32")
        patch.setattr("qcompile.passes.features.PRECISION", "f32")
        qcompile.build(str(target), tmp_path / "out", recipe="f32", drafts=[str(head), "lookup"])
    prompts = ["a b c d " * 20 + "a b", *PROMPTS[:3]]
    options: list[dict[str, Any]] = [{"max_tokens": 200}, DRAWN]
    wanted = [generate(plain, prompts, **each)[0] for each in options]
    counts = []
    for room in (64, 32):  # the head falls behind by up to room - 16 rows
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("qcompile.runtime.cpu.heads._ROOM", room)
            with qcompile.load(tmp_path / "out", threads=1, gamma=2) as llm:
                fix_calls(llm.engine, 8)
                made = [generate(llm, prompts, **each) for each in options]
                assert [tokens for tokens, _ in made] == wanted
                counts.append([(one.drafted, one.accepted) for _, metrics in made for one in metrics])
                llm.engine.speculation.gamma = AUTO
                assert generate(llm, prompts, **options[0])[0] == wanted[0]
    assert counts[0] == counts[1]
    drafted = np.sum([drafted for drafted, _ in counts[0]], axis=0)
    assert drafted[6] > 10  # by the lookup
    assert drafted[1] > drafted[2] + 10  # by the head


def test_a_rotated_model_gives_the_same_features(target: Path, head: Path, artifact: Path, tmp_path: Path) -> None:
    """The rotation is folded into fc, and tokens are those of the rotated model."""
    options = {"fold_norms.enabled": True, "rotate.enabled": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qcompile.recipes.HEAD_RECIPE", "f32")
        patch.setattr("qcompile.passes.features.PRECISION", "f32")
        report = qcompile.build(str(target), tmp_path / "out", recipe="f32", drafts=str(head), options=options)
    assert next(record for record in report.passes if record.name == "rotate").fired > 20
    features = []
    for path in (artifact, tmp_path / "out"):
        with qcompile.load(path, threads=1, gamma=3) as llm:
            executor = llm.engine.executor
            assert isinstance(executor, Executor)
            executor.step([Rows(list(range(30, 60)), 0, [0], 1)], False)
            features.append(executor.features[:30].copy())
            drafted, _ = generate(llm)
        with qcompile.load(path, threads=1, gamma=0) as llm:
            assert generate(llm)[0] == drafted
    assert np.abs(features[0]).max() > 0.5
    np.testing.assert_allclose(features[1], features[0], atol=1e-4)


def test_rejection_keeps_the_targets_distribution(artifact: Path, plain: LLM) -> None:
    """The head has a distribution over few tokens of the vocabulary; chi-square of the second and third token."""
    count, prompt = 300, [int(token) for token in PROPOSED[1:6]]

    def drawn(llm: LLM, seed: int) -> tuple[Counter[tuple[int, ...]], int]:
        params = [SamplingParams(temperature=1.0, top_k=2, max_tokens=4, seed=seed + i) for i in range(count)]
        outputs = llm.generate([prompt] * count, params)
        accepted = sum(sum(o.speculation.accepted) for o in outputs if o.speculation)
        return Counter(tuple(o.outputs[0].token_ids[1:3]) for o in outputs), accepted

    wanted, _ = drawn(plain, 0)
    with qcompile.load(artifact, threads=1, gamma=3, acceptance="rejection") as llm:
        result, accepted = drawn(llm, count)
    assert accepted > count / 4
    distance = sum((wanted[key] - result[key]) ** 2 / (wanted[key] + result[key]) for key in wanted | result)
    assert len(wanted | result) == 8 and distance < 18.5  # exceeded in 1 of 100 cases


def test_inspect_calls_it_a_head(artifact: Path) -> None:
    contents = inspect.summary(artifact)
    assert contents["drafts"][0]["head"] and contents["drafts"][0]["drafted_vocabulary"] == len(PROPOSED)
    assert f"draft1 (draft head for {len(PROPOSED)} tokens, own cache" in inspect.as_text(contents)


def test_pages_that_requests_share(artifact: Path, plain: LLM) -> None:
    """A request that finds the pages of another one drafts as well as that one did."""
    wanted, _ = generate(plain, [PROMPTS[3]] * 2)
    with qcompile.load(artifact, threads=1, gamma=3) as llm:
        result = [generate(llm, [PROMPTS[3]]) for _ in range(2)]
        assert [tokens for tokens, _ in result] == [wanted[:1], wanted[1:]]
        first, second = (np.array(metrics[0].accepted) for _, metrics in result)
        assert (first == second).all()


def test_pages_that_are_taken_away(artifact: Path, plain: LLM) -> None:
    """Requests that give way to others when pages run out go on with the same tokens."""
    wanted, _ = generate(plain, max_tokens=100)
    page = plain.engine.pool.page_tokens
    with qcompile.load(artifact, threads=1, gamma=3, max_batch=5, prefix_caching=False) as llm:
        llm.engine.pool.take(llm.engine.pool.free - 700 // page)
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=100))
        assert [o.outputs[0].token_ids for o in outputs] == wanted
        assert llm.engine.scheduler.preemptions
