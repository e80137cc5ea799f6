"""The transformers configuration of a checkpoint: read, checked, truncated, and asked for the context length."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qcompile.artifact.layout import MANIFEST
from qcompile.checkpoints.checkpoint import read_json
from qcompile.checkpoints.contents import check_checkpoint
from qcompile.checkpoints.sizes import check_sizes
from qcompile.checkpoints.stored import formats
from qcompile.errors import UnsupportedError, UsageError, shown

AUTO_CLASSES = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
}
"""transformers' classes that make decoders, or models with a decoder inside, and their tables of model types."""
LENGTH_KEYS = ("max_position_embeddings", "max_seq_len", "seq_length")
"""Keys of the longest sequence in configurations; transformers translates other keys to the first."""
DEPTH_KEY = "num_hidden_layers"
"""The key of the number of layers in configurations; transformers translates other keys to this one."""
MOST_LAYERS = 1024
"""The limit for the number of layers; a larger number is a mistake. Published models have about 130 at most."""
MOST_LETTERS = 100
"""Most letters of the name of a type, or of an architecture."""
_WEIGHT_TYPE = re.compile(r"(torch\.)?(auto|half|float|double|bfloat16|float(8\w*|16|32|64))")
UNSTATED_LENGTH = 2048
"""Context of a model if its configuration states none. Such a model has no table of positions, and so no limit."""


def read_config(directory: Path, allow_remote: bool = False) -> Any:
    """The checkpoint's transformers configuration, refused if it is not of a decoder or a model with one inside."""
    if (directory / MANIFEST).exists() and not (directory / "config.json").exists():
        raise UsageError(f"{directory} is an artifact, built already: give the folder of a model")
    check_checkpoint(directory)
    raw = read_json(directory / "config.json")
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise UsageError(f"{directory / 'config.json'} has no model_type")
    if len(kind) > MOST_LETTERS:  # messages have it
        raise UsageError(f"{directory / 'config.json'} has a model_type of {len(kind):,} letters")
    _check_types(directory / "config.json", raw)
    from transformers import CONFIG_MAPPING, AutoConfig

    if kind not in CONFIG_MAPPING and not (allow_remote and "auto_map" in raw):
        hint = " and wants its own code run (--allow-remote-code)" if "auto_map" in raw else ""
        raise UnsupportedError(f"model type {kind} is unknown to transformers{hint}")
    if (stored := formats.stated(directory)) is not None:
        formats.reader(stored)
    if raw.get("is_encoder_decoder"):
        raise UnsupportedError(f"model type {kind} is an encoder-decoder; only decoders are compiled")
    stated = raw.get("architectures") or []
    if kind in CONFIG_MAPPING and auto_class(kind, stated) is None:
        raise UnsupportedError(f"{(stated or [kind])[0]} is not a decoder language model; only those are compiled")
    check_sizes(directory / "config.json", raw, CONFIG_MAPPING)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=allow_remote, local_files_only=True)
    except Exception as error:  # validation of a configuration may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{directory / 'config.json'} is not a valid {kind} configuration: {reason[:200]}") from error
    if (inner := text_config(config)).is_encoder_decoder:
        raise UnsupportedError(f"model type {kind} has an encoder-decoder for text; only decoders are compiled")
    _check_sizes(directory / "config.json", inner)
    return config


def _check_types(path: Path, raw: Mapping[str, Any]) -> None:
    """Refuse fields that transformers uses before it checks them, and types of weights that are none."""
    stated = raw.get("architectures")
    named = isinstance(stated, list) and all(isinstance(name, str) and len(name) <= MOST_LETTERS for name in stated)
    if stated is not None and not named:
        raise UsageError(f"{path}: architectures must be a list of names, is {shown(stated)}")
    for name, part in raw.items():
        if name.endswith("_config") and part is not None and not isinstance(part, dict):
            raise UsageError(f"{path}: {name} must be an object, is {shown(part)}")
        kind = part.get("model_type") if isinstance(part, dict) else None
        if kind is not None and not isinstance(kind, str):
            raise UsageError(f"{path}: {name}.model_type must be a name, is {shown(kind)}")
    for name in ("dtype", "torch_dtype"):
        stored = raw.get(name)
        parts = stored.values() if isinstance(stored, dict) else () if stored is None else (stored,)
        if not all(isinstance(part, str) and _WEIGHT_TYPE.fullmatch(part) for part in parts):
            raise UsageError(f"{path}: {name} must be a type of floating-point numbers, is {shown(stored)}")


def auto_class(kind: str, stated: Sequence[str]) -> str | None:
    """The name of transformers' class that makes the decoder of model type `kind`, or the model that has one inside.

    `stated` are the architectures that the configuration states; without any, the first class that has the type. None:
    no such class makes any of them.
    """
    from transformers.models.auto import modeling_auto

    for auto, table in AUTO_CLASSES.items():
        made = getattr(modeling_auto, table, {}).get(kind)
        if made is not None and (not stated or made in stated):
            return auto
    return None


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the text decoder: all of it for a plain decoder."""
    try:
        return config.get_text_config(decoder=True)
    except ValueError as error:  # several parts might be meant
        reason = " ".join(str(error).split())
        raise UnsupportedError(
            f"{config.model_type} does not say which of its parts is the decoder: {reason}"
        ) from error


def _check_sizes(path: Path, config: Any) -> None:
    """Refuse sizes that no model has, before memory is allocated for them."""
    layers = getattr(config, DEPTH_KEY, 1)
    if isinstance(layers, int) and not 1 <= layers <= MOST_LAYERS:
        raise UsageError(f"{path}: {DEPTH_KEY} is {layers}; it must be from 1 to {MOST_LAYERS}")
    for name, value in vars(config).items():
        if isinstance(value, int) and value >= 1 << 31:
            raise UsageError(f"{path}: {name} is {value}; sizes must be below 2^31")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{path}: {name} is {value}; it must be a number")


def cut(config: Any, layers: int) -> Any:
    """`config` with its first `layers` layers; lists with an entry for each layer are cut too."""
    config = copy.deepcopy(config)
    text = text_config(config)
    depth = getattr(text, DEPTH_KEY)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(text, name, value[:layers])
    setattr(text, DEPTH_KEY, layers)
    return config


def context_length(config: Any) -> int:
    """The longest sequence that the configuration states, in tokens; UNSTATED_LENGTH if it states none."""
    text = text_config(config)
    for key in LENGTH_KEYS:
        value = getattr(text, key, None)
        if value is not None:
            if value < 1:
                raise UsageError(f"the configuration says {key} = {value}; it must be a number of tokens")
            return int(value)
    return UNSTATED_LENGTH
