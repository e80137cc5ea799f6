"""The special tokens that an artifact's tokenizer has by name, such as the one that ends a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.artifact.hashes import listed_file
from qcompile.errors import ArtifactError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG = "tokenizer_config.json"
_FILES = ("special_tokens_map.json", CONFIG)
"""Files with special tokens by name; the later counts."""
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def json_object(root: Path, files: dict[str, Any], name: str) -> dict[str, Any]:
    """The JSON object in a file of the artifact at `root`; empty if it has no such file.

    files: those of the artifact's manifest. Raises ArtifactError.
    """
    content = listed_file(root, files, name)
    if content is None:
        return {}
    try:
        value = json.loads(content)
        json.dumps(value, ensure_ascii=False).encode()  # half a character is no text to any tokenizer
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{root / name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{root / name} holds a JSON {type(value).__name__} where an object belongs")
    return value


def special_tokens(root: Path, files: dict[str, Any]) -> dict[str, str]:
    """The texts of special tokens by name, such as `eos_token`. Raises ArtifactError."""
    special = {}
    for config in (json_object(root, files, name) for name in _FILES):
        for name in _NAMES:
            token = config.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                special[name] = text
    return special


def end_tokens(root: Path, files: dict[str, Any], tokenizer: Tokenizer | None) -> list[int]:
    """The token that ends a text by the tokenizer's own files, if they name one.

    The model's configuration may name another, for example that of the texts before it learned to converse.
    """
    end = special_tokens(root, files).get("eos_token")
    token = tokenizer.token_to_id(end) if tokenizer and end else None
    return [] if token is None else [token]
