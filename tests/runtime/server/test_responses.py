"""/v1/responses: OpenAI's own client, whole and streamed, with tools, reasoning, and responses that go on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from qcompile.runtime.chat import ChatTemplate
from qcompile.runtime.dialogue import DialogueFormat
from qcompile.runtime.engine.samples import PromptSamples
from qcompile.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from qcompile.runtime.sampling.logprobs import Logprob
from qcompile.runtime.server.logprobs import TokenSpeller
from qcompile.runtime.server.responses.items import messages_of
from qcompile.runtime.server.responses.reply import ResponseReply
from qcompile.runtime.server.responses.request import ResponsesRequest
from qcompile.runtime.server.responses.store import ResponseStore, StoredResponse, UnknownResponseError
from qcompile.runtime.server.responses.token_places import TokenPlaces
from tests.runtime.server.test_server import Client, slow_steps
from tests.runtime.server.test_tools import REPLY, TEMPLATE, TOKENIZER, Say, say, serving_with

openai = pytest.importorskip("openai")
__all__ = ["say"]

PATH = "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "count": {"type": "integer"}}}
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": PARAMETERS, "strict": False} for name in ("search", "noop")
]
LOGPROBS = "message.output_text.logprobs"
ASKED: dict[str, Any] = {"model": "tiny", "input": "x", "temperature": 0, "max_output_tokens": 500}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving_with(TEMPLATE) as opened:
        yield opened


@pytest.fixture(scope="module")
def responses(client: Client) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key="none", max_retries=0) as opened:
        yield opened.responses


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What templates get."""
    result: list[Any] = []
    render = ChatTemplate.__call__

    def noted(self: ChatTemplate, messages: Any, **variables: Any) -> str:
        result.append((messages, variables))
        return render(self, messages, **variables)

    monkeypatch.setattr(ChatTemplate, "__call__", noted)
    return result


def test_a_text(responses: Any, say: Say, asked: list[Any]) -> None:
    say("Hello.")
    result = responses.create(**ASKED, instructions="Be brief.", metadata={"a": "b"}, store=False)
    assert result.output_text == "Hello." and result.status == "completed" and result.error is None
    assert (result.model, result.instructions, result.metadata) == ("tiny", "Be brief.", {"a": "b"})
    assert result.usage.input_tokens == 1 and result.usage.output_tokens == 7 and result.usage.total_tokens == 8
    assert (result.temperature, result.max_output_tokens, result.tool_choice, result.tools) == (0, 500, "auto", [])
    assert [message["content"] for message in asked[-1][0]] == ["Be brief.", "x"]
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        responses.retrieve(result.id)


def test_max_output_tokens_leave_it_incomplete(responses: Any, say: Say) -> None:
    say("Hello.")
    result = responses.create(**ASKED | {"max_output_tokens": 3})
    assert result.status == "incomplete" and result.incomplete_details.reason == "max_output_tokens"
    assert result.output_text == "Hel" and result.output[0].status == "incomplete"
    with responses.stream(**ASKED | {"max_output_tokens": 3}) as stream:
        *_, done, last = list(stream)
    assert last.type == "response.incomplete" and done.item.status == "incomplete" == last.response.status


def test_a_conversation_goes_on_with_the_results_of_calls(responses: Any, say: Say, asked: list[Any]) -> None:
    say(REPLY)
    result = responses.create(**ASKED, tools=TOOLS)
    thought, said, call, other = result.output
    assert [item.type for item in result.output] == ["reasoning", "message", "function_call", "function_call"]
    assert thought.content[0].text == "Let me see." and said.content[0].text == "Sure."
    assert (call.name, json.loads(call.arguments)) == ("search", {"path": "a b", "count": 2}) and other.name == "noop"
    assert 5 <= result.usage.output_tokens_details.reasoning_tokens < result.usage.output_tokens
    say("Done.")
    results: list[Any] = [
        {"type": "function_call_output", "call_id": each.call_id, "output": each.name} for each in (call, other)
    ]
    after = responses.create(**ASKED | {"input": results}, tools=TOOLS, previous_response_id=result.id)
    assert after.output_text == "Done." and after.previous_response_id == result.id
    kept = asked[-1][0]
    back = [{"role": "user", "content": "x"}, *result.output, *results]
    assert responses.create(**ASKED | {"input": back}, tools=TOOLS, store=False).output_text == "Done."
    assert asked[-1][0] == kept and [message["role"] for message in kept] == ["user", "assistant", "tool", "tool"]
    assert kept[1]["reasoning_content"] == "Let me see." and kept[1]["content"] == "Sure."
    assert [each["function"]["arguments"]["count"] for each in kept[1]["tool_calls"]] == [2, 2]
    again = responses.create(**ASKED, previous_response_id=after.id)
    assert len(asked[-1][0]) == 6 and again.output_text == "Done."


def test_kept_responses(responses: Any, say: Say) -> None:
    say("Hello.")
    result = responses.create(**ASKED)
    assert responses.retrieve(result.id) == result
    with pytest.raises(openai.BadRequestError, match="only responses in the background can be cancelled"):
        responses.cancel(result.id)
    with pytest.raises(openai.BadRequestError, match="stream: a response that was kept cannot be streamed"):
        responses.retrieve(result.id, stream=True)
    responses.delete(result.id)
    for use in (responses.retrieve, responses.delete, responses.cancel):
        with pytest.raises(openai.NotFoundError, match=f"there is no response '{result.id[:5]}"):
            use(result.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id: there is no response"):
        responses.create(**ASKED, previous_response_id=result.id)


def test_a_stream_is_put_together(client: Client, responses: Any, say: Say) -> None:
    say(REPLY)
    with slow_steps(client.service.llm, 0.002), responses.stream(**ASKED, tools=TOOLS) as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds.count("function_call_arguments.delta") > 3 and kinds.count("reasoning_text.delta") > 1
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    whole, kept = responses.create(**ASKED, tools=TOOLS), responses.retrieve(last.id)
    assert kept.usage == last.usage == whole.usage and [item.id for item in kept.output] == [i.id for i in last.output]

    def plain(response: Any) -> list[Any]:
        return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]

    assert plain(kept) == plain(whole)
    for index, item in enumerate(last.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        assert mine[0].type == "response.output_item.added" and mine[-1].type == "response.output_item.done"
        assert mine[0].item.id == mine[-1].item.id == item.id
        deltas = "".join(event.delta for event in mine if event.type.endswith(".delta"))
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
        assert all(event.item_id == item.id for event in mine[1:-1])


def test_a_parsed_output(responses: Any) -> None:
    class Answer(BaseModel):
        a: bool

    result = responses.parse(**ASKED, text_format=Answer)
    assert result.output_parsed.a in (True, False) and result.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "noop"}, "noop"),
        ("required", None),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "noop"}]}, "noop"),
    ],
)
def test_forced_calls(responses: Any, choice: Any, name: str | None) -> None:
    result = responses.create(**ASKED, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    (call,) = result.output
    assert call.type == "function_call" and call.name in ([name] if name else ["search", "noop"])
    assert isinstance(json.loads(call.arguments), dict)


def test_log_probabilities_are_those_of_the_text_alone() -> None:
    """Tokens of reasoning and calls are left out, also where a call has the text that follows it."""
    text = REPLY + "\na"
    asked = ResponsesRequest.model_validate({"input": "x", "tools": TOOLS, "include": [LOGPROBS], "top_logprobs": 2})
    each = [{ord(char): Logprob(-1.0, 1, char), 0: Logprob(-2.0, 2, "?")} for char in text]

    def grown(end: int) -> RequestOutput:
        ended = "stop" if end == len(text) else None
        sample = CompletionOutput(0, text[:end], list(map(ord, text[:end])), None, each[:end], ended)
        return RequestOutput(0, None, [1], [sample], end == len(text), RequestMetrics())

    def reply() -> ResponseReply:
        turn = DialogueFormat(ChatTemplate({"default": TEMPLATE}, {}), TOKENIZER).turn(asked.dialogue([]))
        return ResponseReply("tiny", asked, asked.params({}), turn, len)

    whole = reply().whole(grown(len(text)))
    parts = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
    for part in parts:
        assert "".join(one["token"] for one in part["logprobs"]) == part["text"]
        assert all(
            [len(one["top_logprobs"]), bytes(one["bytes"])] == [2, one["token"].encode()] for one in part["logprobs"]
        )
    assert [part["text"] for part in parts] == ["Sure.", "a"] and whole["top_logprobs"] == 2
    streamed, pieces = reply(), []
    for end in range(1, len(text) + 1):
        for change, added in streamed._changes(grown(end)):
            pieces += [event for event in streamed._events_of(change, added) if "output_text.delta" in event]
    deltas = [json.loads(piece.partition("data: ")[2]) for piece in pieces]
    assert [["".join(one["token"] for one in delta["logprobs"])] for delta in deltas] == [[d["delta"]] for d in deltas]
    assert "".join(delta["delta"] for delta in deltas) == "Sure.a"


def test_tokens_in_the_text_of_a_reply() -> None:
    """Parts of a character, a token without text, and a text that lags behind its tokens."""
    texts, raw = ["", " ", "\ufffd", "\ufffd", "b", "b"], [b"", b" ", b"\xc3", b"\xa9", b"b", b"b"]
    each = [{token: Logprob(-1.0, 1, text)} for token, text in enumerate(texts)]
    places = TokenPlaces(TokenSpeller(lambda token: raw[token]), 0)
    assert places.read(CompletionOutput(0, "\u00e9", [0, 1, 2, 3], None, each[:4])) == [0, 0, 1, 1]
    assert [one["bytes"] for one in places.logprobs("\u00e9", 1)] == [[0xC3], [0xA9]]
    assert places.read(CompletionOutput(0, "\u00e9b", [0, 1, 2, 3, 4, 5], None, each)) == [2]
    assert places.read(CompletionOutput(0, "\u00e9bb", [0, 1, 2, 3, 4, 5], None, each, finish_reason="stop")) == [3]
    assert len(places.logprobs("bb", 3)) == 2 and places.logprobs("bb", 3) == []


def test_input_items(responses: Any, say: Say) -> None:
    say("Hello.")
    given = [{"role": "user", "content": name} for name in "abc"]
    result = responses.create(**ASKED | {"input": given})
    listed = responses.input_items.list(result.id, limit=2)
    assert [item.content[0].text for item in listed.data] == ["c", "b"] and listed.has_more
    assert [item.content[0].text for item in listed] == ["c", "b", "a"]
    assert listed.data[0].type == "message" and listed.data[0].content[0].type == "input_text"
    (last,) = responses.input_items.list(result.id, order="asc", after=listed.data[1].id).data
    assert last == listed.data[0]
    with pytest.raises(openai.BadRequestError, match="after: there is no item 'x'"):
        responses.input_items.list(result.id, after="x")


def test_allowed_tools_alone_are_shown(responses: Any, say: Say, asked: list[Any]) -> None:
    say("x")
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "noop"}]}
    assert len(responses.create(**ASKED, tools=TOOLS, tool_choice=choice).tools) == 2
    assert [tool["function"]["name"] for tool in asked[-1][1]["tools"]] == ["noop"]


def test_tokens_are_counted(responses: Any) -> None:
    assert responses.input_tokens.count(model="tiny", input="x", tools=TOOLS).input_tokens == 1


def test_a_response_that_fails_says_so(responses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptSamples, "overflowed", property(lambda self: True))
    events = list(responses.create(**ASKED, stream=True))
    assert events[-1].type == "response.failed" and "not finite" in events[-1].response.error.message
    with pytest.raises(openai.InternalServerError, match="not finite"):
        responses.create(**ASKED)


def test_leaving_a_stream_cancels_it(client: Client, responses: Any) -> None:
    with slow_steps(client.service.llm):
        stream = responses.create(**ASKED, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        assert client.service.running or client.service.waiting
        stream.close()
        end = time.monotonic() + 20
        while client.service.running and time.monotonic() < end:
            time.sleep(0.01)
    assert not client.service.running


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "input: Field required"),
        ({"input": []}, "input has no message"),
        ({"input": 5}, "input: Input should be a valid list"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0: Input tag 'item_reference' found using 'type' "),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "content.0: 'input_image' is not support",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]},
            "messages.0.tool_calls",
        ),
        ({"input": "x", "background": True}, "background: is not supported"),
        ({"input": "x", "truncation": "auto"}, "truncation: is not supported"),
        ({"input": "x", "include": [LOGPROBS, "x"]}, "include: 'x' (number 1) is not supported"),
        ({"input": "x", "top_logprobs": 2}, 'top_logprobs needs include: ["message.output_text.logprobs"]'),
        ({"input": "x", "top_logprobs": 21}, "top_logprobs: Input should be less than or equal to 20"),
        ({"input": "x", "conversation": "c"}, "conversation: is not supported"),
        ({"input": "x", "n": 2}, "n: is not supported"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0: 'web_search' is not supported: only functions"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice needs tools"),
        ({"input": "x", "tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice must be 'auto', "),
        (
            {"input": "x", "tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": [{"name": "f"}]}},
            "tool_choice.tools has 'f', which is no function of tools",
        ),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type: Input should be "),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema is missing"),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"not": {}}, "new": 1}}},
            "text.format.new: is not supported",
        ),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "text.format cannot be compiled: Unimplemented keys",
        ),
        ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity: is not supported"),
        ({"input": "x", "reasoning": {"effort": "max"}}, "reasoning_effort must be one of none, "),
        ({"input": "x", "reasoning": {"summary": "detailed"}}, "reasoning.summary: is not supported"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens: Input should be greater than or equal to 1"),
        (b'{"input": "x", "metadata": {"a": "\\ud800"}}', "metadata must be JSON: with finite numbers"),
        (b'{"input": "x", "metadata": {"a": 1e999}, "stream": true}', "metadata must be JSON"),
        (b'{"input": "x", "user": "\\ud800"}', "user must be JSON"),
        ({"input": "x", "tools": [TOOLS[0] | {"description": "\ud800"}], "tool_choice": "none"}, "tools must be JSON"),
        ({"input": "x" * 2000, "instructions": 5}, "instructions: Input should be a valid string"),
    ],
)
def test_what_is_refused(client: Client, body: Any, said: str) -> None:
    message = client.refused(400, body, PATH)
    assert said in message


def test_a_model_without_a_template_has_no_responses(client: Client) -> None:
    assert client.refused(404, {"model": "other", "input": "x"}, PATH).startswith("there is no model 'other'")


def test_items_as_messages() -> None:
    """A reply's items are one message; a reply that follows is another."""
    reasoning = {"type": "reasoning", "id": "1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    hidden = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]}
    text = {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]}
    items = [text, text, reasoning, text, call, text, reasoning, call, result, hidden, text]
    outcome = messages_of(ResponsesRequest.model_validate({"input": items}).input)
    called = {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    said = {"role": "assistant", "content": "a"}
    assert outcome == [
        said,
        said,
        said | {"content": "aa", "reasoning_content": "hm"} | called,
        said | {"content": None, "reasoning_content": "hm"} | called,
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        said,
    ]


def test_the_oldest_responses_are_forgotten() -> None:
    store = ResponseStore(most=3, most_characters=400)

    def add(number: int, length: int = 10) -> None:
        store.add(StoredResponse({"id": str(number)}, [{"content": "x" * length}]))

    def kept() -> list[int]:
        result = []
        for number in range(20):
            try:
                store.get(str(number))
                result.append(number)
            except UnknownResponseError:
                pass
        return result

    for number in range(5):
        add(number)
    assert kept() == [2, 3, 4]
    add(5, 300)
    assert kept() == [4, 5] or kept() == [3, 4, 5]
    add(6, 500)
    assert 6 not in kept()
    store.remove("5")
    add(7, 300)
    assert 7 in kept()
