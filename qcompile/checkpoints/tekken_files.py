"""Mistral's tekken.json as a tokenizer.json: byte pairs by rank, behind special tokens that have the first numbers."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from qcompile.checkpoints.checkpoint import read_json
from qcompile.errors import shown

_NAMED = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""The special tokens of files that list none."""
_BEGIN = "<s>"
_MOST_TOKENS = 1 << 22
"""Most tokens of a file: ten times those of any known tokenizer."""
_LONGEST = 1024
"""Most bytes of a piece. All its splits are tried as merges, which takes time with the square of its length."""


def converted(path: Path) -> bytes:
    """The tokenizer.json. Raises ValueError, KeyError, TypeError for a file that is none of tekken."""
    facts = read_json(path)
    config = facts["config"]
    size, reserved = config["default_vocab_size"], config["default_num_special_tokens"]
    for name, number in (("default_vocab_size", size), ("default_num_special_tokens", reserved)):
        if type(number) is not int or not 0 <= number <= _MOST_TOKENS:
            raise ValueError(f"{name} is {shown(number)}; a whole number from 0 to {_MOST_TOKENS:,} belongs there")
    special = _special(facts.get("special_tokens"), reserved)
    ranks = _ranks(facts["vocab"], size - reserved)
    letters = _letters()
    texts = {piece: "".join(letters[byte] for byte in piece) for piece in ranks}
    vocabulary = {text: number for number, text in enumerate(special)}
    if clash := vocabulary.keys() & set(texts.values()):
        raise ValueError(f"{clash.pop()!r} is a special token and a piece of text")
    vocabulary |= {texts[piece]: reserved + rank for piece, rank in ranks.items()}
    model = {"type": "BPE", "vocab": vocabulary, "merges": _merges(ranks, texts), "ignore_merges": True}
    whole = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": config["pattern"]}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tables = {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": text} | flags for number, text in enumerate(special)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel"} | whole]},
        "post_processor": _begun(special),
        "decoder": {"type": "ByteLevel"} | whole,
        "model": model,
    }
    return json.dumps(tables, ensure_ascii=False).encode()


def _special(listed: list[dict[str, Any]] | None, count: int) -> list[str]:
    """The special tokens by number; those that the file does not name are fillers."""
    named = dict(enumerate(_NAMED)) if not listed else {token["rank"]: token["token_str"] for token in listed}
    texts = [named.get(number, f"<SPECIAL_{number}>") for number in range(count)]
    if len(set(texts)) != count or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("its special tokens are not all different texts")
    return texts


def _ranks(vocab: list[dict[str, Any]], count: int) -> dict[bytes, int]:
    """The rank of each piece of the first `count`."""
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in vocab[: max(count, 0)]}
    if any(len(piece) > _LONGEST for piece in ranks):
        raise ValueError(f"a piece of its vocabulary has more than {_LONGEST:,} bytes")
    if sorted(ranks.values()) != list(range(count)):
        raise ValueError(f"its vocabulary has no {count} different pieces with ranks from 0")
    return ranks


def _merges(ranks: dict[bytes, int], texts: dict[bytes, str]) -> list[list[str]]:
    """All pairs of pieces that make a piece, in the order of the ranks of what they make."""
    merges = []
    for piece in sorted(ranks, key=ranks.__getitem__):
        parts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [(left, right) for left, right in parts if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [[texts[left], texts[right]] for left, right in pairs]
    return merges


def _letters() -> list[str]:
    """The character that stands for each byte in vocabularies of byte pairs: itself if it can be seen, else others."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(256)]


def _begun(special: list[str]) -> dict[str, Any] | None:
    """The rule that puts the first token before a text."""
    if _BEGIN not in special:
        return None
    first, text = {"SpecialToken": {"id": _BEGIN, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    tokens = {_BEGIN: {"id": _BEGIN, "ids": [special.index(_BEGIN)], "tokens": [_BEGIN]}}
    pair = [first, text, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": [first, text], "pair": pair, "special_tokens": tokens}
