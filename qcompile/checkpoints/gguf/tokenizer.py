"""The tokenizer that a GGUF file's metadata describe, as the files that a checkpoint has.

transformers builds it, from the vocabulary, merges and scores of the file. What it would only guess is refused: how the
file's pre-tokenizer splits texts.
"""

from __future__ import annotations

import json
from typing import Any

from qcompile.checkpoints.gguf.header import Header
from qcompile.errors import UnsupportedError, UsageError, shown

_PREFIX, _TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPLIT_AS_GPT2 = ("gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "roberta-bpe", "gigachat", "trillion")
"""Pre-tokenizers of byte-level vocabularies that split texts as that of GPT-2 does."""
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Pre-tokenizers with which words of the vocabulary are tokens, whatever the merges, and texts get a first token."""


def tokenizer_files(header: Header) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja of the file; empty if it has no vocabulary.

    Raises UsageError for a vocabulary that contradicts itself, UnsupportedError for one that is not read.
    """
    tokens = header.metadata.get(f"{_PREFIX}tokens")
    if tokens is None:
        return {}
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise UsageError(f"{header.path}: {_PREFIX}tokens is no list of texts")
    for key in (f"{_PREFIX}model", f"{_PREFIX}pre", _TEMPLATE):
        if not isinstance(value := header.metadata.get(key, ""), str):
            raise UsageError(f"{header.path}: {key} is {shown(value)}; a text belongs there")
    special = {name: _token(header, tokens, key) for name, key in _SPECIAL.items()}
    begins, ends = _added(header)
    config = {name: text for name, text in special.items() if text is not None}
    facts: dict[str, Any] = {"add_bos_token": begins, "add_eos_token": ends, **config}
    template = header.metadata.get(_TEMPLATE)
    files = {"tokenizer.json": _converted(header, tokens, special, begins, ends)}
    files["tokenizer_config.json"] = json.dumps(facts | {"tokenizer_class": "PreTrainedTokenizerFast"}).encode()
    if isinstance(template, str):
        files["chat_template.jinja"] = template.encode()
    return files


def _token(header: Header, tokens: list[str], key: str) -> str | None:
    """The text of a special token; None if the file names none."""
    number = header.metadata.get(f"{_PREFIX}{key}_token_id")
    if number is None:
        return None
    if type(number) is not int or not 0 <= number < len(tokens):
        raise UsageError(
            f"{header.path}: {_PREFIX}{key}_token_id is {shown(number)}; the vocabulary has {len(tokens)} tokens"
        )
    return tokens[number]


def _added(header: Header) -> tuple[bool, bool]:
    """Whether the tokens that begin and end a text are put around prompts."""
    begins = header.metadata.get(f"{_PREFIX}model") == "llama" or header.metadata.get(f"{_PREFIX}pre") in _WHOLE_WORDS
    given = header.metadata
    return bool(given.get(f"{_PREFIX}add_bos_token", begins)), bool(given.get(f"{_PREFIX}add_eos_token", False))


def _converted(header: Header, tokens: list[str], special: dict[str, str | None], begins: bool, ends: bool) -> bytes:
    """tokenizer.json, by transformers."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            GGUF_PRE_TOKENIZER_SPLITS,
            GGUF_TOKENIZER_MAPPING,
            convert_gguf_tokenizer,
        )
    except ImportError:
        raise UnsupportedError(f"{header.path}: its tokenizer needs a newer transformers") from None

    kind, split = (header.metadata.get(f"{_PREFIX}{key}") for key in ("model", "pre"))
    if kind == "gpt2" and split not in GGUF_PRE_TOKENIZER_SPLITS and split not in _SPLIT_AS_GPT2:
        raise UnsupportedError(
            f"{header.path}: how its pre-tokenizer {shown(split)} splits texts is unknown: put the tokenizer.json of "
            "the model beside the file"
        )
    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    facts = {
        name: header.metadata[f"tokenizer.{key}"]
        for key, name in names.items()
        if f"tokenizer.{key}" in header.metadata
    }
    try:
        backend, _ = convert_gguf_tokenizer(header.architecture, facts)
        if kind == "gpt2" and split in _WHOLE_WORDS:
            backend.model.ignore_merges = True
        _surround(backend, special["bos_token"] if begins else None, special["eos_token"] if ends else None)
        content: bytes = backend.to_str(pretty=False).encode()
    except Exception as error:  # the converter may raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(f"{header.path}: its tokenizer cannot be converted: {reason}") from error
    if header.metadata.get(f"{_PREFIX}add_space_prefix") is False:
        content = _without_space(content)
    for number in {0, len(tokens) // 2, len(tokens) - 1}:
        if backend.id_to_token(number) is None:
            raise UnsupportedError(f"{header.path}: its tokenizer cannot be converted: token {number} is lost")
    return content


def _without_space(content: bytes) -> bytes:
    """tokenizer.json without the space that is put before texts, and taken from them again."""
    facts = json.loads(content)
    if (facts["pre_tokenizer"] or {}).get("type") == "Metaspace":
        facts["pre_tokenizer"]["prepend_scheme"] = "never"
    for part, key, kind in (("normalizer", "normalizers", "Prepend"), ("decoder", "decoders", "Strip")):
        if (facts[part] or {}).get("type") == "Sequence":
            facts[part][key] = [step for step in facts[part][key] if step["type"] != kind]
    return json.dumps(facts, ensure_ascii=False).encode()


def _surround(backend: Any, begin: str | None, end: str | None) -> None:
    """Let the tokenizer put these tokens around texts."""
    from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

    single = [f"{begin}:0"] * (begin is not None) + ["$A:0"] + [f"{end}:0"] * (end is not None)
    pair = [*single, *(piece.replace(":0", ":1").replace("$A", "$B") for piece in single)]
    known = [(text, backend.token_to_id(text)) for text in {begin, end} - {None}]
    around = TemplateProcessing(single=single, pair=pair, special_tokens=known)
    backend.post_processor = Sequence([ByteLevel(trim_offsets=False), around]) if known else None
