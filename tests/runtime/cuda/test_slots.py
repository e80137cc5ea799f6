"""Copies of recurrent states on a GPU: where they lie, when they are made, and that no token of a request changes."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qcompile.runtime.cuda import launching, load
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.cuda.follower import follow
from qcompile.runtime.cuda.plans import PlanWriter, SharedPlan
from qcompile.runtime.devices import open_model
from qcompile.runtime.llm import _pool
from qcompile.runtime.options import LoadOptions
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.speculation import lookup
from qcompile.runtime.step import Limits, Rows
from tests.runtime.cuda.test_adapters import artifact
from tests.runtime.cuda.test_sleep import Device
from tests.support.calls import fix_calls
from tests.support.cases import first
from tests.support.fake_driver import LIMITS, PLAN, FakeDriver, FakeLaunch
from tests.support.graphs import recurrent
from tests.support.interpreted import interpreted
from tests.support.mtp import save

SLOT = 768


class CopyingDriver(FakeDriver):
    """One that writes down copies."""

    def copy(self, to: int, source: int, size: int) -> None:
        self.log.append(("copy", to, source, size))


def executor(monkeypatch: pytest.MonkeyPatch, copies: int) -> CudaExecutor:
    monkeypatch.setattr(launching, "LaunchCall", FakeLaunch)
    functions: Any = {name: name for name in PLAN["kernels"]}
    driver: Any = CopyingDriver()
    limits = LIMITS._replace(slots=4, copies=copies)
    return CudaExecutor(driver, PLAN | {"slot_bytes": SLOT}, functions, {"w": 99}, 4, limits)


def test_slots_for_copies_are_behind_those_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = executor(monkeypatch, 3)
    driver: Any = opened.driver
    assert opened.state_slots == 7 and driver.memory[opened.memory.states] == 7 * SLOT
    copies = opened.copies
    assert copies and (copies.first, copies.many) == (4, 3)
    states = opened.memory.states
    wait = opened.start([Rows([1], 5, [2], 1, slot=2)], 1)
    launched = len(driver.log)
    copies.copy(2, 6)  # behind the step that nobody has waited for
    assert driver.log[launched:] == [("copy", states + 6 * SLOT, states + 2 * SLOT, SLOT)]
    assert opened._started.turns
    wait()
    assert executor(monkeypatch, 0).copies is None


def test_other_ranks_copy_their_parts_in_the_order_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    bell, memory = os.eventfd(0), SharedPlan(1 << 20)
    plans = PlanWriter(memory, [bell])
    first_rank, second = executor(monkeypatch, 3), executor(monkeypatch, 3)
    ranks: Any = SimpleNamespace(plans=plans, check=lambda: None, close=lambda: None)
    first_rank.join(0, [0, 0], 0, ranks)
    first_rank.step([Rows([1, 2], 5, [2], 1, slot=1)], False)
    assert first_rank.copies
    first_rank.copies.copy(1, 5)
    first_rank.step([Rows([3], 7, [2], 1, slot=1)], False)
    plans.end()
    follow([second], memory, 1, bell)
    logs: list[Any] = [first_rank.driver.log, second.driver.log]  # type: ignore[attr-defined]
    moved = second.memory.states - first_rank.memory.states
    copied = [i for i, line in enumerate(logs[0]) if line[0] == "copy"]
    assert len(copied) == 1 and len(logs[0]) == 7
    _, to, source, size = logs[0][copied[0]]
    assert logs[1][copied[0]] == ("copy", to + moved, source + moved, size)
    assert [line[0] for line in logs[1]] == [line[0] for line in logs[0]]
    memory.close()
    os.close(bell)


@pytest.mark.parametrize(
    ("room", "copies", "pages"),
    [
        (load._Room(1 << 20, 96 << 20, 1 << 20, 1.0, most_copies=16), 16, 6944),  # of 64 MiB: a draft has 32 of its own
        (load._Room(1 << 20, 64 << 20, 1 << 20, 1.0, most_copies=400), 31, 6016),  # a quarter of the rest
        (load._Room(1 << 20, 64 << 20, 1 << 20, 0.5, most_copies=400), 15, 3008),
        (load._Room(0, 64 << 20, 99, 1.0, most_copies=400), 31, 99),  # no attention
        (load._Room(1 << 20, 64 << 20, 1 << 20, 0.1, most_copies=400).granted(7000), 3, 7000),  # these come first
        (load._Room(1 << 20, 64 << 20, 1 << 20, 1.0), 0, 8000),  # no prefix caching
    ],
)
def test_copies_take_a_share_of_what_is_left_for_the_cache(room: load._Room, copies: int, pages: int) -> None:
    plans = [PLAN | {"slot_bytes": 64 << 20, "scratch": {}, "arena_bytes": {"tokens": 0, "outputs": 0}}]
    limits = LIMITS._replace(slots=1, vocab=0)
    mib, after = 1 << 20, 512 + 64 + 8000  # buffers, and the slot of the one request
    fitting, got = load._fitting(plans, limits, room, after * mib, 8064 * mib)
    assert (fitting.copies, got) == (copies, pages)


def test_copies_leave_a_page_and_none_are_kept_over_a_hierarchical_cache() -> None:
    plans = [PLAN | {"slot_bytes": 1 << 20, "scratch": {}, "arena_bytes": {"tokens": 0, "outputs": 0}}]
    limits = LIMITS._replace(slots=1, vocab=0)
    room = load._Room(1 << 20, 1 << 20, 9, 1.0, most_copies=4)
    free = (512 << 20) + (2 << 20)
    assert load._fitting(plans, limits, room, free, free) == (limits, 1)
    assert load._most_copies(Limits(8, 8, 64, 64, slots=16), True) == 64
    assert load._most_copies(Limits(8, 8, 64, 64, slots=16), False) == 0
    assert load._most_copies(Limits(8, 8, 64, 64, ring_tokens=384, slots=16), True) == 0
    assert load._of_drafts(limits._replace(copies=4)).copies == 0


@pytest.mark.parametrize("reuses", [True, False])
def test_models_with_states_keep_copies_if_prefixes_are_reused(
    reuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    monkeypatch.setattr(load, "driver", lambda: device)
    monkeypatch.setattr(launching, "LaunchCall", FakeLaunch)
    monkeypatch.setitem(PLAN, "slot_bytes", SLOT)
    options = LoadOptions(max_batch=2, prefix_caching=reuses)
    opened: Any = open_model(tmp_path / "model", artifact(tmp_path / "model"), options).executor
    assert device.memory[opened.memory.states] == (10 if reuses else 2) * SLOT
    assert opened.memory.states in opened.memory.caches  # which sleep gives back
    assert (opened.copies is not None) is reuses is (_pool(opened, None).prefixes is not None)


def often(machine: Any) -> None:
    """Keep copies of short prompts, too."""
    if machine.target.copies:
        assert machine.target.copies.apart > 64
        machine.target.copies = machine.target.copies._replace(apart=0)


SMALL: dict[str, Any] = {"vocab": 40, "hidden": 128, "heads": 2, "key_heads": 1, "key_dim": 32, "value_dim": 64}
SMALL |= {"layers": 1, "attended": 128, "unit_keys": True}


def interpret_reuse(how: str) -> None:
    """Prompts that share 70 tokens, and turns of a conversation, with and without copies; one is cancelled.

    At the end, all that pages and slots hold is lost, as when a model has slept.
    """
    from tests.support.gpu_machine import Machine

    lookup.SHORTEST_MATCH = 1  # so that a lookup finds something
    graph, draw = recurrent(**SMALL, attention=how != "states alone"), random.Random(3)
    drafts: Any = {"own states": [recurrent(**SMALL, attention=False)], "lookup": ["lookup"]}.get(how, [])
    recipe, gamma = "nested" if how == "nested" else "bf16", 2 if drafts or how == "nested" else 0

    def drawn(count: int) -> list[int]:
        return [draw.randrange(40) for _ in range(count)]

    shared = drawn(70)
    prompts = [[*shared, *drawn(count)] for count in (3, 1, 61, 9)]
    greedy = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    result, cached = [], []
    for copies in (0, 3):
        machine = Machine(graph, recipe, pages=12, drafts=drafts, copies=copies)
        often(machine)
        engine = machine.engine(gamma)
        assert (engine.scheduler.snapshots is not None) is (copies > 0)
        fix_calls(engine, 2)
        requests = [engine.add(prompts[0], greedy)]
        tokens = machine.run(engine, requests)
        requests += [engine.add([*prompts[0], *tokens[0], 7, 9], greedy)]
        tokens += machine.run(engine, requests[1:])
        requests += [engine.add(prompt, greedy) for prompt in prompts[1:]]
        engine.step()
        doomed = engine.add([*prompts[0], 4, 4], greedy)
        engine.step()
        engine.cancel(doomed)
        tokens += machine.run(engine, requests[2:])
        engine.pool.forget_texts()
        for address in machine.target.memory.caches:
            machine.driver.memory[address].fill_(255)
        requests += [engine.add(prompts[1], greedy)]
        tokens += machine.run(engine, requests[-1:])
        result.append(tokens)
        cached.append([request.metrics.cached_tokens for request in requests])
        if gamma:
            assert sum(sum(request.drafts.metrics.drafted) for request in requests)
    assert result[0] == result[1] and all(len(tokens) == 5 for tokens in result[1])
    assert result[1][-1] == result[1][2]
    assert cached == [[0] * 6, [0, 64, 64, 64, 64, 0]], cached


WAYS = ("attention too", "nested", "own states", "states alone", "lookup")


@pytest.mark.parametrize("how", first(WAYS[:2], WAYS))
def test_requests_continue_from_copies_interpreted(how: str) -> None:
    interpreted(__name__, f"interpret_reuse({how!r})")


def interpret_head_reuse(folder: str) -> None:
    """Drafts by a module for multi-token prediction: its own cache has the reused positions, or has no features of
    them."""
    from tests.support.gpu_machine import Machine

    save("whole blocks", Path(folder))
    shared = [number * 7 % 50 + 40 for number in range(70)]
    greedy = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    result, cached = [], []
    for copies, gammas in ((0, (0, 0, 0)), (3, (2, 2, 0)), (3, (0, 2, 2))):
        machine = Machine(folder, "bf16", pages=9, drafts="mtp", copies=copies)
        requests, tokens = [], []
        often(machine)
        engine = machine.engine(2 if copies else 0)
        fix_calls(engine, 2)
        for number, gamma in enumerate(gammas):
            engine.speculation.gamma = gamma
            requests.append(engine.add([*shared, *range(number)], greedy))
            tokens += machine.run(engine, requests[-1:])
        assert not copies or sum(sum(request.drafts.metrics.drafted) for request in requests)
        result.append(tokens)
        cached.append([request.metrics.cached_tokens for request in requests])
    assert result[0] == result[1] == result[2]
    assert cached == [[0, 0, 0], [0, 64, 64], [0, 64, 64]]


@pytest.mark.exhaustive
def test_heads_continue_from_copies_interpreted(tmp_path: Path) -> None:
    interpreted(__name__, f"interpret_head_reuse({str(tmp_path)!r})")
