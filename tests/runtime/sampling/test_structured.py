"""Structured outputs: grammars along texts, in all ways in which tokens are chosen, and what is refused."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from qcompile.errors import UsageError
from qcompile.runtime import sandboxed
from qcompile.runtime.detokenizer import Detokenizer
from qcompile.runtime.llm import LLM
from qcompile.runtime.sampling import grammars
from qcompile.runtime.sampling.grammars import Grammars
from qcompile.runtime.sampling.masks import GrammarState, mask_words
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.structured import StructuredOutputsParams
from qcompile.runtime.speculation.stages import DraftStage, Speculator
from tests.support.fake import EOS, VOCAB, LateExecutor, byte_tokenizer, fake_llm

WORDS = mask_words(VOCAB)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
ASKED: list[dict[str, Any]] = [
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"json": json.dumps({"type": "array", "items": {"enum": ["a", "é", None]}, "maxItems": 4})},
    {"regex": r"[a-c]{3,9}-[0-9]{2,4}"},
    {"choice": ["yes", "no", 'maybe "so", é']},
    {"grammar": 'start: "(" start ")" | /[xyz]{1,5}/'},
    {"grammar": 'root ::= "(" root ")" | letters  # of llama.cpp\nletters ::= [xyz]{1,5}\n'},
    {"json": {"anyOf": [{"type": "boolean"}, {"const": [1, "b"]}]}},
    {"json": "true"},
]
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "top_k": 20, "seed": 1},
    {"temperature": 2.0, "top_p": 0.9, "seed": 2},
    {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.3, "logit_bias": {65: 2}},
    {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 1.5, "seed": 4, "logprobs": 21},
]


def valid(asked: dict[str, Any], text: str) -> bool:
    """Whether a text is what was asked for, by Python's own means."""
    if "choice" in asked:
        return text in asked["choice"]
    if "regex" in asked:
        return re.fullmatch(asked["regex"], text) is not None
    if "grammar" in asked:
        return re.fullmatch(r"(\(*)[xyz]{1,5}(\)*)", text) is not None and text.count("(") == text.count(")")
    value = json.loads(text)
    if asked["json"] == "true":
        return True
    if isinstance(value, dict):
        return set(value) == {"name", "size"} and len(value["name"]) <= 5 and value["size"] <= 99
    return isinstance(value, bool) or value == [1, "b"] or (isinstance(value, list) and {*value} <= {"a", "é", None})


def given(params: SamplingParams) -> dict[str, Any]:
    """What a request of `requests` asks for."""
    assert params.structure
    return {name: value for name, value in vars(params.structure).items() if value is not None}


def requests() -> list[SamplingParams]:
    options = {"max_tokens": 48}
    return [SamplingParams(**options, **one, structured_outputs=asked) for asked in ASKED for one in SAMPLED]


@pytest.fixture
def llm() -> Iterator[LLM]:
    with fake_llm(max_batch=64, pages=256, tokenizer=byte_tokenizer()) as model:
        yield model


def ran(llm: LLM, params: list[SamplingParams]) -> list[tuple[Any, ...]]:
    outputs = [output.outputs[0] for output in llm.generate([[3, 4, 3]] * len(params), params)]
    return [(output.token_ids, output.text, output.finish_reason, output.logprobs) for output in outputs]


@pytest.mark.usefixtures("executors")
def test_finished_outputs_are_what_was_asked_for(llm: LLM) -> None:
    """Also beside requests without a grammar, which get the same tokens as alone."""
    free = [SamplingParams(max_tokens=9, temperature=0), SamplingParams(max_tokens=9, seed=8)]
    alone = ran(llm, free)
    asked, result = requests(), ran(llm, requests() + free)
    ended = [text for params, (_, text, reason, _) in zip(asked, result, strict=False) if reason == "stop"]
    assert len(ended) > 30
    for params, (tokens, text, reason, _) in zip(asked, result, strict=False):
        assert reason in ("stop", "length") and (reason == "stop") == (tokens[-1] == EOS)
        if reason == "stop":
            assert valid(given(params), text), text
    assert result[-2:] == alone


@pytest.mark.usefixtures("executors")
def test_python_and_the_executor_choose_the_same(llm: LLM) -> None:
    result = ran(llm, requests())
    llm.executor.samples = llm.engine.scheduler.samples = False
    assert ran(llm, requests()) == result


@pytest.mark.usefixtures("executors")
def test_a_step_with_masks_is_queued_behind_the_one_that_runs(llm: LLM) -> None:
    """Its masks follow from tokens that are not known when it is planned; some of these end their texts."""
    params = [one for one in requests() if not one.counts and one.logprobs is None and one.repetition_penalty == 1]
    assert {one.temperature > 0 for one in params} == {False, True}
    together = ran(llm, params)
    if isinstance(llm.executor, LateExecutor):
        assert llm.executor.most_late == 2
    assert together == [alone for one in params for alone in ran(llm, [one])]


def test_drafts_are_masked_and_change_nothing(llm: LLM) -> None:
    """Of a model that drafts for itself all drafts are accepted: each is masked after the drafts before it."""
    params = [one for one in requests() if one.temperature]
    plain = ran(llm, params)
    llm.engine.speculation.drafter = Speculator(llm.executor, [DraftStage(llm.executor, 4, shares_cache=True)])
    llm.engine.speculation.gamma = 4
    assert ran(llm, params) == plain
    [output] = llm.generate([[3, 4, 3]], params[2])
    assert output.speculation and output.speculation.drafted[3] > 0
    llm.engine.speculation.rejects = True
    for one, (_, text, reason, _) in zip(params, ran(llm, params), strict=True):
        assert reason == "length" or valid(given(one), text)


def mask_of(state: GrammarState, ahead: list[int]) -> list[int]:
    mask = np.zeros(WORDS, np.uint32)
    state.fill(ahead, mask.ctypes.data, WORDS)
    return mask.tolist()


def test_a_state_goes_back_after_drafts() -> None:
    """Random tokens ahead, allowed or not, and random notes: each mask is that of a new state that noted the text."""
    random = np.random.default_rng(0)
    made = Grammars(byte_tokenizer(), VOCAB, [EOS])
    text: list[int] = []
    asked = StructuredOutputsParams(json=SCHEMA)
    state, seen = made.compile(asked).start(), set()
    for turn in range(300):
        if not text:
            asked = (StructuredOutputsParams(json=SCHEMA), StructuredOutputsParams(regex="[ab]{0,30}"))[turn % 2]
            state = made.compile(asked).start()
        ahead: list[int] = []
        fresh = made.compile(asked).start()
        for token in text:
            fresh.note(token)
        for _ in range(int(random.integers(0, 5))):
            mask = mask_of(fresh, [])
            allowed = [t for t in range(VOCAB) if mask[t // 32] >> (t % 32) & 1]
            token = int(random.choice(allowed)) if random.random() < 0.9 else int(random.integers(1, VOCAB - 3))
            ahead.append(token)
            if token not in allowed or token == EOS:
                break
            fresh.note(token)
        got = mask_of(state, ahead)
        ends, excluded = EOS in ahead, bool(ahead) and ahead[-1] not in allowed
        assert got == ([2**32 - 1] * WORDS if ends or excluded else mask_of(fresh, []))
        seen.add((ends, excluded))
        kept = ahead[: int(random.integers(0, len(ahead) + 1))]
        if len(kept) == len(ahead) and (ends or excluded):
            kept = kept[:-1]
        for token in kept:
            state.note(token)
        text = text + kept if len(text) < 25 else []
    assert seen == {(False, False), (True, False), (False, True)}


def test_masks_computed_together_are_those_computed_alone() -> None:
    made = Grammars(byte_tokenizer(), VOCAB, [EOS])
    grammars = [made.compile(StructuredOutputsParams(**asked)) for asked in ASKED]
    states, alone = [[grammar.start() for grammar in grammars] for _ in range(2)]
    buffer = np.zeros((len(states), WORDS), np.uint32)
    for _ in range(4):
        buffer[:], asked = 7, []
        for index, state in enumerate(states):
            if (matcher := state.begin([], buffer[index].ctypes.data, WORDS)) is not None:
                asked.append((matcher, index))
        grammars[0].together(asked, buffer.ctypes.data, 4 * WORDS, len(states))
        for _, index in asked:
            states[index].end([], buffer[index].ctypes.data, WORDS)
        for state, single, mask in zip(states, alone, buffer, strict=True):
            single.grammar.known._masks.clear()
            assert mask.tolist() == mask_of(single, [])
            token = int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[-1])
            state.note(token)
            single.note(token)
    assert asked


def test_a_token_is_allowed_if_its_mask_has_it() -> None:
    """Of ends, and where a certain text must follow, only the mask tells."""
    random = np.random.default_rng(0)
    made, told = Grammars(byte_tokenizer(), VOCAB, [EOS]), set()
    for asked in ASKED:
        grammar = made.compile(StructuredOutputsParams(**asked))
        state, text = grammar.start(), list[int]()
        for _ in range(40):
            fresh = grammar.start()
            for token in text:
                fresh.note(token)
            mask, forced = mask_of(fresh, []), fresh._matcher.compute_ff_bytes()
            for token in [*random.integers(0, VOCAB, 5).tolist(), EOS]:
                has = bool(mask[token // 32] >> (token % 32) & 1)
                said = state.allows([], token)
                assert said == (has and token != EOS and not forced)
                told.add((said, has, bool(forced)))
            assert mask_of(state, []) == mask
            token = int(random.choice([t for t in range(VOCAB) if mask[t // 32] >> (t % 32) & 1]))
            if token == EOS:
                break
            state.note(token)
            text.append(token)
    assert {(True, True, False), (False, False, False), (False, True, True)} <= told


def test_what_follows_an_end_or_an_excluded_draft_is_allowed() -> None:
    state = Grammars(byte_tokenizer(), VOCAB, [EOS]).compile(StructuredOutputsParams(regex="[ab]{2,9}")).start()
    a, z = byte_tokenizer().encode("az").ids
    assert state.allows([a], a) and not state.allows([a], z)
    assert state.allows([a, z], z) and state.allows([a, a, EOS], z)
    for token in (a, a, EOS):
        state.note(token)
    assert state.allows([], z)


@pytest.mark.usefixtures("executors")
def test_greedy_tokens_that_are_allowed_need_no_mask(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are those that masks lead to."""
    filled, fill = list[int](), GrammarState.fill
    monkeypatch.setattr(GrammarState, "fill", lambda *given: (filled.append(1), fill(*given))[1])
    params = [SamplingParams(temperature=0, max_tokens=40, structured_outputs={"regex": "(?s:.){90}"})] * 3
    result = ran(llm, params)
    few = len(filled)
    monkeypatch.setattr(GrammarState, "allows", lambda *_: False)
    filled.clear()
    assert ran(llm, params) == result
    assert few < len(filled) / 2


@pytest.mark.parametrize("samples", [True, False])
def test_a_grammar_beyond_limits_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, samples: bool
) -> None:
    llm.executor.samples = llm.engine.scheduler.samples = samples
    monkeypatch.setattr(grammars, "_LIMITS", {"max_lexer_states": 20, "verbose_errors": False})
    hard = SamplingParams(max_tokens=60, temperature=0, structured_outputs={"regex": "[ab]{30}"})
    message = "prompt 1 of 1: structured_outputs became too complex at this output: "
    with pytest.raises(UsageError, match=message) as error:
        llm.generate([[5]], hard)
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    assert ran(llm, requests()[3:4])[0][2] == "stop"


def test_texts_before_do_not_take_the_states_of_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts of a grammar share a lexer with a limit of states. A text that exceeds it alone ends in error."""
    asked, tokenizer = StructuredOutputsParams(regex="[ab]*a[ab]{12}c"), byte_tokenizer()
    free = Grammars(tokenizer, VOCAB, [EOS]).compile(asked)
    monkeypatch.setattr(grammars, "_LIMITS", {"max_lexer_states": 300, "verbose_errors": False})
    compiled: list[Any] = []
    new = grammars._matcher

    def compiling(*given: Any) -> Any:
        compiled.append(new(*given))
        return compiled[-1]

    monkeypatch.setattr(grammars, "_matcher", compiling)
    limited = Grammars(tokenizer, VOCAB, [EOS]).compile(asked)
    letters, random = tokenizer.encode("ab").ids, np.random.default_rng(0)

    def follow(states: tuple[GrammarState, GrammarState], tokens: int) -> None:
        for token in random.choice(letters, tokens).tolist():
            ahead = random.choice(letters, 2).tolist()
            masks = [mask_of(state, ahead) for state in states]
            assert any(masks[0]) and masks[0] == masks[1], states[0].error
            for state in states:
                state.note(token)

    earlier = limited.start(), free.start()
    follow(earlier, 20)
    for _ in range(20):
        follow((limited.start(), free.start()), 40)
    assert len(compiled) > 2  # the limit was reached
    follow(earlier, 20)
    endless = limited.start()
    for token in random.choice(letters, 3000).tolist():
        if not any(mask_of(endless, [])):
            break
        endless.note(token)
    assert "too many states" in endless.error and len(compiled) < 40


def test_what_is_too_complex_for_one_step_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes up to seconds, in which all requests would wait: a new lexer helps only where the old is full."""
    compiled: list[Any] = []
    new = grammars._matcher
    monkeypatch.setattr(grammars, "_matcher", lambda *given: compiled.append(new(*given)) or compiled[-1])
    tokenizer = byte_tokenizer()
    asked = StructuredOutputsParams(regex="(a{1000}){1000}")
    state = Grammars(tokenizer, VOCAB, [EOS]).compile(asked).start()
    for token in tokenizer.encode("aa").ids:
        if not any(mask_of(state, [])):
            break
        state.note(token)
    assert "too many expressions" in state.error and len(compiled) == 1


def test_text_of_special_tokens_is_spelled(llm: LLM) -> None:
    """Also where no other text is possible: there, llguidance would have the special token itself."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<t>"])
    tokenizer.add_special_tokens(["<|s|>"])
    with fake_llm(max_batch=64, pages=256, tokenizer=tokenizer) as model:
        for text in ("<t>", "a<t>b", "<eos>", "<|s|><t>", "<eos>a"):
            asked = [{"choice": [text]}, {"regex": re.escape(text)}, {"json": {"const": text}}]
            given = [SamplingParams(max_tokens=16, temperature=0, structured_outputs=one) for one in asked]
            for output, params in zip(model.generate([[5]] * 3, given), asked, strict=True):
                wanted = json.dumps(text) if "json" in params else text
                assert (output.outputs[0].text, output.outputs[0].finish_reason) == (wanted, "stop")
        for named, wanted in (('"a" <|s|> "b"', "a<|s|>b"), ('"a" <eos>', "a"), ('"a" (<eos> "b")?', "a")):
            asked_by_name = {"grammar": f"start: {named}"}
            params = SamplingParams(skip_special_tokens=False, max_tokens=16, structured_outputs=asked_by_name)
            assert model.generate([[5]], params)[0].outputs[0].text.removesuffix("<eos>") == wanted


@pytest.mark.usefixtures("executors")
def test_no_text_ends_where_its_grammar_goes_on(llm: LLM) -> None:
    """A grammar that names the end token in its middle has no texts; one that names all tokens has those without it."""
    for grammar in ('start: <eos> "a"', 'start: "a" <eos> "b"', f'start: "a" <[{EOS}]> "b"'):
        with pytest.raises(UsageError, match="structured_outputs goes on behind a token that ends texts: leave the"):
            llm.generate([[5]], SamplingParams(structured_outputs={"grammar": grammar}))
    bias = {EOS: 100}
    for seed in range(3):
        params = SamplingParams(seed=seed, logit_bias=bias, structured_outputs={"grammar": 'start: "a" <[*]> "b"'})
        tokens = llm.generate([[5]], params)[0].outputs[0].token_ids
        assert len(tokens) == 4 and tokens.index(EOS) == 3
    llm.engine.check()


@pytest.mark.parametrize("texts", [[""], ["", "ab"], [f"{number}!" for number in range(5000)], ["same"] * 5000])
def test_a_choice_may_have_many_texts_and_the_empty_one(llm: LLM, texts: list[str]) -> None:
    params = SamplingParams(max_tokens=16, seed=1, structured_outputs={"choice": texts})
    assert ran(llm, [params])[0][2] == "stop"
    assert llm.generate([[5]], params)[0].outputs[0].text in texts


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "must have one of json, regex, choice, grammar, json_object, not none"),
    ({"json_object": False}, "not none"),
    ({"json": {}, "regex": "a"}, "not both json and regex"),
    ({"json": "{"}, "json is not JSON: "),
    ({"json": "3"}, "must be a JSON schema: an object"),
    ({"json": {"a": object()}}, "json is not JSON: "),
    ({"json": '{"items":' * 10_000 + "{}" + "}" * 10_000}, "nested deeper than 128 levels"),
    ({"json": {"const": "a" * (10 << 20)}}, "bytes, of at most 262,144"),
    ({"json": {"not": {"type": "string"}}}, 'cannot be compiled: Unimplemented keys: ["not"]'),
    ({"json": {"minimum": float("nan")}}, "json is not JSON: it has NaN"),
    ({"json": '{"minimum": 1e400}'}, "json cannot be compiled: number out of range"),
    ({"json": '{"const": "\\ud800"}'}, "json cannot be compiled: "),
    ({"json": {"$ref": "#"}}, "json cannot be compiled: its recursion has no end"),
    ({"grammar": "start: start"}, "grammar cannot be compiled: its recursion has no end"),
    ({"grammar": "root ::= root"}, "grammar cannot be compiled: its recursion has no end"),
    ({"grammar": "root ::= other"}, "grammar cannot be compiled: GBNF: Rule 'other' not found"),
    ({"grammar": 'root ::= "a'}, "grammar cannot be compiled: GBNF: Unexpected end of input"),
    ({"grammar": "root ::= " + "(" * 900 + '"a"' + ")" * 900}, "grammar cannot be compiled: GBNF that nests too deep"),
    ({"grammar": "root ::= " + '"a" ' * 600}, "grammar cannot be compiled: GBNF of 2409 characters, of at most 2048"),
    ({"json": {"properties": {f"p{at}": {} for at in range(3001)}}}, "json has 3,001 properties, of at most 3,000"),
    ({"json": {"type": "integer", "multipleOf": 10_000_019}}, "json has values of multipleOf with too large a common"),
    ({"json": {"multipleOf": 9_999_100}}, "too large a common multiple: the limit is 100,000"),
    ({"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 99.1}]}}, "too large a common multiple"),
    ({"json": True, "disable_any_whitespace": "no"}, "disable_any_whitespace must be True or False, not 'no'"),
    ({"json": {"type": "foo"}}, "cannot be compiled: Invalid type: foo"),
    ({"json": False}, "json is false: no output can satisfy it"),
    ({"json": {"$ref": "https://example.com/schema"}}, "cannot be compiled: "),
    (
        {
            "json": {
                "allOf": [
                    {"anyOf": [{"properties": {f"{i}_{j}": {"type": "null"}}} for j in range(10)]} for i in range(8)
                ]
            }
        },
        "cannot be compiled: ",
    ),
    ({"regex": "(("}, "regex parse error: error: unclosed group"),
    ({"regex": "(" * 100_000 + "a" + ")" * 100_000}, "regex cannot be compiled: "),
    ({"regex": "(?=a)b"}, "cannot be compiled: "),
    ({"regex": ""}, "regex must be a text with at least one character"),
    ({"grammar": "start: other"}, "grammar cannot be compiled: "),
    ({"grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000}, "grammar cannot be compiled: "),
    ({"grammar": 7}, "grammar must be a text"),
    ({"choice": []}, "choice must be a list of texts"),
    ({"choice": "yes"}, "choice must be a list of texts"),
    ({"choice": ["a", 3]}, "choice must be a list of texts"),
    ({"choice": ["\ud800"]}, "choice is not valid Unicode at character "),
    ({"json_object": 1}, "json_object must be True"),
    ({"lark": "a"}, "has no field 'lark'"),
]


@pytest.mark.parametrize("multiple", [5, 0.01, 1e-5, 99991])
def test_small_multiples_are_compiled(llm: LLM, multiple: float) -> None:
    schema = {"type": "number", "multipleOf": multiple, "minimum": 0}
    assert llm.generate([[5]], SamplingParams(max_tokens=1, structured_outputs={"json": schema}))


def test_what_cannot_be_compiled_is_refused_soon(llm: LLM) -> None:
    llm.generate([[5]], SamplingParams(max_tokens=1, structured_outputs={"json_object": True}))
    for asked, message in REFUSED:
        started = time.process_time()
        with pytest.raises(UsageError) as error:
            llm.generate([[5]], SamplingParams(structured_outputs=asked))
        assert message in str(error.value) and len(str(error.value)) < 500 and "\n" not in str(error.value)
        assert time.process_time() - started < 1
    with pytest.raises(UsageError, match="must be StructuredOutputsParams or its fields, not 'json'"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="ignore_eos is not possible with structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)


def test_models_that_cannot_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})
    with fake_llm() as nameless, pytest.raises(UsageError, match="this artifact has no tokenizer"):
        nameless.generate([[5]], params)
    with pytest.raises(UsageError, match="no token that ends a text"):
        Grammars(byte_tokenizer(), VOCAB, []).compile(StructuredOutputsParams(regex="a"))
    monkeypatch.setattr(grammars, "spelled", lambda tokenizer, token: "other")
    with pytest.raises(
        UsageError, match="not supported with this tokenizer: token 1 is 'other', and b'!' for grammars"
    ):
        llm.generate([[5]], params)


def test_a_slow_compilation_is_given_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MOST_SECONDS", 0.01)
    monkeypatch.setattr(grammars, "_matcher", lambda *given: time.sleep(0.2))
    with pytest.raises(UsageError, match="regex takes too long to compile"):
        llm.generate([[5]], SamplingParams(structured_outputs={"regex": "a"}))


def test_a_grammar_that_would_take_hours_ends_another_process(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 texts in any order there are 2^20 states; llguidance's own limits let it go on."""
    monkeypatch.setattr(sandboxed, "SECONDS", 0)  # and one more, of processor time
    compiler = Grammars(llm.tokenizer, VOCAB, [EOS])
    bomb = {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrst"]}
    for _ in range(2):
        with pytest.raises(UsageError, match=r"structured_outputs\.json takes too much time or memory to compile"):
            compiler.compile(StructuredOutputsParams(json=bomb))
        assert compiler.compile(StructuredOutputsParams(regex="[ab]+")) is not None
        compiler._kept.clear()


def test_compiled_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    real = grammars._matcher
    monkeypatch.setattr(grammars, "_matcher", lambda guide, source: compiled.append(source) or real(guide, source))
    monkeypatch.setattr(grammars, "_MOST_KEPT", 2)
    made = Grammars(byte_tokenizer(), VOCAB, [EOS])
    for text in ("a", "b", "a", "c", "a", "b"):
        made.compile(StructuredOutputsParams(regex=text))
    assert [source.text for source in compiled] == ["a", "b", "c", "b"]


def trained(kind: str) -> Tokenizer:
    """A tokenizer with merges. "fallback": with tokens of single bytes and spaces as letters, as of SentencePiece."""
    if kind == "words":
        return Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    texts = ['{"name": "x é", "size": 12}', "hello world 你好 def main(): return 1"] * 9
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == "fallback", unk_token="<unk>"))
    special = ["<eos>", "<unk>"]
    if kind == "fallback":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(parts)
        tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=200, special_tokens=special))
        tokenizer.add_tokens([f"<0x{byte:02X}>" for byte in range(256)])
        return tokenizer
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    return tokenizer


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_random_outputs_of_tokenizers_with_merges_fit(kind: str) -> None:
    """Any allowed tokens give texts that fit. The model's vocabulary is larger than the tokenizer's."""
    tokenizer, random = trained(kind), np.random.default_rng(0)
    vocab = tokenizer.get_vocab_size() + 37
    grammar = Grammars(tokenizer, vocab, [0]).compile(StructuredOutputsParams(json=SCHEMA))
    ended = longest = 0
    for _ in range(30):
        state, tokens, written = grammar.start(), [], Detokenizer(tokenizer, tokenizer.encode("x =").ids)
        while len(tokens) < 80 and 0 not in tokens:
            allowed = np.flatnonzero(np.isfinite(state.masked(np.zeros(vocab, np.float32))))
            assert allowed.max() < tokenizer.get_vocab_size()
            tokens.append(int(random.choice(allowed)))
            longest = max(longest, len(tokenizer.decode(tokens[-1:])))
            state.note(tokens[-1])
        if 0 in tokens:
            ended += 1
            assert valid({"json": SCHEMA}, written.push(tokens, last=True))
    assert ended > 3 and longest > 1


def test_tokenizers_whose_tokens_are_no_bytes_are_refused() -> None:
    with pytest.raises(UsageError, match="not supported with this tokenizer: can't determine decoder type"):
        Grammars(trained("words"), 2, [0]).compile(StructuredOutputsParams(regex="a"))
