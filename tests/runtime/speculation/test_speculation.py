"""Speculation changes the speed and nothing else: tokens, texts, ends and log probabilities are the target's own."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

import qcompile
from qcompile import SamplingParams, calibration
from qcompile.checkpoints import frontend
from qcompile.errors import ResourceError, UnsupportedError, UsageError
from qcompile.runtime.cpu import load
from qcompile.runtime.cpu.executor import Executor
from qcompile.runtime.cpu.speculate import LibrarySpeculator
from qcompile.runtime.engine.blocks import BlockPool
from qcompile.runtime.llm import LLM
from qcompile.runtime.options import AUTO
from qcompile.runtime.outputs import CompletionOutput
from qcompile.runtime.request import Request
from qcompile.runtime.speculation.host import HostSpeculator
from qcompile.runtime.speculation.reencode import Reencoder
from qcompile.runtime.speculation.stages import Speculator
from qcompile.runtime.step import Limits, Rows
from tests.support.calls import fix_calls
from tests.support.cases import first
from tests.support.fake import VOCAB, byte_tokenizer, fake_llm

PROMPTS = ["def main(", "import os\n\n\nclass Reader:\n", "x", "# " + "word " * 90, "for i in range(10):\n    "]
TOKENS = 32
DRAFTS: dict[str, tuple[str, list[str]]] = {
    "qspec": ("qspec", []),
    "qspec-w4a4": ("qspec-w4a4", []),
    "nested": ("nested", []),
    "ml-specqd": ("ml-specqd", []),
    "two stages": ("ml-specqd", ["other"]),
    "three stages": ("ml-specqd", ["other", "lookup"]),
    "lookup": ("w4a8", ["lookup"]),
    "other": ("f32", ["other"]),
}
"""Recipe and drafts by name; `other` is a model of other random weights, which is nearly always wrong."""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """Another tiny model of the same tokenizer: one layer, other weights, a shorter context."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("models") / "other"
    config = LlamaConfig.from_pretrained(tiny_checkpoint)
    config.num_hidden_layers, config.hidden_size, config.max_position_embeddings = 1, 32, 192
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, other: Path) -> Callable[[str], Path]:
    """Artifacts of DRAFTS, built when first asked for."""
    folder = tmp_path_factory.mktemp("speculation")

    def build(name: str) -> Path:
        recipe, drafts = DRAFTS[name]
        out = folder / name
        if not out.exists():
            given = [str(other) if draft == "other" else draft for draft in drafts]
            qcompile.build(str(tiny_checkpoint), out, recipe=recipe, drafts=given)
        return out

    return build


def facts(output: CompletionOutput) -> tuple[object, ...]:
    """All that a user sees of a sample."""
    return (
        output.token_ids,
        output.text,
        output.finish_reason,
        output.stop_reason,
        output.logprobs,
        output.cumulative_logprob,
    )


def generate(llm: LLM, prompts: Sequence[str] = PROMPTS, **options: object) -> list[tuple[object, ...]]:
    params = {"temperature": 0, "max_tokens": TOKENS, **options}
    outputs = llm.generate(list(prompts), SamplingParams(**params))  # type: ignore[arg-type]
    llm.engine.check()
    assert llm.engine.pool.used == 0
    return [facts(output.outputs[0]) for output in outputs]


# The others are parts of these.
@pytest.mark.parametrize("name", first(("qspec", "nested", "three stages", "lookup"), DRAFTS))
def test_tokens_are_the_targets_own(name: str, artifact: Callable[[str], Path]) -> None:
    """Gammas and auto, alone and together, greedy and drawn with a seed."""
    drawn = {"temperature": 0.7, "top_p": 0.9, "seed": 5, "logprobs": 1}
    with qcompile.load(artifact(name), threads=1, gamma=0, prefix_caching=False) as llm:
        plain, plain_drawn = generate(llm), generate(llm, **drawn)
    with qcompile.load(artifact(name), threads=1, prefix_caching=False) as llm:
        for gamma in (1, 3, 8, AUTO):
            llm.engine.speculation.gamma = gamma
            assert generate(llm) == plain, gamma
            assert generate(llm, PROMPTS[:1]) == plain[:1]
            assert generate(llm, **drawn) == plain_drawn, gamma


@pytest.mark.parametrize("name", first(("qspec", "lookup"), DRAFTS))
def test_penalties_know_what_was_drafted(name: str, artifact: Callable[[str], Path]) -> None:
    """Tokens that penalties invite to recur are those that Python chooses, by the library's rounds and the host's."""
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 0.05, "frequency_penalty": 0.4, "presence_penalty": 0.5},
        {"repetition_penalty": 0.3, "frequency_penalty": 0.2, "temperature": 0.5, "seed": 5},
    ]
    with qcompile.load(artifact(name), threads=1, gamma=0) as llm:
        llm.executor.samples = llm.engine.scheduler.samples = False  # type: ignore[misc]
        plain = [generate(llm, **one) for one in options]
    assert any(len(set(tokens)) < len(tokens) - 9 for result in plain for tokens, *_ in result)  # type: ignore[arg-type, misc]
    for kind in (LibrarySpeculator, HostSpeculator):
        with qcompile.load(artifact(name), threads=1) as llm:
            drafter = llm.engine.speculation.drafter
            assert isinstance(drafter, LibrarySpeculator)
            llm.engine.speculation.drafter = kind(drafter.target, drafter.stages)  # type: ignore[arg-type]
            for gamma in (1, 4, 8, AUTO):
                llm.engine.speculation.gamma = gamma
                assert [generate(llm, **one) for one in options] == plain, gamma


@pytest.mark.parametrize("name", first(("qspec", "lookup"), ["qspec", "three stages", "lookup"]))
def test_bans_hold_for_what_is_drafted(name: str, artifact: Callable[[str], Path]) -> None:
    """Tokens are those that Python chooses where ends may not come yet, few tokens are allowed, and words are bad."""
    options: list[dict[str, Any]] = [
        {"min_tokens": 13, "stop_token_ids": range(0, 8192, 3), "max_tokens": 40},
        {"min_tokens": 13, "stop_token_ids": range(0, 8192, 3), "max_tokens": 40, "temperature": 0.8, "seed": 2},
        {"allowed_token_ids": range(40, 60), "ignore_eos": True},
        {"allowed_token_ids": range(40, 60), "temperature": 1.5, "seed": 1, "logprobs": 1},
        {"allowed_token_ids": range(5, 9), "bad_words": ["#$", "&"], "temperature": 2.0, "seed": 1},
    ]
    with qcompile.load(artifact(name), threads=1, gamma=0) as llm:
        library = [generate(llm, **one) for one in options]
        llm.executor.samples = llm.engine.scheduler.samples = False  # type: ignore[misc]
        plain = [generate(llm, **one) for one in options]
    assert [[result[:4] for result in each] for each in library] == [[result[:4] for result in each] for each in plain]
    assert all(13 < len(tokens) < 40 for each in plain[:2] for tokens, *_ in each)  # type: ignore[arg-type, misc]
    assert all("#$" not in text and "&" not in text for _, text, *_ in plain[4])  # type: ignore[operator, misc]
    with qcompile.load(artifact(name), threads=1) as llm:
        for gamma in (2, 7, AUTO):
            llm.engine.speculation.gamma = gamma
            assert [generate(llm, **one) for one in options] == library, gamma


@pytest.mark.parametrize(
    ("gamma", "threshold"), first(((1, 0.0), (6, 0.3)), [(1, 0.0), (3, 0.0), (6, 0.3), (AUTO, 0.0)])
)
@pytest.mark.parametrize("name", first(("three stages",), ["two stages", "three stages", "lookup", "other"]))
def test_rounds_by_the_host_are_those_of_the_library(
    name: str, gamma: int, threshold: float, artifact: Callable[[str], Path]
) -> None:
    """Tokens, and what was drafted and kept at every place; also of texts that say the same again and again."""
    prompts = [*PROMPTS, "word " * 60, "a b c d " * 20 + "a b"]
    result = []
    for kind in (LibrarySpeculator, HostSpeculator):
        with qcompile.load(artifact(name), threads=1, gamma=gamma) as llm:
            drafter = llm.engine.speculation.drafter
            assert isinstance(drafter, LibrarySpeculator)
            fix_calls(llm.engine, 4)
            stages = [replace(stage, threshold=threshold) for stage in drafter.stages]
            llm.engine.speculation.drafter = kind(drafter.target, stages)  # type: ignore[arg-type]
            outputs = llm.generate(prompts, temperature=0, max_tokens=60)
            drawn = llm.generate(prompts, temperature=0.7, seed=3, max_tokens=20)
            every = [o.speculation for o in outputs if o.speculation]
            kept = [(one.rounds, one.drafted, one.accepted) for one in every] if gamma != AUTO else None
            result.append((kept, [facts(o.outputs[0]) for o in (*outputs, *drawn)]))
    assert result[0] == result[1]


def test_ends_are_the_targets_own(artifact: Callable[[str], Path]) -> None:
    """Stop texts, end of text and max_tokens, wherever in a round they fall."""
    with qcompile.load(artifact("qspec"), threads=1, gamma=0) as llm:
        plain = generate(llm)
        text = str(plain[0][1])
        stops = [text[at : at + size] for at in (3, 11, 20, 31) for size in (1, 4)]
        eos = [tokens[at] for tokens, at in ((plain[0][0], 5), (plain[1][0], 17))]  # type: ignore[index]
        wanted = [generate(llm, stop=stop) for stop in stops]
        short = [generate(llm, max_tokens=count) for count in (1, 2, 5, 8, 9, 10)]
        llm.engine.postprocessor.eos = frozenset(eos)
        ended = generate(llm)
        with_logprobs = generate(llm, logprobs=0)
    assert {facts[2] for facts in ended} == {"stop", "length"}
    for gamma in (1, 4, 7):
        with qcompile.load(artifact("qspec"), threads=1, gamma=gamma) as llm:
            assert [generate(llm, stop=stop) for stop in stops] == wanted
            assert [generate(llm, max_tokens=count) for count in (1, 2, 5, 8, 9, 10)] == short
            llm.engine.postprocessor.eos = frozenset(eos)
            assert generate(llm) == ended
            assert generate(llm, logprobs=0) == with_logprobs


class Scripted(Speculator):
    """Drafts by a function of the request: what the rest of the engine does must not depend on their worth."""

    def __init__(self, llm: LLM, script: Callable[[list[int], int], list[int]]) -> None:
        super().__init__(llm.executor, [])
        self.script = script

    def propose(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[list[int]]:
        return [self.script(r.sequence.tokens, gamma) for r, gamma in zip(requests, gammas, strict=True)]


@pytest.mark.parametrize("kind", ["wrong", "random", "right", "fewer"])
def test_any_drafts_leave_the_output_alone(kind: str, tiny_artifact: Callable[[str], Path]) -> None:
    draw = random.Random(0)
    with qcompile.load(tiny_artifact("w4a8"), threads=1) as llm:
        plain = generate(llm, logprobs=0)
        outputs = llm.generate(PROMPTS, temperature=0, max_tokens=TOKENS)
        known = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]

        def script(tokens: list[int], gamma: int) -> list[int]:
            right = next(full for full in known if full[: len(tokens)] == tokens)[len(tokens) :][:gamma]
            if kind == "random":
                return [draw.randrange(llm.vocab_size) for _ in range(gamma)]
            if kind == "fewer":
                return right[: draw.randrange(gamma + 1)]
            return right if kind == "right" else [(token + 1) % llm.vocab_size for token in right]

        llm.engine.speculation.drafter, llm.engine.speculation.gamma = Scripted(llm, script), 5
        assert generate(llm, logprobs=0) == plain
        request = llm.generate(PROMPTS[0], temperature=0, max_tokens=TOKENS, logprobs=0)[0]
    if kind == "right":
        assert request.speculation and request.speculation.acceptance_rate == 1.0
        assert request.speculation.tokens_per_round == pytest.approx(6, abs=0.7)
    if kind == "wrong":
        assert request.speculation and request.speculation.acceptance_rate == 0.0


def test_drafts_are_drawn_as_the_target_draws(artifact: Callable[[str], Path]) -> None:
    """At a temperature more drafts stay than greedy ones would, and rejection sampling keeps its promises."""
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, seed=1, max_tokens=60, logprobs=21)
    with qcompile.load(artifact("qspec"), threads=1, gamma=4) as llm:
        speculator = llm.engine.speculation.drafter
        assert speculator
        kept = []
        greedy = lambda requests, gammas, distributions: speculator.propose(requests, gammas)  # noqa: E731
        for draw in (speculator.draw, greedy):
            speculator.draw = draw  # type: ignore[method-assign]
            result = [output.speculation for output in llm.generate(PROMPTS, params)]
            kept.append(sum(sum(one.accepted) for one in result if one) / sum(one.rounds for one in result if one))
        assert kept[0] > 1.5 * kept[1]
    with qcompile.load(artifact("qspec"), threads=1, gamma=4, acceptance="rejection") as llm:
        first, again = (llm.generate(PROMPTS, params) for _ in range(2))
        assert [facts(o.outputs[0]) for o in first] == [facts(o.outputs[0]) for o in again]  # seeds reproduce
        for output in first:
            sample = output.outputs[0]
            assert sample.logprobs and len(sample.logprobs) == len(sample.token_ids)
            assert all(token in result for token, result in zip(sample.token_ids, sample.logprobs, strict=True))


def test_metrics_say_what_happened(artifact: Callable[[str], Path]) -> None:
    with qcompile.load(artifact("qspec"), threads=1, gamma=3) as llm:
        output = llm.generate(PROMPTS[0], temperature=0, max_tokens=TOKENS)[0]
        result = output.speculation
        assert result and result.gamma in (1, 2, 3) and result.draft_seconds > 0 and result.verify_seconds > 0
        kept = sum(result.accepted)
        assert result.rounds + kept >= TOKENS - 1  # the first token is the prompt's
        assert result.acceptance_rate == kept / sum(result.drafted)
        assert result.tokens_per_round == 1 + kept / result.rounds
        assert len(result.accepted_per_position) == 3
    with qcompile.load(artifact("qspec"), threads=1, gamma=0) as llm:
        assert llm.engine.speculation.drafter is None
        assert llm.generate(PROMPTS[0], temperature=0, max_tokens=4)[0].speculation is None


def test_shared_weights_and_cache_take_no_room(artifact: Callable[[str], Path], tiny_artifact: Callable) -> None:  # type: ignore[type-arg]
    def runtime(path: Path) -> dict[str, object]:
        result: dict[str, object] = json.loads((path / "qcompile.json").read_text())["runtime"]
        return result

    def weight_bytes(path: Path) -> int:
        return sum(file.stat().st_size for file in path.glob("weights-*"))

    assert weight_bytes(artifact("qspec")) == weight_bytes(tiny_artifact("w4a16"))
    assert runtime(artifact("qspec"))["kv"] == runtime(tiny_artifact("w4a16"))["kv"]
    assert weight_bytes(artifact("ml-specqd")) < weight_bytes(tiny_artifact("bf16")) + weight_bytes(
        tiny_artifact("mxfp4")
    )
    for gamma in (0, 4):
        with qcompile.load(artifact("qspec"), threads=1, gamma=gamma, kv_cache_bytes=1 << 20) as llm:
            assert llm.engine.pool.total == (1 << 20) // llm.manifest["runtime"]["kv"]["page_bytes"]


def test_a_lookup_proposes_past_the_levels_between(artifact: Callable[[str], Path]) -> None:
    """Where the text has come round to what it said before, more is proposed than gamma lets a model draft."""
    for tokens, proposed in ((list(range(5, 11)) * 6, [1] * 7 + [0]), (list(range(5, 41)), [1, 1, 0])):
        with qcompile.load(artifact("three stages"), threads=1, gamma=2) as llm:
            request = llm.engine.add(tokens[:-1], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))
            llm.engine.step()
            request.sequence.tokens[-1] = tokens[-1]  # as if the target had said so
            speculator = llm.engine.speculation.drafter
            assert isinstance(speculator, Speculator)
            gained, rounds = speculator.rounds([request], [2], 1, [len(request.sequence.tokens) + 10])
            assert rounds == 1 and request.drafts.metrics.drafted[: len(proposed)] == proposed
            llm.engine.cancel(request)
            llm.engine.speculation.gamma = 0
            plain = llm.generate(tokens, temperature=0, max_tokens=len(gained[0]), ignore_eos=True)[0]
            assert plain.outputs[0].token_ids == gained[0]


def _steps(llm: LLM, requests: list[Request]) -> Iterator[None]:
    while any(request.output.finish_reason is None for request in requests):
        llm.engine.step()
        llm.engine.check()
        yield


def speller(tiny_checkpoint: Path, folder: Path) -> Path:
    """A checkpoint of a model with bytes as tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    letters = folder / "letters"
    config = LlamaConfig.from_pretrained(tiny_checkpoint)
    config.vocab_size, config.num_hidden_layers = 257, 1
    torch.manual_seed(2)
    LlamaForCausalLM(config).save_pretrained(letters)
    (letters / "tokenizer.json").write_text(byte_tokenizer().to_str())
    return letters


@pytest.mark.parametrize("case", first((1, 2), range(4)))
def test_other_models_are_calibrated_on_text_of_their_own_tokens(
    case: int, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    import torch

    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 60)
    letters, tokens = speller(tiny_checkpoint, tmp_path), torch.randint(0, 200, (2, 32))
    spelled = calibration.CalibrationSource(text, 2, 32)
    own, graph = str(tiny_checkpoint), frontend.load(str(tiny_checkpoint))  # a graph has no tokenizer to read text with
    cases: Any = ((own, tokens, 9), (str(letters), spelled, 5), (str(letters), tokens, 0), (graph, spelled, 9))
    for draft, calib, weights in cases[case : case + 1]:
        report = qcompile.build(own, tmp_path / "out", recipe="w4a8", drafts=[draft], calib=calib)
        record = next(record for record in report.drafts["draft1"] if record.name == "calibrate")
        assert record.fired == weights
        untold = any("no calibration text" in note for note in record.notes)
        assert untold == (weights == 0)  # token ids are not the tokens of the draft, and a note says so
        assert report.seconds["calibrate"] >= sum(p.seconds for p in report.passes if p.name == "calibrate")


def test_a_draft_of_another_tokenizer(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A model that spells letter by letter drafts for one of long tokens, and the other way round."""
    letters, short = speller(tiny_checkpoint, tmp_path), [prompt for prompt in PROMPTS if len(prompt) < 100]
    for target, draft in ((str(tiny_checkpoint), str(letters)), (str(letters), str(tiny_checkpoint))):
        out = tmp_path / f"{Path(target).name}.out"
        qcompile.build(target, out, recipe="w4a8", drafts=[draft])
        with qcompile.load(out, threads=1, gamma=0) as llm:
            plain, drawn = generate(llm, short), generate(llm, short, temperature=0.8, seed=2)
        for threshold in (0.0, 0.9):
            with qcompile.load(out, threads=1, gamma=4) as llm:
                assert isinstance(llm.engine.speculation.drafter, Reencoder)
                llm.engine.speculation.drafter.threshold = threshold
                assert generate(llm, short) == plain
                assert generate(llm, short, temperature=0.8, seed=2) == drawn
                assert llm.engine.speculation.drafter.pool.used == 0
                drafted = llm.generate(PROMPTS[0], temperature=0, max_tokens=TOKENS)[0].speculation
                assert (drafted is None) == (threshold == 0.9)
    with pytest.raises(UnsupportedError, match="another tokenizer: it can only draft alone"):
        qcompile.build(str(tiny_checkpoint), tmp_path / "out", recipe="qspec", drafts=[str(letters)])


def test_a_draft_that_spells_what_the_target_has_no_number_for() -> None:
    """Tokenizers may know more tokens than the model has: what is drafted ends before."""
    known = byte_tokenizer()
    known.add_tokens([f"unused {number}" for number in range(VOCAB - 257)])
    known.add_tokens(["zz"])
    assert known.token_to_id("zz") == VOCAB
    spelled = known.encode("azz").ids  # that of the target
    letters = byte_tokenizer().encode("a" + "zz").ids
    steps = iter(letters)

    def step(rows: Sequence[Rows], logits: bool) -> tuple[list[int], np.ndarray]:
        return [next(steps)], np.zeros((1, 257), np.float32)

    draft: Any = SimpleNamespace(limits=Limits(64, 257, 64, 512), step=step, close=lambda: None)
    with fake_llm(tokenizer=known) as llm:
        drafter = Reencoder(known, byte_tokenizer(), draft, BlockPool(8, 64), None, 0.0, VOCAB)
        llm.engine.speculation.drafter = drafter
        request = llm.engine.add(known.encode("b").ids, SamplingParams(temperature=0))
        assert spelled[1:] == [VOCAB] and drafter.propose([request], [3]) == [spelled[:1]]
        llm.engine.cancel(request)


@pytest.mark.parametrize("unknown", ["word", "number"])
def test_a_text_that_the_draft_cannot_read_is_not_drafted_for(unknown: str) -> None:
    """Its tokenizer may have no token for the unknown, or more tokens than the model that drafts."""
    letters = byte_tokenizer()
    own = Tokenizer(models.WordLevel({"a": 1, "b": 5 if unknown == "word" else 257}, unk_token="missing"))

    def step(rows: Sequence[Rows], logits: bool) -> tuple[list[int], np.ndarray]:
        assert all(token < 257 for row in rows for token in row.tokens)
        return [1], np.zeros((1, 257), np.float32)

    draft: Any = SimpleNamespace(limits=Limits(64, 257, 64, 512), step=step, close=lambda: None)
    with fake_llm(tokenizer=letters) as llm:
        llm.engine.speculation.drafter = Reencoder(letters, own, draft, BlockPool(8, 64), None, 0.0, VOCAB)
        for text, known in (("a", True), ("c" if unknown == "word" else "b", False)):
            request = llm.engine.add(letters.encode(text).ids, SamplingParams(temperature=0))
            assert [bool(draft) for draft in llm.engine.speculation.drafter.propose([request], [1])] == [known]
            llm.engine.cancel(request)


def test_drafts_of_short_contexts_stop_in_time(artifact: Callable[[str], Path]) -> None:
    """The other model ends at 192 positions, the target at 256."""
    with qcompile.load(artifact("other"), threads=1, gamma=0) as llm:
        plain = generate(llm, ["def main("], max_tokens=None, ignore_eos=True)
    with qcompile.load(artifact("other"), threads=1, gamma=5) as llm:
        assert generate(llm, ["def main("], max_tokens=None, ignore_eos=True) == plain


def test_texts_beyond_the_context_of_a_draft_go_on_beside_others(artifact: Callable[[str], Path]) -> None:
    """Of two requests in a call one is longer than what the other model can take."""
    result = []
    for gamma in (0, 5):
        with qcompile.load(artifact("other"), threads=1, gamma=gamma) as llm:
            prompts = [[*range(1, 231)], [5, 6, 7]]
            result.append([o.outputs[0] for o in llm.generate(prompts, temperature=0, max_tokens=20, ignore_eos=True)])
    assert [sample.token_ids for sample in result[0]] == [sample.token_ids for sample in result[1]]


@pytest.mark.parametrize("missing", ["memory", "rounds"])
def test_a_model_whose_drafts_cannot_be_opened_leaves_no_threads(
    missing: str, artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its own, nor the drafts' where what follows them fails."""

    def refuse(*given: object) -> None:
        raise ResourceError("no memory for drafts")

    with qcompile.load(artifact("other"), threads=1):
        pass  # what starts threads once and for all has done so
    closed = []
    close = Executor.close
    monkeypatch.setattr(Executor, "close", lambda executor: closed.append(executor) or close(executor))  # type: ignore[func-returns-value]
    opens = {"memory": "_open_stages", "rounds": "LibrarySpeculator"}
    monkeypatch.setattr(load, opens[missing], refuse)
    before = len(os.listdir("/proc/self/task"))
    with pytest.raises(ResourceError, match="for drafts"):
        qcompile.load(artifact("other"), threads=3)
    assert len(os.listdir("/proc/self/task")) == before
    assert len(closed) == (1 if missing == "memory" else 2)


def test_a_stream_ends_with_its_model(artifact: Callable[[str], Path]) -> None:
    with qcompile.load(artifact("qspec"), threads=1, gamma=4) as llm:
        stream = llm.stream([[5, 6, 7]], temperature=0, ignore_eos=True, max_tokens=200)
        next(stream)
    with pytest.raises(UsageError, match="closed: load it again"):
        list(stream)
    assert not llm.engine.busy and llm.engine.pool.used == 0


def test_cache_too_small_and_cancelled_neighbours(artifact: Callable[[str], Path]) -> None:
    """Preempted, computed again, in small chunks, beside requests that come and go: the same tokens."""
    with qcompile.load(artifact("two stages"), threads=1, gamma=0) as llm:
        plain = dict(zip(PROMPTS, generate(llm, max_tokens=90), strict=True))
        page = sum(cache["page_bytes"] for cache in _caches(llm))
    draw = random.Random(2)
    with qcompile.load(artifact("two stages"), threads=1, gamma=4, kv_cache_bytes=3 * page) as llm:
        llm.engine.scheduler.max_tokens = 23
        fix_calls(llm.engine, 1)
        wanted = SamplingParams(temperature=0, max_tokens=90)
        prompts = [draw.choice((PROMPTS[0], PROMPTS[2], PROMPTS[4])) for _ in range(12)]
        requests = [llm.engine.add(llm.encode(prompt), wanted) for prompt in prompts]
        for _ in _steps(llm, requests):
            if draw.random() < 0.02:
                llm.engine.cancel(draw.choice(requests))
        assert llm.engine.scheduler.preemptions > 0 and llm.engine.pool.used == 0
    finished = [pair for pair in zip(prompts, requests, strict=True) if pair[1].output.finish_reason != "abort"]
    assert 0 < len(finished) < len(requests)
    for prompt, request in finished:
        assert facts(request.output) == plain[prompt]


def _caches(llm: LLM) -> list[dict[str, int]]:
    runtime = llm.manifest["runtime"]
    return [runtime["kv"], *(stage["kv"] for stage in runtime["levels"] if stage.get("kv"))]


@pytest.mark.parametrize(
    "options", first(({"temperature": 0.8},), [{"temperature": 0.8}, {"temperature": 0, "logprobs": 0}])
)
def test_many_requests_whose_drafts_lag_behind_fit_into_a_step(
    artifact: Callable[[str], Path], options: dict[str, float]
) -> None:
    """After plain steps every draft has some positions to catch up with: for 100 requests more than a step has rows."""
    result = {}
    for gamma in (0, 3):
        with qcompile.load(artifact("other"), max_batch=100, gamma=gamma, threads=1) as llm:
            engine = llm.engine
            params = [SamplingParams(seed=seed, max_tokens=20, ignore_eos=True, **options) for seed in range(100)]
            requests = [engine.add([seed + 1] * 20, one) for seed, one in enumerate(params)]
            for steps, drafts in ((7, gamma), (6, 0)):  # the first four take the prompts
                engine.speculation.gamma = drafts
                for _ in range(steps):
                    engine.step()
            engine.speculation.gamma = gamma
            while engine.busy:
                engine.step()
            assert not gamma or requests[0].drafts.metrics.rounds > 0
            result[gamma] = [facts(request.output) for request in requests]
    assert result[0] == result[3]
