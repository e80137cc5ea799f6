"""Parsers of replies: what was written is found, wherever the text is cut, and malformed calls come out as text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from qcompile.errors import UsageError
from qcompile.runtime.parsers.channels import StructuredChannelsParser
from qcompile.runtime.parsers.events import ArgumentsPiece, CallStart, Event, TextPiece, merged
from qcompile.runtime.parsers.forced_calls import ForcedCallsParser
from qcompile.runtime.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, reasoning_tags, tool_format
from qcompile.runtime.parsers.reasoning import ReasoningParser
from qcompile.runtime.parsers.reply import ParsedReply, ReplyParser
from qcompile.runtime.parsers.tools import DeclaredTools
from tests.support.conversations import DECLARED, WRITERS, Spoken, spoken, thinking

CONVERSATIONS = 200
NAMES = sorted(TOOL_FORMATS)
PYTHONIC = DeclaredTools({name.replace("-", "_"): schema for name, schema in DECLARED.parameters.items()})


def parser(name: str, begun: bool = False) -> ReplyParser:
    form = TOOL_FORMATS[name]
    reasoning = None if form.whole else ReasoningParser(REASONING_FORMATS["think"], begun)
    return ReplyParser(reasoning, form.parser(PYTHONIC if name == "pythonic" else DECLARED))


def events(made: ReplyParser, pieces: list[str]) -> list[Event]:
    result = [event for piece in pieces for event in made.push(piece)]
    return merged(result + made.end())


def cut(text: str, places: list[int]) -> list[str]:
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def conversation(name: str, seed: int) -> tuple[Spoken, str]:
    draw = random.Random(f"{name} {seed}")
    said = spoken(draw, WRITERS[name].mixes)
    text = WRITERS[name].write(said, draw)
    return said, text if TOOL_FORMATS[name].whole else thinking("<think>", "</think>", said, text)


def assert_found(name: str, said: Spoken, result: ParsedReply) -> None:
    assert (result.reasoning, result.content) == (said.reasoning, said.content)
    calls = [(call.name, json.loads(call.arguments)) for call in result.calls]
    assert calls == [(n.replace("-", "_") if name == "pythonic" else n, a) for n, a in said.calls]


@pytest.mark.parametrize("name", NAMES)
def test_what_was_written_is_found_however_it_comes(name: str) -> None:
    for seed in range(CONVERSATIONS):
        said, text = conversation(name, seed)
        assert_found(name, said, parser(name).whole(text))
        assert events(parser(name), list(text)) == events(parser(name), [text]), text


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_at_any_place_changes_nothing(name: str) -> None:
    texts = sorted((conversation(name, seed)[1] for seed in range(CONVERSATIONS)), key=len)
    for text in texts[CONVERSATIONS // 4 : CONVERSATIONS // 2 : CONVERSATIONS // 10]:
        whole = events(parser(name), [text])
        for place in range(1, len(text)):
            assert events(parser(name), cut(text, [place])) == whole, (text, place)


@pytest.mark.parametrize("name", NAMES)
def test_damaged_replies_are_no_exception_and_the_same_in_pieces(name: str) -> None:
    """Characters are lost, doubled, swapped and put in; the end is missing."""
    for seed in range(0, CONVERSATIONS, 2):
        text = conversation(name, seed)[1]
        draw = random.Random(seed)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(text) + 1)
            text = draw.choice(
                [
                    text[:at] + text[at + draw.randrange(1, 9) :],
                    text[:at] + text[max(at - 5, 0) :],
                    text[:at] + draw.choice(['"', "{", "}", "<", "\n", "]", ",", "<tool_call>", "é"]) + text[at:],
                    text[:at],
                ]
            )
        whole = events(parser(name), [text])
        assert events(parser(name), list(text)) == whole
        places = sorted(draw.sample(range(len(text) + 1), min(len(text), 5)))
        assert events(parser(name), cut(text, places)) == whole


@pytest.mark.parametrize("name", NAMES)
def test_text_without_calls_comes_out_as_it_is(name: str) -> None:
    for text in ("", " ", "\n two \n\n", "a <b> {c} [d] <tool <| [TOOL <", "x\n\n", "{", "[1, 2]", '{"answer": 4}\n'):
        assert (parser(name).whole(text).content or "") == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>\n{"name": "search", "argum'),
        ("hermes", '<tool_call>\n{"nome": "search", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "a b", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "search", "arguments": [1]}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "search", "arguments": "no object"}\n</tool_call>'),
        ("hermes", "<tool_call>\nsearch(path=1)\n</tool_call>"),
        ("hermes", '<tool_call>{"arguments": ' + "[" * 200 + "]" * 200 + "}"),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("llama3_json", '{"answer": {"name": "search"}}'),
        ("llama3_json", '<|python_tag|>search.call(query="x")'),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "[search(1)]"),
        ("pythonic", "[search(path=open('x'))]"),
        ("pythonic", "[search(path=1), 2]"),
        ("pythonic", "[search(path='x'"),
        ("pythonic", "[" * 100),
        ("pythonic", "[search(path=" + "-" * 60000 + "1)]"),
        ("pythonic", "[search(count=" + "1" * 6000 + ")]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]search"),
        ("mistral", "[TOOL_CALLS]two words[ARGS]{}"),
        ("deepseek", "<｜tool▁calls▁begin｜>nothing"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>[]"),
        ("glm45", "<tool_call>no name here</tool_call>"),
        ("glm45", '<tool_call>{"name": "search"}</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=search"),
        ("qwen3_coder", "<function=unknown>\n</function>"),
        ("qwen3_coder", '<tool_call>\n{"name": "search"}\n</tool_call>'),
        ("kimi_k2", "<|tool_calls_section_begin|>nothing"),
        ("kimi_k2", "<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>[]"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="a b">'),
        ("minimax_m2", '<invoke name="search"></invoke>'),
        ("command_a", '<|START_ACTION|>[{"name": "search", "parameters": {}}]'),
        ("granite", "<|tool_call|>search"),
        ("jamba", '<tool_calls>["search"]</tool_calls>'),
        ("harmony", "plain words"),
        ("harmony", "<|channel|>analysis"),
        ("harmony", " to=functions.search and more"),
    ],
)
def test_what_is_no_call_is_content_as_it_stands(name: str, text: str) -> None:
    result = parser(name).whole(text)
    assert result == ParsedReply(content=text)


@pytest.mark.parametrize(
    ("name", "text", "arguments", "rest"),
    [
        ("hermes", '<tool_call>\n{"name": "search", "arguments": {"path": "x', '{"path": "x', None),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"a": }} b', '{"a": ', "}} b"),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"a": 01}}', '{"a": 0', "1}}"),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"a": 1', '{"a": 1', None),
        ("qwen3_coder", "<tool_call><function=search><parameter=path>\nx</param", '{"path": "x</param', None),
        ("qwen3_coder", "<function=search><parameter=count>5</parameter> so", '{"count": 5', "so"),
        ("glm45", "<tool_call>search<arg_key>tags</arg_key><arg_value>[1", '{"tags": [1', None),
        ("harmony", "<|channel|>commentary to=functions.search<|message|>{oops", "{oops", None),
    ],
)
def test_arguments_that_break_off_stay_as_they_are(name: str, text: str, arguments: str, rest: str | None) -> None:
    result = parser(name).whole(text)
    assert [(call.name, call.arguments) for call in result.calls] == [("search", arguments)] and result.content == rest


@pytest.mark.parametrize("nothing", ['"arguments": null', '"arguments": ""', '"arguments": {}', '"id": "x"'])
def test_a_call_without_arguments_has_an_empty_object(nothing: str) -> None:
    result = parser("hermes").whole(f'<tool_call>{{"name": "noop", {nothing}}}</tool_call>')
    assert result.calls[0].arguments == "{}" and not result.content


def test_whitespace_around_calls_is_dropped() -> None:
    call = '<tool_call> {"name": "noop"} </tool_call>'
    for pieces in ([f"a\n\n{call}\n{call} \n b \n"], list(f"a\n\n{call}\n{call} \n b \n")):
        result = ParsedReply()
        result.add(events(parser("hermes"), pieces))
        assert result.content == "ab \n" and len(result.calls) == 2
    assert parser("mistral").whole("[TOOL_CALLS] search [ARGS] {}").calls[0].name == "search"


def test_calls_before_a_malformed_one_stay() -> None:
    one = '<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"path": 1}<｜tool▁call▁end｜>'
    result = parser("deepseek").whole(f"<｜tool▁calls▁begin｜>{one}\n<｜tool▁call▁begin｜>search")
    assert len(result.calls) == 1 and result.content == "<｜tool▁call▁begin｜>search"
    result = parser("mistral").whole('[TOOL_CALLS][{"name": "noop", "arguments": {}}, {"name": 5}]')
    assert len(result.calls) == 1 and result.content == '{"name": 5}]'


def test_arguments_written_as_a_text_are_unwrapped() -> None:
    inner = json.dumps({"path": 'a "b"'})
    result = parser("hermes").whole(f"<tool_call>{json.dumps({'name': 'search', 'arguments': inner})}</tool_call>")
    assert result.calls[0].arguments == inner
    half = '<tool_call>{"name": "search", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'
    assert not parser("hermes").whole(half).calls


def test_arguments_are_handed_out_while_they_come() -> None:
    made = parser("hermes")
    assert made.push('Well.\n<tool_call>\n{"name": "search"') == [TextPiece("Well.")]
    assert made.push(', "arguments": {"path": "ab') == [CallStart("search"), ArgumentsPiece('{"path": "ab')]
    assert made.push('c"') == [ArgumentsPiece('c"')]
    assert made.push("}") == [ArgumentsPiece("}")] and not made.push("}\n</tool_call>\n") + made.end()
    made = parser("qwen3_coder")
    assert made.push("<function=search>\n<parameter=path>\n")[-1] == ArgumentsPiece('{"path": "')
    assert made.push('say "a"\nb\n</para') == [ArgumentsPiece('say \\"a\\"\\nb')]


def test_types_decide_what_text_becomes() -> None:
    written = "<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>"

    def typed(schema: object, value: str) -> object:
        tools = DeclaredTools({"f": {"properties": {"a": schema}}})
        return json.loads(TOOL_FORMATS["glm45"].parser(tools) and _whole("glm45", tools, written.format(value)))["a"]

    assert typed({"type": "string"}, "5") == "5" and typed({"type": "integer"}, "5") == 5 == typed({}, "5")
    assert typed({"type": ["string", "null"]}, "null") is None and typed({"type": ["string", "null"]}, "5") == "5"
    assert typed({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5") == 5
    assert typed({"anyOf": [{"type": "string"}, {"$ref": "#/x"}]}, "5") == 5
    assert typed({"enum": ["1", "2"]}, "1") == "1" and typed({"const": 1}, "1") == 1
    assert typed({"type": "boolean"}, "True") is True and typed({"type": "integer"}, "many") == "many"
    assert typed({"type": "integer"}, "5.0") == 5 and typed({"type": "integer"}, "5.5") == "5.5"
    assert typed({}, "NaN") == "NaN" and typed({}, '"quoted"') == '"quoted"' and typed({}, "9" * 5000) == "9" * 5000
    assert typed({}, "[" * 5000) == "[" * 5000 and typed("no schema", "{}") == {}


def _whole(name: str, tools: DeclaredTools, text: str) -> str:
    return ReplyParser(calls=TOOL_FORMATS[name].parser(tools)).whole(text).calls[0].arguments


@pytest.mark.parametrize("begun", [True, False])
def test_reasoning_that_the_prompt_begins_needs_no_opening_tag(begun: bool) -> None:
    result = parser("hermes", begun).whole("so\n</think>\n\nYes </think> <think>")
    if begun:
        assert result == ParsedReply("Yes </think> <think>", "so")
        assert parser("hermes", begun).whole("<think>so</think>Yes") == ParsedReply("Yes", "so")
        assert parser("hermes", begun).whole("so </thin") == ParsedReply(None, "so </thin")
    else:
        assert result == ParsedReply("so\n</think>\n\nYes </think> <think>", None)


def test_further_calls_are_left_out_where_one_is_allowed() -> None:
    text = '<tool_call>{"name": "noop", "arguments": {}}</tool_call>' * 2 + "end"
    for pieces in ([text], list(text)):
        made = ReplyParser(calls=TOOL_FORMATS["hermes"].parser(DECLARED), most_calls=1)
        result = ParsedReply()
        result.add(events(made, pieces))
        assert len(result.calls) == 1 and result.calls[0].arguments == "{}" and result.content == "end"


def test_parts_between_tokens() -> None:
    text = "<|START_THINKING|>so\n<|END_THINKING|><|START_RESPONSE|>Hello.<|END_RESPONSE|>"
    for pieces in ([text], list(text)):
        result = ParsedReply()
        result.add(events(ReplyParser(calls=TOOL_FORMATS["command_a"].parser(DECLARED)), pieces))
        assert result == ParsedReply("Hello.", "so\n")


def test_messages_of_a_kind_are_joined_by_line_breaks() -> None:
    text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>"
    text += "<|start|>assistant<|channel|>analysis<|message|>c<|start|>assistant<|channel|>final<|message|>d<|return|>"
    for pieces in ([text], list(text)):
        result = ParsedReply()
        result.add(events(parser("harmony"), pieces))
        assert result == ParsedReply("b\nd", "a\nc")


def test_long_texts_take_linear_time() -> None:
    """Each of these would take minutes if the parser began again after each failure."""
    for name, text in (
        ("hermes", "<tool_call>" * 20000),
        ("hermes", '<tool_call>{"arguments": "' * 4000),
        ("mistral", "[TOOL_CALLS]" * 20000),
        ("deepseek", "<｜tool▁call▁begin｜>" * 10000),
        ("qwen3_coder", "<function=" * 20000),
        ("harmony", "<|channel|>" * 10000),
        ("hermes", "<" * 100000),
    ):
        assert parser(name).whole(text).content == text


def test_formats_are_chosen_by_the_template_or_by_name() -> None:
    marks: list[tuple[str, Callable[[], object]]] = [
        ("{{ '<tool_call>' }}{{ '<arg_key>' }}", lambda: TOOL_FORMATS["glm45"]),
        ("<tool_call>\n<function=f>\n<parameter=x>", lambda: TOOL_FORMATS["qwen3_coder"]),
        ("<tool_call>", lambda: TOOL_FORMATS["hermes"]),
        ("no tools here", lambda: None),
        ("<|tool_calls_section_begin|>", lambda: TOOL_FORMATS["kimi_k2"]),
        ("<minimax:tool_call>", lambda: TOOL_FORMATS["minimax_m2"]),
        ("<seed:tool_call><function=f><parameter=x>", lambda: TOOL_FORMATS["seed_oss"]),
        ("<|START_ACTION|>", lambda: TOOL_FORMATS["command_a"]),
        ("<|tool_call|>", lambda: TOOL_FORMATS["granite"]),
        ("<tool_calls>", lambda: TOOL_FORMATS["jamba"]),
        ("<tool_calls><tool_call>", lambda: TOOL_FORMATS["hermes"]),
        ('{"name": function name, "parameters": dictionary}', lambda: TOOL_FORMATS["llama3_json"]),
        ('"name" and "parameters" of tool_calls in a format of its own', lambda: None),
        ("[func_name1(a=1), func_name2()]", lambda: TOOL_FORMATS["pythonic"]),
    ]
    for template, expected in marks:
        assert tool_format(template) is expected()
    assert (
        tool_format("<tool_call>", "mistral") is TOOL_FORMATS["mistral"] and tool_format("<tool_call>", "none") is None
    )
    assert reasoning_tags("{{ m.split('</think>') }}") is REASONING_FORMATS["think"]
    assert reasoning_tags("x") is None is reasoning_tags("</think>", "none")
    with pytest.raises(UsageError, match="there is no tool-parser 'x': use one of harmony, "):
        tool_format("", "x")
    with pytest.raises(UsageError, match="there is no reasoning-parser 'x': use one of think, "):
        reasoning_tags("", "x")


@pytest.mark.parametrize("several", [True, False])
def test_forced_calls_have_no_content_wherever_they_end(several: bool) -> None:
    """A call is certain with its name, and with the first character where one tool alone can be called."""
    tools = DECLARED if several else DECLARED.only("search")
    for seed in range(CONVERSATIONS):
        draw = random.Random(seed)
        given = [(n, a) for n, a in spoken(draw).calls if tools.knows(n)] or [("search", {"path": "a]}"})]
        parts = [json.dumps({"name": n, "parameters": a}, separators=draw.choice([None, (",", ":")])) for n, a in given]
        text = f"[{','.join(parts)}]"
        assert [(call.name, json.loads(call.arguments)) for call in forced(tools, [text]).calls] == given
        end = draw.randrange(1, len(text))
        half = forced(tools, [text[:end]])
        assert half == forced(tools, list(text[:end])) and half.content is None
        assert several or half.calls
        assert [call.name for call in half.calls] == [name for name, _ in given][: len(half.calls)]
        assert all(call.arguments in text[:end] for call in half.calls)


def forced(tools: DeclaredTools, pieces: list[str]) -> ParsedReply:
    result = ParsedReply()
    result.add(events(ReplyParser(calls=ForcedCallsParser(tools)), pieces))
    return result


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("[", [], None),
        ('[{"name":"sea', [], None),
        ('[{"name":"search"', [("search", "")], None),
        ('[{"name":"search","parameters":{"path":"', [("search", '{"path":"')], None),
        ('[{"name":"search","parameters":{}},{"na', [("search", "{}")], None),
        ('[{"name":"search","parameters":{}}] so', [("search", "{}")], "so"),
        ('[{"nome":"search"}]', [], '[{"nome":"search"}]'),
        ("[] x", [], "[] x"),
    ],
)
def test_where_forced_calls_end_or_leave_their_format(text: str, calls: list[tuple[str, str]], content: str) -> None:
    for pieces in ([text], list(text)):
        result = forced(DECLARED, pieces)
        assert ([(call.name, call.arguments) for call in result.calls], result.content) == (calls, content)


def test_a_header_in_which_a_forced_call_ends_is_no_content() -> None:
    header = "<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
    for end in range(len("<|channel|>"), len(header)):
        assert ReplyParser(calls=StructuredChannelsParser(DECLARED)).whole(header[:end]) == ParsedReply()
