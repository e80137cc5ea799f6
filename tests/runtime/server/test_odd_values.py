"""Whatever JSON value a field has, the server answers or refuses it with a line; it is never an unexpected error."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from qcompile.runtime.server.api import BodyPart, CompletionRequest
from qcompile.runtime.server.chat_api import ChatRequest
from qcompile.runtime.server.embeddings import EmbeddingsRequest
from qcompile.runtime.server.messages.request import MessagesRequest
from qcompile.runtime.server.responses.request import ResponsesRequest
from tests.runtime.server.test_server import Client
from tests.runtime.server.test_tools import SAID, TEMPLATE, serving_with

ODD: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        2**200,
        0.5,
        float("inf"),
        float("nan"),
        "",
        "x",
        "\ud800",
        "\x00",
        [],
        [[]],
        [None],
        ["\ud800"],
    ),
    *({}, {"a": float("inf")}, {"\ud800": 1}, {"type": 5}, {"type": "\ud800"}, [{"type": "text"}], [{"role": "user"}]),
    *({"type": "function", "function": 5}, [{"type": "function", "name": "f", "function": {"name": "f"}}], [-1, 2**40]),
]
"""Python writes and reads NaN, infinity and halves of characters as JSON."""
REQUESTS: list[tuple[str, type[BodyPart], dict[str, Any]]] = [
    ("/v1/completions", CompletionRequest, {"prompt": "x", "max_tokens": 1, "temperature": 0}),
    ("/v1/chat/completions", ChatRequest, {"messages": SAID, "max_tokens": 1, "temperature": 0}),
    ("/v1/responses", ResponsesRequest, {"input": "x", "max_output_tokens": 1, "temperature": 0}),
    ("/v1/messages", MessagesRequest, {"messages": SAID, "max_tokens": 1, "temperature": 0}),
    ("/v1/embeddings", EmbeddingsRequest, {"input": "x"}),
]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving_with(TEMPLATE) as opened:
        yield opened


def refuses(model: type[BodyPart], body: dict[str, Any]) -> bool:
    """Whether the request's type alone refuses it, before any code of ours."""
    try:
        model.model_validate(json.loads(json.dumps(body)))
    except ValidationError:
        return True
    return False


@pytest.mark.parametrize("part", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("path", "model", "body"), REQUESTS, ids=[path for path, _, _ in REQUESTS])
def test_no_value_is_an_unexpected_error(
    client: Client, path: str, model: type[BodyPart], body: dict[str, Any], part: int
) -> None:
    """Of what the type of a request refuses, one in `part`, other values for each field."""
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
    for place, field in enumerate(each.alias or name for name, each in model.model_fields.items()):
        for number, value in enumerate(ODD):
            if (place + number) % part and refuses(model, body | {field: value}):
                continue
            asked = json.dumps(body | {field: value})
            connection.request("POST", path, asked, {"Content-Type": "application/json"})
            response = connection.getresponse()
            said = response.read().decode()
            assert response.status in (200, 400, 404), (asked, said)
            assert response.status == 200 or json.loads(said)["error"]["message"].count("\n") == 0
    connection.close()
    assert client.ask("/health")[0] == 200
