"""The HTTP server, over real sockets: its answers are the model's own, whoever asks at the same time."""

from __future__ import annotations

import gc
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from pydantic import BaseModel, ValidationError
from tokenizers import processors

import qcompile
from qcompile import SamplingParams
from qcompile.errors import ResourceError, UsageError
from qcompile.runtime.llm import LLM
from qcompile.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from qcompile.runtime.sampling.logprobs import Logprob
from qcompile.runtime.server import app as server
from qcompile.runtime.server.api import CompletionRequest
from qcompile.runtime.server.chat_api import ChatRequest
from qcompile.runtime.server.chat_replies import ChatReply
from qcompile.runtime.server.replies import CompletionReply
from qcompile.runtime.server.service import Service
from tests.support.fake import byte_tokenizer, fake_llm

Build = Callable[[str], Path]
PROMPTS = ["def main(", "import os\n\n\nclass Reader:\n", "x", "# " + "word " * 60, "for i in range(10):\n    "]
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@dataclass
class Client:
    """Talks to a running server."""

    port: int
    service: Service

    def open(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
        response = connection.getresponse()
        response.connection = connection  # type: ignore[attr-defined]  # kept open while it is read
        return response

    def ask(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, Any]:
        response = self.open(path, body, method, **headers)
        return response.status, json.loads(response.read())

    def complete(self, prompt: Any, **options: Any) -> dict[str, Any]:
        status, result = self.ask("/v1/completions", {"prompt": prompt} | GREEDY | options)
        assert status == 200, result
        return result

    def refused(self, status: int, body: Any, path: str = "/v1/completions", **headers: str) -> str:
        got, result = self.ask(path, body, **headers)
        assert got == status and set(result["error"]) == {"message", "type", "param", "code"}
        return result["error"]["message"]


@contextmanager
def serving(llm: LLM, kind: Callable[[LLM, int], Service] = Service, **options: Any) -> Iterator[Client]:
    """A server in a thread of this process. kind: makes its service."""
    served = server.Served(llm, "tiny", **options)
    service = kind(llm, served.max_waiting)
    running = uvicorn.Server(server.server_config(served, service, drain_seconds=1))
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as `serve` does; a command that was run in this process obeys it
    listening = server.bind("127.0.0.1", 0)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield Client(listening.getsockname()[1], service)
    finally:
        running.should_exit = True
        thread.join()
        service.close()
        listening.close()


@pytest.fixture(scope="module")
def llm(tiny_artifact: Build) -> Iterator[LLM]:
    with qcompile.load(tiny_artifact("w4a8"), threads=1, max_batch=4) as opened:
        yield opened


@pytest.fixture
def another(tiny_artifact: Build) -> Iterator[LLM]:
    """One that the server of `client` does not use."""
    with qcompile.load(tiny_artifact("w4a8"), threads=1, max_batch=4) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[str]:
    """What the model says to each prompt without a server."""
    return [llm.generate(prompt, SamplingParams(**GREEDY))[0].outputs[0].text for prompt in PROMPTS]


@pytest.fixture(scope="module")
def client(llm: LLM, alone: list[str]) -> Iterator[Client]:
    with serving(llm, template=lambda messages: "".join(m["content"] for m in messages)) as opened:
        yield opened
    llm.engine.check()


def events(response: http.client.HTTPResponse) -> list[dict[str, Any]]:
    """The objects of a stream, which must end with [DONE]."""
    assert response.getheader("content-type", "").startswith("text/event-stream")
    lines = [line.decode().removeprefix("data: ").strip() for line in response if line.strip()]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def idle(client: Client) -> bool:
    """Waits until nothing runs and every page is free."""
    pool = client.service.llm.engine.pool
    for _ in range(500):
        if not client.service.llm.engine.busy and pool.free == pool.total and not client.service.waiting:
            return True
        time.sleep(0.01)
    return False


@contextmanager
def slow_steps(llm: LLM, seconds: float = 0.02) -> Iterator[None]:
    """Steps of a larger model, so that clients can meet and streams come in pieces."""
    step = llm.engine.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "step", lambda: (time.sleep(seconds), step())[1])
        patch.setattr(llm.engine.runner.timer.steps, "count", lambda batch: 1)
        yield


def test_a_completion_is_what_generate_gives(client: Client, alone: list[str]) -> None:
    result = client.complete(PROMPTS[0], model="tiny", user="someone")
    assert result["object"] == "text_completion" and result["model"] == "tiny" and result["id"].startswith("cmpl-")
    assert result["choices"] == [{"index": 0, "text": alone[0], "logprobs": None, "finish_reason": "length"}]
    count = len(client.service.llm.encode(PROMPTS[0]))
    usage = {"prompt_tokens": count, "completion_tokens": 24, "total_tokens": count + 24}
    assert result["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert client.complete(client.service.llm.encode(PROMPTS[0]))["choices"] == result["choices"]


def test_requests_at_once_do_not_see_each_other(client: Client, alone: list[str]) -> None:
    def one(index: int) -> tuple[str, str]:
        prompt = index % len(PROMPTS)
        if index % 2:
            return client.complete(PROMPTS[prompt])["choices"][0]["text"], alone[prompt]
        body = {"prompt": PROMPTS[prompt], "stream": True} | GREEDY
        pieces = events(client.open("/v1/completions", body))
        return "".join(piece["choices"][0]["text"] for piece in pieces), alone[prompt]

    with ThreadPoolExecutor(12) as pool:
        for got, want in pool.map(one, range(40)):
            assert got == want
    assert idle(client)


def test_prompts_and_samples_are_numbered(client: Client, llm: LLM) -> None:
    options = {"temperature": 1.0, "seed": 5, "max_tokens": 9}
    result = client.complete(PROMPTS[:3], n=2, **options)
    assert [choice["index"] for choice in result["choices"]] == [0, 1, 2, 3, 4, 5]
    body = {"prompt": PROMPTS[:3], "n": 2, "stream": True, "stream_options": {"include_usage": True}, **options}
    pieces = events(client.open("/v1/completions", body | {"ignore_eos": True}))
    assert pieces[-1]["choices"] == [] and pieces[-1]["usage"] == result["usage"]
    texts = [""] * 6
    for piece in pieces[:-1]:
        texts[piece["choices"][0]["index"]] += piece["choices"][0]["text"]
    assert texts == [choice["text"] for choice in result["choices"]]
    ends = [piece["choices"][0]["index"] for piece in pieces[:-1] if piece["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3, 4, 5]


def test_chat_goes_through_the_template(client: Client, alone: list[str]) -> None:
    parts = [{"type": "text", "text": PROMPTS[0][:3]}, {"type": "text", "text": PROMPTS[0][3:]}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": parts}]} | GREEDY
    status, result = client.ask("/v1/chat/completions", body | {"max_completion_tokens": 24, "max_tokens": None})
    message = {"role": "assistant", "content": alone[0]}
    assert status == 200
    assert result["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    with slow_steps(client.service.llm):
        pieces = events(client.open("/v1/chat/completions", body | {"stream": True, "logprobs": True}))
    assert len(pieces) > 3
    assert pieces[0]["choices"][0]["delta"] == message | {"content": ""}
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == alone[0]
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"


def test_a_chat_template_has_all_special_tokens_itself() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    said = {"messages": [{"role": "user", "content": "ab"}]}
    with (
        fake_llm(tokenizer=tokenizer) as llm,
        serving(llm, template=lambda messages: "<eos>" + messages[0]["content"]) as client,
    ):
        assert client.ask("/v1/chat/completions", said | GREEDY)[1]["usage"]["prompt_tokens"] == 3
        assert client.complete("ab")["usage"]["prompt_tokens"] == 3


def test_log_probabilities(client: Client) -> None:
    result = client.complete("x", logprobs=2)["choices"][0]["logprobs"]
    assert len(result["tokens"]) == len(result["token_logprobs"]) == len(result["text_offset"]) == 24
    assert all(value <= 0 for value in result["token_logprobs"]) and result["text_offset"][0] == 0
    with slow_steps(client.service.llm):
        pieces = events(client.open("/v1/completions", {"prompt": "x", "logprobs": 2, "stream": True} | GREEDY))
    told = [token for piece in pieces for token in piece["choices"][0]["logprobs"]["tokens"]]
    assert told == result["tokens"] and len(pieces) > 2
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == client.complete("x")["choices"][0]["text"]
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2} | GREEDY
    content = client.ask("/v1/chat/completions", body)[1]["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == result["tokens"]
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"] == result["token_logprobs"][0]


def test_log_probabilities_of_parts_of_characters() -> None:
    """Their text is all the same; they are spelled by their bytes, if those are known."""
    places = [{7: Logprob(-0.1, 1, "\ufffd"), 8: Logprob(-0.2, 2, "é"), 9: Logprob(-3.0, 3, "\ufffd")}]
    sample = CompletionOutput(0, "", [7], -0.1, places)
    output = RequestOutput(0, None, [0], [sample], True, RequestMetrics())
    told = CompletionReply("tiny", 1).choice(0, output, sample)["logprobs"]
    assert told["top_logprobs"] == [{"\ufffd": -0.1, "é": -0.2}] and told["token_logprobs"] == [-0.1]
    (chosen,) = ChatReply("tiny", 1, top=2).choice(0, output, sample)["logprobs"]["content"]
    assert chosen["bytes"] is None and [one["bytes"] for one in chosen["top_logprobs"]] == [None, [0xC3, 0xA9]]
    known = {7: b"\xe4\xbd", 9: b"\xa0"}.get
    told = CompletionReply("tiny", 1, known).choice(0, output, sample)["logprobs"]
    assert told["tokens"] == ["bytes:\\xe4\\xbd"]
    assert told["top_logprobs"] == [{"bytes:\\xe4\\xbd": -0.1, "é": -0.2, "bytes:\\xa0": -3.0}]
    (chosen,) = ChatReply("tiny", 1, known, 3).choice(0, output, sample)["logprobs"]["content"]
    assert chosen["token"] == "\\xe4\\xbd" and chosen["bytes"] == [0xE4, 0xBD]
    assert [one["token"] for one in chosen["top_logprobs"]] == ["\\xe4\\xbd", "é", "\\xa0"]


def test_offsets_of_a_stream_are_those_of_the_whole() -> None:
    """Also where text is held back, for it may turn out to be a stop text, or is half a character."""
    reply, offsets, told = CompletionReply("tiny", 1), [], []
    spelled = ["ab", "c", "\ufffd", "d"]
    logprobs = [{at: Logprob(-1.0, 1, text)} for at, text in enumerate(spelled)]
    for count, text in ((1, ""), (3, "abc"), (4, "abcéd")):
        sample = CompletionOutput(0, text, list(range(count)), -1.0, logprobs[:count])
        output = RequestOutput(0, None, [0], [sample], False, RequestMetrics())
        (piece,) = reply._pieces(output)
        offsets += piece["logprobs"]["text_offset"]
        told.append(piece["text"])
    assert told == ["", "abc", "éd"] and offsets == [0, 2, 3, 4]
    assert reply.choice(0, output, sample)["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "the body: not JSON at character 1"),
        pytest.param(b"[" * 100_000, 400, "the body: its JSON is nested too deeply", id="deep"),
        (b'{"prompt": "\\ud800"}', 400, "not valid Unicode at character 0"),
        ({"prompt": {"a": 1}}, 400, "text or a list of token numbers"),
        ({"prompt": [1, "x"]}, 400, "text or a list of token numbers"),
        ({"prompt": [True]}, 400, "text or a list of token numbers"),
        (b"\xff", 400, ""),
        ([], 400, "the body"),
        ({}, 400, "prompt"),
        ({"prompt": "x", "suffix": "y"}, 400, "suffix is not supported by this model: its tokenizer has no tokens"),
        ({"prompt": "x", "logit_bias": {"1": 101}}, 400, "logit_bias of token 1 must be a number between -100 and 100"),
        ({"prompt": "x", "presence_penalty": 3}, 400, "presence_penalty must be a number between -2 and 2, not 3"),
        ({"prompt": "x", "frequency_penalty": True}, 400, "frequency_penalty: Input should be a valid number"),
        ({"prompt": "x", "stream_options": {"echo": False}}, 400, "stream_options.echo: is not supported"),
        ({"prompt": "x", "max_tokens": "9"}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "x", "stop": [str(number) for number in range(2000)]}, 400, "stop has 6890 characters in all"),
        ({"prompt": None}, 400, "prompt: Field required"),
        ({"promt": "x"}, 400, "promt: is not supported"),
        ({"prompt": "x", "stop": 5}, 400, "stop: must be a text or a list of texts"),
        ({"prompt": "x", "stop": {}}, 400, "stop: must be a text or a list of texts"),
        ({"prompt": "x", "logit_bias": None, "n": 3, "best_of": 2, "suffix": ""}, 400, "best_of must be None or"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        (b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
        ({"prompt": "x", "n": 2, "best_of": 3, "stream": True}, 400, "best_of 3 above n cannot be streamed"),
        ({"prompt": "x", "n": 10**6}, 400, "at most"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": "x", "seed": 2**200}, 400, "seed must be None or a whole number of 64 bits"),
        ({"prompt": "x", "model": None}, 400, "model must be the name of a model, not null"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": ["x", ""]}, 400, "empty"),
        ({"prompt": [9000]}, 400, "outside the vocabulary"),
        ({"prompt": [-1]}, 400, "outside the vocabulary"),
        ({"prompt": "word " * 300}, 400, "shorten it"),
        ({"prompt": "x", "model": "other"}, 404, "no model 'other'"),
        ({"prompt": "x" * (3 << 20)}, 413, "larger than 2,097,152 bytes"),
    ],
)
def test_what_is_wrong_is_named(client: Client, body: Any, status: int, said: str) -> None:
    assert said in client.refused(status, body)
    assert idle(client)


def test_null_is_not_given(client: Client) -> None:
    """Some clients send every field that OpenAI's API has, null where nothing is asked."""
    names = ("max_tokens", "stream", "frequency_penalty", "presence_penalty", "logit_bias", "suffix", "stop", "n")
    nulls = dict.fromkeys(names)
    assert client.complete("x", **nulls)["usage"]["completion_tokens"] == 16
    body = {"messages": [{"role": "user", "content": "x", "name": None}], "logprobs": None} | nulls | {"max_tokens": 2}
    assert client.ask("/v1/chat/completions", body)[1]["usage"]["completion_tokens"] == 2


def test_what_asks_for_nothing_is_not_given(client: Client) -> None:
    """Some clients send the values that OpenAI's API has unless told otherwise."""
    idle = {"frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "store": False}
    assert client.complete("x", **idle, echo=False, suffix="", best_of=1)["choices"] == client.complete("x")["choices"]
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [], "response_format": {"type": "text"}}
    assert client.ask("/v1/chat/completions", chat | idle | {"max_tokens": 2})[0] == 200
    said = [{"role": "assistant", "content": "y", "tool_calls": [], "annotations": [], "refusal": None}]
    more = {"tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}, "messages": chat["messages"] + said}
    more |= {"stop_token_ids": [], "stream_options": {"include_usage": True, "continuous_usage_stats": False}}
    assert client.ask("/v1/chat/completions", chat | more | {"max_tokens": 2})[0] == 200
    more |= {"detokenize": True, "continue_final_message": False, "cache_prompt": True, "include_reasoning": True}
    assert client.ask("/v1/chat/completions", chat | more | {"max_tokens": 2})[0] == 200
    asks = chat | {"length_penalty": 2}
    assert client.refused(400, asks, "/v1/chat/completions") == "length_penalty: is not supported"


@pytest.mark.parametrize(
    ("kind", "body", "first"),
    [
        (CompletionRequest, {"prompt": "x"} | {str(number): 1 for number in range(100)}, [("0",)]),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 100}, [("stop", 0)]),
        (ChatRequest, {"messages": [{"content": "x"}] * 100}, [("messages", 0, "role")]),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": "x"} | {str(number): 1 for number in range(100)}]},
            [("messages", 0, "0")],
        ),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "text"}] * 100}]},
            [("messages", 0, "content", 0, "text")],
        ),
    ],
)
def test_of_a_million_wrong_things_the_first_is_told(kind: type[BaseModel], body: Any, first: list[Any]) -> None:
    """A server that describes each answers nobody else for a minute."""
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(body)
    assert [error["loc"] for error in raised.value.errors()] == first


def test_chat_refuses_what_it_cannot_read(client: Client) -> None:
    for messages in (
        [],
        [{"role": "function", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ):
        assert "messages" in client.refused(400, {"messages": messages}, "/v1/chat/completions")
    body = {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 1}
    assert "logprobs: true" in client.refused(400, body, "/v1/chat/completions")


def test_other_paths_and_methods(client: Client) -> None:
    response = client.open("/v1/completions", b'{"prompt": "x"}', **{"Content-Type": "text/plain"})
    assert response.status == 400 and b"Content-Type: application/json" in response.read()
    assert client.ask("/v1/nothing")[0] == 404
    assert client.ask("/v1/completions")[0] == 405
    listed = client.ask("/v1/models")[1]["data"]
    assert listed[0]["id"] == "tiny" and client.ask("/v1/models/tiny") == (200, listed[0])
    status, result = client.ask("/v1/models/other/one")
    assert status == 404 and "no model 'other/one' here" in result["error"]["message"]


def test_metrics_count(client: Client) -> None:
    def value(name: str) -> float:
        lines = client.open("/metrics").read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    before, path = (
        value("qcompile_generated_tokens_total"),
        'qcompile_responses_total{model_name="tiny",path="/v1/completions",status="200"}',
    )
    answered = value(path)
    client.complete("x")
    assert value("qcompile_generated_tokens_total") == before + 24 and value(path) == answered + 1
    assert value("qcompile_running_samples") == value("qcompile_waiting_samples") == 0


def test_usage_and_metrics_tell_what_was_cached(another: LLM) -> None:
    prompt = [7, 8, 9] * 50
    with serving(another) as client:
        cached = [client.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
        counted = client.open("/metrics").read().decode()
    assert cached == [0, 128] and 'qcompile_cached_prompt_tokens_total{model_name="tiny"} 128.0' in counted


def test_a_key_may_be_of_any_letters(another: LLM) -> None:
    with serving(another, api_key="ключ") as client:
        assert client.ask("/v1/models", Authorization="Bearer ключ".encode())[0] == 200  # type: ignore[arg-type]
        assert "API key" in client.refused(401, {"prompt": "x"}, Authorization="Bearer kljutsch")


def test_extremes_of_one_client_harm_nobody(client: Client) -> None:
    """What overflows where it is drawn from must not end the engine that all share."""
    for options in ({"temperature": 1e-320, "top_p": 0.9}, {"temperature": 1e-320, "top_k": 3}):
        status, result = client.ask("/v1/completions", {"prompt": "def main(", "max_tokens": 3} | options)
        assert status == 200 and result["usage"]["completion_tokens"] == 3
    asked = {"prompt": "x", "temperature": 1, "top_p": 0.9, "repetition_penalty": 1e-46}
    assert "repetition_penalty must be a number between" in client.refused(400, asked)
    assert client.complete("x")["choices"]


def test_stop_texts_need_a_tokenizer(tiny_artifact: Build) -> None:
    with qcompile.load(tiny_artifact("w4a8"), threads=1, max_batch=2) as llm:
        llm.tokenizer = llm.engine.tokenizer = None
        with serving(llm) as client:
            assert "stop texts cannot be found" in client.refused(400, {"prompt": [1, 2], "stop": "a"} | GREEDY)
            assert client.complete([1, 2])["usage"]["completion_tokens"] == 24


def test_a_key_is_asked_for(another: LLM) -> None:
    with serving(another, api_key="geheim") as client:
        assert "API key" in client.refused(401, {"prompt": "x"})
        assert "API key" in client.refused(401, {"prompt": "x"}, Authorization="Bearer wrong")
        for scheme in ("Bearer ", "bearer  "):
            assert client.ask("/v1/models", Authorization=f"{scheme}geheim")[0] == 200
        assert client.ask("/health") == (200, {"status": "ok"})
        body = {"messages": [{"role": "user", "content": "x"}]}
        message = client.refused(400, body, "/v1/chat/completions", Authorization="Bearer geheim")
        assert "no chat template" in message


def test_who_hangs_up_frees_its_place(tiny_artifact: Build) -> None:
    """Full: others are sent away until the first client, streaming or waiting, is gone."""
    with (
        qcompile.load(tiny_artifact("w4a8"), threads=1, max_batch=1) as llm,
        serving(llm, max_waiting=0) as client,
        slow_steps(llm),
    ):
        for stream in (True, False):
            connection = http.client.HTTPConnection("127.0.0.1", client.port)
            body = {"prompt": "x", "max_tokens": 250, "temperature": 0.5, "ignore_eos": True, "stream": stream}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            if stream:
                connection.getresponse().readline()
            while not llm.engine.busy:
                time.sleep(0.005)
            response = client.open("/v1/completions", {"prompt": "x"})
            assert response.status == 429 and response.getheader("retry-after") == "1"
            connection.close()
            if connection.sock:
                connection.sock.close()
            assert idle(client), f"stream={stream}"
        assert client.complete("x", max_tokens=1)["usage"]["completion_tokens"] == 1
        counted = client.open("/metrics").read().decode()
        assert 'qcompile_samples_total{finish_reason="abort",model_name="tiny"} 2.0' in counted
        assert 'qcompile_samples_total{finish_reason="length",model_name="tiny"} 1.0' in counted
        tokens = next(line for line in counted.splitlines() if line.startswith("qcompile_generated_tokens_total"))
        assert 2 <= float(tokens.split()[1]) < 500  # those of whom nobody waited for any more, too


def test_a_failed_engine_says_so(tiny_artifact: Build) -> None:
    with qcompile.load(tiny_artifact("w4a8"), threads=1) as llm, serving(llm) as client:
        told: list[BaseException] = []
        client.service.failed = told.append

        def broken() -> Any:
            raise ResourceError("the device is lost")

        llm.engine.step = broken  # type: ignore[method-assign]
        assert "the device is lost" in client.refused(503, {"prompt": "x"})
        assert "the device is lost" in client.refused(503, {"prompt": "x"})
        assert client.ask("/health")[0] == 503
        assert [str(error) for error in told] == ["the device is lost"]


def test_settings_of_python_end_with_the_server() -> None:
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.set_threshold(700, 10, 10)  # commands that ran in this process may have set others
    before = sys.getswitchinterval(), gc.get_threshold()
    try:
        with pytest.raises(ValueError), server.python_of_a_server():
            assert gc.get_freeze_count() > max(frozen, 1000) and gc.get_threshold()[0] > before[1][0]
            raise ValueError
        assert (sys.getswitchinterval(), gc.get_threshold()) == before and (gc.get_freeze_count() > 0) == (frozen > 0)
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("host", ["..", "a" * 70, "\udcff"])
def test_a_host_that_has_no_such_name(host: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be the name of a host: give another \(--host\)"):
        server.bind(host, 0)


def test_the_command_serves_until_it_is_told_to_end(tiny_artifact: Build) -> None:
    command = [sys.executable, "-m", "qcompile", "serve", str(tiny_artifact("w4a8")), "--port", "0", "--json"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    try:
        assert process.stdout
        ready = json.loads(process.stdout.readline())
        assert ready["model"] == tiny_artifact("w4a8").name
        with urllib.request.urlopen(f"{ready['url']}/health") as response:
            assert json.load(response) == {"status": "ok"}
        port = ready["url"].rsplit(":", 1)[1]
        second = subprocess.run([*command[:-3], "--port", port], capture_output=True, text=True)
        assert second.returncode == 5 and f"port {port} of 127.0.0.1" in second.stderr
        assert second.stderr.count("\n") == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert "Traceback" not in process.communicate()[1]
    finally:
        process.kill()
