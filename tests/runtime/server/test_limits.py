"""What the HTTP server asks of requests before they are read: their length, their key; and how it counts them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qcompile.runtime.llm import LLM
from qcompile.runtime.server import bodies
from tests.runtime.server.test_server import Client, serving
from tests.support.fake import CONTEXT, byte_tokenizer, fake_llm


@pytest.fixture
def llm() -> Iterator[LLM]:
    with fake_llm(tokenizer=byte_tokenizer()) as opened:
        yield opened


def responses(client: Client) -> dict[str, float]:
    """By path and status, as the metrics have them."""
    lines = client.open("/metrics").read().decode().splitlines()
    counted = (
        line.removeprefix("qcompile_responses_total").rsplit(" ", 1) for line in lines if "responses_total{" in line
    )
    return {labels: float(count) for labels, count in counted}


def test_paths_that_clients_make_up_are_counted_as_one(llm: LLM) -> None:
    """Each label is kept for as long as the server runs."""
    with serving(llm) as client:
        for path in ("/v1/nothing", "/v1/nothing/else", "/", "/metrics/x?y"):
            assert client.ask(path)[0] == 404
        client.ask("/v1/models/a/b")
        client.ask("/v1/models/c")
        client.ask("/v1/models")
        assert responses(client) == {
            '{model_name="tiny",path="other",status="404"}': 4,
            '{model_name="tiny",path="/v1/models/{name:path}",status="404"}': 2,
            '{model_name="tiny",path="/v1/models",status="200"}': 1,
        }


def padded(size: int) -> bytes:
    """A request of `size` bytes."""
    body = b'{"prompt": "x", "max_tokens": 1}'
    return body + b" " * (size - len(body))


@pytest.mark.parametrize("a_token", [16, 4096])
def test_bodies_may_be_as_long_as_the_context_asks_for(llm: LLM, a_token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two MiB, or `a_token` bytes for each token of the context if that is more."""
    monkeypatch.setattr(bodies, "MOST_BYTES_A_TOKEN", a_token)
    most = max(2 << 20, a_token * CONTEXT)
    with serving(llm) as client:
        assert client.ask("/v1/completions", padded(most))[0] == 200
        assert f"larger than {most:,} bytes" in client.refused(413, padded(most + 1))


def test_the_key_is_what_follows_bearer(llm: LLM) -> None:
    right = ("Bearer geheim", "Bearer   geheim", "BEARER geheim")
    wrong = (
        "geheim",
        "Bearer geheim x",
        "Bearer Bearer geheim",
        "Bearer",
        "Bearer ",
        "Basic geheim",
        "Bearer GEHEIM",
        "Bearergeheim",
    )
    with serving(llm, api_key="geheim") as client:
        for given in (*right, *wrong):
            status, _ = client.ask("/v1/models", Authorization=given)
            assert status == (200 if given in right else 401), given


def test_of_several_keys_clients_send_one(llm: LLM) -> None:
    with serving(llm, api_key=["eins", "zwei"]) as client:
        for given, status in (("eins", 200), ("zwei", 200), ("eins zwei", 401), ("", 401)):
            assert client.ask("/v1/models", Authorization=f"Bearer {given}")[0] == status, given


@pytest.mark.parametrize("isolated", [False, True])
def test_isolated_keys_share_no_prefixes(isolated: bool, llm: LLM) -> None:
    """Neither do they see in `usage` that another client has sent the same prompt before."""
    prompt = [7, 8, 9 + isolated] * 50
    with serving(llm, isolate_keys=isolated) as client:
        result = []
        for key in ("ann", "ann", "bob", "bob", None):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            status, answer = client.ask("/v1/completions", {"prompt": prompt, "max_tokens": 1}, **headers)
            assert status == 200
            result.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert result == ([False, True, False, True, False] if isolated else [False, True, True, True, True])
