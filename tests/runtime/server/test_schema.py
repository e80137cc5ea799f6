"""The OpenAPI schema tells all routes, and the models of answers in it are what clients get."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import qcompile
from qcompile.runtime.server import answers
from qcompile.runtime.server.messages.answer import CountAnswer, MessageAnswer, MessagesFailure
from qcompile.runtime.server.responses.answer import DeletedAnswer, InputTokensAnswer, ResponseAnswer
from qcompile.runtime.server.schema import docs_page
from tests.runtime.server.test_server import Client, serving
from tests.runtime.server.test_tools import REPLY, SAID, TEMPLATE, Say, say, serving_with
from tests.support.conversations import TOOLS

__all__ = ["say"]
FUNCTIONS = [{"type": "function"} | tool["function"] for tool in TOOLS]
CUSTOM = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED: list[tuple[str, Any, type[BaseModel]]] = [
    ("/health", None, answers.HealthAnswer),
    ("/version", None, answers.VersionAnswer),
    ("/v1/models", None, answers.ModelsAnswer),
    ("/v1/models/tiny", None, answers.ModelEntry),
    ("/tokenize", {"prompt": "x"}, answers.TokenizeAnswer),
    ("/tokenize", {"messages": SAID, "return_token_strs": True}, answers.TokenizeAnswer),
    ("/detokenize", {"tokens": [5]}, answers.DetokenizeAnswer),
    (COMPLETIONS, {"prompt": "x", "n": 2}, answers.CompletionAnswer),
    (COMPLETIONS, {"prompt": "xy", "echo": True, "logprobs": 2}, answers.CompletionAnswer),
    (COMPLETIONS, {"prompt": "xy", "prompt_logprobs": 1, "stop": "a"}, answers.CompletionAnswer),
    (CHAT, {"messages": SAID}, answers.ChatAnswer),
    (CHAT, {"messages": SAID, "tools": TOOLS}, answers.ChatAnswer),
    (CHAT, {"messages": SAID, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}, answers.ChatAnswer),
    (RESPONSES, {"input": "x", "max_output_tokens": 3}, ResponseAnswer),
    (RESPONSES, {"input": "x", "tools": FUNCTIONS, "metadata": {"a": "b"}}, ResponseAnswer),
    ("/v1/responses/input_tokens", {"input": "x"}, InputTokensAnswer),
    (MESSAGES, {"messages": SAID, "max_tokens": 500, "tools": CUSTOM}, MessageAnswer),
    (MESSAGES, {"messages": SAID, "max_tokens": 500, "stop_sequences": ["Sure"]}, MessageAnswer),
    ("/v1/messages/count_tokens", {"messages": SAID}, CountAnswer),
]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving_with(TEMPLATE) as opened:
        yield opened


@pytest.fixture(scope="module")
def schema(client: Client) -> dict[str, Any]:
    status, result = client.ask("/openapi.json")
    assert status == 200
    return result


@pytest.mark.parametrize(("path", "body", "model"), ASKED)
def test_answers_are_as_described(client: Client, say: Say, path: str, body: Any, model: type[BaseModel]) -> None:
    if "logprobs" not in str(body):  # the script of replies makes no logits
        say(REPLY)
    sampled = path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
    status, result = client.ask(path, body | {"temperature": 0} if sampled else body)
    assert status == 200
    model.model_validate(result)


def test_answers_about_a_response_are_as_described(client: Client, say: Say) -> None:
    say(REPLY)
    _, made = client.ask(RESPONSES, {"input": "x", "temperature": 0})
    place = f"{RESPONSES}/{made['id']}"
    assert ResponseAnswer.model_validate(client.ask(place)[1])
    assert DeletedAnswer.model_validate(client.ask(place, method="DELETE")[1])


def test_refusals_are_as_described(client: Client) -> None:
    for path in (COMPLETIONS, RESPONSES, "/v1/embeddings", "/nothing"):
        assert answers.Failure.model_validate(client.ask(path, {})[1])
    assert MessagesFailure.model_validate(client.ask(MESSAGES, {})[1])


def test_embeddings_are_as_described(tiny_artifact: Callable[[str], Path]) -> None:
    with qcompile.load(tiny_artifact("f32"), threads=1, max_batch=2) as llm, serving(llm) as client:
        for form in ("float", "base64"):
            status, result = client.ask("/v1/embeddings", {"input": "x", "encoding_format": form})
            assert status == 200 and answers.EmbeddingsAnswer.model_validate(result)


def test_all_routes_are_described(client: Client, schema: dict[str, Any]) -> None:
    told = {(path, method) for path, methods in schema["paths"].items() for method in methods}
    assert ("/v1/embeddings", "post") in told and ("/v1/responses/{id}", "delete") in told and len(told) == 18
    for path, method in told:
        route = schema["paths"][path][method]
        content = route["responses"]["200"]["content"]
        assert path == "/metrics" or content["application/json"]["schema"]["$ref"]
        assert "4XX" in route["responses"] and "422" not in route["responses"]
        streams = path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES) and method == "post"
        assert ("text/event-stream" in content) == streams
        assert (method == "post") == ("requestBody" in route) or path.endswith("/cancel")
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(schema)))
    assert named <= set(schema["components"]["schemas"])


def test_requests_are_described_as_they_are_taken(schema: dict[str, Any]) -> None:
    parts = schema["components"]["schemas"]

    def kinds(part: str, field: str) -> set[str]:
        what = parts[part]["properties"][field]
        return {each.get("type", "") for each in what.get("anyOf", [what])}

    assert kinds("CompletionRequest", "prompt") == {"string", "array"} == kinds("ChatMessage", "content")
    assert kinds("ResponsesRequest", "input") == {"string", "array"} == kinds("EmbeddingsRequest", "input")
    assert kinds("CompletionRequest", "stop") == {"string", "array", "null"}
    assert parts["MessagesRequest"]["required"] == ["messages", "max_tokens"]
    assert parts["CompletionRequest"]["additionalProperties"] is False


def test_the_page_needs_no_network(client: Client, schema: dict[str, Any]) -> None:
    response = client.open("/docs")
    page = response.read().decode()
    assert response.status == 200 and response.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert page == docs_page(schema) and "<script" not in page and "http" not in page and " src=" not in page
    linked, named = set(re.findall(r'href="#([^"]+)"', page)), set(re.findall(r'id="([^"]+)"', page))
    assert {"ChatRequest", "ChatAnswer"} <= linked <= named
    assert "<h2>POST /v1/chat/completions</h2>" in page
    assert client.open("/openapi.json", method="HEAD").status == client.open("/health", method="HEAD").status == 200


def test_descriptions_are_escaped() -> None:
    route = {"get": {"description": "<b>", "responses": {"200": {}}}}
    parts = {"A<": {"description": "&", "properties": {"x": {"default": "<i>", "const": "<u>"}}}}
    page = docs_page(
        {"info": {"title": "t", "version": "1"}, "paths": {"/<p>": route}, "components": {"schemas": parts}}
    )
    assert not any(mark in page for mark in ("<b>", "<i>", "<u>", "<p>t", "/<p>", 'id="A<"'))


def test_the_schema_needs_no_key() -> None:
    with serving_with(TEMPLATE, api_key="key") as client:
        assert client.ask("/openapi.json")[0] == 200 and client.open("/docs").status == 200
