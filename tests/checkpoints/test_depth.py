"""Deep models examined by their first layers: the same facts as from all of them, and only where these repeat."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, Gemma2Config, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2MoeConfig

from qcompile.checkpoints import depth
from qcompile.cli import doctor
from tests.support.cases import first

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
LLAMA = LlamaConfig(**SMALL, num_hidden_layers=8)
GEMMA2 = Gemma2Config(**SMALL, num_hidden_layers=9, sliding_window=32)  # local and global layers by turns
GPT2 = GPT2Config(n_embd=64, n_head=4, n_layer=9, vocab_size=128, n_positions=256)
MOE = Qwen2MoeConfig(
    **{key: value for key, value in SMALL.items() if key != "head_dim"},
    num_hidden_layers=9,
    num_experts=4,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    mlp_only_layers=[0, 1],
)


def saved(config: PretrainedConfig, folder: Path) -> str:
    """A checkpoint directory of a configuration alone."""
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("config", "repeats"),
    [
        (LLAMA, depth.Repeats(8, 0, 1)),
        (GPT2, depth.Repeats(9, 0, 1)),
        (GEMMA2, depth.Repeats(9, 0, 2)),
        (MOE, depth.Repeats(9, 2, 1)),
    ],
    ids=["llama", "gpt2", "alternating", "dense first"],
)
def test_layers_that_repeat_are_found(config: PretrainedConfig, repeats: depth.Repeats) -> None:
    assert depth.find(config) == repeats


@pytest.mark.parametrize("config", first((LLAMA,), [LLAMA, GEMMA2, MOE]), ids=["llama", "alternating", "dense first"])
def test_facts_are_those_of_the_whole_model(
    config: PretrainedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(config, tmp_path)
    short = doctor.examine(model, "cpu", "qserve", {}, None).as_json()
    assert short["plan"].pop("layers") == config.num_hidden_layers > short["plan"].pop("layers_examined")
    monkeypatch.setattr(depth, "find", lambda config, **_: None)
    whole = doctor.examine(model, "cpu", "qserve", {}, None).as_json()
    # Files describe the graph, and numbers of nodes get longer: a few bytes for each hundred nodes.
    assert short.pop("disk_bytes") == pytest.approx(whole.pop("disk_bytes"), rel=0.02)
    assert short == whole


def test_few_layers_or_layers_unlike_are_examined_whole(tmp_path: Path) -> None:
    assert depth.find(LlamaConfig(**SMALL, num_hidden_layers=5)) is None
    kinds = ["full_attention"] * 12
    kinds[7] = "sliding_attention"
    unlike = AutoConfig.for_model("qwen2", **SMALL, num_hidden_layers=12, layer_types=kinds, sliding_window=32)
    assert depth.find(unlike) is None


def test_a_setting_that_numbers_the_layers_does_not_tell_them_apart_but_others_do() -> None:
    same = [{"kind": "a"}] * 6
    assert depth._repeats(same) == depth.Repeats(6, 0, 1)
    assert depth._repeats([*same[:5], {"kind": "b"}]) is None or depth._repeats([*same[:5], {"kind": "b"}]).first == 5


def test_what_does_not_grow_by_whole_periods_is_an_error() -> None:
    repeats = depth.Repeats(10, 0, 2)
    assert repeats.cuts == (2, 4)
    assert repeats.extrapolate({"a": 3, "b": "x"}, {"a": 5, "b": "x", "c": 1}) == {"a": 11, "b": "x", "c": 4}
    with pytest.raises(AssertionError):
        repeats.extrapolate("x", "y")


def test_doctor_says_how_many_layers_it_looked_at(tmp_path: Path) -> None:
    result = doctor.examine(saved(LLAMA, tmp_path), "cpu", "w4a8", {}, None)
    assert "layers: 8, which repeat the first 2" in result.as_text()
    assert json.dumps(result.as_json())
