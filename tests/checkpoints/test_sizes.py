"""Sizes of configurations that no model has: of every decoder type, each is refused by the name of its field."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qcompile.checkpoints import huggingface
from qcompile.checkpoints.configuration import read_config
from qcompile.checkpoints.sizes import POSITIVE, check_sizes
from qcompile.errors import QCompileError, UsageError

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CLUMSY = ("division", "modulo", "positional argument", "by zero")
"""What Python says where it should have been the name of a field."""


@functools.cache
def default(kind: str) -> dict[str, Any] | None:
    """The default configuration of a type as a file has it; None if the type's own code refuses it."""
    try:
        config = CONFIG_MAPPING[kind]()
        raw = json.loads(config.to_json_string(use_diff=False)) | {"model_type": kind}
        check_sizes(Path("config.json"), raw, CONFIG_MAPPING)
    except Exception:
        return None
    return raw


def test_defaults_pass() -> None:
    """Whatever a type states by itself is no error."""
    refused = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            raw = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
        except Exception:  # its own code refuses its defaults
            continue
        try:
            check_sizes(Path("config.json"), raw, CONFIG_MAPPING)
        except UsageError as error:
            refused.append(str(error))
    assert not refused


@pytest.mark.parametrize("bad", [0, -1, 1 << 31, 2.5, "8"])
def test_every_type_names_the_field(bad: Any) -> None:
    tried = 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raw = default(kind)
        for usual in POSITIVE if raw else ():
            name = getattr(CONFIG_MAPPING[kind], "attribute_map", {}).get(usual, usual)
            if name not in raw:
                continue
            with pytest.raises(UsageError, match=rf"config.json: {name} must be .*is {bad!r}$"):
                check_sizes(Path("config.json"), raw | {name: bad}, CONFIG_MAPPING)
            tried += 1
    assert tried > 900


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "text part": ({"text_config": 7}, "text_config must be an object, is 7"),
    "class": ({"architectures": 7}, "architectures must be a list of names, is 7"),
    "classes": ({"architectures": [7]}, r"architectures must be a list of names, is \[7\]"),
    "type": ({"dtype": 7}, "dtype must be a type of floating-point numbers, is 7"),
    "old type": ({"torch_dtype": "int8"}, "torch_dtype must be a type of floating-point numbers, is 'int8'"),
    "rotated part": ({"partial_rotary_factor": 3}, "partial_rotary_factor must be above 0 and at most 1, is 3"),
    "no rotated part": ({"partial_rotary_factor": 0}, "partial_rotary_factor must be above 0 and at most 1, is 0"),
    "no keys": ({"num_key_value_heads": 0}, "num_key_value_heads must be positive, is 0"),
    "no words": ({"vocab_size": 0}, "vocab_size must be positive, is 0"),
    "heads": (
        {"num_attention_heads": 5, "num_key_value_heads": 2},
        "must be a multiple of num_key_value_heads 2, is 5",
    ),
    "width": ({"hidden_size": 66}, r"hidden size \(66\) is not a multiple of the number of attention\s+heads"),
    "head": ({"head_dim": 0}, "head_dim must be positive, is 0"),
    "large head": ({"head_dim": 1 << 30}, "head_dim must be less than 65536, is 1073741824"),
    "layers": ({"num_hidden_layers": 0}, "num_hidden_layers must be positive, is 0"),
    "many layers": ({"num_hidden_layers": 5000}, "num_hidden_layers is 5000; it must be from 1"),
    "epsilon": ({"rms_norm_eps": -1e-6}, "rms_norm_eps must not be negative, is -1e-06"),
    "theta": ({"rope_theta": float("inf")}, "rope_theta is inf; it must be a number"),
    "no theta": ({"rope_theta": 0}, "rope_theta must be positive, is 0"),
    "inner theta": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}},
        "rope_parameters.rope_theta must be a positive number, is 0.0",
    ),
    "theta of a kind of layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": float("inf")}}},
        "rope_parameters.full_attention.rope_theta must be a positive number, is inf",
    ),
    "factor": (
        {"rope_scaling": {"rope_type": "linear", "factor": -2.0}},
        "rope_scaling.factor must be a positive number, is -2.0",
    ),
    "kind of rope": ({"rope_scaling": {"rope_type": 3}}, "rope_scaling.rope_type must be a name, is 3"),
    "partial": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5}},
        "partial_rotary_factor must be above 0 and at most 1, is 1.5",
    ),
    "longrope": (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 0.0]}},
        r"short_factor must hold positive numbers, is \[1.0, 0.0\]",
    ),
    "experts": (
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
        "num_experts_per_tok must be at most num_local_experts 4, is 5",
    ),
    "no choice": ({"num_local_experts": 4, "num_experts_per_tok": 0}, "num_experts_per_tok must be positive, is 0"),
    "groups of experts": (
        {"model_type": "deepseek_v3", "n_routed_experts": 6, "n_group": 4},
        "n_group must divide n_routed_experts 6, is 4",
    ),
    "groups kept": (
        {"model_type": "deepseek_v3", "n_routed_experts": 6, "n_group": 3, "topk_group": 4},
        "topk_group must be at most n_group 3, is 4",
    ),
    "period": ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step must be positive, is 0"),
    "scale": ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be positive, is 0"),
    "count": ({"model_type": "qwen3_moe", "num_experts": "many"}, "num_experts must be a whole number, is 'many'"),
    "negative": ({"model_type": "qwen3_moe", "num_experts": -8}, "num_experts must not be negative, is -8"),
    "widths by layer": ({"intermediate_size": [96, 0]}, "intermediate_size must be positive, is 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, message = CASES[case]
    (tmp_path / "config.json").write_text(json.dumps(SMALL | changes))
    with pytest.raises(QCompileError, match=message) as raised:
        huggingface.load(tmp_path, weights=False)
    assert raised.value.exit_code == 2 and "\n" not in str(raised.value)


def test_without_experts_none_are_chosen(tmp_path: Path) -> None:
    check_sizes(tmp_path, {"num_local_experts": 0, "num_experts_per_tok": 0}, {})


def test_a_text_part_is_checked(tmp_path: Path) -> None:
    raw = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "vocab_size": 9, "head_dim": 0}}
    with pytest.raises(UsageError, match=r"config.json: text_config.head_dim must be positive, is 0"):
        check_sizes(Path("config.json"), raw, CONFIG_MAPPING)


@pytest.mark.parametrize("bad", [0, -1, 1 << 30, "x", 1.5, float("inf"), [], True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "deepseek_v3", "gemma2"])
def test_any_value_of_any_field_is_no_bug(kind: str, bad: Any, tmp_path: Path) -> None:
    """Either a model can be made of it, or one line says why not."""
    raw = default(kind) | SMALL | {"model_type": kind, "num_key_value_heads": 4}  # type: ignore[operator]
    numbers = [key for key, value in raw.items() if isinstance(value, int | float) and not isinstance(value, bool)]
    assert len(numbers) > 12
    for name in numbers:
        (tmp_path / "config.json").write_text(json.dumps(raw | {name: bad}))
        try:
            huggingface.build(read_config(tmp_path))
        except QCompileError as error:
            assert error.exit_code in (2, 3) and not any(word in str(error) for word in CLUMSY), error
