"""What clients of OpenAI's API send unasked, and what they look for in errors."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from qcompile import SamplingParams
from qcompile.runtime.llm import LLM
from qcompile.runtime.server import app
from tests.runtime.server.test_server import GREEDY, Client, serving
from tests.support.fake import CONTEXT, byte_tokenizer, fake_llm

ALONE = "is not supported: only the text decoder is compiled, and messages are text alone"
IMAGE = f"messages.0.content.0: 'image_url' {ALONE}"
SAID = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with fake_llm(tokenizer=byte_tokenizer()) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[Client]:
    with serving(llm, template=lambda messages: "".join(m["content"] for m in messages)) as opened:
        yield opened


def error(client: Client, status: int, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
    """What a refusal with that status says."""
    got, result = client.ask(path, body, **options)
    assert got == status, result
    return result["error"]


@pytest.mark.parametrize(
    "unasked",
    [
        {"metadata": {"trace": "a"}, "safety_identifier": "b", "prompt_cache_key": "c", "user": "d", "store": True},
        {"function_call": "none", "reasoning_effort": "none", "verbosity": "medium", "service_tier": "flex"},
        {"seed": -1, "top_p": 0, "best_of": 1, "n": 1, "top_k": -1},
        {"use_beam_search": False, "length_penalty": 1.0, "priority": 0, "spaces_between_special_tokens": True},
        {"add_generation_prompt": True, "chat_template_kwargs": {}, "return_token_ids": False},
        {"logprobs": False, "top_logprobs": 0},
    ],
)
def test_what_changes_no_answer_is_taken(client: Client, unasked: dict[str, Any]) -> None:
    plain = client.ask("/v1/chat/completions", {"messages": SAID} | GREEDY)[1]
    status, result = client.ask("/v1/chat/completions", {"messages": SAID} | GREEDY | unasked)
    assert status == 200 and result["choices"] == plain["choices"]


@pytest.mark.parametrize("asks", [{"verbosity": "low"}, {"audio": {}}])
def test_what_asks_for_something_is_refused(client: Client, asks: dict[str, Any]) -> None:
    (name,) = asks
    result = error(client, 400, "/v1/chat/completions", {"messages": SAID} | asks)
    assert result["message"] == f"{name}: is not supported" and result["param"] == name


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": [{"type": "image_url", "image_url": {}}]}, IMAGE),
        (
            {"content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]},
            IMAGE.replace("0:", "1:").replace("image_url", "input_audio"),
        ),
        ({"content": 5}, "messages.0.content: Input should be a valid list"),
        (
            {"role": "assistant", "content": None, "tool_calls": [{}]},
            "messages.0.tool_calls.0.function: Field required",
        ),
    ],
)
def test_a_wrong_message_is_named_by_its_place(client: Client, message: dict[str, Any], said: str) -> None:
    """Without the names of the types that it might have been."""
    result = error(client, 400, "/v1/chat/completions", {"messages": [{"role": "user"} | message]})
    assert result["message"] == said and result["param"] == said.split(":")[0]


def test_the_length_that_was_given_is_named(client: Client) -> None:
    result = error(client, 400, "/v1/chat/completions", {"messages": SAID, "max_completion_tokens": 0})
    assert result["message"].startswith("max_completion_tokens: ") and result["param"] == "max_completion_tokens"


def test_codes_that_clients_look_for(client: Client) -> None:
    """They shorten the conversation or ask another server."""
    result = error(client, 400, "/v1/completions", {"prompt": [1] * CONTEXT})
    assert result["code"] == "context_length_exceeded" and "prompt is too long" in result["message"]
    result = error(client, 404, "/v1/completions", {"prompt": "x", "model": "other"})
    assert (result["code"], result["param"]) == ("model_not_found", "model")
    assert error(client, 404, "/v1/models/other")["code"] == "model_not_found"


def test_other_paths_and_methods_say_what_there_is(client: Client) -> None:
    said = error(client, 404, "/v1/images", {"input": "x"})["message"]
    assert said == "there is nothing at '/v1/images': use /v1/completions or /v1/chat/completions"
    assert error(client, 405, "/v1/completions")["message"] == "'/v1/completions' does not take GET: use POST"


def test_what_can_be_read_has_a_head(client: Client) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/v1/models/tiny"):
        response = client.open(path, method="HEAD")
        assert response.status == 200 and response.read() == b"" and int(response.headers["content-length"]) > 0


def test_the_key_is_asked_for_before_a_request_is_read() -> None:
    with fake_llm(tokenizer=byte_tokenizer()) as llm, serving(llm, api_key="geheim") as guarded:
        for body in (b"{", {"prompt": "x" * (3 << 20)}, {"nothing": 1}):
            response = guarded.open("/v1/completions", body)
            assert response.status == 401 and response.headers["www-authenticate"] == "Bearer"
        connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=60)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Length", "100")
        connection.endheaders()  # and nothing more
        assert connection.getresponse().status == 401
        connection.close()


def test_too_large_a_body_is_refused_before_it_is_sent(client: Client) -> None:
    """A client that waits to be told to go on is not."""
    with socket.create_connection(("127.0.0.1", client.port), timeout=60) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 99999999\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_connections_are_kept_for_longer_than_clients_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that closes an idle one just as a request comes leaves it unanswered; proxies wait for 60 seconds."""
    result = []

    class Stub(app.Server):
        def run(self, sockets: Any = None) -> None:
            result.append(self.config.timeout_keep_alive)

    monkeypatch.setattr(app, "Server", Stub)
    with fake_llm() as opened, app.bind("127.0.0.1", 0) as listening:
        app.serve(app.Served(opened, "tiny"), listening)
    assert result[0] > 60


def test_penalties_of_what_was_generated(client: Client) -> None:
    options = {"frequency_penalty": 2.0, "presence_penalty": 1}
    with fake_llm(tokenizer=byte_tokenizer()) as alone:
        want, plain = (alone.generate("ab", SamplingParams(**GREEDY | more))[0].outputs[0] for more in (options, {}))
    assert client.complete("ab", **options)["choices"][0]["text"] == want.text
    assert want.token_ids != plain.token_ids


def test_responses_do_not_wait_for_acknowledgements() -> None:
    """A response is several writes; Nagle's algorithm would keep the second until the client acknowledges the first,
    which takes 40 ms."""
    with app.bind("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
