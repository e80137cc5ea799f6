"""OpenAI's own client against the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from qcompile.runtime.llm import LLM
from tests.runtime.server.test_server import serving, slow_steps
from tests.support.fake import CONTEXT, byte_tokenizer, fake_llm

SAID: list[Any] = [{"role": "user", "content": "ab"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    """One that no server uses."""
    with fake_llm(tokenizer=byte_tokenizer()) as opened:
        yield opened


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[LLM, openai.OpenAI]]:
    def render(messages: list[dict[str, Any]]) -> str:
        return "|".join(message["content"] for message in messages)

    with (
        fake_llm(tokenizer=byte_tokenizer()) as llm,
        serving(llm, template=render, api_key="key") as running,
        openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="key", max_retries=0) as client,
    ):
        yield llm, client


@pytest.fixture
def client(served: tuple[LLM, openai.OpenAI]) -> openai.OpenAI:
    return served[1]


def texts(llm: LLM, prompts: list[Any], **options: Any) -> list[str]:
    result = llm.generate(prompts, temperature=0, max_tokens=12, ignore_eos=True, **options)
    return [sample.text for output in result for sample in output.outputs]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_completions(client: openai.OpenAI, alone: LLM) -> None:
    """Prompts of all four forms, and several samples."""
    ids = [alone.encode(text) for text in ("ab", "cde")]
    for prompt, prompts in (("ab", ["ab"]), (["ab", "cde"], ["ab", "cde"]), (ids[0], ["ab"]), (ids, ["ab", "cde"])):
        result = client.completions.create(model="tiny", prompt=prompt, **GREEDY)
        assert [choice.text for choice in result.choices] == texts(alone, prompts)
        assert result.usage and result.usage.completion_tokens == 12 * len(prompts)
    result = client.completions.create(model="tiny", prompt=ids, n=2, best_of=2, seed=3, max_tokens=5, stop=["\n\n"])
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
    result = client.completions.create(model="tiny", prompt="x é", echo=True, logprobs=2, max_tokens=0)
    told = result.choices[0].logprobs
    assert told and told.text_offset == [0, 1, 2, 2] and told.tokens == ["x", " ", "bytes:\\xc3", "bytes:\\xa9"]


def test_chats(client: openai.OpenAI, alone: LLM) -> None:
    (want,) = texts(alone, ["ab"])
    result = client.chat.completions.create(model="tiny", messages=SAID, **GREEDY, logprobs=True, top_logprobs=2)
    (choice,) = result.choices
    assert choice.message.content == want and choice.finish_reason == "length" and choice.logprobs
    told = choice.logprobs.content or []
    assert b"".join(bytes(one.bytes or []) for one in told).decode(errors="replace") == want
    assert all(len(one.top_logprobs) == 2 for one in told)
    back = [*SAID, choice.message, {"role": "assistant", "content": None}, {"role": "user", "content": "c"}]
    assert client.chat.completions.create(model="tiny", messages=back, store=True, metadata={"a": "b"}, max_tokens=1)
    fields = {"min_tokens": 3, "bad_words": ["zz"], "top_k": 5, "stop_token_ids": [7], "prompt_logprobs": 1}
    body = {"extra_body": fields, "reasoning_effort": "none", "n": 2, "seed": -1, "tool_choice": "none"}
    result = client.chat.completions.create(model="tiny", messages=SAID, max_completion_tokens=4, **body)
    assert len(result.choices) == 2 and (result.model_extra or {})["prompt_logprobs"][0] is None


def test_streams(served: tuple[LLM, openai.OpenAI], alone: LLM) -> None:
    llm, client = served
    (want,) = texts(alone, ["ab"])
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, **GREEDY}
    with slow_steps(llm):
        pieces: Any = list(client.chat.completions.create(model="tiny", messages=SAID, **options))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1]) == want and len(pieces) > 3
        assert pieces[-1].usage and pieces[-1].usage.completion_tokens == 12
        last = want[5]
        with client.chat.completions.stream(model="tiny", messages=SAID, stop=last, **GREEDY) as stream:
            assert stream.get_final_completion().choices[0].message.content == want[: want.index(last)]
        pieces = client.completions.create(model="tiny", prompt="ab", **options)
        whole = [piece.choices[0].text for piece in pieces if piece.choices]
    assert "".join(whole) == want and len(whole) > 2


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[1] * CONTEXT)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="verbosity: is not supported") as caught:
        client.chat.completions.create(model="tiny", messages=SAID, verbosity="low")
    assert caught.value.param == "verbosity"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
