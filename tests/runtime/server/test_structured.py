"""Structured outputs over HTTP: in all fields that ask for them, and what is refused, after which the server lives."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.server.test_server import Client, events, serving
from tests.support.fake import byte_tokenizer, fake_llm

SCHEMA = {"type": "array", "items": {"enum": ["a", None]}, "minItems": 1, "maxItems": 3}
CHAT = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 150}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with fake_llm(tokenizer=byte_tokenizer(), max_batch=4) as llm:
        with serving(llm, template=lambda messages: "".join(m["content"] for m in messages)) as opened:
            yield opened
        llm.engine.check()


def fits_schema(text: str) -> bool:
    return set(json.loads(text)) <= {"a", None}


ASKED: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, fits_schema),
    ({"structured_outputs": {"json": SCHEMA, "regex": None, "disable_fallback": False}}, fits_schema),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, fits_schema),
    ({"guided_json": SCHEMA}, fits_schema),
    ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, fits_schema),
    ({"guided_json": json.dumps(SCHEMA)}, fits_schema),
    ({"guided_regex": "[ab]{2,5}"}, re.compile("[ab]{2,5}").fullmatch),
    ({"guided_choice": ["one", "two"]}, ("one", "two").__contains__),
    ({"guided_grammar": 'start: "<" start ">" | "x"'}, re.compile("<*x>*").fullmatch),
    ({"structured_outputs": {"choice": ["one", "two"]}}, ("one", "two").__contains__),
]


@pytest.mark.parametrize(("asked", "fits"), ASKED)
def test_every_field_is_followed_whole_and_streamed(client: Client, asked: dict[str, Any], fits: Any) -> None:
    status, result = client.ask("/v1/chat/completions", CHAT | asked)
    assert status == 200, result
    [choice] = result["choices"]
    assert choice["finish_reason"] == "stop" and fits(choice["message"]["content"])
    pieces = events(client.open("/v1/chat/completions", CHAT | asked | {"stream": True}))
    said = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"])
    assert said == choice["message"]["content"]
    many = client.complete(["x", "y"], **asked, n=2, temperature=1, seed=1, max_tokens=150, ignore_eos=False)
    assert all(fits(one["text"]) for one in many["choices"] if one["finish_reason"] == "stop")


def test_an_object_may_be_cut_off(client: Client) -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        [choice] = client.ask("/v1/chat/completions", CHAT | fields | {"max_tokens": 3})[1]["choices"]
        assert choice["finish_reason"] == "length" and choice["message"]["content"][0] == "{"
    [choice] = client.ask("/v1/chat/completions", CHAT | {"response_format": {"type": "text"}})[1]["choices"]
    assert choice["finish_reason"]


def schema(given: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}}


REFUSED: list[tuple[dict[str, Any] | str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type must be text, json_object or json_schema, not 'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema must be an object with a schema"),
    (
        {"response_format": {"type": "json_object", "shema": {}}},
        "response_format has no field 'shema': it has type, schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "sort": 1}}},
        "response_format.json_schema has no field 'sort': it has name, schema, strict, description",
    ),
    ({"response_format": "json"}, "response_format: Input should be a valid dictionary"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "not both guided_regex and guided_choice: give one of them"),
    ({"guided_backend": "x"}, "guided_backend: is not supported"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs has no field 'structural_tag'"),
    ({"structured_outputs": {}}, "structured_outputs must have one of json, "),
    ({"guided_regex": "(("}, "guided_regex cannot be compiled: "),
    ({"guided_grammar": "start: " + "(" * 100_000}, "guided_grammar cannot be compiled: "),
    ({"guided_choice": []}, "guided_choice must be a list of texts, with at least one"),
    ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex cannot be compiled: "),
    (schema({"not": {}}), 'response_format.json_schema cannot be compiled: Unimplemented keys: ["not"]'),
    (schema({"const": "a" * 1_000_000}), "response_format.json_schema has 1,000,013 bytes, of at most 262,144"),
    ({"guided_json": '{"items":' * 10_000 + "{}" + "}" * 10_000}, "guided_json is nested deeper than 128"),
    ('{"guided_json":' + '{"items":' * 10_000 + "{}" + "}" * 10_000, "the body: its JSON is nested too deeply"),
    ('{"guided_json":' + '{"items":' * 400 + "{}" + "}" * 400, "guided_json is nested deeper than 128"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos is not possible with structured_outputs"),
]


def test_what_cannot_be_compiled_is_refused_soon(client: Client) -> None:
    client.complete("x", guided_regex="a", ignore_eos=False)
    for asked, message in REFUSED:
        started = time.process_time()
        body: Any = f'{asked}, "prompt": "x"}}'.encode() if isinstance(asked, str) else {"prompt": "x"} | asked
        said = client.refused(400, body)
        assert said.startswith(message) and "\n" not in said and len(said) < 500
        assert time.process_time() - started < 1
        assert client.ask("/health")[0] == 200
    assert client.complete("x", guided_regex="a", ignore_eos=False)["choices"][0]["text"] == "a"
