"""Speculation over a hierarchical cache: what is drafted, rejected, batched or evicted leaves no trace in it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import qcompile
from qcompile import SamplingParams
from qcompile.artifact.reader import read_manifest
from qcompile.runtime.llm import LLM
from qcompile.runtime.options import AUTO
from tests.support.calls import fix_calls
from tests.support.cases import first

LENGTHS = (3, 250, 254, 300, 382, 500, 511)
"""Of prompts: their answers of TOKENS cross the ends of groups, where older positions are rounded."""
TOKENS = 24
VARIANTS: dict[str, tuple[str, dict[str, str], bool]] = {
    "quantspec": ("quantspec", {}, False),
    "8-bit weights": ("quantspec-w8", {}, False),
    "nested all through": ("nested", {"cache.format": "kv_hier"}, False),
    "with another draft": ("quantspec", {}, True),
}
"""Recipe, options, and whether a second draft stage has a cache of its own."""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Callable[[str], Path]:
    """Artifacts of VARIANTS of the tiny model with a context of 1024 tokens, built when first asked for."""
    folder = tmp_path_factory.mktemp("hierarchical")
    model = folder / "model"
    shutil.copytree(tiny_checkpoint, model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}), encoding="utf-8")

    def build(name: str) -> Path:
        recipe, options, other = VARIANTS[name]
        out = folder / name
        if not out.exists():
            qcompile.build(str(model), out, recipe=recipe, options=options, drafts=[str(model)] if other else [])
        return out

    return build


def prompts(llm: LLM) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(llm.vocab_size) for _ in range(length)] for length in LENGTHS]


def generate(llm: LLM, texts: list[list[int]], **options: object) -> list[tuple[object, ...]]:
    params = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **options}
    outputs = llm.generate(texts, SamplingParams(**params))  # type: ignore[arg-type]
    llm.engine.check()
    assert llm.engine.pool.used == 0
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]


@pytest.mark.parametrize("name", first(("quantspec",), VARIANTS))
def test_tokens_are_the_verifying_paths_own(name: str, artifact: Callable[[str], Path]) -> None:
    with qcompile.load(artifact(name), threads=1, gamma=0) as llm:
        texts = prompts(llm)
        plain = [generate(llm, [text])[0] for text in texts]
        noted = generate(llm, texts, logprobs=0)
    with qcompile.load(artifact(name), threads=2) as llm:
        for gamma in (1, 3, 8, AUTO):
            llm.engine.speculation.gamma = gamma
            assert generate(llm, texts) == plain, gamma
        llm.engine.speculation.gamma = 5
        assert generate(llm, texts, logprobs=0) == noted
        assert [generate(llm, [text])[0] for text in texts[1:4]] == plain[1:4]


def test_chunks_and_eviction_change_nothing(artifact: Callable[[str], Path]) -> None:
    """With pages for a quarter of the demand, requests are computed again from the start, in other chunks."""
    path = artifact("quantspec")
    page = read_manifest(path)["runtime"]["kv"]["page_bytes"]
    with qcompile.load(path, threads=1, gamma=0) as llm:
        texts = prompts(llm) * 2
        plain = generate(llm, texts[: len(LENGTHS)]) * 2
    with qcompile.load(path, threads=1, gamma=4, kv_cache_bytes=40 * page) as llm:
        assert generate(llm, texts) == plain
        assert llm.engine.scheduler.preemptions > 0


def test_drafts_read_the_upper_half(artifact: Callable[[str], Path]) -> None:
    """Two paths over one layout: the draft's library differs, and its cache is the target's."""
    manifest = read_manifest(artifact("nested all through"))
    kv, stage = manifest["runtime"]["kv"], manifest["runtime"]["levels"][0]
    assert kv["format"] == "kv_hier" and kv["ring_tokens"] == 384 and stage["kv"] is None
    caches = [each for each in stage["passes"] if each["name"] == "cache"]
    assert [(cache["options"], cache["fired"]) for cache in caches] == [({"format": "kv_hier4"}, 2)]
    program = json.loads((artifact("nested all through") / "graphs" / "draft1.json").read_text(encoding="utf-8"))
    assert program["kv"]["format"] == "kv_hier4" and program["kv"]["page_bytes"] == kv["page_bytes"]
    # 8 bits for each of 16 (padded to 32) elements of K and V, two floats a position and one a channel of a group.
    assert kv["page_bytes"] == 2 * 2 * (64 * 2 * 32 + 64 * 8 + 32 * 4)


@pytest.mark.parametrize(
    ("name", "gamma"),
    first(
        (("with another draft", 3),),
        [(name, gamma) for name in ("quantspec", "with another draft") for gamma in (0, 3)],
    ),
)
def test_a_text_goes_on_from_its_pages(name: str, gamma: int, artifact: Callable[[str], Path]) -> None:
    """Turns of two conversations in turn, over groups' ends: each answer is that of its whole text computed anew."""
    draw = random.Random(1)
    with (
        qcompile.load(artifact(name), threads=1, gamma=0, prefix_caching=False) as anew,
        qcompile.load(artifact(name), threads=1, gamma=gamma) as llm,
    ):
        talks = [[draw.randrange(llm.vocab_size) for _ in range(length)] for length in (100, 300)]
        params = [SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0) for _ in talks]
        cached = []
        for turn in range(11):
            outputs = llm.generate(talks, params) if turn % 2 else [llm.generate(talk, params[0])[0] for talk in talks]
            wanted = anew.generate(talks, params)
            assert [output.outputs[0] for output in outputs] == [output.outputs[0] for output in wanted]
            cached += [output.metrics.cached_tokens for output in outputs]
            for talk, output in zip(talks, outputs, strict=True):
                talk += output.outputs[0].token_ids + [
                    draw.randrange(llm.vocab_size) for _ in range(draw.randrange(30))
                ]
            llm.engine.check()
        assert (
            cached[:2] == [0, 0] and sum(count > 0 for count in cached) >= 12
        )  # not where drafts went over a group's end
        assert llm.engine.pool.used == 0


def test_a_text_that_another_one_took_is_computed_again(artifact: Callable[[str], Path]) -> None:
    path = artifact("quantspec")
    with qcompile.load(path, threads=1, gamma=0) as llm:
        start = prompts(llm)[3]
        first = generate(llm, [start])[0]
        going_on = [[*start, *first[0], *range(1, 1 + index)] for index in (5, 9)]  # type: ignore[misc]
        outputs = llm.generate(going_on, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        assert [output.metrics.cached_tokens for output in outputs] == [len(start) + TOKENS - 1, 0]
    with qcompile.load(path, threads=1, gamma=0, prefix_caching=False) as llm:
        wanted = llm.generate(going_on, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert [output.outputs[0] for output in outputs] == [output.outputs[0] for output in wanted]


def test_kept_texts_give_way(artifact: Callable[[str], Path]) -> None:
    path = artifact("quantspec")
    page = read_manifest(path)["runtime"]["kv"]["page_bytes"]
    with qcompile.load(path, threads=1, gamma=0, kv_cache_bytes=40 * page) as llm:
        texts = prompts(llm)
        plain = [generate(llm, [text])[0] for text in texts]
        assert [generate(llm, [text])[0] for text in texts] == plain
        kept = llm.engine.pool.texts
        assert kept and sum(len(ending.pages) for ending in kept) <= llm.engine.pool.total == llm.engine.pool.free


@pytest.mark.parametrize("gamma", first((3,), (0, 3)))
def test_a_text_that_ended_within_a_call_is_continued(gamma: int, artifact: Callable[[str], Path]) -> None:
    """Positions past its end have been computed in vain, some of them over a group's end."""
    draw = random.Random(2)
    with (
        qcompile.load(artifact("quantspec"), threads=1, gamma=0, prefix_caching=False) as anew,
        qcompile.load(artifact("quantspec"), threads=1, gamma=gamma) as llm,
    ):
        for each in (llm, anew):
            each.engine.postprocessor.eos = frozenset(range(0, llm.vocab_size, 9))
            fix_calls(each.engine, 16)
        talk = [draw.randrange(llm.vocab_size) for _ in range(230)]
        cached = []
        for _ in range(40):
            result, wanted = (each.generate([talk], temperature=0, max_tokens=40)[0] for each in (llm, anew))
            assert result.outputs[0] == wanted.outputs[0]
            cached.append(result.metrics.cached_tokens)
            talk += result.outputs[0].token_ids + [draw.randrange(llm.vocab_size) for _ in range(3)]
        assert sum(count > 0 for count in cached) > 20
