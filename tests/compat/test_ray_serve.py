"""Two CPU replicas of pycode-1m on Ray Serve: replies, streams, conversations, and what a killed replica costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import qcompile

pytest.importorskip("ray.serve")
from benchmarks import ray_serve

REQUESTS = 240


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "pycode-1m"
    qcompile.build(str(ray_serve.ROOT / "samples" / "pycode-1m"), path, recipe="w4a8")
    return path


@pytest.fixture(scope="module")
def expected(artifact: Path) -> dict[str, str]:
    return ray_serve.alone(artifact, ray_serve.prompts())


@pytest.fixture(scope="module")
def url(artifact: Path) -> Iterator[str]:
    with ray_serve.cluster() as url:
        ray_serve.deploy(artifact)
        yield url


async def completion(client: aiohttp.ClientSession, **fields: Any) -> dict[str, Any]:
    async with client.post("/v1/completions", json={"temperature": 0, "max_tokens": 4} | fields) as response:
        result: dict[str, Any] = await response.json()
        assert response.status == 200, result
        return result


def test_turns_of_a_conversation_find_their_beginning(url: str) -> None:
    """In the cache of a replica, while several conversations take turns; two replicas have them."""

    async def test() -> None:
        await ray_serve.both_answer(url)
        async with aiohttp.ClientSession(url) as client:
            texts = [f"# conversation {at}\n" + f"value_{at} = {at}\n" * 60 for at in range(6)]
            for turn in range(3):
                for at, text in enumerate(texts):
                    usage = (await completion(client, prompt=text))["usage"]
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
                    assert (cached > 0.5 * usage["prompt_tokens"]) == bool(turn), (turn, at, usage)
                    texts[at] += f"next_{turn} = {at}\n" * 20
        assert await _replicas_that_answered(url) == 2

    asyncio.run(test())


async def _replicas_that_answered(url: str) -> int:
    async with aiohttp.ClientSession(url) as client, client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    counts = [line for line in lines if line.startswith("qcompile_prompt_tokens_total")]
    return sum(float(line.rpartition(" ")[2]) > 0 for line in counts)


def test_errors_and_paths_are_those_of_the_server(url: str) -> None:
    async def test() -> None:
        async with aiohttp.ClientSession(url) as client:
            refused = await client.post("/v1/completions", json={"prompt": "x", "model": "other"})
            assert refused.status == 404 and "there is no model" in (await refused.json())["error"]["message"]
            assert (await client.get("/nothing")).status == 404
            assert [one["id"] for one in (await (await client.get("/v1/models")).json())["data"]] == [ray_serve.MODEL]

    asyncio.run(test())


def test_a_client_that_leaves_ends_its_samples(url: str) -> None:
    async def test() -> None:
        long = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "n": 8, "stream": True}
        async with aiohttp.ClientSession(url) as client:
            response = await client.post("/v1/completions", json=long)
            assert (await response.content.readline()).startswith(b"data: ")
            assert await ray_serve.metric(url, "qcompile_running_samples") > 0
            response.close()
        async with asyncio.timeout(20):
            while await ray_serve.metric(url, "qcompile_running_samples"):
                await asyncio.sleep(0.1)

    asyncio.run(test())


def test_a_killed_replica_costs_its_requests_alone(url: str, expected: dict[str, str]) -> None:
    result = asyncio.run(ray_serve.killed_under_load(url, REQUESTS, expected))
    assert (result.wrong, result.lost) == (0, 0) and result.right >= REQUESTS - ray_serve.CLIENTS, result
    counted = asyncio.run(ray_serve.metric(url, "qcompile_lost_requests_total"))
    assert counted == result.in_flight_errors and all("send it again" in one for one in result.messages), result


def test_an_update_costs_no_requests(url: str, artifact: Path, expected: dict[str, str]) -> None:
    result = asyncio.run(ray_serve.replaced_under_load(url, REQUESTS, expected, artifact))
    assert result.right == REQUESTS, json.dumps(vars(result))
