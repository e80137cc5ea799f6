"""Tools and reasoning over HTTP: what templates get, and what clients get, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from qcompile.errors import UsageError
from qcompile.runtime.chat import ChatTemplate
from qcompile.runtime.dialogue import Dialogue, DialogueFormat
from qcompile.runtime.messages import MessageStream
from qcompile.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from qcompile.runtime.server import app
from qcompile.runtime.server.chat_replies import ChatReply
from tests.runtime.server.test_server import Client, serving
from tests.support.conversations import TOOLS
from tests.support.fake import FakeLibrary, byte_tokenizer, fake_llm, ints

SAID = [{"role": "user", "content": "x"}]
CALL = '<tool_call>\n{"name": "search", "arguments": {"path": "a b", "count": 2}}\n</tool_call>'
REPLY = f"<think>\nLet me see.\n</think>\n\nSure.\n{CALL}\n{CALL.replace('search', 'noop')}"
READS = "{% if tools or documents or enable_thinking or reasoning_effort %}{% endif %}"
TEMPLATE = "?{# <tool_call> </think> tool_calls #}" + READS
"""Its prompt is one token, so that the scripted reply begins with its first character."""

PATH = "/v1/chat/completions"
TOKENIZER = byte_tokenizer()
TOKENIZER.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
Say = Callable[[str], None]


@contextmanager
def serving_with(template: str, **options: Any) -> Iterator[Client]:
    """A server of a model with this chat template."""
    options["template"] = ChatTemplate({"default": template}, {})
    with fake_llm(tokenizer=TOKENIZER) as llm, serving(llm, **options) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving_with(TEMPLATE) as opened:
        yield opened


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Sets the reply of models to prompts of one token."""

    def set_reply(text: str) -> None:
        reply = TOKENIZER.encode(text).ids

        def run(self: Any, batch: Any) -> None:
            for at, row in enumerate(ints(batch.output_rows, batch.outputs)):
                position = int(ints(batch.positions, batch.tokens)[row])
                ints(batch.argmax, batch.outputs)[at] = reply[position] if position < len(reply) else 0

        monkeypatch.setattr(FakeLibrary, "_run", run)

    return set_reply


def chat(client: Client, **options: Any) -> dict[str, Any]:
    body = {"messages": SAID, "temperature": 0, "max_tokens": 500} | options
    status, result = client.ask("/v1/chat/completions", body)
    assert status == 200, result
    return result["choices"][0]


def streamed(client: Client, **options: Any) -> dict[str, Any]:
    """The message that a stream's deltas add up to, with its end."""
    body = {"messages": SAID, "temperature": 0, "max_tokens": 500, "stream": True} | options
    lines = client.open("/v1/chat/completions", body).read().decode().split("\n\n")
    events = [json.loads(line[6:])["choices"][0] for line in lines if line and line != "data: [DONE]"]
    message: dict[str, Any] = {}
    for event in events:
        add(message, event["delta"])
    return {"message": message, "finish_reason": events[-1]["finish_reason"]}


def add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a message, as clients do."""
    for name in ("role", "content", "reasoning_content"):
        if name in delta:
            message[name] = message.get(name, "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            assert call["id"] and call["type"] == "function" and call["function"]["name"]
            calls.append({"function": {"name": call["function"]["name"], "arguments": ""}})
        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]


def test_calls_and_reasoning_are_parts_of_the_message(client: Client, say: Say) -> None:
    say(REPLY)
    result = chat(client, tools=TOOLS)
    message = result["message"]
    assert result["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"]) == ("Sure.", "Let me see.")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["search", "noop"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"path": "a b", "count": 2}
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(each.startswith("call_") for each in ids)
    say(CALL)
    assert chat(client, tools=TOOLS)["message"]["content"] is None


def test_marks_for_caches_are_no_part_of_the_prompt() -> None:
    """Some clients mark messages, parts and tools for Anthropic's cache. Templates write whole messages and tools."""
    marked = {"cache_control": {"type": "ephemeral"}}
    said = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    plain = {"messages": said, "tools": tools}
    parts = [part | marked for part in said[0]["content"]]  # type: ignore[union-attr]
    functions = [{"type": "function", "function": {"name": "f"} | marked} | marked]
    with serving_with("{{ messages | tojson }}{{ tools | tojson }}{# <tool_call> tool_calls #}") as opened:
        counts = []
        for body in (plain, {"messages": [said[0] | marked | {"content": parts}], "tools": functions}):
            status, result = opened.ask("/v1/chat/completions", body | {"max_tokens": 1})
            assert status == 200, result
            counts.append(result["usage"]["prompt_tokens"])
    assert counts[0] == counts[1]


def test_a_stream_adds_up_to_the_whole_message(client: Client, say: Say) -> None:
    say(REPLY)
    whole = chat(client, tools=TOOLS)
    for call in whole["message"]["tool_calls"]:
        del call["id"], call["type"]
    assert streamed(client, tools=TOOLS) == {name: whole[name] for name in ("message", "finish_reason")}


def test_structured_output_and_forced_calls_follow_reasoning_in_messages(say: Say) -> None:
    """Whole and streamed, of a model with replies of several messages."""
    thought = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
    number = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    final = {"response_format": number, "reasoning_effort": "high"}
    forced = {"tools": TOOLS, "tool_choice": "required", "reasoning_effort": "high"}
    with serving_with("?{# <|channel|><|message|> #}" + READS) as client:
        say(thought + '<|channel|>final<|message|>{"a": "<|end|>"}')
        result = chat(client, **final)
        assert (result["message"]["reasoning_content"], result["finish_reason"]) == ("Let me see.", "stop")
        assert result["message"]["content"] == '{"a": "<|end|>"}'
        assert streamed(client, **final) == {name: result[name] for name in ("message", "finish_reason")}
        say(thought + '<|channel|>commentary to=functions.noop <|constrain|>json<|message|>{"a":1}')
        result = chat(client, **forced)
        [call] = result["message"]["tool_calls"]
        assert call["function"] == {"name": "noop", "arguments": '{"a":1}'} and result["finish_reason"] == "tool_calls"
        again = streamed(client, **forced)
        assert again["message"]["tool_calls"] == [{"function": call["function"]}]
        assert again["message"]["reasoning_content"] == result["message"]["reasoning_content"] == "Let me see."


def test_arguments_come_in_pieces() -> None:
    """Nothing is sent while it is not certain what the text is."""
    turn = DialogueFormat(ChatTemplate({"default": TEMPLATE}, {}), TOKENIZER).turn(Dialogue(SAID, TOOLS))
    reply, message, pieces = ChatReply("tiny", 1, turn=turn), {}, 0
    for end in range(1, len(REPLY) + 1):
        sample = CompletionOutput(0, REPLY[:end], [1] * end, finish_reason="stop" if end == len(REPLY) else None)
        output = RequestOutput(0, None, [1], [sample], end == len(REPLY), RequestMetrics())
        piece = reply.piece(0, output, sample, end - 1, end - 1)
        if piece is not None:
            pieces += any(call["function"]["arguments"] for call in piece["delta"].get("tool_calls", ()))
            assert piece["delta"] and piece["finish_reason"] == ("tool_calls" if end == len(REPLY) else None)
            add(message, piece["delta"])
    whole = MessageStream(turn)
    whole.push(REPLY, ended=True)
    expected = whole.message
    names = [call["function"] for call in expected["tool_calls"]]
    assert [call["function"] for call in message["tool_calls"]] == names
    assert (message["content"], message["reasoning_content"]) == (expected["content"], expected["reasoning_content"])
    assert pieces == sum(len(call["arguments"]) for call in names)  # one for each character


def test_without_tools_calls_are_text(client: Client, say: Say) -> None:
    say(REPLY)
    for options in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        result = chat(client, **options)
        assert result["finish_reason"] == "stop" and "tool_calls" not in result["message"]
        assert result["message"]["content"] == REPLY.partition("</think>\n\n")[2]
        assert streamed(client, **options)["message"] == result["message"]


def test_one_call_where_one_is_allowed(client: Client, say: Say) -> None:
    say(REPLY)
    result = chat(client, tools=TOOLS, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in result["message"]["tool_calls"]] == ["search"]


def test_a_call_that_breaks_off_is_of_its_length(client: Client, say: Say) -> None:
    say(CALL)
    for result in (chat(client, tools=TOOLS, max_tokens=60), streamed(client, tools=TOOLS, max_tokens=60)):
        assert result["finish_reason"] == "length"
        assert CALL[:60].endswith(result["message"]["tool_calls"][0]["function"]["arguments"])


def test_a_forced_call_ends_as_in_openais_api() -> None:
    """With `tool_calls` where the model had a choice, with `stop` where the function was named."""
    choices = (("required", "tool_calls"), ({"type": "function", "function": {"name": "noop"}}, "stop"))
    tools = [{"type": "function", "function": {"name": "noop"}}]
    with serving_with(TEMPLATE) as client:
        for choice, reason in choices:
            options = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
            for result in (chat(client, **options), streamed(client, **options)):
                [call] = result["message"]["tool_calls"]
                assert call["function"] == {"name": "noop", "arguments": "{}"} and result["finish_reason"] == reason


def test_a_forced_call_that_breaks_off_leaves_no_json_in_the_content() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("noop", "none")]
    whole = '[{"name":"noop","parameters":{}}]'
    with serving_with(TEMPLATE) as client:
        for choice in ("required", {"type": "function", "function": {"name": "noop"}}):
            for most in (1, 5, 9, 12, 17, 31):
                options = {"tools": tools, "tool_choice": choice, "max_tokens": most}
                for result in (chat(client, **options), streamed(client, **options)):
                    assert result["finish_reason"] == "length" and not result["message"].get("content")
                    calls = [call["function"] for call in result["message"].get("tool_calls", ())]
                    assert choice == "required" or [call["name"] for call in calls] == ["noop"]
                    assert all(call["arguments"] in whole for call in calls)


def test_several_samples_have_parsers_of_their_own(client: Client, say: Say) -> None:
    say(CALL)
    status, result = client.ask(
        "/v1/chat/completions", {"messages": SAID, "temperature": 0, "max_tokens": 500, "n": 2, "tools": TOOLS}
    )
    assert status == 200 and [len(choice["message"]["tool_calls"]) for choice in result["choices"]] == [1, 1]


def test_tokens_of_a_format_are_found_though_they_are_special(say: Say) -> None:
    """They have no text otherwise. Ids have the length that templates of this format demand."""
    text = '[TOOL_CALLS]search[ARGS]{"path": "x"}'
    say(text)
    with serving_with("?{% if tools %}{% endif %}{# [TOOL_CALLS] #}") as client:
        call = chat(client, tools=TOOLS)["message"]["tool_calls"][0]
        assert call["function"] == {"name": "search", "arguments": '{"path": "x"}'} and len(call["id"]) == 9
        assert chat(client)["message"]["content"] == 'search{"path": "x"}'


def test_a_parser_may_be_named(say: Say) -> None:
    say('[search(path="x")]')
    template = "?{% if tools %}{% endif %}"
    with serving_with(template) as client:
        assert "name it (--tool-parser)" in client.refused(400, {"messages": SAID, "tools": TOOLS}, PATH)
    with serving_with(template, tool_parser="pythonic", reasoning_parser="think") as client:
        assert chat(client, tools=TOOLS)["message"]["tool_calls"][0]["function"]["arguments"] == '{"path": "x"}'
        say("<think>a</think>b")
        assert chat(client)["message"]["reasoning_content"] == "a"


def test_an_unknown_parser_is_refused_before_the_server_begins() -> None:
    template = ChatTemplate({"default": TEMPLATE}, {})
    with fake_llm(tokenizer=TOKENIZER) as llm, app.bind("127.0.0.1", 0) as listening:
        for options in ({"tool_parser": "x"}, {"reasoning_parser": "x"}):
            for given in (template, None):  # completions need no template
                with pytest.raises(UsageError, match=r"there is no (tool|reasoning)-parser 'x': use one of "):
                    app.serve(app.Served(llm, "tiny", given, **options), listening)
        assert llm.generate("x", max_tokens=1)


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_are_those_that_are_called(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    result: list[Any] = []
    turn = DialogueFormat.turn
    monkeypatch.setattr(DialogueFormat, "turn", lambda self, asked: [result.append(asked), turn(self, asked)][1])
    called = chat(client, tools=TOOLS, tool_choice=allowed("noop", mode="required"))["message"]["tool_calls"]
    assert {call["function"]["name"] for call in called} == {"noop"}
    chat(client, tools=TOOLS, tool_choice=allowed("noop"), max_tokens=1)
    assert [([t["function"]["name"] for t in one.tools], one.tool_choice) for one in result] == [
        (["noop"], "required"),
        (["noop"], "auto"),
    ]


def function(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice: structured outputs exclude calls; use 'auto' or 'none'",
        ),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": allowed("search", "f")}, "tool_choice.tools has 'f', which is no function"),
        (
            {"tools": TOOLS, "tool_choice": allowed("search", mode="none")},
            "tool_choice: the mode of allowed_tools must",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools must be a list of functions"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools: 'search' occurs twice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name: not a name: give "),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type: Input should be 'function'"),
        ({"tools": 5}, "tools: Input should be a valid list"),
        (
            {"tools": [function({"type": "array"})], "tool_choice": "required"},
            "tools: the parameters of 'f' must be of type 'object', not 'array'",
        ),
        ({"tools": [function({"not": {}})], "tool_choice": "required"}, "tools cannot be compiled: Unimplemented keys"),
        ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 2}, "tool_choice: min_tokens, allowed_token_ids, "),
        (
            {"messages": [{"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}]},
            "messages.0 has reasoning and reasoning_content, which differ: give one of them",
        ),
        ({"reasoning_effort": "most"}, "reasoning_effort: Input should be 'none', "),
        (
            {"chat_template_kwargs": {"size": 5}},
            "chat_template_kwargs has 'size', which the chat template does not read",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs has messages, which "),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages.0: only messages of the assistant have tool_calls and reasoning_content",
        ),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "messages.0: only messages of tools "),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages.0.tool_calls.0: the arguments are not JSON: ",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "5"}}]}]},
            "messages.0.tool_calls.0: the arguments are JSON, but no object",
        ),
    ],
)
def test_what_is_refused(client: Client, body: dict[str, Any], said: str) -> None:
    assert client.refused(400, {"messages": SAID} | body, PATH).startswith(said)


def test_what_the_template_does_not_read_is_refused() -> None:
    with serving_with("?</think>") as client:
        for body, said in (
            ({"tools": TOOLS}, "tools: the chat template of this model takes none"),
            ({"documents": [{"text": "a"}]}, "documents: the chat template of this model takes none"),
            ({"reasoning_effort": "low"}, "reasoning_effort 'low': the chat template reads no such variable"),
            ({"reasoning_effort": "none"}, "reasoning_effort 'none': the chat template cannot turn reasoning off"),
        ):
            assert client.refused(400, {"messages": SAID} | body, PATH) == said
