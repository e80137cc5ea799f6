"""Sleep: memory is given back, all use is refused, and after waking every token is the one of before."""

from __future__ import annotations

import asyncio
import ctypes
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import qcompile
from qcompile import LLM, AsyncLLM, SamplingParams
from qcompile.artifact.layout import ADAPTER_TABLE, ADAPTER_TABLE_BYTES
from qcompile.errors import ArtifactError, AsleepError, UnsupportedError, UsageError
from qcompile.runtime import loader
from qcompile.runtime.cpu.sleep import CpuMemory
from tests.runtime.server.test_server import Client, serving
from tests.runtime.server.test_service import held_after_a_step
from tests.support.fake import byte_tokenizer, fake_llm

Build = Callable[[str], Path]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = "import os\n\n\nclass Reader:\n" * 12
"""Longer than a page."""


class Memory:
    """Counts; what it is told to raise, it raises."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.error: Exception | None = None

    def release(self, level: int) -> None:
        self.calls.append(level)

    def restore(self) -> None:
        self.calls.append("restore")
        if self.error:
            raise self.error


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def fake(memory: Memory) -> Iterator[LLM]:
    with fake_llm(tokenizer=byte_tokenizer()) as llm:
        llm.engine.sleep.memory = memory
        yield llm


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate([PROMPT, "x"], PARAMS)]


def in_memory(arena: loader.Arena) -> int:
    """Bytes of an arena that take memory."""
    pages = -(-arena.size // 4096)
    state = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    given = ctypes.c_void_p(arena.address), ctypes.c_size_t(arena.size), state
    assert libc.mincore(*given) == 0, ctypes.get_errno()
    return 4096 * sum(page & 1 for page in state)


@pytest.mark.parametrize("recipe, level", [("w4a8", 1), ("qspec", 2)])
def test_a_model_gives_its_memory_back_and_wakes_as_it_was(tiny_artifact: Build, recipe: str, level: int) -> None:
    with qcompile.load(tiny_artifact(recipe), threads=1, max_batch=2, kv_cache_bytes=16 << 20) as llm:
        executor: Any = llm.executor
        artifact: Any = llm._keep
        arenas = [artifact.weights, *executor.caches]
        awake = tokens_of(llm)
        assert all(map(in_memory, arenas))
        llm.sleep(level)
        llm.sleep()
        assert llm.is_sleeping and not any(map(in_memory, arenas))
        uses = (lambda: llm.generate("x"), lambda: llm.logits([[1, 2]]), lambda: llm.embed("x"))
        for use in (*uses, lambda: llm.perplexity(["some text"], window=2)):
            with pytest.raises(AsleepError, match="the model is asleep: wake it first"):
                use()
        llm.wake_up()
        llm.wake_up()
        assert not llm.is_sleeping
        again = llm.generate([PROMPT, "x"], PARAMS)
        assert [output.outputs[0].token_ids for output in again] == awake
        assert again[0].metrics.cached_tokens == 0
        llm.engine.check()
        freed = [weakref.ref(arena) for arena in arenas]
        del artifact, arenas
        llm.close()
        assert not any(arena() for arena in freed)
        with pytest.raises(UnsupportedError, match="cannot sleep: it is closed; load it again"):
            llm.sleep()


def test_weights_that_have_changed_do_not_wake(tiny_artifact: Build, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_artifact("w4a8"), tmp_path / "copy")
    with qcompile.load(path, threads=1, max_batch=2) as llm:
        artifact: Any = llm._keep
        awake, file = tokens_of(llm), path / next(iter(artifact.places))
        content = file.read_bytes()
        llm.sleep()
        for wrong in (content[:-1] + bytes([content[-1] ^ 1]), content[:-1]):
            file.write_bytes(wrong)
            with pytest.raises(ArtifactError, match=f"{path} has changed since the model was loaded: {file.name}"):
                llm.wake_up()
            assert llm.is_sleeping and not in_memory(artifact.weights)
        file.write_bytes(content)
        llm.wake_up()
        assert tokens_of(llm) == awake


def test_what_loading_wrote_over_weights_is_written_again(tiny_artifact: Build) -> None:
    """As the table of adapters, which is a weight of zeros in the artifact."""
    artifact = loader.load_artifact(tiny_artifact("w4a8"))
    artifact = replace(artifact, names=(ADAPTER_TABLE, *artifact.names[1:]))
    weight = (ctypes.c_ubyte * ADAPTER_TABLE_BYTES).from_address(artifact.pointers[0])
    weight[:] = table = bytes(range(ADAPTER_TABLE_BYTES))
    memory = CpuMemory(artifact, [])
    memory.release(1)
    assert not any(weight)
    memory.restore()
    assert bytes(weight) == table


def test_sleep_is_refused_where_it_is_not_possible(fake: LLM, memory: Memory) -> None:
    for level in (0, 3, True, "1"):
        with pytest.raises(UsageError, match="level must be 1 or 2, not"):
            fake.sleep(level)  # type: ignore[arg-type]
    stream = fake.stream("x", PARAMS)
    next(stream)
    with pytest.raises(UsageError, match="unfinished requests: let them end"):
        fake.sleep()
    list(stream)
    fake.engine.sleep.memory = "it is a test"
    with pytest.raises(UnsupportedError, match="this model cannot sleep: it is a test"):
        fake.sleep()
    assert memory.calls == [] and not fake.is_sleeping


def test_a_shared_model_sleeps_when_its_requests_have_ended(fake: LLM, memory: Memory) -> None:
    """Those that it has, and not those that come later; waking comes after."""

    async def use() -> None:
        async with AsyncLLM(fake) as llm:
            with held_after_a_step(llm._service) as made:
                running = asyncio.ensure_future(llm.generate("x", PARAMS))
                await asyncio.to_thread(made.wait, 30)
                falling = asyncio.ensure_future(llm.sleep(2))
                await asyncio.sleep(0)
                with pytest.raises(AsleepError, match="the model is falling asleep: wake it first"):
                    await llm.generate("z", PARAMS)
                assert not falling.done() and memory.calls == []
            await falling
            assert len((await running).outputs[0].token_ids) == 24
            assert llm.is_sleeping and memory.calls == [2]
            with pytest.raises(AsleepError, match="the model is asleep"):
                await llm.generate("z", PARAMS)
            memory.error = ArtifactError("changed")
            with pytest.raises(ArtifactError, match="changed"):
                await llm.wake_up()
            assert llm.is_sleeping
            memory.error = None
            asleep_again = asyncio.gather(llm.wake_up(), llm.sleep(), llm.wake_up())
            await asleep_again
            assert not llm.is_sleeping and memory.calls == [2, "restore", "restore", 1, "restore"]
            assert (await llm.generate("z", PARAMS)).finished

    asyncio.run(asyncio.wait_for(use(), 60))


def asleep_gauge(client: Client) -> float:
    lines = client.open("/metrics").read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("qcompile_asleep{"))


def test_clients_with_the_key_let_the_model_sleep(fake: LLM, memory: Memory) -> None:
    key = {"Authorization": "Bearer k"}
    with serving(fake, api_key="k", enable_sleep=True) as client:

        def post(path: str) -> tuple[int, Any]:
            return client.ask(path, b"", **key)

        assert client.ask("/sleep", b"")[0] == client.ask("/wake_up", b"")[0] == client.ask("/is_sleeping")[0] == 401
        for wrong in ("/sleep?level=0", "/sleep?level=x", "/sleep?mode=keep", "/wake_up?tags=weights"):
            assert post(wrong)[0] == 400
        assert memory.calls == [] and asleep_gauge(client) == 0 and client.ask("/health") == (200, {"status": "ok"})
        assert post("/sleep") == post("/sleep?level=2") == (200, {"is_sleeping": True})
        assert client.ask("/is_sleeping", **key) == (200, {"is_sleeping": True})
        assert asleep_gauge(client) == 1 and client.ask("/health") == (200, {"status": "asleep"})
        assert "the model is asleep: wake it" in client.refused(503, {"prompt": "x"}, **key)
        memory.error = ArtifactError("changed")
        assert client.refused(503, b"", "/wake_up", **key) == "changed"
        memory.error = None
        assert post("/wake_up") == (200, {"is_sleeping": False})
        assert client.ask("/v1/completions", {"prompt": "x"}, **key)[0] == 200
    assert memory.calls == [1, "restore", "restore"]


def test_sleep_is_offered_only_with_the_option_and_a_key(fake: LLM) -> None:
    with serving(fake, api_key="k") as client:
        assert client.ask("/sleep", b"", Authorization="Bearer k")[0] == 404
    with pytest.raises(UsageError, match="--enable-sleep lets clients stop the model from answering: give an API key"):
        serving(fake, enable_sleep=True).__enter__()
