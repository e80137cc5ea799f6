"""Logits that are not finite end the request that has them, with one clear line, and no other."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import qcompile
from qcompile.cli.tune import tune
from qcompile.errors import OverflowedError, UnsupportedError
from qcompile.runtime import evaluate
from qcompile.runtime.llm import LLM
from qcompile.runtime.request import Request
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.speculation.stages import Speculator
from tests.runtime.server.test_server import serving
from tests.support.fake import byte_tokenizer, fake_llm, reference_greedy

pytestmark = pytest.mark.usefixtures("executors")

BROKEN = 250
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"seed": 1},
    "with log probabilities": {"temperature": 0, "logprobs": 1},
    "penalized": {"temperature": 0, "repetition_penalty": 1.1},
}
MESSAGE = "the model's logits are not finite: its weights or activations overflow their formats"


@pytest.fixture
def llm() -> Iterator[LLM]:
    with fake_llm(tokenizer=byte_tokenizer()) as opened:
        opened.executor.library.broken = BROKEN  # type: ignore[attr-defined]
        yield opened


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS.keys())
def test_the_prompt_is_named(llm: LLM, how: dict[str, Any]) -> None:
    with pytest.raises(OverflowedError, match=f"^prompt 2 of 3: {MESSAGE}$"):
        llm.generate([[1, 2], [3, BROKEN], [5]], max_tokens=9, **how)
    assert llm.engine.pool.used == 0 and not llm.engine.busy
    assert llm.generate([[BROKEN, 2]], max_tokens=9, **how)[0].finished


def test_what_was_generated_before_stays(llm: LLM) -> None:
    """In the middle of a multi-step decode: tokens before the end are the request's, what follows is nobody's."""
    prompt = [1, 2, 3]
    tokens = reference_greedy(prompt, 40, eos=None)
    llm.executor.library.broken = tokens[20]  # type: ignore[attr-defined]
    first = tokens.index(tokens[20]) + 1
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    request, other = llm.engine.add(prompt, params), llm.engine.add([9], params)
    while llm.engine.busy:
        llm.engine.step()
    assert (request.output.token_ids, request.output.finish_reason) == (tokens[:first], "error")
    assert other.output.finish_reason != "abort" and llm.engine.pool.used == 0
    # Who has had enough before does not hear of it.
    assert (
        llm.generate([prompt], temperature=0, max_tokens=first, ignore_eos=True)[0].outputs[0].token_ids
        == tokens[:first]
    )


class Knowing(Speculator):
    """Drafts what the model is about to say."""

    def __init__(self, llm: LLM, text: list[int]) -> None:
        super().__init__(llm.executor, [])
        self.text = text

    def propose(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[list[int]]:
        result = [self.text[len(r.sequence.tokens) :][:gamma] for r, gamma in zip(requests, gammas, strict=True)]
        for request, draft in zip(requests, result, strict=True):
            request.drafts.proposed = [(np.array([token]), np.ones(1)) for token in draft]
        return result

    def draw(self, requests: Sequence[Request], gammas: Sequence[int], distributions: bool) -> list[list[int]]:
        return self.propose(requests, gammas)


@pytest.mark.parametrize("rejects", [False, True])
@pytest.mark.parametrize("how", [{"temperature": 0, "logprobs": 0}, {"temperature": 1e-6, "logprobs": 1}])
def test_drafts_that_end_a_text_may_be_followed_by_no_number(llm: LLM, how: dict[str, Any], rejects: bool) -> None:
    """What a round computes behind the end is nobody's; and what precedes such logits in a round is the request's."""
    prompt = [1, 2, 3]
    text = reference_greedy(prompt, 40, eos=None)
    llm.executor.library.broken = text[20]  # type: ignore[attr-defined]
    result = []
    for gamma in (0, 5):
        llm.engine.speculation.drafter, llm.engine.speculation.gamma = Knowing(llm, prompt + text), gamma
        llm.engine.speculation.rejects = rejects
        llm.engine.postprocessor.eos = frozenset([text[20]])
        ended = llm.generate([prompt], max_tokens=40, **how)[0].outputs[0]
        request = llm.engine.add(prompt, SamplingParams(max_tokens=40, ignore_eos=True, **how))
        while llm.engine.busy:
            llm.engine.step()
        every = ended, request.output
        result.append([(one.token_ids, one.logprobs, one.cumulative_logprob, one.finish_reason) for one in every])
        assert llm.engine.pool.used == 0
    assert [ending[3] for ending in result[0]] == ["stop", "error"] and len(result[0][0][0]) > 5
    assert result[1] == result[0]


def test_perplexity_of_no_number(llm: LLM) -> None:
    llm.executor.library.broken = llm.encode("x")[0]  # type: ignore[attr-defined]
    with pytest.raises(OverflowedError, match=f"^window 2: {MESSAGE}$"):
        llm.perplexity(["plain text", "another"], window=8)


def test_perplexity_beyond_floats(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "negative_log_likelihood", lambda logits, targets: np.full(len(targets), 800.0))
    with pytest.raises(UnsupportedError, match="wrong by 800 nats a token"):
        llm.perplexity(["plain text"], window=8)


def test_a_server_goes_on(llm: LLM) -> None:
    with serving(llm) as client:
        for how in ({"temperature": 0}, {"seed": 1}, {"seed": 1, "n": 2}):
            assert client.refused(500, {"prompt": [[3, 4], [3, BROKEN]], "max_tokens": 5} | how) == MESSAGE
        body = {"prompt": [BROKEN], "stream": True, "temperature": 0}
        events = client.open("/v1/completions", body).read().decode().split("\n\n")
        assert MESSAGE in events[0] and "[DONE]" not in events[-1]
        assert client.complete([3, 4], max_tokens=5)["choices"][0]["finish_reason"] == "length"
        assert client.ask("/health")[0] == 200 and client.service.running == 0


@pytest.fixture(scope="module")
def overflowing(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a head so large that its products overflow."""
    path = tmp_path_factory.mktemp("overflowing") / "model"
    shutil.copytree(tiny_checkpoint, path)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = torch.full_like(weights["lm_head.weight"], 3e38).abs()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("recipe", ["f32", "ml-specqd"])
def test_kernels_tell(overflowing: Path, tmp_path: Path, recipe: str) -> None:
    qcompile.build(str(overflowing), tmp_path / "out", recipe=recipe, head_dtype="f32")
    for gamma in (0, 3) if recipe == "ml-specqd" else (0,):
        with qcompile.load(tmp_path / "out", threads=2, gamma=gamma) as llm:
            assert not llm.logits([[1, 2]]).isfinite().any()
            for how in WAYS.values():
                with pytest.raises(OverflowedError, match=MESSAGE):
                    llm.generate([[1, 2], [3]], max_tokens=9, **how)
            assert llm.engine.pool.used == 0
    if recipe == "ml-specqd":
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "def main("}')
        with pytest.raises(OverflowedError, match=MESSAGE):
            tune(tmp_path / "out", prompts, 8, threads=2)
