"""The engine's thread: what it takes, what it refuses, and what it ends, as its callers see it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from types import SimpleNamespace

import pytest

from qcompile.errors import BusyError, OverflowedError, ResourceError, UsageError
from qcompile.runtime.llm import LLM
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.ranks.failure import RankFailure
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.server import service as service_module
from qcompile.runtime.server.service import Answer, Service
from tests.support.calls import fix_calls
from tests.support.fake import fake_llm

pytestmark = pytest.mark.usefixtures("executors")

BROKEN = 250


def params(tokens: int, n: int = 1, stop: str | None = None) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=tokens, seed=1, ignore_eos=True, stop=stop)


@contextmanager
def opened(max_batch: int, max_waiting: int) -> Iterator[tuple[Service, LLM]]:
    with fake_llm(max_batch=max_batch) as llm:
        service = Service(llm, max_waiting)
        try:
            yield service, llm
        finally:
            service.close()


@contextmanager
def held_after_a_step(service: Service) -> Iterator[threading.Event]:
    """The engine's thread makes one step, tells of that by the event given here, and waits."""
    made, go, step = threading.Event(), threading.Event(), service.llm.engine.step

    def one() -> object:
        result = step()
        made.set()
        assert go.wait(30)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.llm.engine, "step", one)
        try:
            yield made
        finally:
            go.set()


def test_a_rank_that_fails_ends_the_service_while_it_waits() -> None:
    with fake_llm() as llm:
        failure = RankFailure()
        llm.executor.ranks = SimpleNamespace(failure=failure, close=lambda: None)  # type: ignore[attr-defined]
        service, told = Service(llm, 2), Queue[BaseException]()
        service.failed = told.put
        assert failure.note("rank 1 has ended") and not failure.note("rank 2 has ended")
        assert "rank 1 has ended" in str(told.get(timeout=5))
        service.close()
        with pytest.raises(ResourceError, match="the engine has ended: rank 1"):
            service.check()


def test_a_model_that_is_served_refuses_other_use() -> None:
    """Steps of the server's would take the outputs, and `generate` would wait for ever."""
    with opened(4, 4) as (service, llm):
        for use in (lambda: llm.generate([[1, 2]]), lambda: llm.logits([[1, 2]]), llm.close, lambda: Service(llm, 4)):
            with pytest.raises(UsageError, match="a server uses this model"):
                use()
        with pytest.raises(UsageError, match="a server uses this model"):
            next(llm.stream([[1, 2]]))
        service.close()
        assert llm.generate([[1, 2]], params(3))[0].finished
        running = llm.stream([[1, 2]], params(9))
        next(running)
        with pytest.raises(UsageError, match="unfinished requests"):
            Service(llm, 4)
        assert list(running)[-1].finished
        last = llm.stream([[1, 2]], params(1))
        assert next(last).finished
        with contextlib.closing(Service(llm, 4)):
            assert list(last) == []  # a stream ends beside a server if its requests have ended


async def all_of(answer: Answer) -> list[RequestOutput]:
    return [output async for output in answer]


def test_what_runs_does_not_wait() -> None:
    async def ask(service: Service) -> None:
        with held_after_a_step(service) as made:
            answer = service.submit([[1], [2], [3]], params(4))
            another = service.submit([[4]], params(4, n=2))
            await asyncio.to_thread(made.wait, 30)
            assert (service.running, service.waiting) == (2, 3)
        await all_of(answer)
        await all_of(another)
        assert (service.running, service.waiting) == (0, 0)

    with opened(max_batch=2, max_waiting=8) as (service, _):
        asyncio.run(ask(service))


def test_pieces_of_a_stream_are_held_back_while_many_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not the first one nor the last, and nothing is lost; what is not streamed wakes nobody before its end."""
    counts: dict[str, int] = {}

    async def texts(name: str, answer: Answer) -> list[int]:
        outputs = await all_of(answer)
        counts[name] = len(outputs)
        return outputs[-1].outputs[0].token_ids

    async def ask(service: Service) -> None:
        given = [service.submit([[i, 9]], params(200), partial=True) for i in (1, 2, 3)]
        whole = service.submit([[4, 9]], params(200))
        result = await asyncio.gather(*(texts(str(i), each) for i, each in enumerate([*given, whole])))
        assert result == [alone(i) for i in (1, 2, 3, 4)]

    def alone(first: int) -> list[int]:
        with fake_llm() as llm:
            return llm.generate([[first, 9]], params(200))[0].outputs[0].token_ids

    for seconds, least, most in ((1e3, 1, 2), (0.0, 5, 200)):
        monkeypatch.setattr(service_module, "_PIECE_SECONDS", seconds)
        monkeypatch.setattr(service_module, "_MOST_PIECE_SECONDS", seconds)
        with opened(4, 4) as (service, llm):
            fix_calls(llm.engine, 4)
            asyncio.run(ask(service))
            assert not service._grown
        assert all(least <= counts[name] <= most for name in "012") and counts["3"] == 1


def test_as_many_samples_are_taken_as_may_run_and_wait() -> None:
    """More in one request could never be answered; more at once may come back later."""

    async def ask(service: Service) -> None:
        assert len(await all_of(service.submit([[1]] * 5, params(2)))) == 5
        assert len(await all_of(service.submit([[1]], params(2, n=5)))) == 1
        for prompts, n in ((6, 1), (1, 6), (2, 3)):
            with pytest.raises(UsageError, match="6 samples in one request: at most 5 may run and wait"):
                service.submit([[1]] * prompts, params(2, n))
        with held_after_a_step(service):
            first = service.submit([[1]] * 2, params(2))
            with pytest.raises(BusyError, match="2 samples run or wait already, of at most 5"):
                service.submit([[1]] * 2, params(2, n=2))
            with pytest.raises(BusyError):
                service.admit(4, params(2))  # before prompts are encoded
            second = service.submit([[1]] * 3, params(2))
        assert len(await all_of(first)) == 2 and len(await all_of(second)) == 3

    with opened(max_batch=2, max_waiting=3) as (service, _):
        asyncio.run(ask(service))


def test_what_the_model_cannot_do_never_reaches_the_engine() -> None:
    """There it would end the thread, and with it what all others wait for."""

    async def ask(service: Service) -> None:
        with pytest.raises(UsageError, match="stop texts cannot be found"):
            service.submit([[1]], params(2, stop="x"))
        assert service.waiting == 0 and len(await all_of(service.submit([[1]], params(2)))) == 1

    with opened(max_batch=2, max_waiting=2) as (service, _):
        asyncio.run(ask(service))
    assert service.failure is None


@pytest.mark.parametrize("partial", [False, True])
def test_an_overflow_of_one_sample_ends_the_others_at_once(partial: bool) -> None:
    async def ask(service: Service, llm: LLM) -> None:
        ended: list[str | None] = []
        service.cancelled = lambda tokens, reasons: ended.extend(reasons)
        with pytest.raises(OverflowedError):
            await all_of(service.submit([[3]], params(900, n=3), partial))
        assert sorted(map(str, ended)) == ["abort", "abort", "error"]
        assert not llm.engine.busy and not service._owner and not service._grown

    with opened(max_batch=4, max_waiting=4) as (service, llm):
        llm.executor.library.broken = BROKEN  # type: ignore[attr-defined]
        asyncio.run(ask(service, llm))


def test_an_overflow_ends_all_of_its_job_at_once() -> None:
    """Though the caller keeps the answer: what it cannot read takes no more steps, and is counted."""

    async def ask(service: Service, llm: LLM) -> None:
        ended: list[str | None] = []
        service.cancelled = lambda tokens, reasons: ended.extend(reasons)
        kept = service.submit([[3], [5, BROKEN], [7]], params(500))
        with pytest.raises(OverflowedError):
            await all_of(kept)
        assert ended == ["abort", "error", "abort"]
        assert len(await all_of(service.submit([[1]], params(2)))) == 1
        assert not llm.engine.busy and llm.engine.pool.used == 0 and not service._owner
        kept.cancel()

    with opened(max_batch=4, max_waiting=4) as (service, llm):
        llm.executor.library.broken = BROKEN  # type: ignore[attr-defined]
        asyncio.run(ask(service, llm))
