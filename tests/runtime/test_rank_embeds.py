"""Prompts given as embeddings to a model that two processes run together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import qcompile
from qcompile import LLM, ops, pipeline
from qcompile.errors import UsageError
from qcompile.runtime.cpu import load
from qcompile.runtime.cpu.executor import Executor
from tests.conftest import MadeOnce
from tests.support.embeds import step_with_both
from tests.support.ranks import TWO, small

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def artifact(made_once: MadeOnce) -> Path:
    return made_once("two-ranks-f32", lambda path: pipeline.build(small(), path, recipe="f32", options=TWO))


@pytest.fixture(scope="module")
def llm(artifact: Path) -> Iterator[LLM]:
    with qcompile.load(artifact, threads=1) as loaded:
        yield loaded


def embeds(tokens: list[int]) -> torch.Tensor:
    """The rows of the model's table of embeddings."""
    graph = small()
    [node] = graph.calls("embedding")
    return graph.evaluate(ops.operand(node, "weight"))[tokens]


def answers(llm: LLM, **given: Any) -> list[tuple[list[int], Any]]:
    return [(each.outputs[0].token_ids, each.outputs[0].cumulative_logprob) for each in llm.generate(**given, **GREEDY)]


def test_rows_of_the_table_have_the_bits_of_tokens(llm: LLM) -> None:
    """Together and alone, beside prompts of tokens, and where a prompt is computed in parts."""
    prompts = [[7 * i % 257 for i in range(length)] for length in (1, 9, 70)]
    tokens = answers(llm, prompts=prompts)
    llm.engine.scheduler.max_tokens = 8
    assert answers(llm, prompt_embeds=[embeds(prompt) for prompt in prompts]) == tokens
    assert [answers(llm, prompt_embeds=embeds(prompt))[0] for prompt in prompts] == tokens
    other = answers(llm, prompt_embeds=embeds(prompts[1]) + 0.5)[0]
    assert other[1] != tokens[1][1]


def test_a_step_with_both(llm: LLM) -> None:
    """A row's logits depend neither on its neighbors nor on how it was given."""
    ids = [5, 6, 7, 8, 9, 10, 11]
    assert step_with_both(llm, ids, embeds(ids).numpy())


class EarlierExecutor(Executor):
    """That of a library which plans steps of tokens only, as earlier versions built them."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        assert self.description.pop("plans_embeds")


def test_artifacts_of_earlier_versions_refuse_embeddings(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "Executor", EarlierExecutor)
    with qcompile.load(artifact, threads=1) as llm, pytest.raises(UsageError, match="takes no prompt_embeds"):
        llm.generate(prompt_embeds=embeds([1, 2]))
