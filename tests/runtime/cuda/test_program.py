"""Launches that are prepared once for all counts are those that are prepared for each."""

from __future__ import annotations

import random
from typing import Any

import pytest

from qcompile.runtime.cuda import launching
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.step import Rows
from tests.support.fake_driver import LIMITS, PLAN, FakeDriver, FakeLaunch, variant

PAST = {"kind": "input", "name": "starts", "past": ["decoding"]}
LAUNCHES = [
    *PLAN["launches"],
    {
        "name": "past",
        "by": "tokens",
        "variants": [variant("many", ["tokens", 1, 1], PAST, 9), variant("", [1, 1, 1], PAST)],
    },
    {"name": "none", "by": "prompts", "variants": [variant("split", ["prompts", 2, "splits"], PAST)]},
]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> CudaExecutor:
    monkeypatch.setattr(launching, "LaunchCall", FakeLaunch)
    functions: Any = {name: name for name in PLAN["kernels"]}
    plan = PLAN | {"launches": LAUNCHES}
    return CudaExecutor(FakeDriver(), plan, functions, {"w": 99}, 64, LIMITS)  # type: ignore[arg-type]


def test_any_counts_give_the_launches_that_are_prepared_for_them(opened: CudaExecutor) -> None:
    draw, launcher, log = random.Random(0), opened.launcher, opened.driver.log  # type: ignore[attr-defined]
    launcher._address_of = lambda name: 5000
    steps = []
    for _ in range(60):
        lengths = [draw.choice((1, 1, 1, 2, 20)) for _ in range(draw.randrange(1, 4))]
        pages = list(range(16))
        rows = [Rows([1] * length, draw.randrange(900), pages, draw.randrange(2)) for length in lengths]
        steps.append(opened.fill(rows))
    launcher.grow({name: max(step[name] for step in steps) for name in steps[0]})
    for counts in steps * 2:
        feed_back = draw.random() < 0.5
        log.clear()
        for _, call in launcher.prepare(launcher._launches(feed_back, "whole"), counts):
            call.run()
        wanted = list(log)
        log.clear()
        launcher.launch(launcher._launches(feed_back, "whole"), counts)
        assert log == wanted and wanted
    assert {count for step in steps for count in (step["prompts"], step["outputs"])} >= {0, 1, 2}
