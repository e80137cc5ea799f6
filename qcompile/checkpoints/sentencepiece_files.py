"""What a tokenizer made of a SentencePiece file must keep of it: the order of merges, and the space before a text.

transformers may order merges by number instead of score, and leave out the space that the file puts before texts. Both
change most texts, without an error. They are set from the file, and the result is compared with the sentencepiece
package.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SPACE = "\u2581"
"""What SentencePiece writes for a space."""
_BPE = 2
"""trainer_spec.model_type of byte-pair encoding."""
_NORMAL, _BYTE = 1, 6
"""Types of pieces: those of text, and bytes of what has no piece."""
_LONGEST = 1024
"""Most characters of a piece. All its splits are tried as merges, which takes time with the square of its length."""
_PROBES = ("Hello world, x = 1", "two  spaces\n    and lines", "Gr\u00fc\u00dfe")
_PLAIN_PROBES = _PROBES[:1]
"""Texts that are compared; where the file changes spaces or characters itself, only one without any to change."""


def corrected(path: Path, content: bytes) -> bytes:
    """The tokenizer.json `content`, made of the file `path`, as the file says. Raises ValueError if it differs then."""
    from sentencepiece import SentencePieceProcessor

    messages: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    file = messages.ModelProto()
    file.ParseFromString(path.read_bytes())
    rules = file.normalizer_spec
    plain = not (rules.precompiled_charsmap or rules.remove_extra_whitespaces)
    if file.trainer_spec.model_type == _BPE and plain:
        tables = json.loads(content)
        _set_merges(tables["model"], file)
        _set_spaces(tables, rules.add_dummy_prefix)
        content = json.dumps(tables, ensure_ascii=False).encode()
    _compare(SentencePieceProcessor(model_file=str(path)), content, _PROBES if plain else _PLAIN_PROBES)
    return content


def _set_merges(model: dict[str, Any], file: Any) -> None:
    """Merges in the order of the scores of what they make, as SentencePiece chooses them."""
    scores = {piece.piece: piece.score for piece in file.pieces if piece.type == _NORMAL}
    numbers = {piece.piece: number for number, piece in enumerate(file.pieces)}
    if any(len(text) > _LONGEST for text in scores):
        raise ValueError(f"a piece of its vocabulary has more than {_LONGEST:,} characters")
    merges: list[tuple[str, str]] = []
    for made in sorted(scores, key=lambda text: (-scores[text], numbers[text])):
        parts = [(made[:at], made[at:]) for at in range(1, len(made))]
        both = [pair for pair in parts if pair[0] in scores and pair[1] in scores]
        merges += sorted(both, key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
    model["merges"] = [list(pair) for pair in merges]
    model["byte_fallback"] = any(piece.type == _BYTE for piece in file.pieces)


def _set_spaces(tables: dict[str, Any], prefix: bool) -> None:
    """The space before texts, unless transformers has set it only before the first part of one."""
    spaces = tables.get("pre_tokenizer")
    if isinstance(spaces, Mapping) and spaces.get("type") == "Metaspace" and spaces.get("prepend_scheme") == "first":
        return
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    before = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    tables["normalizer"] = {"type": "Sequence", "normalizers": [*before, replace]}
    tables["pre_tokenizer"] = None
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    tables["decoder"] = {"type": "Sequence", "decoders": decoders}


def _compare(processor: Any, content: bytes, texts: tuple[str, ...]) -> None:
    """Raise ValueError if the tokenizer gives one of these texts other tokens than the sentencepiece package does."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(content)
    for text in texts:
        if tokenizer.encode(text, add_special_tokens=False).ids != processor.encode(text):
            raise ValueError(f"transformers gives {text!r} other tokens than sentencepiece")
