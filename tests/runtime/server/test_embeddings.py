"""/v1/embeddings: OpenAI's own client gets the embeddings that Python gives."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import qcompile
from qcompile.errors import BusyError, ResourceError, UsageError
from qcompile.runtime.server.service import Service
from tests.runtime.server.test_server import Client, serving
from tests.support.fake import byte_tokenizer, fake_llm

PATH = "/v1/embeddings"
TEXTS = ["import os", "x", "def main(arguments):\n    return " + "value + " * 60]


@pytest.fixture(scope="module")
def artifact(tiny_artifact: Callable[[str], Path]) -> Path:
    return tiny_artifact("f32")


@pytest.fixture(scope="module")
def wanted(artifact: Path) -> Callable[..., np.ndarray]:
    with qcompile.load(artifact, threads=1) as llm:
        made = {each: llm.embed(TEXTS, **dict(each)) for each in ((), (("pooling", "mean"), ("dimensions", 7)))}
    return lambda **options: made[tuple(options.items())]


@pytest.fixture(scope="module")
def client(artifact: Path) -> Iterator[Client]:
    with qcompile.load(artifact, threads=1, max_batch=2) as llm, serving(llm) as opened:
        yield opened
        llm.engine.check()


@pytest.fixture(scope="module")
def embeddings(client: Client) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key="none", max_retries=0) as opened:
        yield opened.embeddings


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_embeddings(client: Client, embeddings: Any, wanted: Callable[..., np.ndarray], form: Any) -> None:
    options = {} if form is None else {"encoding_format": form}
    result = embeddings.create(model="tiny", input=TEXTS, **options)
    assert [one.index for one in result.data] == [0, 1, 2] and result.model == "tiny"
    values = [one.embedding for one in result.data]
    if form == "base64":
        values = [np.frombuffer(base64.b64decode(value), "<f4") for value in values]
    np.testing.assert_array_equal(np.array(values, np.float32), wanted())
    ids = [client.service.llm.encode(text) for text in TEXTS]
    assert result.usage.prompt_tokens == result.usage.total_tokens == sum(map(len, ids))
    for given, row in ((ids[0], 0), (ids[2:], 2), (TEXTS[1], 1)):
        np.testing.assert_array_equal(embeddings.create(model="tiny", input=given).data[0].embedding, wanted()[row])


def test_embeddings_are_counted(client: Client, embeddings: Any) -> None:
    def counted() -> dict[str, float]:
        lines = client.open("/metrics").read().decode().splitlines()
        named = [line.partition("{") for line in lines if line.startswith("qcompile_embedding")]
        return {name: float(rest.rpartition(" ")[2]) for name, _, rest in named if name.endswith("_total")}

    before = counted()
    embeddings.create(model="tiny", input=[[89], [90, 91]])
    grown = {name: value - before[name] for name, value in counted().items()}
    assert grown == {"qcompile_embeddings_total": 2, "qcompile_embedding_tokens_total": 3}


def test_pooling_and_dimensions(embeddings: Any, wanted: Callable[..., np.ndarray]) -> None:
    result = embeddings.create(model="tiny", input=TEXTS, dimensions=7, extra_body={"pooling": "mean"})
    values = np.array([one.embedding for one in result.data], np.float32)
    np.testing.assert_array_equal(values, wanted(pooling="mean", dimensions=7))


def test_embeddings_and_completions_at_once(client: Client, embeddings: Any, wanted: Callable[..., np.ndarray]) -> None:
    alone = client.complete("def main(", max_tokens=60)["choices"]
    result: list[Any] = []
    writers = [
        threading.Thread(target=lambda: result.append(client.complete("def main(", max_tokens=60)["choices"]))
        for _ in range(3)
    ]
    for writer in writers:
        writer.start()
    for _ in range(6):
        values = [one.embedding for one in embeddings.create(model="tiny", input=TEXTS).data]
        np.testing.assert_array_equal(np.array(values, np.float32), wanted())
    for writer in writers:
        writer.join()
    assert result == [alone] * 3


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "input: Field required"),
        ({"input": []}, "input has 0 texts: give 1 to 2048"),
        ({"input": ["x"] * 2049}, "input has 2049 texts"),
        ({"input": ""}, "the prompt is empty"),
        ({"input": 5}, "prompt must be"),
        ({"input": "x", "dimensions": 65}, "dimensions must be at most 64"),
        ({"input": "x", "dimensions": 0}, "dimensions must be a whole number of at least 1"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format: Input should be 'float' or 'base64'"),
        ({"input": "x", "pooling": "max"}, "pooling: Input should be 'last' or 'mean'"),
        ({"input": "x", "task": "classify"}, "task: is not supported"),
        ({"input": [[5] * 300]}, "it has 300 tokens"),
    ],
)
def test_what_is_refused(client: Client, body: dict[str, Any], said: str) -> None:
    assert said in client.refused(400, body, PATH)


def test_a_model_without_hidden_states() -> None:
    with fake_llm(tokenizer=byte_tokenizer()) as llm, serving(llm) as client:
        assert client.refused(400, {"input": "x"}, PATH).startswith("this artifact gives no hidden states: ")


def test_calls_run_between_steps_and_end_with_the_service() -> None:
    def refuse() -> None:
        raise UsageError("no")

    async def use(service: Service) -> None:
        assert await service.call(lambda: 5) == 5
        with pytest.raises(UsageError, match="no"):
            await service.call(refuse)
        gone = asyncio.ensure_future(service.call(lambda: started.set() or released.wait(20)))
        await asyncio.to_thread(started.wait, 20)
        waiting = [asyncio.ensure_future(service.call(json.dumps)) for _ in range(service.most - 1)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="requests wait already"):
            await service.call(refuse)
        for one in (gone, *waiting):
            one.cancel()
        await asyncio.gather(gone, *waiting, return_exceptions=True)
        released.set()
        late = asyncio.ensure_future(service.call(lambda: service.end() or 6))
        assert await late == 6
        await asyncio.to_thread(service.close)
        with pytest.raises(ResourceError, match="the server is closing"):
            await service.call(refuse)

    started, released = threading.Event(), threading.Event()
    with fake_llm() as llm:
        service = Service(llm, 2)
        try:
            asyncio.run(use(service))
        finally:
            released.set()
            service.close()
