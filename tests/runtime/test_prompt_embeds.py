"""Prompts given as embeddings: the bits of tokens, images through transformers' own code, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import qcompile
from benchmarks import families, multimodal
from qcompile.errors import LongPromptError, UsageError
from qcompile.runtime.llm import LLM
from qcompile.runtime.step import Rows
from tests.support.calls import fix_calls
from tests.support.cases import first
from tests.support.embeds import step_with_both
from tests.support.fake import fake_llm

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
KINDS = {
    "llava": "w4a8",
    "gemma3": "f32",  # scales embeddings in the module that reads the table: given ones are scaled already
    "paddleocr_vl": "nested",  # three positions a token; a draft over the same cache
}


class Pair(NamedTuple):
    """A compiled model, and the module it was compiled from."""

    llm: LLM
    module: Any

    def embeds(self, tokens: list[int]) -> torch.Tensor:
        """What transformers calls inputs_embeds, of tokens: [tokens, width]."""
        with torch.no_grad():
            return self.module.get_input_embeddings()(torch.tensor(tokens))


@pytest.fixture(scope="module", params=first(("gemma3", "paddleocr_vl"), KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    with families.quiet():
        module = multimodal.save_random(request.param, folder / "model", multimodal.tiny_config(request.param, 2))
        qcompile.build(folder / "model", folder / "artifact", recipe=KINDS[request.param])
    with qcompile.load(folder / "artifact", threads=1) as llm:
        yield Pair(llm, module)


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, multimodal.VOCABULARY, length).tolist()


def answers(llm: LLM, *prompts: Any, embedded: bool, **options: Any) -> list[tuple[list[int], Any]]:
    given: dict[str, Any] = {"prompt_embeds": list(prompts)} if embedded else {"prompts": list(prompts)}
    outputs = llm.generate(**given, **GREEDY, logprobs=0, **options)
    return [(each.outputs[0].token_ids, each.outputs[0].cumulative_logprob) for each in outputs]


@pytest.mark.parametrize("budget", first((8,), [8, 512]))
def test_rows_of_the_table_have_the_bits_of_tokens(pair: Pair, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step has one row of a prompt left, and where it begins in the middle."""
    monkeypatch.setattr(pair.llm.engine.scheduler, "max_tokens", budget)
    prompts = [text(length, length) for length in (1, 9, 17, 40)]
    tokens = answers(pair.llm, *prompts, embedded=False)
    assert answers(pair.llm, *(pair.embeds(prompt) for prompt in prompts), embedded=True) == tokens
    assert [answers(pair.llm, pair.embeds(prompt), embedded=True)[0] for prompt in prompts] == tokens


def test_logits_of_a_step_with_both(pair: Pair) -> None:
    """A row's logits depend neither on its neighbors nor on how it was given."""
    ids = text(11)
    assert step_with_both(pair.llm, ids, pair.embeds(ids).numpy())


def test_pages_are_not_shared(pair: Pair) -> None:
    """The tokens of an embedded prompt say nothing about it: neither it nor a prompt of such tokens finds its pages."""
    prompt = text(100, 5)
    zeros = [0] * 100
    expected = answers(pair.llm, zeros, prompt, embedded=False)
    embeds = pair.embeds(prompt)
    for _ in range(2):
        output = pair.llm.generate(prompt_embeds=embeds, **GREEDY)[0]
        assert output.metrics.cached_tokens == 0 and output.outputs[0].token_ids == expected[1][0]
        assert output.prompt is None and output.prompt_token_ids == []
    assert answers(pair.llm, zeros, embedded=False) == expected[:1]
    pair.llm.engine.check()


def test_preempted_prompts_are_computed_again(pair: Pair) -> None:
    fix_calls(pair.llm.engine, 1)
    prompts = [text(60, seed) for seed in range(4)]
    options = {**GREEDY, "max_tokens": 20}
    alone = [pair.llm.generate([prompt], **options)[0].outputs[0].token_ids for prompt in prompts]
    made: dict[int, list[int]] = {}
    for count, output in enumerate(pair.llm.stream(prompt_embeds=[pair.embeds(one) for one in prompts], **options)):
        made[output.request_id] = output.outputs[0].token_ids
        if count in (2, 21):
            assert pair.llm.engine.scheduler.preempt().sequence.embeds is not None
    assert [made[number] for number in range(len(prompts))] == alone
    pair.llm.engine.check()


def test_streams_samples_and_arrays(pair: Pair) -> None:
    prompt = text(12)
    embeds = pair.embeds(prompt)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "n": 2, "max_tokens": 6, "ignore_eos": True}
    wanted = [each.token_ids for each in pair.llm.generate([prompt], **options)[0].outputs]
    for given in (embeds, embeds.numpy(), embeds.double(), [embeds.numpy()]):
        *_, last = pair.llm.stream(prompt_embeds=given, **options)
        assert [each.token_ids for each in last.outputs] == wanted
    for given in (embeds.bfloat16(), embeds.numpy().astype(np.float16)):
        pair.llm.generate(prompt_embeds=given, **options)


def refused(llm: LLM, message: str, error: type[Exception] = UsageError, **given: Any) -> None:
    with pytest.raises(error, match=message):
        llm.generate(**given)


def test_refusals(pair: Pair) -> None:
    llm, good = pair.llm, pair.embeds(text(5))
    width = good.shape[1]
    refused(llm, "give prompts, or prompt_embeds instead of them")
    refused(llm, "give prompts, or prompt_embeds instead of them", prompts=[[1]], prompt_embeds=good)
    refused(llm, "prompt_embeds is empty", prompt_embeds=[])
    refused(llm, rf"must be \[tokens, {width}\], and have shape \[5, 3\]", prompt_embeds=good[:, :3])
    refused(llm, r"must be \[tokens, width\], and have shape \[1, 5, ", prompt_embeds=good[None])
    refused(llm, r"must be \[tokens, width\], and have shape \[0, ", prompt_embeds=good[:0])
    refused(llm, "floating-point numbers, not int64", prompt_embeds=torch.zeros(3, width, dtype=torch.int64))
    refused(llm, "floating-point numbers, not list", prompt_embeds=[[0.5] * width])
    refused(llm, "floating-point numbers, not complex64", prompt_embeds=np.zeros((3, width), np.complex64))
    for bad in (torch.nan, torch.inf):
        refused(llm, "hold NaN or infinite", prompt_embeds=torch.full((2, width), bad))
    refused(llm, "too large ones for float32", prompt_embeds=np.full((2, width), 1e300))
    refused(llm, "the prompt is too long", LongPromptError, prompt_embeds=torch.zeros(llm.context, width))
    refused(llm, "prompt_logprobs are for prompts of tokens", prompt_embeds=good, prompt_logprobs=1)


def test_models_that_take_none_say_so() -> None:
    with fake_llm() as llm:
        refused(llm, "this artifact takes no prompt_embeds", prompt_embeds=np.zeros((2, 8), np.float32))


def test_a_rotated_table_takes_none(tmp_path: Path) -> None:
    with families.quiet():
        multimodal.save_random("llava", tmp_path / "model", multimodal.tiny_config("llava", 1))
        options = {"fold_norms.enabled": "true", "rotate.enabled": "true"}
        report = qcompile.build(tmp_path / "model", tmp_path / "artifact", recipe="f32", options=options)
    assert {record.name: record.fired for record in report.passes}["rotate"]
    with qcompile.load(tmp_path / "artifact", threads=1) as llm:
        refused(llm, "no pass has changed it", prompt_embeds=np.zeros((2, 64), np.float32))


def test_an_image_through_its_own_code(tmp_path: Path) -> None:
    """transformers' vision tower and projector make the embeddings of an image; the compiled decoder reads them."""
    with families.quiet():
        config = multimodal.tiny_config("llava", 2)
        module = multimodal.save_random("llava", tmp_path / "model", config)
        qcompile.build(tmp_path / "model", tmp_path / "artifact", recipe="f32")
    size, patch = config.vision_config.image_size, config.vision_config.patch_size
    image = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[5, 6, *[config.image_token_id] * (size // patch) ** 2, 7, 8, 9]])
    seen: list[torch.Tensor] = []
    inner = module.model.language_model
    hook = inner.register_forward_pre_hook(lambda _, args, named: seen.append(named["inputs_embeds"]), with_kwargs=True)
    with torch.no_grad():
        wanted = module(input_ids=ids, pixel_values=image).logits[0]
        hook.remove()
        alone = module(input_ids=ids).logits[0]
    (embeds,) = seen
    assert (wanted[-1] - alone[-1]).abs().max() > 1e-2  # the image matters
    with qcompile.load(tmp_path / "artifact", threads=1) as llm:
        count = ids.shape[1]
        pages = llm.engine.pool.take(llm.engine.pool.pages_for(count))
        rows = Rows([0] * count, 0, pages, count, embeds=embeds[0].numpy())
        logits = llm.engine.executor.step([rows], logits=True)[1]
        assert logits is not None
        torch.testing.assert_close(torch.from_numpy(logits.copy()), wanted, atol=2e-5, rtol=0)
        llm.engine.pool.give_back(pages)
        with torch.no_grad():
            continued = module.generate(inputs_embeds=embeds, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        made = llm.generate(prompt_embeds=embeds[0], temperature=0, max_tokens=6, ignore_eos=True)[0]
        assert made.outputs[0].token_ids == continued[0, -6:].tolist()
