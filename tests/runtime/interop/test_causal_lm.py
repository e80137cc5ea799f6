"""`LLM.as_transformers`: tokens, logits and loss are those of transformers' own model; what it cannot do is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer, pipeline
from transformers.generation import EosTokenCriteria, StoppingCriteriaList

import qcompile
from qcompile.errors import QCompileError, UnsupportedError, UsageError
from qcompile.runtime.interop.causal_lm import CompiledCausalLM
from qcompile.runtime.llm import LLM
from tests.support import fake
from tests.support.fake import EOS, fake_llm

TEXTS = ["def main(", "import os\nimport sys\n\n\nclass Reader", "x"]


@pytest.fixture(scope="module")
def llm(tiny_artifact: Callable[[str], Path]) -> Iterator[LLM]:
    with qcompile.load(tiny_artifact("f32"), threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(llm: LLM) -> CompiledCausalLM:
    return llm.as_transformers()


@pytest.fixture(scope="module")
def theirs(tiny_checkpoint: Path) -> Any:
    """The model as transformers computes it."""
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(tiny_artifact: Callable[[str], Path]) -> Any:
    """The artifact's own."""
    return AutoTokenizer.from_pretrained(tiny_artifact("f32"), padding_side="left")


@pytest.fixture(scope="module")
def inputs(tokenizer: Any) -> Any:
    """Three prompts of different lengths, padded on the left."""
    made = tokenizer(TEXTS, return_tensors="pt", padding=True)
    assert (made.attention_mask[0] == 0).any()
    return made


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 24},
        {"max_length": 30, "do_sample": False, "repetition_penalty": 1.3},
        {"max_new_tokens": 12, "eos_token_id": [0, 1, 13], "pad_token_id": 7, "min_new_tokens": 3},
        {"generation_config": GenerationConfig(max_new_tokens=9, num_beams=1, return_dict_in_generate=True)},
        {},
    ],
)
def test_greedy_tokens_are_theirs(model: Any, theirs: Any, inputs: Any, llm: LLM, options: dict[str, Any]) -> None:
    """And those of the plain model, for a batch with padding."""
    result, want = model.generate(**inputs, **options), theirs.generate(**inputs, **options)
    if "generation_config" in options:
        result, want = result.sequences, want.sequences
    assert torch.equal(result, want) and result.dtype == torch.long
    if options == {"max_new_tokens": 24}:
        outputs = llm.generate(TEXTS, temperature=0, max_tokens=24, ignore_eos=True)
        width = inputs.input_ids.shape[1]
        assert [output.outputs[0].token_ids for output in outputs] == result[:, width:].tolist()


def test_drawn_tokens_follow_torchs_seed(model: Any, llm: LLM, inputs: Any) -> None:
    """num_return_sequences for each prompt, in the order of transformers; top_k 50 is its default."""

    def drawn(seed: int, **more: Any) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.generate(**inputs, do_sample=True, num_return_sequences=2, max_new_tokens=9, **more)

    first = drawn(1)
    assert first.shape == (6, inputs.input_ids.shape[1] + 9) and torch.equal(first, drawn(1))
    assert not torch.equal(first, drawn(2)) and not torch.equal(first[0], first[1])
    assert torch.equal(drawn(3), drawn(3, top_k=50)) and not torch.equal(drawn(3), drawn(3, top_k=0, temperature=2.0))
    width = inputs.input_ids.shape[1]
    assert torch.equal(first[:, :width], inputs.input_ids.repeat_interleave(2, 0))
    torch.manual_seed(1)
    params = qcompile.SamplingParams(n=2, top_k=50, seed=torch.randint(2**31, (3,)).tolist()[0], max_tokens=9)
    (output,) = llm.generate(TEXTS[:1], params)
    assert [sample.token_ids for sample in output.outputs] == first[:2, width:].tolist()


def test_logits_and_loss_are_theirs(model: Any, theirs: Any, tokenizer: Any, inputs: Any) -> None:
    """float32 sums in another order differ by some 1e-6 of logits of about 1."""
    mask = inputs.attention_mask
    result, want = model(**inputs), theirs(**inputs)
    torch.testing.assert_close(result.logits[mask == 1], want.logits[mask == 1], rtol=0, atol=1e-4)
    assert result.loss is None and not result.logits[mask == 0].any() and not result.logits.requires_grad
    right = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="right")
    labels = right.input_ids.masked_fill(right.attention_mask == 0, -100)
    loss, logits = model(**right, labels=labels, return_dict=False, logits_to_keep=3)
    torch.testing.assert_close(loss, theirs(**right, labels=labels).loss.detach(), rtol=0, atol=1e-4)
    assert logits.shape == (3, 3, 8192)
    places = torch.tensor([0, 2])
    assert torch.equal(model(**right, logits_to_keep=places).logits, model(**right).logits[:, places])
    left = model(**inputs, labels=inputs.input_ids.masked_fill(mask == 0, -100)).loss
    torch.testing.assert_close(left, loss, rtol=0, atol=1e-5)


def test_pipelines(model: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("transformers").propagate = True
    made = pipeline("text-generation", model=model, tokenizer=tokenizer)
    greedy = {"do_sample": False, "max_new_tokens": 6}
    whole = made(TEXTS, batch_size=2, **greedy)
    alone = [made(text, **greedy) for text in TEXTS]
    assert whole == alone and whole[0][0]["generated_text"].startswith("def main(")
    (stopped,) = made(TEXTS[0], stop_sequence=whole[0][0]["generated_text"][9:11], **greedy)
    assert stopped["generated_text"] == whole[0][0]["generated_text"][: len(stopped["generated_text"])]
    assert len(stopped["generated_text"]) < len(whole[0][0]["generated_text"])
    assert len(made("", **greedy)) == 1  # begins with the token that begins a text
    assert "not supported" not in caplog.text


def test_streamers_and_criteria(model: Any, inputs: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ids = inputs.input_ids[1:2]
    whole = model.generate(ids, max_new_tokens=12)
    streamed = model.generate(ids, max_new_tokens=12, streamer=TextStreamer(tokenizer))
    assert torch.equal(whole, streamed) and capsys.readouterr().out == tokenizer.decode(whole[0]) + "\n"
    third = int(whole[0, ids.shape[1] + 2])
    seen: list[list[int]] = []

    def note(tokens: torch.Tensor, scores: None) -> torch.Tensor:
        seen.append(tokens[0].tolist())
        return torch.tensor([False])

    criteria = StoppingCriteriaList([note, EosTokenCriteria(third)])
    stopped = model.generate(ids, max_new_tokens=12, stopping_criteria=criteria)
    count = 1 + whole[0, ids.shape[1] :].tolist().index(third)
    assert torch.equal(stopped, whole[:, : ids.shape[1] + count])
    assert seen == [whole[0, : ids.shape[1] + each].tolist() for each in range(1, count + 1)]
    seen.clear()
    criteria = [note, EosTokenCriteria(third)]
    batch = model.generate(**inputs, max_new_tokens=12, stopping_criteria=criteria, pad_token_id=5)
    for each in batch.tolist():
        assert each[: ids.shape[1] + 1] in seen
    assert batch[1, : stopped.shape[1]].tolist() == stopped[0].tolist() and set(
        batch[1, stopped.shape[1] :].tolist()
    ) <= {5}
    assert model.generate(ids, max_new_tokens=200, max_time=1e-9).shape[1] == ids.shape[1] + 1


@pytest.mark.parametrize("executor", [fake.Executor, fake.LateExecutor])
def test_tokens_after_a_stop_text_are_dropped(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are known before their text is, and something watches them."""
    monkeypatch.setattr(fake, "Chosen", executor)
    with fake_llm(tokenizer=fake.byte_tokenizer()) as llm:
        model, ids = llm.as_transformers(), torch.tensor([[70, 71, 72]])
        options: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": 259, "pad_token_id": 1}
        whole = model.generate(ids, **options)
        text = llm.decode(whole[0, 3:].tolist())
        stop = next(letter for letter in text[20:] if letter.isascii() and letter not in text[:20])
        plain = model.generate(ids, stop_strings=stop, **options)
        watched = model.generate(ids, stop_strings=stop, stopping_criteria=[lambda tokens, scores: False], **options)
        assert torch.equal(plain, watched) and 20 < plain.shape[1] < whole.shape[1]


def test_embeddings_are_prompts(model: Any, theirs: Any, inputs: Any) -> None:
    embeds = theirs.get_input_embeddings()(inputs.input_ids).detach()
    want = model.generate(**inputs, max_new_tokens=8)[:, inputs.input_ids.shape[1] :]
    result = model.generate(inputs_embeds=embeds, attention_mask=inputs.attention_mask, max_new_tokens=8)
    assert torch.equal(result, want)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 4}, "num_beams 4"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"bad_words_ids": [[5]]}, "bad_words_ids"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"logits_processor": [len]}, "logits_processor"),
        ({"prefix_allowed_tokens_fn": len}, "prefix_allowed_tokens_fn"),
        ({"assistant_model": "x"}, "assistant_model"),
        ({"past_key_values": ()}, "past_key_values"),
        ({"max_new_token": 5}, "max_new_token: generate of a compiled model has no such argument"),
        ({"generation_config": GenerationConfig(num_beams=2)}, "num_beams 2"),
        ({"num_return_sequences": 2}, "without do_sample"),
        ({"max_new_tokens": 0}, "no token may be generated: max_new_tokens is 0"),
        ({"forced_eos_token_id": 0}, "forced_eos_token_id 0"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"max_length": 1}, "max_length 1 with a prompt of"),
        ({"streamer": object()}, "it takes one sequence, not 3"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "shape of input_ids"),
        ({"token_type_ids": torch.ones(1, 3)}, "token_type_ids"),
        ({"inputs_embeds": torch.ones(1, 3, 64)}, "not both"),
    ],
)
def test_what_generate_refuses(model: Any, inputs: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(QCompileError, match=says):
        model.generate(inputs.input_ids, **options)


def test_arguments_that_ask_for_nothing(model: Any, inputs: Any) -> None:
    nothing = {"synced_gpus": False, "logits_processor": [], "decoder_start_token_id": 3, "forced_eos_token_id": None}
    result = model.generate(**inputs, max_new_tokens=3, **nothing)
    assert torch.equal(result, model.generate(**inputs, max_new_tokens=3))


def test_what_else_is_refused(model: Any, inputs: Any) -> None:
    ids = torch.tensor([[1, 2, 3]])
    for use, says in (
        (lambda: model.train(), "train: a compiled model has no gradients"),
        (lambda: model.requires_grad_(), "no gradients"),
        (lambda: model(ids, output_hidden_states=True), "output_hidden_states"),
        (lambda: model(ids, past_key_values=object()), "past_key_values"),
        (lambda: model(ids, torch.tensor([[1, 0, 1]])), "row 0 masks tokens between others"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            use()
    for mask in (torch.zeros(1, 3), None):
        with pytest.raises(UsageError, match="all padding" if mask is not None else "must be"):
            model(ids if mask is not None else ids[0], mask)
    for use, says in (
        (lambda: model.generate([[1, 2]]), "a tensor of whole numbers, not list"),
        (lambda: model(ids.float()), "whole numbers, not torch.float32"),
        (lambda: model(ids, labels=ids[:, 1:]), "labels must be"),
    ):
        with pytest.raises(UsageError, match=says):
            use()
    assert model.eval() is model and model.requires_grad_(False) is model and not list(model.parameters())
    assert model.half().dtype == torch.float32 and model.device.type == "cpu"
    assert CompiledCausalLM(model.llm, "").to("meta").device.type == "meta"


def test_a_model_of_few_facts() -> None:
    """Several ends of text, and no tokenizer."""
    with fake_llm() as llm:
        llm.end_at([9])
        model = llm.as_transformers()
        assert model.config.eos_token_id == [EOS, 9] and model.generation_config.pad_token_id is None
        assert model.config.vocab_size == llm.vocab_size and model.device.type == "cpu" and model.can_generate()
        result = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=500)
        (output,) = llm.generate([5, 6, 7], temperature=0, max_tokens=500)
        assert result[0, 3:].tolist() == output.outputs[0].token_ids and result[0, -1] in (EOS, 9)
        (output,) = llm.generate([5, 6, 7], temperature=0, max_tokens=300, ignore_eos=True)
        absent = min(set(range(llm.vocab_size)) - set(output.outputs[0].token_ids))
        others = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=300, eos_token_id=absent)[0, 3:].tolist()
        assert others == output.outputs[0].token_ids and EOS in others
        llm.generation_config = {"do_sample": True, "temperature": 0.5, "pad_token_id": 4, "eos_token_id": 77}
        own = llm.as_transformers().generation_config
        assert (own.do_sample, own.temperature, own.pad_token_id, own.eos_token_id) == (True, 0.5, 4, [EOS, 9])
