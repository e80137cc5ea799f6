"""What a request gets does not depend on its company: random batches, chunk sizes and acceptances, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qcompile
from qcompile import SamplingParams
from qcompile.runtime.cpu.executor import Executor
from qcompile.runtime.llm import LLM
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.step import Rows
from tests.support.cases import first

Work = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    out = tmp_path_factory.mktemp("batches") / "out"
    qcompile.build(str(tiny_checkpoint), out, recipe="qspec", drafts=["lookup"])
    return out


def requests(draw: random.Random, vocab: int) -> list[Work]:
    """Two dozen requests: greedy and drawn, short and long, some with log probabilities, also of the prompt, some with
    penalties or biases or a grammar, some that repeat."""
    work: list[Work] = []
    for index in range(24):
        length = draw.choice((1, 2, 7, 30, 63, 64, 65, 100))
        prompt = [draw.randrange(vocab) for _ in range(length)]
        if index % 3 == 0:
            prompt = (prompt[:5] * length)[:length]
        options: dict[str, Any] = {"max_tokens": draw.randrange(1, 14), "ignore_eos": True}
        if index % 2:
            options |= {"temperature": 0.8, "top_p": 0.95, "seed": index}
        else:
            options["temperature"] = 0
        if index % 4 < 2:
            options["logprobs"] = (3, 21)[index % 4]  # reported by steps, and found in logits
        if index % 5 < 2:
            options |= {"repetition_penalty": 0.3, "frequency_penalty": 0.2}
        if index % 7 < 2:
            options["logit_bias"] = {token: (-100, 3.5, 1)[token % 3] for token in range(index, 60, 7)}
        if index % 5 == 3:
            options["prompt_logprobs"] = index % 4
            options["max_tokens"] *= index % 2
        if index % 6 == 5:
            options |= {"structured_outputs": {"regex": f"[a-z_ ]{{{index % 4},9}}\\.?"}, "ignore_eos": False}
        work.append((prompt, SamplingParams(**options)))
    return work


def run(llm: LLM, work: Sequence[Work]) -> list[tuple[Any, ...]]:
    outputs = llm.generate([prompt for prompt, _ in work], [params for _, params in work])
    llm.engine.check()
    assert llm.engine.pool.used == 0
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].text, o.prompt_logprobs) for o in outputs]


def differing(llm: LLM, batches: int, seed: int = 0) -> int:
    """How many requests got something else in a random batch than they got alone without drafts."""
    draw = random.Random(seed)
    work = requests(draw, llm.vocab_size)
    llm.engine.speculation.gamma = 0
    alone = [run(llm, [one])[0] for one in work]
    wrong = 0
    for _ in range(batches):
        llm.engine.speculation.gamma = draw.randrange(9)
        llm.engine.scheduler.max_tokens = draw.choice((37, 64, 130, 512))
        chosen = [draw.randrange(len(work)) for _ in range(draw.randint(1, 32))]
        got = run(llm, [work[index] for index in chosen])
        wrong += sum(result != alone[index] for result, index in zip(got, chosen, strict=True))
    return wrong


@pytest.mark.parametrize("prefix_caching", (False, True))
@pytest.mark.parametrize("batches", first((10,), (10, 200)))
def test_random_batches_change_nothing(artifact: Path, batches: int, prefix_caching: bool) -> None:
    with qcompile.load(artifact, threads=1, max_batch=32, prefix_caching=prefix_caching) as llm:
        assert differing(llm, batches) == 0


def test_a_dependence_on_the_batch_is_noticed(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault put in on purpose: the last bit of the logits follows the number of sequences in the step."""
    step = Executor.step

    def faulty(self: Executor, rows: Sequence[Rows], logits: bool, *rest: Any) -> tuple[list[int], FloatArray | None]:
        argmax, values = step(self, rows, logits, *rest)
        if values is not None and len(rows) > 8:
            values[:] = np.nextafter(values, np.float32(np.inf))
            values[:, ::2] = np.nextafter(values[:, ::2], np.float32(np.inf))
        return argmax, values

    monkeypatch.setattr(Executor, "step", faulty)
    with qcompile.load(artifact, threads=1, max_batch=32) as llm:
        assert differing(llm, 10) > 0
