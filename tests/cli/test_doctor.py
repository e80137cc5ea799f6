"""What `qcompile doctor` says of models: what it will take, and what has no kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from qcompile.checkpoints import huggingface_weights
from qcompile.checkpoints.attention_masks import causal_mask
from qcompile.checkpoints.configuration import context_length
from qcompile.cli.doctor import Diagnosis
from tests.cli.test_app import Capture, code_of, json_of
from tests.support.families import COMMON


def test_doctor_plans_without_reading_weights(capsys: Capture, tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = json_of(capsys, "doctor", tiny_checkpoint, "--recipe", "qserve")
    assert result["exportable"] and result["unsupported"] == [] and result["plan"]["parameters"] > 0
    assert result["memory_bytes"] > result["disk_bytes"] > 0
    assert code_of("doctor", tiny_checkpoint) == 0
    assert "gemm" in capsys.readouterr().out


def test_doctor_says_what_is_unsupported(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert code_of("doctor", tmp_path, "--json") == 3
    result = json.loads(capsys.readouterr().out)
    assert not result["exportable"] and result["unsupported"][0]["reason"]
    named, plain = {"node": "add_3", "reason": "why"}, {"node": "", "reason": "no node is at fault"}
    text = Diagnosis(False, [named, plain]).as_text()
    assert text == "not supported\n  add_3: why\n  no node is at fault"


def test_doctor_says_what_a_gpu_has_no_kernel_for(capsys: Capture, tmp_path: Path) -> None:
    """Experts of odd sizes, which CPUs compute: found where kernels are planned, after all passes."""
    shape = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 256, "head_dim": 64, "vocab_size": 64}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}
    shape |= {"moe_intermediate_size": 40, "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert code_of("doctor", tmp_path, "--recipe", "bf16") == 0
    capsys.readouterr()
    assert code_of("doctor", tmp_path, "--recipe", "bf16", "--target", "h200", "--json") == 3
    (refused,) = json.loads(capsys.readouterr().out)["unsupported"]
    assert refused["node"].startswith("expert_gemm") and "2 slots of 40 f32 in rows of" in refused["reason"]


def test_doctor_needs_no_values_of_numbers_that_activations_hold(capsys: Capture, tmp_path: Path) -> None:
    """Which kernels compute an xIELU, its parameters do not say; what two layers hold is not taken for one."""
    config = AutoConfig.for_model("apertus", **COMMON | {"architectures": ["ApertusForCausalLM"]})
    for name in ("config", "whole"):
        config.save_pretrained(tmp_path / name)
    model = AutoModelForCausalLM.from_config(config)
    for number, value in enumerate(value for value in model.parameters() if value.numel() == 1):
        value.data.fill_(0.1 * number)  # of each layer others, as where they were learned
    model.save_pretrained(tmp_path / "whole")
    alone, whole = (json_of(capsys, "doctor", tmp_path / name)["plan"] for name in ("config", "whole"))
    assert alone["kernels"]["elementwise"] == COMMON["num_hidden_layers"]
    assert {**alone, "model": ""} == {**whole, "model": ""}


@pytest.mark.parametrize("window", [0, 4096])
def test_masks_of_millions_of_tokens_are_looked_at_row_by_row(window: int) -> None:
    """All rows at once would take gigabytes."""
    longest, sizes = 1 << 20, []

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        sizes.append(torch.broadcast_shapes(query.shape, key.shape).numel())
        return (key <= query) & (key > query - (window or longest))

    config = LlamaConfig(max_position_embeddings=longest)
    mask: Any = causal_mask(context_length, mask_function=causal, config=config)
    assert mask.shown == (window, 0) and max(sizes) == longest and len(sizes) > 60


def test_doctor_says_which_weight_it_lacks(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where values decide how a model is compiled, as a table of positions does, it is refused, not a wrong request."""
    monkeypatch.setattr(huggingface_weights, "_computed_buffers", lambda *_: {})
    AutoConfig.for_model("llama", **COMMON | {"num_hidden_layers": 1}).save_pretrained(tmp_path)
    assert code_of("doctor", tmp_path, "--json") == 3
    (refused,) = json.loads(capsys.readouterr().out)["unsupported"]
    assert "inv_freq was not given, and its values are needed: the model was read without" in refused["reason"]
