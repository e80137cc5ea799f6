"""Write an artifact as a GGUF file, which llama.cpp loads: one file with weights, facts of the model and tokenizer."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qcompile.artifact import swap
from qcompile.artifact.layout import disk_errors
from qcompile.checkpoints.checkpoint import read_json
from qcompile.errors import ResourceError, UnsupportedError, UsageError
from qcompile.exports.gguf_blocks import BLOCK, BLOCKS
from qcompile.exports.gguf_tokenizer import tokenizer_facts
from qcompile.exports.plan import ELSE, Exported, rows_of, tied_names
from qcompile.exports.source import ArtifactSource
from qcompile.exports.tensors import Tensors

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""llama.cpp's names of the model types of transformers that are written."""
INTERLEAVED = {"llama"}
"""Architectures for which llama.cpp rotates neighbouring features in the rotary embedding: rows of heads have another
order."""


def write(source: ArtifactSource, out: Path) -> Exported:
    """Write an artifact as the GGUF file `out`.

    Raises UsageError if `out` exists, UnsupportedError with the tensor or the setting for what GGUF or llama.cpp
    cannot hold, ResourceError if the gguf package is missing or the disk is full.
    """
    if out.is_dir():
        raise UsageError(f"{out} is a folder: give the name of a gguf file")
    if os.path.lexists(out):
        raise UsageError(f"{out} exists: choose another file for the checkpoint")
    gguf, tensors, config = _package(), source.tensors, source.settings
    architecture = _architecture(source)
    tokenizer = tokenizer_facts(source.root, source.model["vocab_size"])
    names = gguf.get_tensor_name_map(
        next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    skipped = tied_names(tensors, source.parameters)
    for name in tensors.rows:
        _check(name, tensors, names.get_name(name, (".weight", ".bias")))
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        folder, lock = swap.locked_sibling(out)
    try:
        with disk_errors(out):
            writer = gguf.GGUFWriter(folder / "model", architecture)
            _add_facts(writer, source)
            _add_tokenizer(writer, source, tokenizer)
            size = rounded = 0
            for name, stored, kind in _stored(tensors, [name for name in tensors.rows if name not in skipped], config):
                heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
                if architecture in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
                    stored = stored[_interleaved_rows(len(stored), heads)]
                block = getattr(gguf.GGMLQuantizationType, kind)
                writer.add_tensor(names.get_name(name, (".weight", ".bias")), stored.numpy(), raw_dtype=block)
                size += stored.numel() * stored.element_size()
                rounded += kind in {each.name for each in BLOCKS.values()}
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            (folder / "model").chmod(0o666 & ~swap.umask())
            os.replace(folder / "model", out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
    notes = ["scales are rounded to float16, as gguf stores them; codes are kept to the bit"] if rounded else []
    return Exported(size, rounded, len(tensors.rows) - len(skipped) - rounded, notes)


def _package() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ResourceError(f"export needs the gguf package ({error}): pip install 'qcompile[gguf]'") from error


def _architecture(source: ArtifactSource) -> str:
    """llama.cpp's name of the model's architecture. Raises UnsupportedError for settings that the file cannot say."""
    config = source.settings
    if config.model_type not in ARCHITECTURES:
        held = ", ".join(ARCHITECTURES)
        raise UnsupportedError(f"export: gguf is written for the model types {held}, not {config.model_type}; {ELSE}")
    if source.tensors.changed:
        raise UnsupportedError(f"export: passes have changed weights, and gguf holds those of the checkpoint; {ELSE}")
    rope = getattr(config, "rope_parameters", None) or {}
    kind, window = rope.get("rope_type", "default"), getattr(config, "sliding_window", None)
    windows = any(each != "full_attention" for each in getattr(config, "layer_types", None) or ())
    rotated_share = rope.get("partial_rotary_factor", 1.0)
    for name, value, right in (
        ("rope_type", kind, kind == "default"),
        ("partial_rotary_factor", rotated_share, rotated_share == 1.0),
        ("hidden_act", config.hidden_act, config.hidden_act == "silu"),
        ("sliding_window", window, not windows and (config.model_type != "mistral" or window is None)),
    ):
        if not right:
            raise UnsupportedError(f"export: gguf is not written for {name} {value}; {ELSE}")
    return ARCHITECTURES[config.model_type]


def _check(name: str, tensors: Tensors, place: str | None) -> None:
    """Raise UnsupportedError unless GGUF has a place for the tensor, and blocks for its format."""
    if place is None:
        raise UnsupportedError(f"export: gguf has no place for {name}; {ELSE}")
    kinds = tensors.formats(name)
    if any(kind.marks_rows for kind in kinds):
        raise UnsupportedError(f"export: {name}: {rows_of(tensors, name)}; gguf holds one format a tensor; {ELSE}")
    if not kinds <= set(BLOCKS):
        held = ", ".join(kind.name for kind in BLOCKS)
        there = " and ".join(sorted(kind.name for kind in kinds))
        raise UnsupportedError(f"export: {name} is in {there}, and gguf holds {held}; {ELSE}")
    inputs = tensors.shapes[name][-1]
    if kinds and inputs % BLOCK:
        raise UnsupportedError(f"export: {name} has {inputs} inputs, and gguf holds multiples of {BLOCK}; {ELSE}")


def _stored(tensors: Tensors, chosen: list[str], config: Any) -> Iterator[tuple[str, Tensor, str]]:
    """Each tensor as the file stores it, a row for each output, and the name of its type."""
    for name in chosen:
        for kind in tensors.formats(name):
            yield name, BLOCKS[kind].encode(tensors.parts(name)), BLOCKS[kind].name
        if not tensors.formats(name):
            value = tensors.floats(name)
            short = value.to(torch.bfloat16)
            if value.dim() > 1 and torch.equal(short.float(), value):
                yield name, short.view(torch.uint8), "BF16"
            else:
                yield name, value, "F32"


def _interleaved_rows(rows: int, heads: int) -> Tensor:
    """The order of rows in which features that rotate together are neighbours; before, they are halves of a head."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()


def _add_facts(writer: Any, source: ArtifactSource) -> None:
    config = source.settings
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(source.model["name"])
    writer.add_vocab_size(source.model["vocab_size"])
    writer.add_context_length(source.model["max_position"])
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_quantization_version(2)


def _add_tokenizer(writer: Any, source: ArtifactSource, facts: dict[str, Any]) -> None:
    writer.add_tokenizer_model(facts["model"])
    writer.add_tokenizer_pre(facts["pre"])
    writer.add_token_list(facts["tokens"])
    writer.add_token_types(facts["token_type"])
    writer.add_token_merges(facts["merges"])
    if source.model["bos_token_id"] is not None:
        writer.add_bos_token_id(source.model["bos_token_id"])
    if source.model["eos_token_ids"]:
        writer.add_eos_token_id(source.model["eos_token_ids"][0])
    path = source.root / "tokenizer_config.json"
    said = read_json(path) if path.is_file() else {}
    writer.add_add_bos_token(bool(said.get("add_bos_token", False)))
    template = source.root / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else said.get("chat_template")
    if isinstance(text, str):
        writer.add_chat_template(text)
