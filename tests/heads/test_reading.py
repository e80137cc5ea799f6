"""What is read of a head's files, and which heads and builds are refused, with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from qcompile.errors import QCompileError, UnsupportedError, UsageError
from qcompile.heads.reading import HeadFile
from qcompile.passes.features import head_layers
from qcompile.pipeline import plan
from tests.conftest import MadeOnce
from tests.support.heads import PROPOSED, SHAPE, save_head, save_target


@pytest.fixture(scope="module")
def target(made_once: MadeOnce) -> Path:
    return made_once("head-target", save_target)


@pytest.fixture
def head(made_once: MadeOnce, target: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    shutil.copytree(made_once("head", lambda path: save_head(target, path)), tmp_path / "head")
    return tmp_path / "head"


def configure(head: Path, **changes: Any) -> None:
    path = head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(head: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = head / "model.safetensors"
    save_file(change(dict(load_file(path))), path)


def test_sizes_and_tokens(head: Path) -> None:
    read = HeadFile.open(head)
    assert (read.hidden, read.inner, read.heads, read.drafted) == (SHAPE.hidden, 96, 4, SHAPE.drafted)
    assert read.layers == SHAPE.layers and not read.norm_first
    tokens = read.tokens(SHAPE.vocabulary)
    assert tokens is not None and tokens.tolist() == PROPOSED.tolist()
    with pytest.raises(UsageError, match="d2t names tokens that the model does not have"):
        read.tokens(5000)


def test_layers_may_be_called_otherwise(head: Path) -> None:
    """Other files call the decoder layer layers.0, and count layers from 0."""
    rewrite(head, lambda stored: {name.replace("midlayer", "layers.0"): value for name, value in stored.items()})
    configure(head, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 15, 28]})
    read = HeadFile.open(head)
    assert head_layers(read, 32) == (2, 16, 29)
    assert head_layers(read, 40) == (1, 15, 28)


def test_scaled_rotary_embeddings(head: Path) -> None:
    plain = HeadFile.open(head).rotation
    configure(head, rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert torch.allclose(HeadFile.open(head).rotation.inv_freq, plain.inv_freq / 4)
    assert plain.inv_freq[0] == 1 and plain.scaling == 1
    configure(head, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    with pytest.raises(UnsupportedError, match="rotary embeddings of kind dynamic"):
        HeadFile.open(head)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2}, "has 2 layers: heads of one"),
        ({"hidden_act": "gelu"}, "has activation gelu"),
        ({"num_attention_heads": 8}, "self_attn.q_proj.weight has shape"),
        ({"num_attention_heads": "many"}, "num_attention_heads is 'many'"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "2"}}, "is '2', not a list of numbers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}}, "not a list of numbers in rising order"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [True, 2, 3]}}, "not a list of numbers in rising order"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', not a finite number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is 'nan'"),
        ({"rope_theta": -1}, "rope_theta is '-1'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling of kind yarn lacks a setting or has a wrong one"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "rope_scaling of kind linear"),
        ({"head_dim": -128}, "head_dim is '-128', not a number from 1"),
        ({"head_dim": 15}, "head_dim is '15', not an even number"),
        ({"head_dim": None, "num_attention_heads": 128}, "head_dim is '1', not an even number"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads is '2'"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings is 'many'"),
        ({"norm_before_residual": 1}, "norm_before_residual is '1', not true or false"),
    ],
)
def test_configurations_that_are_refused(head: Path, change: dict[str, Any], message: str) -> None:
    configure(head, **change)
    with pytest.raises(QCompileError, match=message):
        HeadFile.open(head)


def test_heads_in_other_files_are_refused(target: Path, head: Path) -> None:
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match="a draft head without safetensors files: convert"):
        plan(str(target), drafts=str(head))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"midlayer.self_attn.q_proj.bias": torch.zeros(3)}, r"q_proj\.bias has shape \[3\], needed is \[64\]"),
        ({"d2t": torch.zeros(SHAPE.drafted, 1, dtype=torch.int64)}, r"d2t has shape \[1024, 1\]"),
        ({"d2t": torch.zeros(SHAPE.drafted - 1, dtype=torch.int64)}, r"d2t has shape \[1023\]"),
        ({"d2t": torch.zeros(SHAPE.drafted)}, r"d2t holds torch\.float32, not whole numbers"),
        ({"d2t": -torch.arange(SHAPE.drafted)}, "d2t names a token twice"),
        ({"fc.weight": torch.zeros(64)}, r"fc\.weight is no matrix"),
        ({"embed_tokens.weight": torch.zeros(100, 64)}, "has 100 rows for the 8192 tokens of the model"),
    ],
)
def test_weights_of_other_shapes_are_refused(
    target: Path, head: Path, weights: dict[str, torch.Tensor], message: str
) -> None:
    rewrite(head, lambda stored: stored | weights)
    with pytest.raises(UsageError, match=message):
        plan(str(target), drafts=str(head))


def test_a_damaged_head_is_named(target: Path, head: Path) -> None:
    (head / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        plan(str(target), drafts=str(head))


def test_a_head_with_numbers_that_are_not_finite_is_named(head: Path) -> None:
    rewrite(head, lambda stored: stored | {"fc.weight": stored["fc.weight"] * float("nan")})
    with pytest.raises(UsageError, match=f"draft {head}: weight fc.weight holds NaN"):
        HeadFile.open(head).weights["fc.weight"].load()


def test_weights_that_are_refused(head: Path) -> None:
    """None is skipped silently."""
    rewrite(head, lambda stored: stored | {"midlayer.gate.weight": torch.zeros(2)})
    with pytest.raises(UnsupportedError, match=r"has a weight gate\.weight, of which"):
        HeadFile.open(head)
    rewrite(
        head, lambda stored: {name: x for name, x in stored.items() if "gate" not in name and "hidden_n" not in name}
    )
    with pytest.raises(UnsupportedError, match=r"no head of the EAGLE-3 type: it has no mlp\.gate_proj\.weight"):
        HeadFile.open(head)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "h200", "more": ["lookup"]}, "no drafts follow a head on h200 yet"),
        ({"recipe": "nested"}, "the recipe has a draft of its own"),
        ({"more": ["another"]}, "only lookup can follow it"),
        ({"options": {"reorder.enabled": "true"}}, "which reorder changes"),
        ({"options": {"cache.format": "kv_hier"}}, "do not draft over hierarchical caches"),
    ],
)
def test_builds_that_are_refused(target: Path, head: Path, options: dict[str, Any], message: str) -> None:
    drafts = [str(head), *options.pop("more", [])]
    with pytest.raises(UnsupportedError, match=message):
        plan(str(target), drafts=drafts, **options)


def test_a_stream_without_its_mean_is_refused(head: Path, tmp_path: Path) -> None:
    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedError, match="the mean was taken out of the residual stream"):
        plan(str(tmp_path / "model"), drafts=str(head), options={"fold_norms.enabled": True})


def test_heads_of_other_models_are_refused(target: Path, head: Path, tiny_checkpoint: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"reads layers \(1, 2, 3\) of a model of 2 layers"):
        plan(str(tiny_checkpoint), drafts=str(head))
    rewrite(head, lambda stored: stored | {"fc.weight": torch.zeros(64, 2 * 64)})
    with pytest.raises(UnsupportedError, match="the head reads 128 features, 3 hidden states have 192"):
        plan(str(target), drafts=str(head))
