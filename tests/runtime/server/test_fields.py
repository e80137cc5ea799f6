"""What single fields of requests mean, over HTTP and in Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import processors

import qcompile
from qcompile.errors import UsageError
from qcompile.runtime.llm import LLM
from tests.runtime.server.test_server import GREEDY, Client, events, serving, slow_steps
from tests.support.fake import byte_tokenizer, fake_llm

SAID = [{"role": "user", "content": "ab"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """One that no server uses."""
    with fake_llm(tokenizer=byte_tokenizer()) as opened:
        yield opened


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        fake_llm(tokenizer=byte_tokenizer()) as served,
        serving(served, template=lambda messages: "|".join(m["content"] for m in messages)) as opened,
    ):
        yield opened


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice of either endpoint."""
    return choice["text"] if "text" in choice else choice["message"]["content"]


def test_samples_at_temperature_0_are_equal(client: Client, llm: LLM) -> None:
    (alone,) = llm.generate("ab", **GREEDY)[0].outputs
    assert [each.text for each in llm.generate("ab", n=3, **GREEDY)[0].outputs] == [alone.text] * 3
    assert [choice["text"] for choice in client.complete("ab", n=3)["choices"]] == [alone.text] * 3


def test_top_p_0_leaves_the_most_probable_token(client: Client, llm: LLM) -> None:
    want = llm.generate("ab", **GREEDY)[0].outputs[0].text
    assert client.complete("ab", top_p=0, temperature=5)["choices"][0]["text"] == want
    assert llm.generate("ab", **GREEDY | {"temperature": 5, "top_p": 0})[0].outputs[0].text == want


def test_seeds_below_0(llm: LLM) -> None:
    """-1 is none, as in vLLM; the others are seeds."""
    drawn = [
        [llm.generate("ab", temperature=3, seed=seed, ignore_eos=True)[0].outputs[0].token_ids for _ in range(2)]
        for seed in (-1, -2, -3)
    ]
    assert drawn[0][0] != drawn[0][1]
    assert drawn[1][0] == drawn[1][1] != drawn[2][0] == drawn[2][1]


def test_the_best_of_several_samples(client: Client, llm: LLM) -> None:
    """Those of the highest mean log probability of a token."""
    options = {"temperature": 3.0, "seed": 4, "max_tokens": 9, "ignore_eos": False}
    every = llm.generate("ab", n=6, logprobs=0, **options)[0].outputs
    mean = {each.text: sum(p[t].logprob for t, p in zip(each.token_ids, each.logprobs)) / len(each.token_ids) for each in every}  # type: ignore[arg-type]  # fmt: skip  # noqa: B905, E501
    ordered = sorted(mean, key=lambda text: -mean[text])
    assert len(ordered) == 6 and ordered[:2] != [each.text for each in every[:2]]
    result = llm.generate("ab", n=2, best_of=6, **options)[0].outputs
    assert [each.text for each in result] == ordered[:2] and [each.index for each in result] == [0, 1]
    assert result[0].logprobs is None and result[0].cumulative_logprob is None
    response = client.complete("ab", n=2, best_of=6, logprobs=1, **options)
    choices = response["choices"]
    assert response["usage"]["completion_tokens"] == sum(len(each.token_ids) for each in every)
    assert [choice["text"] for choice in choices] == ordered[:2] and [choice["index"] for choice in choices] == [0, 1]
    assert len(choices[0]["logprobs"]["tokens"]) > 0
    with pytest.raises(UsageError, match="best_of 6 above n cannot be streamed"):
        llm.stream("ab", best_of=6)
    assert [each.finished for each in llm.stream("ab", n=2, best_of=2, **options)][-1]
    assert "at most 264 may run and wait" in client.refused(400, {"prompt": "x", "best_of": 265})


@pytest.mark.parametrize("absent", [{"content": None}, {}])
def test_replies_without_content_come_back(client: Client, absent: dict[str, Any]) -> None:
    """As an empty text: clients send a conversation back as they got it."""
    spoken = [*SAID, {"role": "assistant", "refusal": None, **absent}, {"role": "user", "content": "c"}]
    empty = [*SAID, {"role": "assistant", "content": ""}, {"role": "user", "content": "c"}]
    status, result = client.ask(CHAT, {"messages": spoken} | GREEDY)
    assert status == 200 and result["choices"] == client.ask(CHAT, {"messages": empty} | GREEDY)[1]["choices"]
    for role in ("user", "system"):
        said = client.refused(400, {"messages": [{"role": role, **absent}]}, CHAT)
        assert said == "messages.0.content: Field required"


@pytest.mark.parametrize("last", [True, False])
def test_token_counts_in_every_message_of_a_stream(client: Client, last: bool) -> None:
    """As guidellm asks for them."""
    options = {"include_usage": last, "continuous_usage_stats": True}
    body = {"prompt": ["ab", "cde"], "stream": True, "stream_options": options} | GREEDY
    with slow_steps(client.service.llm):
        *pieces, end = events(client.open("/v1/completions", body))
    assert len(pieces) > 4 and all(piece["choices"] for piece in pieces)
    counts = [piece["usage"]["completion_tokens"] for piece in [*pieces, end]]
    assert counts == sorted(counts) and len(set(counts)) > 4 and counts[-1] == 48
    assert end["usage"]["prompt_tokens"] == 5 and end["usage"]["total_tokens"] == 53
    assert bool(end["choices"]) is not last
    silent = events(client.open("/v1/completions", body | {"stream_options": {"continuous_usage_stats": False}}))
    assert not any("usage" in piece for piece in silent)


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}


@pytest.mark.parametrize(
    ("origin", "allowed", "may"),
    [
        ("http://localhost:3000", (), True),
        ("https://127.0.0.1", (), True),
        ("http://[::1]:80", (), True),
        ("https://example.org", (), False),
        ("https://localhost.example.org", (), False),
        ("https://example.org", ("https://example.org",), True),
        ("https://example.com", ("https://example.org",), False),
        ("http://localhost:3000", ("https://example.org",), True),
        ("https://example.com", ("*",), True),
        ("null", (), False),
    ],
)
def test_pages_that_may_use_the_server(origin: str, allowed: tuple[str, ...], may: bool) -> None:
    """A browser asks first, without the key, and reads an answer, also an error, only by the header that says so."""
    with fake_llm(tokenizer=byte_tokenizer()) as llm, serving(llm, api_key="key", origins=allowed) as client:
        asked = client.open("/v1/completions", method="OPTIONS", Origin=origin, **PREFLIGHT)
        assert (asked.status == 200) is may
        given = asked.headers["access-control-allow-origin"]
        assert given in (origin, "*") if may else given is None
        assert not may or "authorization" in asked.headers["access-control-allow-headers"]
        for key, status in (("key", 200), ("wrong", 401)):
            body = {"prompt": "x", "max_tokens": 1}
            answer = client.open("/v1/completions", body, Origin=origin, Authorization=f"Bearer {key}")
            given = answer.headers["access-control-allow-origin"]
            assert answer.status == status and (given in (origin, "*") if may else given is None)
        assert "access-control-allow-credentials" not in answer.headers


def test_stop_tokens_and_special_tokens_over_http(client: Client) -> None:
    bias = {"70": 100}
    for path, body in (("/v1/completions", {"prompt": "ab"}), (CHAT, {"messages": SAID})):
        (choice,) = client.ask(path, body | GREEDY | {"logit_bias": bias, "stop_token_ids": [5, 70]})[1]["choices"]
        assert choice["finish_reason"] == "stop" and text_of(choice) == "" and choice["stop_reason"] == 70
        options = {"logit_bias": {"0": 100}, "stop": "<eos>", "include_stop_str_in_output": True, "max_tokens": 4}
        for skipped, text in ((True, ""), (False, "<eos>")):
            asked = body | GREEDY | options | {"skip_special_tokens": skipped}
            (choice,) = client.ask(path, asked)[1]["choices"]
            assert choice["finish_reason"] == "stop" and text_of(choice) == text
            assert (
                choice["stop_reason"] == "<eos>"
                and "stop_reason" not in client.ask(path, body | GREEDY)[1]["choices"][0]
            )
    assert "outside the model's vocabulary" in client.refused(400, {"prompt": "x", "stop_token_ids": [260]})


def test_what_may_not_be_chosen_over_http(client: Client, llm: LLM) -> None:
    """Fields with the names of SamplingParams' mean the same."""
    fields: list[dict[str, Any]] = [
        {"min_tokens": 9, "stop_token_ids": list(range(0, 260, 2)), "max_tokens": 20},
        {"allowed_token_ids": [66, 67, 68], "bad_words": ["b", "cd"]},
        {"truncate_prompt_tokens": 1},
        {"priority": -3},
    ]
    for asked in fields:
        options = GREEDY | asked
        want = llm.generate("ab", **options)[0].outputs[0].text
        assert client.complete("ab", **options)["choices"][0]["text"] == want
        status, result = client.ask(CHAT, {"messages": SAID} | options)
        assert status == 200 and text_of(result["choices"][0]) == want
    result = client.complete("ab", truncate_prompt_tokens=1, echo=True, logprobs=1, max_tokens=0)
    assert result["choices"][0]["text"] == "b" and result["usage"]["prompt_tokens"] == 1
    assert "leave no token" in client.refused(400, {"prompt": "x", "allowed_token_ids": [66], "bad_words": ["b"]})
    assert "at most max_tokens" in client.refused(400, {"prompt": "x", "min_tokens": 17})
    assert client.ask(CHAT, {"messages": SAID, "min_tokens": 17, "max_tokens": 17})[0] == 200


def test_log_probabilities_of_prompts_over_http(client: Client, llm: LLM) -> None:
    want = llm.generate("abc", prompt_logprobs=2, temperature=0, max_tokens=1)[0].prompt_logprobs
    assert want
    entries = [each and {str(token): one._asdict() for token, one in each.items()} for each in want]
    (choice,) = client.complete("abc", prompt_logprobs=2, max_tokens=1)["choices"]
    assert choice["prompt_logprobs"] == entries and entries[0] is None and len(entries[1] or ()) in (2, 3)
    (choice,) = client.complete("abc", prompt_logprobs=2, max_tokens=0)["choices"]
    assert choice["prompt_logprobs"] == entries and choice["text"] == ""
    body = {"messages": [{"role": "user", "content": "abc"}], "prompt_logprobs": 2, "max_tokens": 1}
    assert client.ask(CHAT, body)[1]["prompt_logprobs"] == entries
    assert "not possible in streams" in client.refused(400, {"prompt": "x", "prompt_logprobs": 0, "stream": True})
    assert "not possible" in client.refused(400, {"prompt": "x", "prompt_logprobs": 0, "echo": True})
    assert "prompt_logprobs" in client.refused(400, {"prompt": "x", "prompt_logprobs": 21})


@pytest.mark.parametrize(
    "marks", [("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("▁<PRE>", "▁<SUF>", "▁<MID>")]
)
def test_the_middle_of_a_text(marks: tuple[str, ...]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(list(marks))
    tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    ids = [0, 257, *tokenizer.encode("ab", add_special_tokens=False).ids, 258]
    ids += [*tokenizer.encode("cd", add_special_tokens=False).ids, 259]
    with fake_llm(tokenizer=tokenizer) as alone, fake_llm(tokenizer=tokenizer) as served, serving(served) as client:
        want = alone.generate([ids], **GREEDY)[0].outputs[0].text
        result = client.complete(["ab", "x"], suffix="cd")
        assert result["choices"][0]["text"] == want and result["usage"]["prompt_tokens"] == len(ids) + len(ids) - 1
        assert "suffix is for prompts of text" in client.refused(400, {"prompt": [1, 2], "suffix": "x"})
        assert "echo with suffix" in client.refused(400, {"prompt": "x", "suffix": "x", "echo": True})


def test_values_that_ask_for_nothing(client: Client) -> None:
    plain = client.complete("ab")["choices"]
    for nothing in ({"stop": ""}, {"stop": [""]}, {"logprobs": False}, {"suffix": ""}, {"bad_words": []}):
        assert client.complete("ab", **nothing)["choices"] == plain


def test_tokens_of_texts_and_texts_of_tokens(client: Client, llm: LLM) -> None:
    ids = llm.encode("a é")
    result = client.ask("/tokenize", {"prompt": "a é", "model": "tiny", "return_token_strs": True})[1]
    assert result["tokens"] == ids and result["count"] == len(ids) == 4 and result["max_model_len"] == llm.context
    assert result["token_strs"] == ["a", "Ġ", "Ã", "©"]
    assert client.ask("/tokenize", {"prompt": "a é"})[1] == result | {"token_strs": None}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    assert client.ask("/tokenize", {"messages": talk})[1]["tokens"] == llm.encode("a|")
    assert client.ask("/detokenize", {"tokens": [0, *ids, 0], "model": "tiny"})[1] == {"prompt": "<eos>a é<eos>"}
    assert client.ask("/tokenize", {"prompt": ""})[1]["count"] == 0
    assert client.ask("/tokenize", {"prompt": "x" * 5000})[1]["count"] == 5000  # longer than the context
    assert client.refused(400, {}, "/tokenize") == "give one of prompt and messages"
    assert client.refused(400, {"prompt": "x", "messages": talk}, "/tokenize") == "give one of prompt and messages"
    assert "tools and chat_template_kwargs need messages" in client.refused(
        400, {"prompt": "x", "chat_template_kwargs": {"a": 1}}, "/tokenize"
    )
    assert client.refused(400, {"prompt": "x", "text": 1}, "/tokenize") == "text: is not supported"
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": []})):
        assert "no model" in client.refused(404, body | {"model": "other"}, path)
    for tokens in ([260], [-1], [2**70]):
        assert "outside the vocabulary of 260" in client.refused(400, {"tokens": tokens}, "/detokenize")
    assert client.ask("/version") == (200, {"version": qcompile.__version__})


def test_special_tokens_of_tokenized_texts() -> None:
    """A template writes its own; other texts get the tokenizer's."""
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    render = lambda messages: "<eos>" + messages[0]["content"]  # noqa: E731
    with fake_llm(tokenizer=tokenizer) as llm, serving(llm, template=render) as client:
        for body in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
            assert client.ask("/tokenize", body)[1]["tokens"] == llm.encode("a")
        assert client.ask("/tokenize", {"prompt": "a", "add_special_tokens": False})[1]["tokens"] == llm.encode("a")[1:]
    with fake_llm() as bare, serving(bare) as client:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": []})):
            assert "no tokenizer" in client.refused(400, body, path)
        body = {"messages": [{"role": "user", "content": "a"}]}
        assert "no chat template" in client.refused(400, body, "/tokenize")
