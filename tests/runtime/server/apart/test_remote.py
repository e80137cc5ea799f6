"""The service of an engine that runs apart, and a server on it, beside those of one process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import qcompile
from qcompile.errors import AsleepError, BusyError, OverflowedError, ResourceError, UsageError
from qcompile.runtime.embeddings import EmbeddingOptions
from qcompile.runtime.llm import LLM
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.structured import StructuredOutputsParams
from qcompile.runtime.server.apart.front import LOST, Asks, Told
from qcompile.runtime.server.apart.model import RemoteModel
from qcompile.runtime.server.apart.remote import RemoteService
from qcompile.runtime.server.mailbox import Answer
from qcompile.runtime.server.service import Service
from tests.runtime.server import test_server
from tests.runtime.server.test_server import Build, Client
from tests.support.apart import hosted, serving_apart
from tests.support.fake import fake_llm

BROKEN = 250
FIXTURES = "llm", "alone", "another"
globals().update(  # the same tests, by another `client`
    {
        name: each
        for name, each in vars(test_server).items()
        if name in FIXTURES or "client" in getattr(each, "__annotations__", ())
    }
)


@pytest.fixture(scope="module")
def client(llm: LLM, alone: list[str], tiny_artifact: Build) -> Iterator[Client]:
    template: Any = lambda messages: "".join(m["content"] for m in messages)  # noqa: E731
    with serving_apart(llm, tiny_artifact("w4a8"), template=template) as (port, service):
        yield Client(port, service)
    llm.engine.check()


def by_both(llm: LLM, work: Callable[[RemoteService, Service], Any], max_waiting: int = 8) -> Any:
    """What `work` gives with a remote service and the engine's own."""
    with hosted(llm, max_waiting) as (host, asking, telling):
        asks, told = Asks(asking), Told(telling)
        model = RemoteModel(Path(), {}, host.facts, lambda tokens: asks.send(("end_at", tokens)))
        remote = RemoteService(model, max_waiting, asks.send)

        def heed(message: Any) -> None:
            getattr(remote, message[0])(*message[1:])

        async def run() -> Any:
            await asks.connect()
            await told.connect(heed, remote)
            try:
                return await asyncio.wait_for(work(remote, host.service), 60)
            finally:
                asking.shutdown(2)

        return asyncio.run(run())


async def all_of(answer: Answer) -> list[RequestOutput]:
    return [output async for output in answer]


def told(output: RequestOutput) -> Any:
    return [vars(sample) | {"new_text": ""} for sample in output.outputs], output.prompt_logprobs, output.dropped_tokens


MANY = [
    SamplingParams(max_tokens=30, temperature=0, logprobs=3),
    SamplingParams(max_tokens=30, n=3, seed=1, temperature=0.7),
    SamplingParams(max_tokens=9, n=2, best_of=4, seed=1, temperature=0.7),
    SamplingParams(max_tokens=9, prompt_logprobs=2, temperature=0, logit_bias={7: 3.0}),
    SamplingParams(max_tokens=20, temperature=0, stop_token_ids=[5, 9]),
    SamplingParams(max_tokens=0, prompt_logprobs=0),
]
STREAMED = [params for params in MANY if params.generated is params]


@pytest.mark.parametrize(("params", "partial"), [(one, False) for one in MANY] + [(one, True) for one in STREAMED])
def test_outputs_are_those_of_one_process(params: SamplingParams, partial: bool) -> None:
    prompts = [[1, 2, 3], [4] * 70]

    async def ask(remote: RemoteService, service: Service) -> list[RequestOutput]:
        last = {output.request_id: output for output in await all_of(remote.submit(prompts, params, partial))}
        return [last[number] for number in sorted(last)]

    with fake_llm(max_batch=4) as llm:
        wanted = llm.generate(prompts, params)
        got = by_both(llm, ask)
        assert list(map(told, got)) == list(map(told, wanted)) and not llm.engine.busy
        assert all(output.finished and output.metrics.finished_time > 0 for output in got)


def test_dropped_answers_free_their_pages_and_are_counted() -> None:
    async def ask(remote: RemoteService, service: Service) -> None:
        ended: list[str] = []
        remote.cancelled = lambda tokens, reasons: ended.extend(reasons)
        answer = remote.submit([[1], [2]], SamplingParams(max_tokens=900, ignore_eos=True, n=2), True)
        async for _ in answer:
            break
        answer.cancel()
        while len(ended) < 4 or service.llm.engine.busy:
            await asyncio.sleep(0.01)
        assert ended == ["abort"] * 4 and service.llm.engine.pool.used == 0 and remote.waiting == 0

    with fake_llm(max_batch=4) as llm:
        by_both(llm, ask)


def test_what_is_refused_is_refused_at_once() -> None:
    async def ask(remote: RemoteService, service: Service) -> None:
        with pytest.raises(UsageError, match="stop texts cannot be found"):
            remote.submit([[1]], SamplingParams(stop="x"))
        with pytest.raises(UsageError, match="at most 3 may run and wait"):
            remote.submit([[1]] * 4, SamplingParams())
        with pytest.raises(UsageError, match="no adapter 'a': none was loaded"):
            remote.submit([[1]], SamplingParams(lora="a"))
        with pytest.raises(UsageError, match="no tokenizer: structured_outputs need one"):
            await remote.compile(StructuredOutputsParams(regex="a"))
        kept = [remote.submit([[1]], SamplingParams(max_tokens=400, ignore_eos=True)) for _ in range(3)]
        with pytest.raises(BusyError, match="3 samples run or wait already"):
            remote.submit([[1]], SamplingParams())
        await remote.refresh()
        assert remote.running <= 2 and remote.running + remote.waiting == 3
        for one in kept:
            assert (await all_of(one))[-1].finished
        assert len(await all_of(remote.submit([[1]] * 3, SamplingParams(max_tokens=2)))) == 3

    with fake_llm(max_batch=2) as llm:
        by_both(llm, ask, max_waiting=1)


def test_an_overflow_ends_one_answer_alone() -> None:
    async def ask(remote: RemoteService, service: Service) -> None:
        with pytest.raises(OverflowedError, match="not finite"):
            await all_of(remote.submit([[5, BROKEN]], SamplingParams(max_tokens=9)))
        assert len(await all_of(remote.submit([[1]], SamplingParams(max_tokens=2)))) == 1

    with fake_llm(max_batch=2) as llm:
        llm.executor.library.broken = BROKEN  # type: ignore[attr-defined]
        by_both(llm, ask)


def test_embeddings_and_sleep(tiny_artifact: Build) -> None:
    texts = [[1, 2, 3], [4, 5]]

    async def ask(remote: RemoteService, service: Service) -> Any:
        await remote.sleep(1)
        assert remote.asleep and service.asleep
        with pytest.raises(AsleepError):
            remote.submit([[1]], SamplingParams())
        await remote.wake_up()
        with pytest.raises(UsageError, match="level must be 1 or 2"):
            await remote.sleep(3)
        assert len(await all_of(remote.submit([[1]], SamplingParams(max_tokens=2)))) == 1
        return await remote.embed(EmbeddingOptions("mean", dimensions=5), texts)

    with qcompile.load(tiny_artifact("w4a8"), threads=1, max_batch=2) as llm:
        wanted = EmbeddingOptions("mean", dimensions=5).embeddings(llm.engine, texts)
        assert (by_both(llm, ask) == wanted).all()


def test_who_waits_is_told_when_the_engine_s_process_is_gone() -> None:
    async def ask(remote: RemoteService, service: Service) -> None:
        answer = remote.submit([[1]], SamplingParams(max_tokens=900, ignore_eos=True))
        remote.lost(ResourceError(LOST))
        with pytest.raises(ResourceError, match="the engine has ended: the process of the engine has ended"):
            await all_of(answer)
        with pytest.raises(ResourceError, match="the engine has ended"):
            await remote.compile(StructuredOutputsParams(regex="a"))

    with fake_llm(max_batch=2) as llm:
        by_both(llm, ask)


def test_metrics_are_told_while_as_many_calls_wait_as_may() -> None:
    async def ask(remote: RemoteService, service: Service) -> None:
        answer = remote.submit([[1]], SamplingParams(max_tokens=900, ignore_eos=True))
        calls = [asyncio.ensure_future(remote.wake_up()) for _ in range(2)]  # they wait for the request to end
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="2 requests wait already"):
            await remote.wake_up()
        await remote.refresh()
        answer.cancel()
        await asyncio.gather(*calls)

    with fake_llm(max_batch=2) as llm:
        by_both(llm, ask, max_waiting=0)


def test_an_answer_collected_in_another_thread_is_dropped_on_the_loop() -> None:
    async def ask(remote: RemoteService, service: Service) -> None:
        asked, send = [], remote._ask
        remote._ask = lambda message: (asked.append((message[0], threading.get_ident())), send(message))[1]
        answer = remote.submit([[1]], SamplingParams(max_tokens=900, ignore_eos=True))
        await asyncio.to_thread(answer.cancel)
        while service.llm.engine.busy or len(asked) < 2:
            await asyncio.sleep(0.01)
        assert asked == [("submit", threading.get_ident()), ("drop", threading.get_ident())] and remote.waiting == 0

    with fake_llm(max_batch=2) as llm:
        by_both(llm, ask)


def test_an_idle_engine_is_not_asked_for_ever(client: Client) -> None:
    """`/metrics` tells what the engine's process knows."""
    for _ in range(100):
        text = client.open("/metrics").read().decode()
        if 'qcompile_running_samples{model_name="tiny"} 0.0' in text:
            return
        time.sleep(0.05)
    raise AssertionError(text)
