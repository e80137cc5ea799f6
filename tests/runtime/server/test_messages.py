"""/v1/messages: Anthropic's own client, whole and streamed, with tools, thinking and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from qcompile.runtime.engine.samples import PromptSamples
from qcompile.runtime.server.blocks import ReplyBlock
from qcompile.runtime.server.messages.reply import content_of
from tests.runtime.server.test_responses import asked
from tests.runtime.server.test_server import Client, serving, slow_steps
from tests.runtime.server.test_tools import REPLY, TEMPLATE, Say, say, serving_with
from tests.support.fake import byte_tokenizer, fake_llm

anthropic = pytest.importorskip("anthropic")
__all__ = ["asked", "say"]

PATH = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "count": {"type": "integer"}}}
TOOLS: list[Any] = [{"name": name, "description": "d", "input_schema": SCHEMA} for name in ("search", "noop")]
SAID: list[Any] = [{"role": "user", "content": "x"}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": SAID, "max_tokens": 500}
GREEDY: dict[str, Any] = ASKED | {"extra_body": {"temperature": 0}}
"""The client itself has no temperature."""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving_with(TEMPLATE, api_key="key") as opened:
        yield opened


@pytest.fixture(scope="module")
def messages(client: Client) -> Iterator[Any]:
    url = f"http://127.0.0.1:{client.port}"
    with anthropic.Anthropic(base_url=url, api_key="key", max_retries=0) as opened:
        yield opened.messages


def test_a_text(messages: Any, say: Say, asked: list[Any]) -> None:
    say("Hello.")
    system: Any = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "b"},
    ]
    result = messages.create(**GREEDY, system=system, metadata={"user_id": "u"})
    assert (result.type, result.role, result.model, result.stop_reason) == ("message", "assistant", "tiny", "end_turn")
    assert [(block.type, block.text) for block in result.content] == [("text", "Hello.")]
    usage = result.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == 1 and usage.output_tokens == 7
    assert [message["content"] for message in asked[-1][0]] == ["Be\nb", "x"]


def test_ends(messages: Any, say: Say) -> None:
    say("Hello.")
    cut = messages.create(**GREEDY | {"max_tokens": 3})
    assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == ("Hel", "max_tokens", None)
    stopped = messages.create(**GREEDY, stop_sequences=["lo"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("Hel", "stop_sequence", "lo")
    say("")
    with messages.stream(**GREEDY) as stream:
        assert [block.text for block in stream.get_final_message().content] == [""]


def test_a_conversation_goes_on_with_the_results_of_calls(messages: Any, say: Say, asked: list[Any]) -> None:
    say(REPLY)
    result = messages.create(**GREEDY, tools=TOOLS)
    assert [block.type for block in result.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, said, call, other = result.content
    assert (thought.thinking, said.text, result.stop_reason) == ("Let me see.", "Sure.", "tool_use")
    assert (call.name, call.input, other.name) == ("search", {"path": "a b", "count": 2}, "noop")
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "1"}]},
        {"type": "tool_result", "tool_use_id": other.id, "content": "none", "is_error": True},
        {"type": "text", "text": "Go"},
        {"type": "text", "text": "on"},
    ]
    say("Done.")
    said_back = [*SAID, result.to_param(), {"role": "user", "content": results}]
    after = messages.create(**GREEDY | {"messages": said_back}, tools=TOOLS)
    assert after.content[0].text == "Done."
    _, reply, first, second, last = asked[-1][0]
    assert (reply["content"], reply["reasoning_content"]) == ("Sure.", "Let me see.")
    assert [each["function"]["arguments"] for each in reply["tool_calls"]] == [call.input] * 2
    assert (first["tool_call_id"], first["content"], first["name"]) == (call.id, "1", "search")
    assert (second["tool_call_id"], second["content"]) == (other.id, "Error: none")
    assert last == {"role": "user", "content": "Go\non"}


def test_a_stream_is_put_together(client: Client, messages: Any, say: Say) -> None:
    say(REPLY)
    whole = messages.create(**GREEDY, tools=TOOLS)
    with slow_steps(client.service.llm, 0.002), messages.stream(**GREEDY, tools=TOOLS) as stream:
        events = [event.type for event in stream]
        last = stream.get_final_message()
    raw = [event for event in events if event not in ("text", "thinking", "input_json")]
    assert raw[0] == "message_start" and raw[-2:] == ["message_delta", "message_stop"]
    assert events.count("input_json") > 3 and events.count("thinking") > 1
    assert events.count("content_block_start") == events.count("content_block_stop") == 4

    def plain(message: Any) -> Any:
        return [block.model_dump(exclude={"id"}) for block in message.content]

    assert plain(last) == plain(whole) and last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens == 1


@pytest.mark.parametrize(("choice", "names"), [("any", {"search", "noop"}), ("tool", {"noop"})])
def test_forced_calls(messages: Any, choice: str, names: set[str]) -> None:
    chosen = {"type": choice, "disable_parallel_tool_use": True} | ({"name": "noop"} if choice == "tool" else {})
    result = messages.create(**GREEDY, tools=TOOLS, tool_choice=chosen)
    (call,) = result.content
    assert call.type == "tool_use" and call.name in names and result.stop_reason == "tool_use"


def test_thinking_and_structured_outputs(messages: Any, say: Say, asked: list[Any]) -> None:
    say("x")
    messages.create(**GREEDY, thinking={"type": "enabled", "budget_tokens": 1024})
    assert asked[-1][1]["enable_thinking"] is True
    messages.create(**GREEDY, thinking={"type": "disabled"})
    assert asked[-1][1]["enable_thinking"] is False
    messages.create(**GREEDY, thinking={"type": "adaptive"}, output_config={"effort": "low"})
    assert asked[-1][1]["reasoning_effort"] == "low"


def test_a_structured_output(messages: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "schema": schema}}
    result = messages.create(**GREEDY, output_config=form)
    assert json.loads(result.content[0].text)["a"] in (1, 2)


def test_what_changes_nothing_is_accepted(client: Client) -> None:
    """Some clients ask to keep all reasoning in the context, which is what happens anyway."""
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    body = ASKED | {"max_tokens": 2, "mcp_servers": [], "context_management": kept}
    assert client.ask(PATH, body, **{"x-api-key": "key"})[0] == 200


def test_tokens_are_counted(messages: Any) -> None:
    assert messages.count_tokens(model="tiny", messages=SAID, tools=TOOLS).input_tokens == 1


def test_errors_have_the_form_of_the_api(client: Client, messages: Any) -> None:
    url = f"http://127.0.0.1:{client.port}"
    with anthropic.Anthropic(base_url=url, api_key="other", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            stranger.messages.create(**GREEDY)
        assert caught.value.body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'other'") as missing:
        messages.create(**GREEDY | {"model": "other"})
    assert missing.value.body == {"type": "error", "error": missing.value.body["error"]}
    assert client.ask("/v1/messages/other", {}, **{"x-api-key": "key"})[1]["error"]["type"] == "not_found_error"
    assert client.ask(PATH, None, **{"x-api-key": "key"})[1]["error"]["message"].startswith("'/v1/messages' does not")
    with pytest.raises(anthropic.RequestTooLargeError):
        messages.create(**GREEDY | {"messages": [{"role": "user", "content": "x" * (3 << 20)}]})


def test_a_message_that_fails_says_so(messages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptSamples, "overflowed", property(lambda self: True))
    with pytest.raises(anthropic.APIStatusError, match="not finite"):
        list(messages.create(**GREEDY, stream=True))
    with pytest.raises(anthropic.InternalServerError, match="not finite"):
        messages.create(**GREEDY)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: Input should be 'user', "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0: 'image' is not supported: only the text decoder is compiled",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages.0.content.0: thinking is no part of a message of the user",
        ),
        (
            {"messages": [*SAID, {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages.1.content.0: tool_result is no part of a message of the assistant",
        ),
        ({"messages": [*SAID, {"role": "assistant", "content": "I"}]}, "messages: the last one must not be the"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools.0: 'bash_20250124' is not supported: ",
        ),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: Field required"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name: not a name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice must be 'auto', "),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice: "),
        ({"stop": ["x"]}, "stop: is not supported"),
        ({"container": "c"}, "container: is not supported"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management: is not"),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display: is not supported"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: Input should be 'json_schema'"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "output_config.format cannot be compiled: Unimplemented",
        ),
    ],
)
def test_what_is_refused(client: Client, body: dict[str, Any], said: str) -> None:
    status, result = client.ask(PATH, ASKED | body, **{"x-api-key": "key"})
    assert status == 400 and result["type"] == "error" and result["error"]["type"] == "invalid_request_error"
    assert result["error"]["message"].startswith(said)


def test_a_model_that_does_not_reason() -> None:
    def render(messages: list[dict[str, Any]]) -> str:
        return "|".join(message["content"] for message in messages)

    with fake_llm(tokenizer=byte_tokenizer()) as llm, serving(llm, template=render) as client:
        status, result = client.ask(PATH, ASKED | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
        assert (
            status == 400 and result["error"]["message"] == "thinking: the chat template of this model has no reasoning"
        )
        assert client.ask(PATH, ASKED | {"thinking": {"type": "disabled"}, "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": [1, "tw', {"a": [1, "tw"]}),
        ("", {}),
        ("[1", {}),
        ("{a", {}),
        ("nu", {}),
        ('{"a": 1e999}', {}),
    ],
)
def test_incomplete_arguments_are_given_as_far_as_they_are(arguments: str, given: Any) -> None:
    block = ReplyBlock("call", arguments, "f", "c")
    assert content_of(block) == {"type": "tool_use", "id": "c", "name": "f", "input": given}
