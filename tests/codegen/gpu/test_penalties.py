"""Biases and penalties by GPU kernels, interpreted: the bits that Python gives, in all kinds of calls."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from qcompile.runtime.cuda import sampling as device_sampling
from qcompile.runtime.sampling.inputs import GREEDY, SamplingInputs
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.penalties import Bias, Occurrences, Penalties, penalize
from tests.codegen.gpu.test_sample import SMALL
from tests.support.cases import first
from tests.support.compiled import Record
from tests.support.graphs import decoder
from tests.support.interpreted import interpreted
from tests.support.sampled import penalized


class Text(NamedTuple):
    """A sequence in a step: what the host gave, and its rows from a position on, all of which give logits."""

    sampling: SamplingInputs
    tokens: list[int]
    start: int


def changed(texts: list[Text], logits: Tensor) -> Tensor:
    """Logits [rows, vocab] of a step as the kernels change them."""
    from qcompile.codegen.gpu.penalties import penalties
    from tests.support.gpu_machine import run_launches, send_sampling

    rows = [(s, token, text.start + i) for s, text in enumerate(texts) for i, token in enumerate(text.tokens)]
    _, counts, given = send_sampling([text.sampling for text in texts], len(rows))
    columns = zip(("row_sequence", "token_ids", "positions"), zip(*rows, strict=True), strict=True)
    given |= {name: torch.tensor(column, dtype=torch.int32) for name, column in columns}
    given |= {"output_rows": torch.arange(len(rows), dtype=torch.int32), "logits": logits.clone()}
    run_launches(penalties("head", logits.shape[1], 80), counts, given)
    return given["logits"]


def texts_of(vocab: int, sequences: int, random: np.random.Generator) -> tuple[list[Text], list[Any]]:
    """Sequences with lists of all lengths, and for each row its bias and penalties, or None.

    Some sequences have no penalties, some have biases, and some have rows before known tokens.
    """
    texts, wanted = [], []
    every = [*penalized(), SamplingParams()]
    for index in range(sequences):
        params, listed = every[(index + sequences) % len(every)], (0, 300, 3, 17, 600, 1)[index % 6]
        first, rows = int(random.integers(0, 50)), 1 + index % 4
        noted = Occurrences(random.integers(0, vocab, listed).tolist())
        for token in random.integers(0, vocab, listed // 2).tolist():
            noted.note(token)
        ahead = random.integers(0, vocab, (0, 70, 2)[index % 3]).tolist()
        tokens = random.integers(0, vocab, rows).tolist()
        options = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        # The first row is the last listed token, or the last of those ahead.
        room = len(ahead) + rows
        given = Penalties(*options, *noted.listed(), room, ahead) if index % 8 < 7 else None
        bias = None
        if index % 3 == 1:
            chosen = random.permutation(vocab)[: min(vocab, (300, 1, 20)[index // 3 % 3])].astype(np.int32)
            bias = Bias(chosen, (100 * random.standard_normal(len(chosen))).astype(np.float32))
            bias.values[::3] = -math.inf  # tokens that may not be chosen
        known = [1, 2, 3][: index % 4] if not ahead else []
        sampling = GREEDY._replace(first=first, penalties=given, bias=bias, known=known)
        if ahead:
            tokens[0] = ahead[-1]
        texts.append(Text(sampling, [7] * len(known) + tokens, first + len(ahead) - len(known)))
        wanted += [(None, None)] * len(known)
        for row in range(rows):
            after = [*ahead, *tokens[1 : row + 1]]
            wanted.append((bias, (noted.listed(after), options) if given else None))
    return texts, wanted


def interpret_rows(vocab: int, sequences: int) -> None:
    """Each row as Python changes it, whatever else is in the step."""
    random = np.random.default_rng(vocab + sequences)
    texts, wanted = texts_of(vocab, sequences, random)
    logits = torch.from_numpy((4 * random.standard_normal((len(wanted), vocab))).astype(np.float32))
    logits[:, 7], logits[:, 9], logits[:, 5], logits[:, 3] = -0.0, 0.0, -math.inf, 1e-42
    got = changed(texts, logits)
    for row, (bias, want) in enumerate(wanted):
        result = bias.added(logits[row].numpy()) if bias else logits[row].numpy()
        expected = torch.from_numpy(penalize(result, *want[0], *want[1]) if want else result)
        assert torch.equal(got[row].view(torch.int32), expected.view(torch.int32)), row
    at = 0
    for text in texts[:6]:
        end = at + len(text.tokens)
        alone = changed([text], logits[at:end])
        assert torch.equal(alone.view(torch.int32), got[at:end].view(torch.int32))
        at = end


EVERY_SIZE = [(vocab, sequences) for vocab in (40, 4096 + 300) for sequences in (1, 3, 17)]


@pytest.mark.parametrize(("vocab", "sequences"), first([(40, 1), (40, 17), (4096 + 300, 3)], EVERY_SIZE), ids=str)
def test_rows_interpreted(vocab: int, sequences: int) -> None:
    interpreted(__name__, f"interpret_rows({vocab}, {sequences})")


def interpret_engine(how: str) -> None:
    """Requests of all penalties in one batch: Python's tokens, in multi-step decodes and in rounds with drafts."""
    from qcompile.runtime.speculation.host import HostSpeculator
    from tests.support.gpu_machine import PROMPTS, Machine, logits_asked

    torch.manual_seed(0)
    device_sampling._FIRST_ROOM = 64  # grows
    graph = decoder(**SMALL)
    machine = Machine.drafted(graph, how, pages=9)
    params = penalized(max_tokens=6, ignore_eos=True)[:6]
    params[3] = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logit_bias={5: 2.5, 9: 2, 30: -100})
    params[2] = replace(params[2], allowed_token_ids=range(3, 30))
    params[5] = replace(params[5], min_tokens=2, stop_token_ids=range(1, 40, 2))
    params[4] = replace(params[4], logit_bias=dict.fromkeys(range(0, 40, 3), 0.5))
    if how == "logits":
        params[1] = SamplingParams(temperature=0, repetition_penalty=0.2, logprobs=21, max_tokens=6, ignore_eos=True)
    asked = logits_asked()

    def generate(samples: bool, gamma: int, chosen: range = range(len(params))) -> list[Any]:
        machine.let_kernels_choose(samples)
        engine = machine.engine(gamma)
        requests = [engine.add(PROMPTS[i], params[i]) for i in chosen]
        return list(zip(machine.run(engine, requests), [r.output.logprobs for r in requests], strict=True))

    by_host = generate(False, 0)
    assert sum(len(set(tokens)) < len(tokens) - 1 for tokens, _ in by_host) >= 3  # tokens recur
    assert any(asked)
    asked.clear()
    if how in ("decodes", "logits"):
        assert generate(True, 0) == by_host
        assert any(asked) is (how == "logits")
        assert generate(True, 0, range(4, 5)) == by_host[4:5]
    else:
        before = machine.driver.replays
        assert generate(True, 3) == by_host
        assert machine.driver.replays > before  # rounds are graphs
        changed = [launch for launch in [*machine.speculator._graphs.values()][-1] if launch.kernel.name == "penalize"]
        assert len(changed) == (1 if how == "lookup" else 4)
        assert len({launch.arguments[-1] for launch in changed}) == 1  # drafts and target share the recent tokens
        assert not any(asked)
    if how == "shared":
        machine.speculator = HostSpeculator(machine.target, machine.speculator.stages)
        assert generate(True, 3) == by_host


def test_arithmetic_is_that_of_python(compiled: Record) -> None:
    """Divisions are exact, and no multiplication is fused with what follows it."""
    from qcompile.codegen.gpu.penalties import penalty_kernel

    for capability in (80, 90):
        result = compiled(penalty_kernel("penalize", 5000, capability), capability)
        assert {name for name in result.ptx if name.startswith(("div", "fma", "mad"))} == {"div.rn.f32"}
        assert result.spill_bytes == 0


@pytest.mark.parametrize("how", first(("logits", "lookup"), ["decodes", "logits", "shared", "own", "lookup"]))
def test_an_engine_with_penalties_interpreted(how: str) -> None:
    interpreted(__name__, f"interpret_engine('{how}')")
