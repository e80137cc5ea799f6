"""`AsyncLLM`: outputs are those of `LLM`, as they grow; tasks share steps; what ends, ends its requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qcompile
from qcompile import AsyncLLM, SamplingParams
from qcompile.errors import ResourceError, UsageError
from qcompile.runtime.chat import ChatTemplate
from qcompile.runtime.llm import LLM
from qcompile.runtime.server.service import BusyError
from tests.runtime.server.test_server import slow_steps
from tests.runtime.server.test_tools import CALL, SAID, TEMPLATE, TOKENIZER, Say, say
from tests.support.conversations import TOOLS
from tests.support.fake import fake_llm

__all__ = ["say"]

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PROMPTS: list[Any] = ["ab", [5, 6, 7], "x" * 300, "é"]


@pytest.fixture
def llm() -> Iterator[LLM]:
    with fake_llm(tokenizer=TOKENIZER) as opened:
        opened.template = ChatTemplate({"default": TEMPLATE}, {})
        yield opened


def using(llm: LLM, use: Callable[[AsyncLLM], Awaitable[Any]], **options: Any) -> Any:
    """What a function of the model returns; all pages are free again afterwards."""

    async def run() -> Any:
        async with AsyncLLM(llm, **options) as model:
            return await use(model)

    result = asyncio.run(asyncio.wait_for(run(), 60))
    llm.engine.check()
    assert not llm.engine.busy and llm.engine.pool.free == llm.engine.pool.total
    return result


def test_outputs_are_those_of_generate(llm: LLM) -> None:
    """One after another, and all at once: then steps are shared."""

    async def together(model: AsyncLLM) -> list[Any]:
        first = await model.generate(PROMPTS[0], **GREEDY)
        steps.clear()
        return [first, *await asyncio.gather(*(model.generate(prompt, **GREEDY) for prompt in PROMPTS))]

    wanted = llm.generate(PROMPTS, **GREEDY)
    steps = llm.executor.library.steps  # type: ignore[attr-defined]
    with slow_steps(llm):
        result = using(llm, together)
    for output, want in zip(result, [wanted[0], *wanted], strict=True):
        assert output.outputs == want.outputs or output.outputs[0].token_ids == want.outputs[0].token_ids
        assert (output.prompt, output.prompt_token_ids) == (want.prompt, want.prompt_token_ids) and output.finished
    assert len(steps) < 40  # and not 12 for each prompt


def test_outputs_grow(llm: LLM) -> None:
    """Also for a caller that is slow: it misses outputs, but no text."""

    async def pieces(model: AsyncLLM) -> list[Any]:
        quick = [output.outputs[0] async for output in model.generate("ab", **options)]
        slow = []
        async for output in model.generate("ab", SamplingParams(**options, logprobs=1)):
            slow.append(output.outputs[0])
            while model.llm.engine.busy:
                await asyncio.sleep(0.01)
        return [quick, slow]

    options = GREEDY | {"max_tokens": 50}
    [wanted] = llm.generate("ab", **options)
    with slow_steps(llm):
        quick, slow = using(llm, pieces)
    assert len(quick) > len(slow) == 2 and len(slow[-1].logprobs) == 50
    for samples in (quick, slow):
        assert "".join(sample.new_text for sample in samples) == samples[-1].text == wanted.outputs[0].text
        assert [sample.finish_reason for sample in samples[-2:]] == [None, "length"]


def test_what_is_no_longer_wanted_is_cancelled(llm: LLM) -> None:
    """By the task, by `aclose`, or by leaving the loop."""

    async def first(model: AsyncLLM) -> None:
        async for _ in model.generate("cd", **LONG):
            break

    async def idle(model: AsyncLLM) -> bool:
        for _ in range(500):
            if not model.llm.engine.busy:
                return True
            await asyncio.sleep(0.01)
        return False

    async def use(model: AsyncLLM) -> None:
        task = asyncio.ensure_future(model.generate("ab", **LONG))
        while not model.llm.engine.busy:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await idle(model)
        await first(model)
        assert await idle(model)
        outputs = model.generate("ef", **LONG)
        await anext(outputs)
        assert model.llm.engine.busy
        await outputs.aclose()
        assert await idle(model)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(model.generate("gh", **LONG), 0.1)
        assert await idle(model)

    LONG = GREEDY | {"max_tokens": 900}
    with slow_steps(llm):
        using(llm, use)


def test_chats_have_messages(llm: LLM, say: Say) -> None:
    async def use(model: AsyncLLM) -> Any:
        whole = await model.chat(SAID, temperature=0, tools=TOOLS)
        grown = [output.outputs[0].message async for output in model.chat(SAID, tools=TOOLS, temperature=0)]
        forced = await model.chat(SAID, SamplingParams(max_tokens=3), tools=TOOLS, tool_choice="none")
        return whole, grown, forced

    say(CALL)
    whole, grown, forced = using(llm, use)
    (call,) = whole.outputs[0].message["tool_calls"]
    assert whole.prompt == "?" and json.loads(call["function"]["arguments"]) == {"path": "a b", "count": 2}
    assert grown[-1]["tool_calls"][0]["function"] == call["function"]
    assert forced.outputs[0].message["content"] == CALL[:3]
    assert llm.chat(SAID, temperature=0, tools=TOOLS)[0].outputs[0].text == whole.outputs[0].text


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda model: model.generate(""), "the prompt is empty"),
        (lambda model: model.generate([1, 999]), "token 999 is outside"),
        (lambda model: model.generate("x", temperatur=1), "unknown sampling option 'temperatur'"),
        (lambda model: model.generate("x", SamplingParams(), top_p=1), "SamplingParams or keywords"),
        (lambda model: model.generate(["x", "y"]), "text or a list of token numbers"),
        (lambda model: model.chat("x"), "messages must be a list"),
        (lambda model: model.chat([SAID, SAID]), "one conversation"),
        (lambda model: model.chat(SAID, tool_parser="none_such"), "none_such"),
        (lambda model: anext(model.generate("x", n=1, best_of=2)), "cannot be streamed"),
        (lambda model: model.generate("x", structured_outputs={"regex": "("}), "cannot be compiled"),
    ],
)
def test_what_is_refused(llm: LLM, use: Callable[[AsyncLLM], Awaitable[Any]], says: str) -> None:
    async def refused(model: AsyncLLM) -> None:
        with pytest.raises(UsageError, match=says):
            await use(model)
        assert (await model.generate("ab", **GREEDY)).finished

    using(llm, refused)


def test_an_output_is_used_once(llm: LLM) -> None:
    async def use(model: AsyncLLM) -> None:
        outputs = model.generate("ab", n=1, best_of=2, max_tokens=4, seed=1)
        assert (await outputs).finished
        for again in (lambda: outputs, lambda: anext(outputs)):
            with pytest.raises(UsageError, match="used already"):
                await again()

    using(llm, use)


def test_a_full_queue(llm: LLM) -> None:
    """`max_waiting` more than run at once; by default any number may wait."""

    async def many(model: AsyncLLM) -> list[Any]:
        asked = [model.generate("ab", **GREEDY) for _ in range(12)]
        return await asyncio.gather(*asked, return_exceptions=True)

    with slow_steps(llm):
        refused = [result for result in using(llm, many, max_waiting=1) if isinstance(result, BusyError)]
    assert len(refused) == 12 - llm.engine.scheduler.max_batch - 1
    assert all(result.finished for result in using(llm, many))


def test_a_model_that_is_given_stays_open(llm: LLM) -> None:
    async def use() -> None:
        model = AsyncLLM(llm)
        with pytest.raises(UsageError, match="a server uses this model"):
            llm.generate("ab")
        running = asyncio.ensure_future(model.generate("ab", **GREEDY | {"max_tokens": 900}))
        await asyncio.sleep(0.05)
        await model.aclose()
        for ended in (running, model.generate("ab")):
            with pytest.raises(ResourceError, match="the model is closed: load it again"):
                await ended

    with slow_steps(llm):
        asyncio.run(use())
    assert llm.generate("ab", **GREEDY)[0].finished
    for options in ({"threads": 1}, {"max_waiting": -1}):
        with pytest.raises(UsageError, match=next(iter(options))):
            AsyncLLM(llm, **options)  # type: ignore[arg-type]


def test_an_artifact_is_loaded_and_closed(tiny_artifact: Callable[[str], Path]) -> None:
    path = tiny_artifact("w4a8")

    async def use() -> Any:
        async with AsyncLLM(path, threads=1) as model:
            opened.append(model.llm)
            with pytest.raises(UsageError, match="dimensions"):
                await model.embed("x", dimensions=0)
            asked = model.generate("import ", temperature=0, max_tokens=8), model.embed(["x", [5, 6]], pooling="mean")
            return await asyncio.gather(*asked)

    opened: list[LLM] = []
    result, embeddings = asyncio.run(use())
    with pytest.raises(UsageError, match="closed"):
        opened[0].generate("x")
    with contextlib.closing(qcompile.load(path, threads=1)) as alone:
        assert alone.generate("import ", temperature=0, max_tokens=8)[0].outputs == result.outputs
        np.testing.assert_array_equal(alone.embed(["x", [5, 6]], pooling="mean"), embeddings)


def test_the_event_loop_goes_on(llm: LLM) -> None:
    """A step ends when the loop lets it."""
    began, go, step = threading.Event(), threading.Event(), llm.engine.step

    def held() -> Any:
        began.set()
        assert go.wait(30)
        return step()

    async def use(model: AsyncLLM) -> Any:
        asked = asyncio.ensure_future(model.generate("ab", **GREEDY))
        while not began.is_set():
            await asyncio.sleep(0.001)
        go.set()
        return await asked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "step", held)
        assert using(llm, use).finished
