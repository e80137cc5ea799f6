"""`LLM.chat`: replies as messages, whole and streamed, and calls that a model is forced to make."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from qcompile.errors import UsageError
from qcompile.runtime.chat import ChatTemplate
from qcompile.runtime.forced_calls import calls_schema
from qcompile.runtime.llm import LLM
from tests.runtime.server.test_tools import CALL, REPLY, SAID, TEMPLATE, TOKENIZER, Say, say
from tests.support.conversations import TOOLS
from tests.support.fake import fake_llm

__all__ = ["say"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    opened = fake_llm(tokenizer=TOKENIZER)
    opened.template = ChatTemplate({"default": TEMPLATE}, {})
    return opened


def test_a_reply_is_a_message(llm: LLM, say: Say) -> None:
    say(REPLY)
    [output] = llm.chat(SAID, temperature=0, tools=TOOLS)
    sample = output.outputs[0]
    assert output.prompt == "?" and sample.text == REPLY and sample.finish_reason == "stop"
    message = sample.message
    assert (message["content"], message["reasoning_content"]) == ("Sure.", "Let me see.")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["search", "noop"]
    alone = llm.chat(SAID, temperature=0)[0].outputs[0].message
    assert alone["content"] == REPLY.partition("</think>\n\n")[2] and "tool_calls" not in alone


def test_a_stream_has_the_message_so_far(llm: LLM, say: Say) -> None:
    say(CALL)
    messages = [output.outputs[0].message for output in llm.chat(SAID, temperature=0, tools=TOOLS, stream=True)]
    arguments = [message["tool_calls"][0]["function"]["arguments"] for message in messages if "tool_calls" in message]
    assert len({message["tool_calls"][0]["id"] for message in messages if "tool_calls" in message}) == 1
    assert all(later.startswith(earlier) for earlier, later in pairwise(arguments))
    assert json.loads(arguments[-1]) == {"path": "a b", "count": 2} and messages[-1]["content"] is None


def test_several_conversations_have_replies_in_order(llm: LLM, say: Say) -> None:
    say("yes")
    outputs = llm.chat([SAID, SAID], temperature=0)
    assert [output.outputs[0].message for output in outputs] == [{"role": "assistant", "content": "yes"}] * 2


def test_a_reply_continues_the_last_message(say: Say) -> None:
    """The prompt ends where the last message does, or where its turn does; each only on request."""
    with fake_llm(tokenizer=TOKENIZER) as llm:
        text = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
        llm.template = ChatTemplate({"default": text + "{% if add_generation_prompt %}<assistant>{% endif %}"}, {})
        begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
        say("yes")
        ends = {
            "<user>Hi</><assistant>Well</><assistant>": {},
            "<user>Hi</><assistant>Well</>": {"add_generation_prompt": False},
            "<user>Hi</><assistant>Well": {"add_generation_prompt": False, "continue_final_message": True},
        }
        for prompt, options in ends.items():
            assert llm.chat(begun, temperature=0, **options)[0].prompt == prompt
        with pytest.raises(UsageError, match="continue_final_message needs add_generation_prompt: false"):
            llm.chat(begun, continue_final_message=True)


@pytest.mark.parametrize("messages", ["hi", [], [[]], [{"content": "x"}], [5], None])
def test_what_is_no_conversation(llm: LLM, messages: Any) -> None:
    with pytest.raises(UsageError, match=r"^(messages must be a list of messages|each message must be a dictionary)"):
        llm.chat(messages)


def test_a_model_without_a_template_does_not_chat(llm: LLM) -> None:
    with pytest.raises(UsageError, match="has no chat template"):
        fake_llm(tokenizer=TOKENIZER).chat(SAID)
    with pytest.raises(UsageError, match="there is no tool-parser 'x'"):
        llm.chat(SAID, tool_parser="x")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "write_file"}}])
def test_a_forced_call_is_of_its_schema(choice: Any) -> None:
    """Whatever the model would say: this one says nothing of sense."""
    with fake_llm(tokenizer=TOKENIZER) as llm:
        llm.template = ChatTemplate({"default": TEMPLATE}, {})
        schema = {"properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"], "additionalProperties": False}
        schema["$defs"] = {"A": {"enum": [1, 2]}}
        functions = [{"name": name, "parameters": {"type": "object", **schema}} for name in ("search", "write_file")]
        tools = [{"type": "function", "function": each} for each in functions]
        sample = llm.chat(SAID, temperature=0, tools=tools, tool_choice=choice, parallel_tool_calls=False)[0].outputs[0]
        [call] = sample.message["tool_calls"]
        assert sample.finish_reason == "stop" and sample.message["content"] is None
        assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
        assert call["function"]["name"] == "write_file" or choice == "required"


@pytest.mark.parametrize(
    ("message", "options", "said"),
    [
        ({"role": "friend", "content": "x"}, {}, "messages.1.role must be one of system, .*, tool, not 'friend'"),
        ({"role": "user", "content": 5}, {}, "messages.1.content must be a text or a list of parts, not 5"),
        ({"role": "user", "content": [{"type": "image_url"}]}, {}, "messages.1 has a part 'image_url': only the text "),
        (SAID[0], {"tools": "add"}, "tools must be a list of dictionaries, not 'add'"),
        (SAID[0], {"tools": [print]}, "tools.0 must be "),
        (SAID[0], {"documents": "add"}, "documents must be a list of dictionaries, not 'add'"),
        (SAID[0], {"chat_template_kwargs": [5]}, "chat_template_kwargs must be a dictionary, not "),
        (
            SAID[0],
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools: the parameters of 'f' must be of type 'object', not 'string'",
        ),
        (
            SAID[0],
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]},
            "tools cannot be compiled: Unimplemented keys",
        ),
    ],
)
def test_what_a_chat_refuses(llm: LLM, message: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"^{said}"):
        llm.chat([SAID[0], message], tool_choice="required" if "tools" in options else "auto", **options)


def test_a_schema_in_calls_keeps_its_values() -> None:
    """References are changed, but not what looks like them in values, nor parameters with names of keywords."""
    parameters = {"properties": {"enum": {"$ref": "#/x"}, "a": {"const": {"$ref": "#/x"}}}, "x": {"type": "null"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    made = calls_schema([tool], None, True)["$defs"]["tool0"]
    assert made["properties"] == {"enum": {"$ref": "#/$defs/tool0/x"}, "a": {"const": {"$ref": "#/x"}}}
    assert made["type"] == "object"
