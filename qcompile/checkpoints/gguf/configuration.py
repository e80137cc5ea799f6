"""The configuration of transformers that a GGUF file's metadata and tensors state.

Each setting below the architecture's prefix is either translated, checked against what it must be, or refused by name:
a setting that is passed over might change the model.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from qcompile.checkpoints.gguf.architectures import ARCHITECTURES, COMMON, MIXTURES, Architecture
from qcompile.checkpoints.gguf.header import Header, TensorPlace
from qcompile.errors import UnsupportedError, UsageError, shown

_SIZES = (
    *("context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count"),
    *("attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length"),
)
"""Settings of COMMON that all architectures read."""
_NEEDED = (
    *("context_length", "block_count", "embedding_length", "attention.head_count"),
    "attention.layer_norm_rms_epsilon",
)
_OPTIONAL_BIASES = {"attn_q": "attention_bias", "ffn_down": "mlp_bias"}
"""Linears by their name in GGUF, and transformers' field for biases, which is true if this linear has one."""
_WHOLE = "rope_freqs.weight"
_BY_LENGTH = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""Tensors of divisors of rotary frequencies, by what transformers calls them."""
ROPE_TENSORS = (_WHOLE, *_BY_LENGTH.values())


def architecture_of(header: Header) -> Architecture:
    """How the file's architecture names and changes things. Raises UnsupportedError for one that is not read."""
    name = header.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"{header.path}: architecture {shown(name)} is not read, only {', '.join(ARCHITECTURES)}: "
            "give the checkpoint that transformers reads"
        )
    mixture = MIXTURES.get(name) if header.metadata.get(f"{name}.expert_count") else None
    return mixture or ARCHITECTURES[name]


def configuration(header: Header, rope_tensors: dict[str, list[float]]) -> dict[str, Any]:
    """config.json for the file with this header, and the values of its ROPE_TENSORS.

    Raises UsageError for settings that are missing or contradict tensors, UnsupportedError for those that are not read.
    """
    return _Settings(header, architecture_of(header), rope_tensors).config()


@dataclass
class _Settings:
    """The settings of one file; `left` are those that nothing has read yet."""

    header: Header
    architecture: Architecture
    rope_tensors: dict[str, list[float]]
    left: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prefix = f"{self.header.architecture}."
        self.left = {
            key.removeprefix(prefix): value for key, value in self.header.metadata.items() if key.startswith(prefix)
        }

    def config(self) -> dict[str, Any]:
        for key in _NEEDED:
            if key not in self.left:
                raise self.wrong(key, "is missing")
        if self.architecture.fixed_local_base and "attention.sliding_window" not in self.left:
            raise self.wrong("attention.sliding_window", "is missing")
        table = self.table()
        config: dict[str, Any] = {"model_type": self.architecture.model_type, **self.architecture.fixed}
        config |= {"vocab_size": table.shape[0], "tie_word_embeddings": "output.weight" not in self.header.tensors}
        for key in (*_SIZES, *self.architecture.settings):
            if key in self.left:
                config[COMMON[key]] = self.number(key)
        self.check_blocks(config["num_hidden_layers"])
        heads = config["num_attention_heads"]
        if type(heads) is not int or heads < 1:
            raise self.wrong("attention.head_count", f"is {shown(heads)}; a positive whole number belongs there")
        config.setdefault("num_key_value_heads", heads)
        config.setdefault("head_dim", config["hidden_size"] // heads)
        if not config.get("sliding_window", 1):
            config["sliding_window"] = None
        for stem, name in _OPTIONAL_BIASES.items():
            config[name] = f"blk.0.{stem}.bias" in self.header.tensors
        self.expect("attention.value_length", config["head_dim"])
        self.expect("vocab_size", table.shape[0])
        config |= self.scale(config) | self.experts(config) | self.rope(config) | self.tokens()
        if self.left:
            raise UnsupportedError(
                f"{self.header.path}: setting {self.header.architecture}.{next(iter(self.left))} "
                "is not read, and may change the model"
            )
        return config

    def wrong(self, key: str, reason: str) -> UsageError:
        return UsageError(f"{self.header.path}: {self.header.architecture}.{key} {reason}")

    def check_blocks(self, stated: Any) -> None:
        """Raise UsageError if the file states blocks without tensors: each would be made before that shows."""
        names = (re.match(r"blk\.(\d{1,9})\.", name) for name in self.header.tensors)
        there = max((int(name[1]) + 1 for name in names if name), default=0)
        if type(stated) is int and stated > there:
            raise self.wrong("block_count", f"is {shown(stated)}, but the tensors are those of {there}")

    def table(self) -> TensorPlace:
        """The table of embeddings."""
        table = self.header.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise UsageError(f"{self.header.path} has no tensor token_embd.weight, a table of embeddings")
        return table

    def number(self, key: str, default: Any = None) -> Any:
        """The setting `key`, a number; some files have it for each layer, and the same for all."""
        value = self.left.pop(key, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if isinstance(value, list):
            raise UnsupportedError(
                f"{self.header.path}: layers differ in {self.header.architecture}.{key}, which is not read"
            )
        if isinstance(value, bool | str) or (isinstance(value, float) and not math.isfinite(value)):
            raise self.wrong(key, f"is {shown(value)}; a number belongs there")
        return value

    def expect(self, key: str, wanted: Any) -> None:
        """Check that the setting `key`, if it is there, is `wanted`."""
        if (value := self.number(key, wanted)) != wanted:
            raise UnsupportedError(
                f"{self.header.path}: {self.header.architecture}.{key} is {shown(value)}; only {wanted} is read"
            )

    def tokens(self) -> dict[str, Any]:
        """Numbers of tokens by name; files may name several that end a text."""
        given = {name: self.header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
        for name, number in given.items():
            if number is not None and type(number) is not int:
                raise UsageError(f"{self.header.path}: tokenizer.ggml.{name}_token_id is {shown(number)}")
        ends = sorted({number for name in ("eos", "eot") if (number := given[name]) is not None})
        return {"bos_token_id": given["bos"], "eos_token_id": ends or None, "pad_token_id": None}

    def scale(self, config: dict[str, Any]) -> dict[str, Any]:
        """By what queries are divided, where transformers has a field for that."""
        if not self.architecture.norms_plus_one:
            return {}
        # llama.cpp knows the largest model of each kind by its number of layers
        largest = (config["model_type"], config["num_hidden_layers"]) in (("gemma2", 46), ("gemma3_text", 62))
        width = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
        return {"query_pre_attn_scalar": width}

    def experts(self, config: dict[str, Any]) -> dict[str, Any]:
        """The number of experts under the name that some types have for it."""
        return {"num_local_experts": config["num_experts"]} if "num_experts" in config else {}

    # ---- rotary embeddings -----------------------------------------------------------------------------

    def rope(self, config: dict[str, Any]) -> dict[str, Any]:
        """Base, share of a head, and scaling of rotary embeddings."""
        base, size = self.number("rope.freq_base", 10000.0), config["head_dim"]
        rotated = self.number("rope.dimension_count", size)
        if not 0 < rotated <= size:
            raise self.wrong("rope.dimension_count", f"is {shown(rotated)}; heads have {size}")
        given = {"rope_theta": float(base)} | self.scaling(config)
        if rotated != size:
            given["partial_rotary_factor"] = rotated / size
        original = "original_max_position_embeddings"  # some types of transformers have it outside
        outside = {original: given[original]} if original in given else {}
        if not self.architecture.fixed_local_base:
            return {"rope_parameters": given, **outside}
        local = {"rope_type": "default", "rope_theta": float(self.number("rope.freq_base_swa", 10000.0))}
        return {"rope_parameters": {"full_attention": given, "sliding_attention": local}}

    def scaling(self, config: dict[str, Any]) -> dict[str, Any]:
        """How frequencies change with the context: divided one by one, linearly, or by YaRN."""
        kind = self.left.pop("rope.scaling.type", "none")
        self.left.pop("rope.scaling.finetuned", None)
        factor = self.number("rope.scaling.factor", 1.0)
        original = self.number("rope.scaling.original_context_length", config["max_position_embeddings"])
        attention = self.number("rope.scaling.attn_factor")
        if self.rope_tensors:
            if kind not in ("none", "longrope"):
                raise UnsupportedError(f"{self.header.path}: rope.scaling.type {shown(kind)} beside rotary divisors")
            return self.divided(config, original, attention)
        if attention is not None:
            raise self.wrong("rope.scaling.attn_factor", "is for rotary divisors, which the file lacks")
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return {"rope_type": "default"}
        if kind == "linear":
            return {"rope_type": "linear", "factor": float(factor)}
        if kind != "yarn":
            raise UnsupportedError(f"{self.header.path}: rope.scaling.type {shown(kind)} is not read")
        betas = {
            name: float(self.number(f"rope.scaling.yarn_{name}"))
            for name in ("beta_fast", "beta_slow")
            if f"rope.scaling.yarn_{name}" in self.left
        }
        return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original, **betas}

    def divided(self, config: dict[str, Any], original: int, attention: Any) -> dict[str, Any]:
        """Frequencies divided by the file's tensors: one for all lengths, or two, for short and for longer contexts."""
        given = self.rope_tensors
        if _WHOLE in given:
            # In transformers' words two equal lists, for short and for long texts, that change no magnitude.
            factors: dict[str, Any] = dict.fromkeys(_BY_LENGTH, given[_WHOLE])
            return {
                "rope_type": "longrope",
                **factors,
                "attention_factor": 1.0,
                "original_max_position_embeddings": config["max_position_embeddings"],
            }
        if set(given) != set(_BY_LENGTH.values()):
            raise UsageError(f"{self.header.path} has {next(iter(given))} without its counterpart")
        factors = {name: given[tensor] for name, tensor in _BY_LENGTH.items()}
        more = {} if attention is None else {"attention_factor": float(attention)}
        return {"rope_type": "longrope", **factors, **more, "original_max_position_embeddings": original}
