"""Dialogues as prompts: what templates get of tools, calls, results, reasoning and variables."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from qcompile.errors import UsageError
from qcompile.runtime.chat import ChatTemplate
from qcompile.runtime.dialogue import Dialogue, DialogueFormat
from qcompile.runtime.forced_calls import calls_schema
from qcompile.runtime.parsers.reply import ParsedReply, ToolCall
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.structured import Reasoning
from tests.support.conversations import TOOLS


def call(name: str, identity: str, **arguments: Any) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


HISTORY = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call("f", "a", x=1), call("g", "b")]},
    {"role": "tool", "tool_call_id": "b", "content": "two"},
    {"role": "tool", "tool_call_id": "a", "content": "one"},
]
MESSAGES = "{# tool_calls #}{% for m in messages %}{{ m | tojson }}\n{% endfor %}"


def form(source: str, **options: Any) -> DialogueFormat:
    return DialogueFormat(ChatTemplate({"default": source}, {}), None, **options)


def rendered(source: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    prompt = form(source).turn(Dialogue(messages)).prompt
    return [json.loads(line) for line in prompt.splitlines()]


def test_reasoning_by_its_newer_name_reaches_the_template() -> None:
    newer = {"role": "assistant", "reasoning": "hm", "content": "x"}
    assert rendered(MESSAGES, [newer]) == [newer | {"reasoning_content": "hm"}]
    assert rendered(MESSAGES, [newer | {"reasoning_content": "hm"}]) == [newer | {"reasoning_content": "hm"}]


def test_calls_and_results_reach_the_template() -> None:
    _, said, two, one = rendered(MESSAGES, HISTORY)
    assert said["content"] == "" and said["reasoning_content"] == "hm" and "thinking" not in said
    assert [each["function"] for each in said["tool_calls"]] == [
        {"name": "f", "arguments": {"x": 1}},
        {"name": "g", "arguments": {}},
    ]
    assert (two["name"], one["name"]) == ("g", "f")


def test_calls_that_are_printed_by_number_are_numbered() -> None:
    said = {"role": "assistant", "tool_calls": [call("f", "c")]}
    result = rendered(MESSAGES + "{# <|tool_call_argument_begin|> #}", [*HISTORY, said])
    ids = [each["id"] for message in result for each in message.get("tool_calls", ())]
    assert ids == ["functions.f:0", "functions.g:1", "functions.f:2"]
    assert [message["tool_call_id"] for message in result[2:4]] == ids[1::-1] and HISTORY[2]["tool_call_id"] == "b"


def test_a_template_that_tests_for_no_content_gets_none() -> None:
    """Others would print it."""
    source = MESSAGES + "{% for message in messages if message.content is none %}{% endfor %}"
    assert rendered(source, HISTORY)[1]["content"] is None and rendered(MESSAGES, HISTORY)[1]["content"] == ""


def test_a_template_that_joins_arguments_as_text_gets_text() -> None:
    source = "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}{{ '<' + c.function.arguments + '>' }}"
    assert form(source + "{% endfor %}{% endfor %}").turn(Dialogue(HISTORY)).prompt == '<{"x": 1}><{}>'
    with pytest.raises(UsageError, match="no such turn"):
        form("{# tool_calls #}{{ raise_exception('no such turn') }}").turn(Dialogue(HISTORY))


def test_calls_that_the_template_would_lose_are_refused() -> None:
    with pytest.raises(UsageError, match="the chat template of this model reads no tool_calls"):
        form("{% for m in messages %}{{ m.content }}{% endfor %}").turn(Dialogue(HISTORY))


def test_a_template_that_refuses_several_calls_gets_one_in_each_message() -> None:
    refusal = (
        "{% for m in messages if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('x') }}{% endfor %}"
    )
    messages = rendered(refusal + MESSAGES, HISTORY)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant", "tool"]


def test_a_template_of_one_call_each_gets_all_of_them() -> None:
    """The results stand behind their calls."""
    source = "{# <|channel|> <|message|> message.thinking #}" + MESSAGES
    messages = rendered(source, HISTORY)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert [m["tool_calls"][0]["id"] for m in messages if "tool_calls" in m] == ["a", "b"]
    assert [m["content"] for m in messages if m["role"] == "tool"] == ["one", "two"]
    assert messages[1]["thinking"] == "hm" and "thinking" not in messages[3]
    spoken = [HISTORY[0], {**HISTORY[1], "content": "I will."}]
    assert "thinking" not in rendered(source, spoken)[1]


def test_tools_documents_and_variables_reach_the_template() -> None:
    source = "{{ tools | tojson }}{{ documents | tojson }}{{ size }}{# <tool_call> #}"
    asked = Dialogue([], TOOLS[:1], documents=[{"text": "d"}], variables={"size": 3})
    assert form(source).turn(asked).prompt == json.dumps(TOOLS[:1]) + '[{"text": "d"}]3'
    assert form(source).turn(Dialogue([], TOOLS, "none")).prompt == "nullnull"


def test_of_several_templates_that_for_tools_is_taken_with_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "<tool_call>{{ tools | length }}"}, {})
    form = DialogueFormat(template, None)
    assert form.turn(Dialogue([])).prompt == "plain"
    assert form.turn(Dialogue([], TOOLS)).prompt == f"<tool_call>{len(TOOLS)}"


@pytest.mark.parametrize(
    ("source", "effort", "prompt"),
    [
        ("{{ enable_thinking }}</think>", "none", "False</think>"),
        ("{{ enable_thinking }}</think>", "low", "True</think>"),
        ("{{ thinking }}{{ reasoning_effort }}", "high", "Truehigh"),
        ("{{ reasoning_effort }}{% if reasoning_effort == 'none' %}{% endif %}", "none", "none"),
        ("no reasoning", "none", "no reasoning"),
    ],
)
def test_effort_sets_what_the_template_reads(source: str, effort: str, prompt: str) -> None:
    assert form(source).turn(Dialogue([], reasoning_effort=effort)).prompt == prompt


def test_another_effort_is_refused_even_where_the_template_reads_one() -> None:
    with pytest.raises(UsageError, match=r"reasoning_effort must be one of none, .*, not 'most'"):
        form("{{ enable_thinking }}{{ reasoning_effort }}").turn(Dialogue([], reasoning_effort="most"))


def test_switches_may_be_off_where_nothing_reasons() -> None:
    assert form("plain").turn(Dialogue([], variables={"enable_thinking": False})).prompt == "plain"
    with pytest.raises(UsageError, match="has 'enable_thinking', which the chat template does not read"):
        form("plain").turn(Dialogue([], variables={"enable_thinking": True}))


def test_reasoning_that_the_prompt_begins_is_known_from_the_prompt() -> None:
    source = "{% if thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
    begun = form(source).turn(Dialogue([], variables={"thinking": True})).parser()
    assert begun.whole("so</think>\nyes") == ParsedReply("yes", "so")
    closed = form(source).turn(Dialogue([])).parser()
    assert closed.whole("yes") == ParsedReply("yes", None)


def test_channels_are_read_without_tools_too() -> None:
    result = form("<|channel|><|message|>").turn(Dialogue([])).parser().whole("<|channel|>final<|message|>yes")
    assert result == ParsedReply("yes")


def forced(choice: Any, **options: Any) -> Any:
    return form("{{ tools | length }}{{ enable_thinking }}").turn(Dialogue([], TOOLS, choice, **options))


def test_forced_calls_have_a_schema_and_no_reasoning() -> None:
    turn = forced("required", variables={"enable_thinking": True})
    assert turn.prompt == f"{len(TOOLS)}False" and not turn.named
    schema = turn.language.json
    names = [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]]
    assert names == [tool["function"]["name"] for tool in TOOLS] and "maxItems" not in schema
    assert forced("required", parallel_tool_calls=False).language.json["maxItems"] == 1
    one = forced({"type": "function", "function": {"name": "noop"}})
    assert one.named and one.language.json["maxItems"] == 1 == len(one.language.json["items"]["anyOf"])
    reply = turn.parser().whole('[{"name":"noop","parameters":{"a":1}},{"name":"search","parameters":{}}]')
    assert [(call.name, call.arguments) for call in reply.calls] == [("noop", '{"a":1}'), ("search", "{}")]
    result = turn.params(SamplingParams()).structure
    assert result is not None and result.disable_any_whitespace  # a model may write spaces without end
    with pytest.raises(UsageError, match="structured outputs exclude calls"):
        forced("required", structured=True)


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        ("{{ enable_thinking }}</think>", "False</think>"),
        ("a<think>\n{# </think> #}", "a<think>\n\n</think>\n\n"),
        ("a{# <|channel|><|message|> #}", "a<|channel|>final<|message|>"),
        ("a{# </think> #}", "a"),
    ],
)
def test_structured_output_is_content_from_its_first_token_on(source: str, prompt: str) -> None:
    turn = form(source).turn(Dialogue([], reasoning_effort="none", structured=True))
    assert turn.prompt == prompt and turn.language is None
    assert turn.parser().whole('{"a": "<think>"}') == ParsedReply('{"a": "<think>"}')


def test_structured_output_stands_behind_reasoning_that_is_asked_for() -> None:
    source = "{{ enable_thinking }}{# </think> #}"
    for asked in ({"reasoning_effort": "high"}, {"variables": {"enable_thinking": True}}):
        turn = form(source).turn(Dialogue([], structured=True, **asked))  # type: ignore[arg-type]
        assert turn.prompt == "True" and turn.reasoning == Reasoning("<think>", "</think>")
        assert turn.parser().whole("<think>a</think>\n\n1") == ParsedReply("1", "a")
        params = turn.params(SamplingParams(structured_outputs={"regex": "1"}))
        assert params.structure is not None and params.structure.source.reasoning == turn.reasoning
    begun = form("{{ enable_thinking }}<think>\n{# </think> #}")
    asked_to = Dialogue([], reasoning_effort="low", structured=True)
    assert begun.turn(asked_to).reasoning == Reasoning("<think>", "</think>", True)
    with pytest.raises(UsageError, match="reasoning_effort 'high': the chat template has no reasoning"):
        form("{{ reasoning_effort }}").turn(Dialogue([], reasoning_effort="high", structured=True))


HARMONY = "{{ reasoning_effort }}{% for tool in tools or () %}{% endfor %}{# <|channel|><|message|> #}"


def test_structured_output_is_the_last_of_several_messages() -> None:
    """It may contain what ends a message elsewhere."""
    turn = form(HARMONY).turn(Dialogue([], reasoning_effort="high", structured=True))
    final, message = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
    assert turn.prompt == "high" and turn.reasoning and turn.reasoning.heads[0] == final
    said = f'{message}a<|end|><|start|>assistant{message}b<|end|><|start|>assistant{final} "<|end|>" '
    for pieces in ([said], list(said)):
        parser, reply = turn.parser(), ParsedReply()
        for piece in pieces:
            reply.add(parser.push(piece))
        reply.add(parser.end())
        assert reply == ParsedReply(' "<|end|>" ', "a\nb")


def test_forced_calls_stand_behind_reasoning_that_is_asked_for() -> None:
    """In a list as without it, or in a message with a call."""
    asked = Dialogue([], TOOLS, "required", reasoning_effort="high")
    listed = form("{{ tools | length }}{{ enable_thinking }}{# </think> #}").turn(asked)
    assert listed.prompt == "4True" and listed.reasoning == Reasoning("<think>", "</think>")
    reply = listed.parser().whole('<think>a</think>[{"name":"noop","parameters":{"a":1}}]')
    assert reply == ParsedReply(None, "a", [ToolCall("noop", '{"a":1}')])
    one = form(HARMONY).turn(asked)
    assert one.reasoning and not one.reasoning.heads and one.language and one.language.calls
    head = "<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
    assert one.language.calls[0][0] == head
    odd = {"function": {"name": "a b"}}
    with pytest.raises(UsageError, match="tools: 'a b' is no name that a call can have in messages"):
        form(HARMONY).turn(Dialogue([], [odd], "required", reasoning_effort="high"))
    params = one.params(SamplingParams()).structure
    assert params is not None and params.source.kind == "calls" and params.source.reasoning == one.reasoning
    said = "<|channel|>analysis<|message|>a<|end|><|start|>assistant" + one.language.calls[3][0] + '{"a":"<|end|>"}'
    assert one.parser().whole(said) == ParsedReply(None, "a", [ToolCall("noop", '{"a":"<|end|>"}')])


def test_references_within_parameters_stay_right() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"items": [{"$ref": "#"}], "$ref": 5}}}
    [result] = calls_schema([{"function": {"name": "f", "parameters": schema}}], None, True)["$defs"].values()
    assert result["properties"]["a"] == {"$ref": "#/$defs/tool0/$defs/A"}
    assert result["$defs"]["A"] == {"items": [{"$ref": "#/$defs/tool0"}], "$ref": 5}


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"type": "function", "function": {"name": "other"}}, "tool_choice: there is no tool 'other'"),
        ({"type": "allowed_tools"}, "tool_choice must be 'auto', 'none', 'required' or "),
        (5, "tool_choice must be 'auto', 'none', 'required' or "),
    ],
)
def test_choices_that_are_none(choice: Any, said: str) -> None:
    with pytest.raises(UsageError, match=f"^{said}"):
        forced(choice)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tools": ["f"]}, "tools.0 must be "),
        ({"tools": [{"function": {"name": "f", "parameters": 5}}]}, "tools.0 must be "),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]},
            "a message is not in OpenAI's form: KeyE",
        ),
        ({"messages": [{"content": "x"}]}, "a message is not in OpenAI's form: KeyError 'role'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0 has a part 'image': "),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content must be a text or a list of parts, not 5"),
    ],
)
def test_malformed_dialogues(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(said)}"):
        form("{{ tools }}<tool_call>{# tool_calls #}").turn(Dialogue(**({"messages": []} | asked)))


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered(MESSAGES, [{"role": "user", "content": parts}]) == [{"role": "user", "content": "ab"}]
