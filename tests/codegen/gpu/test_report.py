"""Log probabilities by GPU kernels, interpreted: Python's but for rounding, in steps, multi-step decodes and rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from qcompile.codegen.gpu.launches import Launch, LaunchPlan
from qcompile.runtime.cuda import sampling as device_sampling
from qcompile.runtime.request import Request
from qcompile.runtime.sampling.inputs import GREEDY, SamplingInputs
from qcompile.runtime.sampling.logprobs import MOST_REPORTED, empty_reports, logprobs_of, reported_logprobs
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.penalties import Bias, Penalties
from qcompile.targets import TARGETS
from tests.codegen.gpu.test_sample import SMALL
from tests.support.cases import first
from tests.support.compiled import Record
from tests.support.graphs import decoder
from tests.support.interpreted import interpreted
from tests.support.sampled import same_logprobs, same_outputs


class Row(NamedTuple):
    """An output row: its sequence, how many positions it is after the first, its token (-1: none), and its logits."""

    sequence: int
    place: int
    token: int
    logits: Tensor


def launches(vocab: int) -> Iterator[Launch]:
    """Those of penalties and reports, with what precedes and follows the choice of tokens."""
    from qcompile.codegen.gpu.penalties import penalties
    from qcompile.codegen.gpu.report import MOST, keeping, reporting

    assert MOST == MOST_REPORTED
    yield from keeping("head", vocab, 80)
    yield from penalties("head", vocab, 80)
    yield from reporting("head", vocab, 80)


def report(sampling: list[SamplingInputs], rows: list[Row]) -> None:
    """Fill the reports of sequences with tokens that were chosen from these rows."""
    from tests.support.gpu_machine import run_launches, send_sampling

    (sender, counts, given), vocab = send_sampling(sampling, len(rows)), len(rows[0].logits)
    columns = {
        "row_sequence": [row.sequence for row in rows],
        "positions": [sampling[row.sequence].first + row.place for row in rows],
        "argmax": [row.token for row in rows],
        "output_rows": range(len(rows)),
        "token_ids": [0] * len(rows),
    }
    given |= {name: torch.tensor(list(column), dtype=torch.int32) for name, column in columns.items()}
    given["logits"] = torch.stack([row.logits for row in rows])
    kv: Any = None
    plan = LaunchPlan(TARGETS["a100"], (kv,), 128, tuple(launches(vocab)))
    for name, (size, over) in plan.scratch.items():
        need = size * math.prod(counts[count] for count in over)
        given[name] = torch.full((need // 4,), -1, dtype=torch.int32)  # NaN, as what precedes it was written there
    run_launches(plan.launches, counts, given)
    sender.fetch()
    sender.deliver()


def rows_of(vocab: int, random: np.random.Generator) -> list[Tensor]:
    """Logits: spread out, with ties, all equal, with tokens that are ruled out, and with all but one ruled out."""
    rows = [4 * random.standard_normal(vocab), np.round(2 * random.standard_normal(vocab)), np.zeros(vocab)]
    rows += [9 * random.standard_normal(vocab), np.full(vocab, -math.inf)]
    rows[1][: vocab // 2] *= -0.0
    rows[3][random.random(vocab) < 0.7] = -math.inf
    rows[3][vocab // 3] = rows[4][vocab - 1] = -3.0
    return [torch.from_numpy(row.astype(np.float32)) for row in rows]


def interpret_rows(vocab: int, sequences: int) -> None:
    """Each row as Python finds it, whatever else is in the step: among biases, penalties, no reports, no tokens and no
    room; of chosen tokens, and of known ones."""
    random = np.random.default_rng(vocab + sequences)
    every, rows, sampling = rows_of(vocab, random), [], []
    for index in range(sequences):
        alternatives = min((5, 0, 1, 20)[index % 4], vocab)
        penalties = None
        if index % 3 == 1:
            listed = random.permutation(vocab)[:17].astype(np.int32)
            penalties = Penalties(1.7, 0.5, 0.1, listed, np.ones_like(listed), 4)
        bias = Bias(np.array([0], np.int32), np.array([9.5], np.float32)) if index % 3 == 2 else None
        known = random.integers(0, vocab, (2, 0, 1)[index % 3]).tolist() if index % 5 < 4 else []
        reports = empty_reports(len(known) + 1 + index % 3, alternatives) if index % 5 < 4 else None
        sampling.append(GREEDY._replace(first=7 + index, penalties=penalties, bias=bias, known=known, reports=reports))
        for place in range(-len(known), 3):
            logits = every[(index + place) % len(every)]
            ranked = np.argsort(-logits.numpy(), kind="stable")
            token = int(ranked[(0, vocab // 2, vocab - 1, 1 % vocab)[(index + place) % 4]])
            rows.append(Row(index, place, -1 if index % 7 == 6 and place == 0 else token, logits))
    report(sampling, rows)
    for row in rows:
        result, known = sampling[row.sequence].reports, sampling[row.sequence].known
        at = row.place + len(known)
        if result is None or at >= len(result):
            continue
        if row.token < 0:
            assert np.isnan(result[at]).all()  # as the memory was
            continue
        token = known[at] if at < len(known) else row.token
        wanted = logprobs_of(row.logits.numpy(), token, (result.shape[1] - 4) // 2, None)
        told = reported_logprobs(result[at : at + 1], [token], None)
        assert same_logprobs(told, [wanted]), (row, told, wanted)
    for index, draw in enumerate(sampling[:4]):
        if draw.reports is not None:
            alone = draw._replace(reports=np.zeros_like(draw.reports))
            report([alone], [row._replace(sequence=0) for row in rows if row.sequence == index])
            assert (alone.reports == draw.reports).all()


EVERY_SIZE = [(vocab, sequences) for vocab in (1, 3, 40, 4096 + 300) for sequences in (1, 3, 17)]


@pytest.mark.parametrize(
    ("vocab", "sequences"), first([(1, 3), (3, 1), (40, 17), (4096 + 300, 3)], EVERY_SIZE), ids=str
)
def test_rows_interpreted(vocab: int, sequences: int) -> None:
    interpreted(__name__, f"interpret_rows({vocab}, {sequences})")


def interpret_engine(how: str) -> None:
    """Requests of all kinds in one batch: what Python finds in the logits, in all kinds of calls."""
    from qcompile.runtime.speculation.host import HostSpeculator
    from tests.support.gpu_machine import PROMPTS, Machine, logits_asked

    torch.manual_seed(0)
    device_sampling._FIRST_REPORTS = 64  # grows
    graph = decoder(**SMALL)
    machine = Machine.drafted(graph, how, pages=9)
    options: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 1.2, "seed": 4, "top_k": 30, "logprobs": 20},
        {"temperature": 0, "repetition_penalty": 0.2, "logprobs": 0},
        {"temperature": 0},
        {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.5, "logprobs": 5},
    ]
    # Few enough that a round has 16 rows at most: interpreted products of more bf16 rows have other last bits.
    params = [SamplingParams(max_tokens=5 - i % 2, ignore_eos=True, **o) for i, o in enumerate(options)]
    asked = logits_asked()

    def generate(samples: bool, gamma: int, chosen: range = range(len(params))) -> list[Any]:
        machine.let_kernels_choose(samples)
        engine = machine.engine(gamma)
        requests = [engine.add(PROMPTS[i], params[i]) for i in chosen]
        return list(zip(machine.run(engine, requests), [r.output.logprobs for r in requests], strict=True))

    plain = generate(True, 0)
    assert not any(asked)
    cases = [(range(5), [1, 1, 1]), (range(1, 2), [0, 1, 1]), (range(3, 4), [0, 0, 0])]
    if how == "shared":
        assert generate(True, 0, range(2, 4)) == plain[2:4]
        assert same_outputs(generate(False, 0), plain) and any(asked)
        asked.clear()
    for chosen, launched in cases if how == "shared" else cases[:1]:
        before = machine.driver.replays
        assert generate(True, 2, chosen) == plain[chosen.start : chosen.stop]
        assert machine.driver.replays > before  # rounds are graphs
        newest = next(reversed(machine.speculator._graphs.values()))
        names = [launch.kernel.name for launch in newest]
        assert [names.count(f"report_{kind}") for kind in ("keep", "parts", "row")] == launched
    assert not any(asked)
    if how == "shared":
        machine.speculator = HostSpeculator(machine.target, machine.speculator.stages)
        assert generate(True, 2) == plain and not any(asked)


def interpret_prompts() -> None:
    """Prompts in steps of few rows, among other requests: the bits that their tokens had when they were generated."""
    from tests.support.gpu_machine import PROMPTS, Machine, logits_asked

    torch.manual_seed(0)
    device_sampling._FIRST_REPORTS = device_sampling._FIRST_ROOM = 16  # grow
    machine = Machine(decoder(**SMALL), "bf16", pages=9)
    common: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    options: list[dict[str, Any]] = [
        {"logprobs": 3, "max_tokens": 6},
        {"logprobs": 3, "max_tokens": 4, "repetition_penalty": 0.3, "logit_bias": {3: 4.5, 9: -100}},
        {"logprobs": 3, "max_tokens": 5, "temperature": 1.1, "seed": 3},
    ]

    def generate(prompts: list[list[int]], params: list[dict[str, Any]], rows: int) -> list[Request]:
        engine = machine.engine()
        engine.scheduler.max_tokens = rows
        requests = [engine.add(p, SamplingParams(**(common | o))) for p, o in zip(prompts, params, strict=True)]
        machine.run(engine, requests)
        return requests

    asked = logits_asked()
    before = generate([PROMPTS[3], *PROMPTS[:2]], options, 16)
    whole = [request.sequence.tokens for request in before]
    for alternatives, rows in ((3, 16), (5, 7)):
        rest: list[dict[str, Any]] = [{"max_tokens": 0}, {"max_tokens": 2, "logprobs": 1}, {"max_tokens": 1}]
        params = [{"prompt_logprobs": alternatives} | o for o in rest]
        params[1] |= {"frequency_penalty": 0.5, "logit_bias": {1: 1.5}}
        for request, old in zip(generate(whole, params, rows), before, strict=True):
            result = request.prompt_report.logprobs
            assert result and result[0] is None and len(result) == len(old.sequence.tokens)
            for new, one in zip(result[old.spec.prompt_length :], old.output.logprobs or (), strict=True):
                assert new and one and one.items() <= new.items()  # of three alternatives, or more
    assert not any(asked)


def test_prompts_interpreted() -> None:
    interpreted(__name__, "interpret_prompts()")


@pytest.mark.parametrize("how", first(("lookup",), ["shared", "own", "lookup"]))
def test_an_engine_that_reports_interpreted(how: str) -> None:
    interpreted(__name__, f"interpret_engine('{how}')")


@pytest.mark.parametrize("vocab", [40, 128256])
def test_reports_compile(vocab: int, compiled: Record) -> None:
    from qcompile.codegen.gpu.report import report_kernel

    for kind in ("keep", "parts", "row"):
        for capability in (80, 90, 100):
            assert compiled(report_kernel(kind, vocab, capability), capability).spill_bytes == 0
