"""OpenAI's own client gets tool calls and reasoning, whole and streamed, and sends them back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from tests.runtime.server.test_server import Client
from tests.runtime.server.test_tools import REPLY, SAID, TEMPLATE, Say, say, serving_with
from tests.support.conversations import TOOLS

openai = pytest.importorskip("openai")
__all__ = ["say"]


class search(BaseModel):
    """Finds files."""

    path: str
    count: int


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    def connected(server: Client) -> Any:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)

    with serving_with(TEMPLATE) as server, connected(server) as opened:
        yield opened.chat.completions


def test_a_conversation_goes_on_with_the_results_of_calls(client: Any, say: Say) -> None:
    say(REPLY)
    messages: list[Any] = list(SAID)
    choice = client.create(model="tiny", messages=messages, tools=TOOLS, temperature=0).choices[0]
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.reasoning_content == "Let me see."
    assert [call.function.name for call in calls] == ["search", "noop"]
    messages.append(choice.message)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": call.function.arguments} for call in calls]
    say("Done.")
    choice = client.create(model="tiny", messages=messages, tools=TOOLS, temperature=0).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Done.", "stop")


def test_a_stream_is_put_together(client: Any, say: Say) -> None:
    say(REPLY)
    with client.stream(model="tiny", messages=SAID, tools=TOOLS, temperature=0) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done", "content.delta"} <= kinds
    assert message.content == "Sure." and len(message.tool_calls) == 2
    assert json.loads(message.tool_calls[0].function.arguments) == {"path": "a b", "count": 2}


def test_arguments_are_parsed_by_a_class(client: Any, say: Say) -> None:
    say(REPLY)
    tools = [openai.pydantic_function_tool(search)]
    result = client.parse(model="tiny", messages=SAID, tools=tools, temperature=0, parallel_tool_calls=False)
    [call] = result.choices[0].message.tool_calls
    assert call.function.parsed_arguments == search(path="a b", count=2)
