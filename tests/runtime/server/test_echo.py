"""Prompts and their log probabilities in answers of the HTTP server, as evaluations of models read them; and biases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.sampling.test_prompt_logprobs import wanted
from tests.runtime.server.test_server import Client, events, serving, slow_steps
from tests.support.cases import first
from tests.support.fake import EOS, byte_tokenizer, fake_llm

pytestmark = pytest.mark.usefixtures("executors")
PROMPT = "Is the sky blue? Yes"
BARE = {"temperature": 0, "ignore_eos": False}


@pytest.fixture(scope="module")
def client(executors: None) -> Iterator[Client]:
    llm = fake_llm(tokenizer=byte_tokenizer(), pages=200)
    with llm, serving(llm, template=lambda messages: messages[0]["content"]) as result:
        yield result


def alone(prompt: str | list[int], count: int) -> list[int]:
    """The model's next tokens, without a server."""
    with fake_llm(tokenizer=byte_tokenizer(), pages=200) as llm:
        return llm.generate([prompt], temperature=0, max_tokens=count, ignore_eos=True)[0].outputs[0].token_ids


def tokens_of(client: Client, text: str) -> list[int]:
    return client.service.llm.encode(text)


def test_the_prompt_alone(client: Client) -> None:
    whole = client.complete(PROMPT, echo=True, logprobs=3, max_tokens=0)
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    told, tokens = choice["logprobs"], tokens_of(client, PROMPT)
    assert "".join(told["tokens"]) == PROMPT and told["text_offset"] == list(range(len(PROMPT)))
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    for at, result in enumerate(wanted(tokens, 3), start=1):
        assert told["token_logprobs"][at] == pytest.approx(result[tokens[at]].logprob, abs=1e-11)
        assert told["tokens"][at] in told["top_logprobs"][at]
    assert whole["usage"]["completion_tokens"] == 0 and whole["usage"]["total_tokens"] == len(tokens)
    assert client.complete(PROMPT, echo=True, max_tokens=0)["choices"] == [choice | {"logprobs": None}]


@pytest.mark.parametrize("logprobs", first((None, 20), [None, 0, 1, 20]))
@pytest.mark.parametrize("max_tokens", [0, 1, 30])
def test_streams_have_what_the_whole_has(client: Client, logprobs: int | None, max_tokens: int) -> None:
    options = {"echo": True, "logprobs": logprobs, "max_tokens": max_tokens}
    prompts = [PROMPT, "x", "a longer text " * 20]
    choices = client.complete(prompts, **options)["choices"]
    with slow_steps(client.service.llm):
        body = {"prompt": prompts, "temperature": 0, "ignore_eos": True, "stream": True} | options
        pieces = [piece["choices"][0] for piece in events(client.open("/v1/completions", body))]
    assert max_tokens < 30 or len(pieces) > 6
    for choice, prompt in zip(choices, prompts, strict=True):
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"] and choice["text"].startswith(prompt)
        assert [piece["finish_reason"] for piece in own] == [None] * (len(own) - 1) + ["length"]
        plain = client.complete(prompt, logprobs=logprobs, max_tokens=max(max_tokens, 1))["choices"][0]
        assert max_tokens == 0 or choice["text"] == prompt + plain["text"]
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [each for piece in own for each in piece["logprobs"][name]] == choice["logprobs"][name]
            assert len(choice["logprobs"][name]) == len(prompt) + max_tokens
            if max_tokens and name != "text_offset":
                assert choice["logprobs"][name][len(prompt) :] == plain["logprobs"][name]
        assert choice["logprobs"]["text_offset"][: len(prompt) + 1] == list(range(len(prompt) + bool(max_tokens)))


def test_samples_of_token_numbers(client: Client) -> None:
    tokens = [tokens_of(client, PROMPT), [EOS, *tokens_of(client, "ab")]]
    options = {"echo": True, "logprobs": 1, "n": 2, "temperature": 1, "seed": 1, "max_tokens": 3}
    choices = client.complete(tokens, **options)["choices"]
    texts = [PROMPT, PROMPT, "<eos>ab", "<eos>ab"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for choice, text in zip(choices, texts, strict=True):
        assert choice["text"].startswith(text) and len(choice["logprobs"]["tokens"]) > 3
    assert choices[3]["logprobs"]["tokens"][:3] == ["<eos>", "a", "b"]
    assert choices[3]["logprobs"]["text_offset"][:4] == [0, 5, 6, 7]
    assert (
        choices[0]["logprobs"]["token_logprobs"][: len(PROMPT)]
        == choices[1]["logprobs"]["token_logprobs"][: len(PROMPT)]
    )
    body = {"prompt": tokens, "stream": True, "ignore_eos": True} | options
    pieces = [piece["choices"][0] for piece in events(client.open("/v1/completions", body))]
    for choice in choices:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        assert [each for piece in own for each in piece["logprobs"]["token_logprobs"]] == choice["logprobs"][
            "token_logprobs"
        ]


def test_what_is_refused(client: Client) -> None:
    assert "max_tokens must be at least 1" in client.refused(400, {"prompt": "x", "max_tokens": 0})
    assert "less than or equal to 20" in client.refused(400, {"prompt": "x", "echo": True, "logprobs": 21})
    assert "echo" in client.refused(400, {"prompt": "x", "echo": 1})
    body = {"messages": [{"role": "user", "content": "x"}], "echo": True}
    assert "echo: is not supported" in client.refused(400, body, "/v1/chat/completions")
    for biases, said in (
        ({"x": 1}, "logit_bias has 'x', which is no token number"),
        ({"-1": 1}, "no token number"),
        ({"1.5": 1}, "no token number"),
        ({"9" * 30: 1}, "no token number"),
        ({"260": 1}, "logit_bias has token 260, outside the model's vocabulary of 260"),
        ({"1": "2"}, "logit_bias of token 1 must be a number between -100 and 100, not '2'"),
        ({"1": -100.5}, "between -100 and 100"),
        ({str(token): 1 for token in range(1025)}, "at most 1024 biases"),
        ([1], "logit_bias"),
    ):
        assert said in client.refused(400, {"prompt": "x", "logit_bias": biases})


def test_prompts_of_the_whole_context(client: Client) -> None:
    context = client.service.llm.context
    options: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = client.complete([5] * context, **options)["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == context
    assert "too long" in client.refused(400, {"prompt": [5] * (context + 1)} | options)
    assert "too long" in client.refused(400, {"prompt": [5] * context} | options | {"max_tokens": 1})


def test_logits_that_are_not_finite(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.service.llm.executor.library, "broken", 9)  # type: ignore[attr-defined]
    for max_tokens in (0, 2):
        body = {"prompt": [1, 9, 1, 1], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        assert "not finite" in client.refused(500, body)


def test_metrics_count_prompts_alone(client: Client) -> None:
    client.complete(PROMPT, echo=True, logprobs=1, max_tokens=0)
    lines = client.open("/metrics").read().decode().splitlines()
    sums = [float(line.split()[1]) for line in lines if line.startswith("qcompile_time_to_first_token_seconds_sum")]
    assert len(sums) == 1 and sums[0] >= 0


def test_biases(client: Client) -> None:
    """On tokens by number, in both kinds of requests."""
    only = client.complete(PROMPT, logit_bias={str(70): 100}, max_tokens=5)["choices"][0]["text"]
    assert only == client.service.llm.decode([70]) * 5
    body = {"messages": [{"role": "user", "content": PROMPT}], "logit_bias": {"70": 100}, "max_tokens": 5}
    assert client.ask("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"] == only
    (plain,) = alone(PROMPT, 1)
    banned = client.complete(PROMPT, max_tokens=1, logit_bias={str(plain): -100})
    assert banned["choices"][0]["text"] != client.service.llm.decode([plain])


def parsed(outputs: Any, ctxlens: list[int]) -> list[tuple[float, bool]]:
    """As lm-evaluation-harness 0.4.9 reads a response: `LocalCompletionsAPI.parse_logprobs`."""
    result = []
    for choice, ctxlen in zip(sorted(outputs["choices"], key=lambda one: one["index"]), ctxlens, strict=True):
        assert ctxlen > 0
        logprobs = choice["logprobs"]["token_logprobs"][ctxlen:-1]
        tops = choice["logprobs"]["top_logprobs"][ctxlen:-1]
        greedy = all(one == max(top.values()) for one, top in zip(logprobs, tops, strict=True))
        result.append((sum(logprobs), greedy))
    return result


def test_an_evaluation_reads_continuations(client: Client) -> None:
    """Whether each is what the model would say, and how probable it is."""
    context = tokens_of(client, "one two three")
    likely = alone(context, 4)
    prompts = [context + likely, [*context, *likely[:3], likely[3] % 200 + 1]]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    status, outputs = client.ask("/v1/completions", {"model": "tiny"} | body)
    assert status == 200
    results = parsed(outputs, [len(context)] * 2)
    assert [greedy for _, greedy in results] == [True, False]
    for (total, _), prompt in zip(results, prompts, strict=True):
        places = wanted(prompt, 0)[len(context) - 1 :]
        assert total == pytest.approx(
            sum(place[token].logprob for place, token in zip(places, prompt[-4:], strict=True))
        )


def test_offsets_of_tokens_that_are_parts_of_characters(client: Client) -> None:
    """Each is that of its character; here every token is a byte."""
    prompt = "x = 你好"
    choice = client.complete(prompt, echo=True, logprobs=2, max_tokens=0)["choices"][0]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 4, 4, 5, 5, 5]
    assert choice["logprobs"]["tokens"][3:6] == [" ", "bytes:\\xe4", "bytes:\\xbd"]
    ids = client.service.llm.encode(prompt)
    whole = client.complete([EOS, *ids], echo=True, logprobs=2, max_tokens=0)["choices"][0]
    assert whole["text"] == "<eos>" + prompt and whole["logprobs"]["tokens"][0] == "<eos>"
    assert whole["logprobs"]["text_offset"] == [0, 5, 6, 7, 8, 9, 9, 9, 10, 10, 10]
    part = client.complete(ids[5:], echo=True, logprobs=2, max_tokens=0)["choices"][0]  # from within a character
    assert part["text"] == "\ufffd\ufffd好" and part["logprobs"]["text_offset"] == [0, 1, 2, 2, 2]


def test_alternatives_that_are_parts_of_characters_are_told_apart(client: Client) -> None:
    bias = {str(client.service.llm.encode("你")[0]): 100}
    told = client.complete("ab", logprobs=20, max_tokens=1, logit_bias=bias)["choices"][0]["logprobs"]
    assert told["tokens"] == ["bytes:\\xe4"] and len(told["top_logprobs"][0]) in (20, 21)
    body = {"messages": [{"role": "user", "content": "ab"}], "logprobs": True, "logit_bias": bias, "max_tokens": 1}
    (chosen,) = client.ask("/v1/chat/completions", body)[1]["choices"][0]["logprobs"]["content"]
    assert chosen["bytes"] == [0xE4] and chosen["token"] == "\\xe4"
