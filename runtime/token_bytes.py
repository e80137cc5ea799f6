"""The bytes of single tokens, of which many are only a part of a character."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from qcompile.runtime.detokenizer import BROKEN, spelled

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""How tokenizers with byte fallback name the token of a byte."""


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes | None:
    """The bytes of a token after other tokens; None if they cannot be told.

    A token of whole characters has those of its text. Other tokens name their bytes in one of two ways, which counts
    only if the tokenizer decodes the token to the same characters.
    """
    text = spelled(tokenizer, token)
    if BROKEN not in text:
        return text.encode()
    name = tokenizer.id_to_token(token) or ""
    byte, alphabet = _BYTE.fullmatch(name), _byte_level()
    if byte:
        raw = bytes.fromhex(byte[1])
    elif all(letter in alphabet for letter in name):
        raw = bytes(alphabet[letter] for letter in name)
    else:
        return None
    decoded = tokenizer.decode([token], skip_special_tokens=False)
    return raw if raw.decode(errors="replace") == decoded else None


@cache
def _byte_level() -> dict[str, int]:
    """The byte of each letter of byte-level tokenizers: printable bytes are their own letters, and the others have the
    letters from number 256 on."""
    printable = [byte for byte in range(256) if 33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
