"""Multimodal checkpoints: the decoder equals transformers' model for texts, and what no text reaches is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks import families, multimodal
from qcompile import pipeline
from qcompile.artifact.reader import read_checked_manifest
from qcompile.checkpoints import frontend, left_out
from qcompile.checkpoints.configuration import auto_class
from qcompile.cli import doctor, inspect
from qcompile.errors import UnsupportedError
from qcompile.passes.raising import Raise
from tests.support.cases import first

NEAR = 2e-5
"""Both compute in float32, in another order; logits are about 2."""
KINDS = (
    "gemma3",  # masks made by the model itself, scaled embeddings, windows
    "mistral3",  # a vision tower of another family
    "qwen2_vl",  # three positions a token, in sections
    "qwen3_vl",  # three positions a token, interleaved in place
    "glm4v",  # three positions a token, each pair rotated
    "internvl",
    "idefics3",
    "llava_onevision",  # options of the head handed on to attention
    "qwen2_audio",
    "aya_vision",
    "kimi_k25",  # placeholders that become token 0, latent attention, experts
    "mllama",  # layers of cross attention, which no text reaches
)


# Of the others the decoder is one of these, or a plain one.
@pytest.mark.parametrize("kind", first(("gemma3", "qwen3_vl", "kimi_k25", "mllama"), KINDS))
def test_decoder_equals_the_model(kind: str, tmp_path: Path) -> None:
    layers = 4 if kind == "mllama" else 2  # its fourth is the first of cross attention
    with families.quiet():
        reference = multimodal.save_random(kind, tmp_path, multimodal.tiny_config(kind, layers))
        raised = Raise().run(frontend.load(tmp_path)).graph
    assert raised.info.left_out and all(size > 0 for size in raised.info.left_out.values())
    with torch.no_grad():
        for batch, length in ((1, 9), (2, 48)):
            ids = families.tokens(batch, length, raised.info.vocab_size)
            result = raised.run(ids, torch.arange(length).expand(batch, length))
            wanted = reference(input_ids=ids, use_cache=False).logits
            assert wanted.abs().max() > 0.5
            torch.testing.assert_close(result, wanted, atol=NEAR, rtol=0)


def test_left_out_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the report of a build, the manifest, `inspect` and `doctor`, with the bytes of the files."""
    with families.quiet():
        multimodal.save_random("llava", tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    size = sum(v.nbytes for name, v in stored.items() if "vision_tower" in name)
    report = pipeline.build(tmp_path / "model", tmp_path / "artifact", recipe="f32")
    assert set(report.left_out) == {"model.vision_tower", "model.multi_modal_projector"}
    assert report.left_out["model.vision_tower"] == size
    assert read_checked_manifest(tmp_path / "artifact")["model"]["left_out"] == report.left_out
    line = "left out, as no text reaches them: model.vision_tower ("
    assert line in inspect.as_text(inspect.summary(tmp_path / "artifact"))
    diagnosis = doctor.examine(str(tmp_path / "model"), "cpu", "f32", {}, None)
    assert line in diagnosis.as_text() and diagnosis.plan["left_out"] == report.left_out


def test_a_configuration_is_enough_for_doctor(tmp_path: Path) -> None:
    config = multimodal.tiny_config("qwen2_vl")
    config.architectures = ["Qwen2VLForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    diagnosis = doctor.examine(str(tmp_path), "cpu", "w4a8", {}, None)
    assert diagnosis.exportable and list(diagnosis.plan["left_out"]) == ["model.visual"]


def test_weights_of_the_decoder_are_enough(tmp_path: Path) -> None:
    with families.quiet():
        multimodal.save_random("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    save_file({name: value for name, value in stored.items() if "vision" not in name}, file, {"format": "pt"})
    info = frontend.load(tmp_path).info
    assert "model.vision_tower" not in info.left_out  # it has no bytes


def refused(kind: str, tmp_path: Path) -> str:
    with families.quiet():
        config: Any = multimodal.tiny_config(kind)
        config.save_pretrained(tmp_path)
        with pytest.raises(UnsupportedError) as caught:
            frontend.load(tmp_path, weights=False)
    return str(caught.value)


def test_what_needs_an_image_is_refused(tmp_path: Path) -> None:
    assert "pixel_values" in refused("blip-2", tmp_path)


def test_attention_over_a_whole_prompt_is_refused(tmp_path: Path) -> None:
    """PaliGemma's texts see what follows them."""
    assert "attention is not causal" in refused("paligemma", tmp_path)


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    assert "encoder-decoder" in refused("florence2", tmp_path)


def test_class_of_the_architecture() -> None:
    assert auto_class("llama4", ["Llama4ForCausalLM"]) == "AutoModelForCausalLM"
    assert auto_class("llama4", ["Llama4ForConditionalGeneration"]) == "AutoModelForImageTextToText"
    assert auto_class("qwen2_audio", ["Qwen2AudioForConditionalGeneration"]) == "AutoModelForMultimodalLM"
    assert auto_class("llava", ()) == "AutoModelForImageTextToText"
    assert auto_class("llava", ["CLIPVisionModel"]) is None
    assert auto_class("no_such_type", ()) is None


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eyes = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        self.text = nn.ModuleDict({"used": nn.Linear(2, 2, bias=False), "not": nn.Linear(2, 2, bias=False)})
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.text["used"].weight
        self.newline = nn.Parameter(torch.zeros(2))


def test_largest_modules_that_are_not_read() -> None:
    unread = left_out.modules(_Parts(), {"text.used.weight"})
    assert list(unread) == ["eyes", "text.not", "newline"]
    assert left_out.sizes(unread) == {"eyes": 34, "text.not": 8, "newline": 4}
    assert left_out.sizes(unread, lambda name: int(name == "eyes.0.bias")) == {"eyes": 1}


def test_manifest_of_plain_decoders_says_nothing(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **multimodal.tiny_config("llava").text_config.to_dict(),
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    assert "left_out" not in frontend.load(tmp_path, weights=False).info.facts
