"""Training of draft heads: it learns, goes on after an interrupt, and writes the public layout."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qcompile.errors import UnsupportedError, UsageError
from qcompile.heads.continuation import WRITTEN, continued
from qcompile.heads.layout import default_layers, is_head
from qcompile.heads.model import DraftHead
from qcompile.heads.target import HeadTarget
from qcompile.heads.training import STATE, Training, TrainingOptions
from qcompile.pipeline import plan
from tests.cli.test_app import Capture, json_of, refusal

SAMPLE = Path(__file__).parents[2] / "samples" / "pycode-1m"
OPTIONS = TrainingOptions(steps=6, batch=2, depth=3, layers=(1, 2, 3), vocabulary=8192, learning_rate=3e-3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers with random weights, and the sample's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("target")
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data *= 5  # it is sure of its choices
    model.save_pretrained(path)
    shutil.copy(SAMPLE / "tokenizer.json", path)
    return path


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> HeadTarget:
    return HeadTarget.load(checkpoint, "cpu")


@pytest.fixture(scope="module")
def windows() -> Tensor:
    """30 texts of 12 tokens."""
    return torch.randint(7, 60, (30, 12), generator=torch.Generator().manual_seed(3))


def weights(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


def test_a_head_learns_one_text(target: HeadTarget, windows: Tensor, tmp_path: Path) -> None:
    options = replace(OPTIONS, steps=15, learning_rate=1e-2)
    training = Training(target, windows[:1].repeat(4, 1), options, tmp_path / "head")
    training.run()
    assert training.losses[-1] < 0.4 * training.losses[0]


def test_a_draft_is_compared_with_the_target_after_the_same_tokens(
    target: HeadTarget, windows: Tensor, tmp_path: Path
) -> None:
    training = Training(target, windows, OPTIONS, tmp_path / "head")
    tokens = windows[:1]
    for depth, wanted in enumerate(training._drafts(tokens)[1], start=1):
        for place in range(wanted.shape[1]):
            alone = target.states(tokens[:, : place + depth + 1], (1, 2))[1]
            torch.testing.assert_close(wanted[0, place], alone[0, -1], rtol=1e-3, atol=1e-3)


def test_a_continued_text_is_what_the_target_writes(target: HeadTarget, windows: Tensor, tmp_path: Path) -> None:
    """Each token after those kept is the target's choice after all before it; windows written at once do not matter."""
    together = continued(target, windows, 4, batch=30, output=tmp_path)
    assert together.shape == windows.shape and together[:, :4].equal(windows[:, :4])
    choices = target.states(together, (1, 2))[1].argmax(-1)
    assert together[:, 4:].equal(choices[:, 3:-1])
    assert not together.equal(windows)
    assert continued(target, windows, 4, batch=7, output=tmp_path).equal(together)


def test_an_interrupted_text_goes_on(target: HeadTarget, windows: Tensor, tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 14:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        continued(target, windows, 4, batch=7, output=tmp_path, progress=interrupt)
    begun: list[int] = []
    with pytest.raises(UsageError, match="another model, text or options"):
        continued(target, windows, 5, batch=7, output=tmp_path)
    whole = continued(target, windows, 4, batch=7, output=tmp_path, progress=lambda _, done, __: begun.append(done))
    assert begun == [14, 21, 28] and whole.equal(continued(target, windows, 4, batch=30, output=tmp_path / "other"))
    (tmp_path / WRITTEN).write_bytes(b"damaged")
    with pytest.raises(UsageError, match=f"{WRITTEN} cannot be read: remove it"):
        continued(target, windows, 4, batch=7, output=tmp_path)


@pytest.mark.parametrize("kept", [0, 12])
def test_a_text_must_leave_something_to_write(target: HeadTarget, windows: Tensor, tmp_path: Path, kept: int) -> None:
    with pytest.raises(UsageError, match=f"--continue-after {kept}: give 1 to 11"):
        continued(target, windows, kept, batch=7, output=tmp_path)


def test_a_model_without_a_cache_of_its_text_is_refused(windows: Tensor, tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1)
    model = HeadTarget(MambaForCausalLM(config).eval(), config)
    with pytest.raises(UnsupportedError, match=r"model type mamba has no cache .* leave out --continue-after"):
        continued(model, windows[:2], 4, batch=2, output=tmp_path)
    assert not any(tmp_path.iterdir())


def test_an_interrupted_training_ends_with_the_same_weights(
    target: HeadTarget, windows: Tensor, tmp_path: Path
) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    Training(target, windows, OPTIONS, tmp_path / "whole").run()
    with pytest.raises(KeyboardInterrupt):
        Training(target, windows, OPTIONS, tmp_path / "parts").run(interrupt)
    with pytest.raises(UsageError, match="another model, text or options"):
        Training(target, windows, replace(OPTIONS, seed=1), tmp_path / "parts")
    resumed = Training(target, windows, OPTIONS, tmp_path / "parts")
    assert len(resumed.losses) == 4
    resumed.run()
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (tmp_path / "parts" / STATE).exists()
    with pytest.raises(UsageError, match="holds other files"):
        Training(target, windows, OPTIONS, tmp_path / "parts")


def test_a_damaged_state_is_refused(target: HeadTarget, windows: Tensor, tmp_path: Path) -> None:
    Training(target, windows, OPTIONS, tmp_path).save()
    state = tmp_path / STATE
    state.write_bytes(state.read_bytes()[:-9])
    with pytest.raises(UsageError, match=f"{STATE} cannot be read: remove it"):
        Training(target, windows, OPTIONS, tmp_path)


def test_rates_that_train_nothing_are_refused(target: HeadTarget, windows: Tensor, tmp_path: Path) -> None:
    for rate in (0.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="give a number above 0"):
            Training(target, windows, replace(OPTIONS, learning_rate=rate), tmp_path)
    with pytest.raises(UsageError, match=r"the loss of step 2 is .* give a lower --learning-rate"):
        Training(target, windows, replace(OPTIONS, learning_rate=1e38), tmp_path / "head").run()
    assert not (tmp_path / "head").exists()


def test_the_layout_is_the_public_one(target: HeadTarget, windows: Tensor, tmp_path: Path) -> None:
    Training(target, windows, replace(OPTIONS, steps=1, vocabulary=40), tmp_path / "head").run()
    tensors = weights(tmp_path / "head")
    assert tensors["fc.weight"].shape == (32, 96) and tensors["lm_head.weight"].shape == (40, 32)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    proposed = tensors["d2t"] + torch.arange(40)
    assert tensors["t2d"].nonzero().flatten().equal(proposed)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 40
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert is_head(tmp_path / "head")


def test_unrolling_is_drafting_one_token_at_a_time(target: HeadTarget) -> None:
    """The draft of depth n at a position depends only on what is known when it is drafted."""
    shape = target.head_shape((1, 2, 3), 40)
    torch.manual_seed(1)
    head = DraftHead(shape)
    features, embedded = torch.randn(1, 6, 96), torch.randn(1, 8, 32)
    together = list(head.unroll(features, embedded, 3))
    for last in range(6):  # positions after `last`, and tokens after those drafted, must not matter
        for depth in range(3):
            known = features[:, : last + 1], embedded[:, : last + 1 + depth]
            alone = list(head.unroll(*known, depth + 1))[-1]
            torch.testing.assert_close(together[depth][0, last], alone[0, last], rtol=1e-4, atol=1e-4)


def test_only_models_of_six_layers_have_usual_layers() -> None:
    assert default_layers(8) == (2, 4, 5)
    with pytest.raises(UsageError, match="too few"):
        default_layers(5)


def test_the_command_trains_a_head_that_build_takes(capsys: Capture, checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"def f{n}(x):\n    return x + {n}\n"}) for n in range(40)))
    head = tmp_path / "head"
    size = "--max-seq-length", 16, "--steps", 2, "--depth", 2, "--layers", "1,2", "--device", "cpu"
    written = "--continue-after", 6
    result: dict[str, Any] = json_of(capsys, "train-draft", checkpoint, "--data", text, "-o", head, *size, *written)
    assert result["steps"] == 2 and len(result["agreement"]) == 2
    assert not (head / WRITTEN).exists()
    (draft,) = plan(str(checkpoint), drafts=str(head)).drafts
    assert draft.program.reads_features and draft.program.vocab_size == 8192
    said = refusal(capsys, 2, "train-draft", checkpoint, "--data", text, "-o", head, *size)
    assert "holds other files" in said
