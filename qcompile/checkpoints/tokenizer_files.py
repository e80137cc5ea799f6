"""The tokenizer and the configuration of a checkpoint, as an artifact stores them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from qcompile.artifact.layout import CONFIG_FILE
from qcompile.checkpoints.checkpoint import read_json
from qcompile.checkpoints.hub import find
from qcompile.errors import ResourceError, UnsupportedError, UsageError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


def tokenizer_files(model: str | Path) -> dict[str, bytes]:
    """The tokenizer of a checkpoint, by file name, as an artifact stores it; empty if there is none.

    A checkpoint with only a SentencePiece model gets the tokenizer.json that transformers converts it to.
    """
    directory = find(model)
    for name in TOKENIZER_FILES:
        if (directory / name).exists() and not (directory / name).is_file():
            raise UsageError(f"{directory / name} is no plain file")
    files = {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).is_file()}
    if "tokenizer.json" not in files and (directory / "tokenizer.model").is_file():
        _check_converters(directory / "tokenizer.model")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from transformers import AutoTokenizer

        try:
            backend = AutoTokenizer.from_pretrained(directory, local_files_only=True).backend_tokenizer
        except Exception as error:  # the converters may raise anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UnsupportedError(f"{directory / 'tokenizer.model'} cannot be converted: {reason}") from error
        files["tokenizer.json"] = backend.to_str(pretty=False).encode()
    _check_tokenizer(directory, files)
    return files


def configuration_files(model: str | Path) -> dict[str, bytes]:
    """The configuration of a checkpoint, by its name in an artifact, which exports need; empty if there is none."""
    path = find(model) / "config.json"
    return {CONFIG_FILE: path.read_bytes()} if path.is_file() else {}


def other_tokenizer(model: Any, draft: Any) -> bytes | None:
    """The tokenizer.json of `draft` if both are checkpoints with one and it differs from the model's; else None."""
    if not all(isinstance(source, (str, Path)) for source in (model, draft)):
        return None
    own, other = (tokenizer_files(source).get("tokenizer.json") for source in (model, draft))
    return other if own is not None and other is not None and own != other else None


def _check_converters(file: Path) -> None:
    """Raise ResourceError if a package is missing that transformers needs to read a SentencePiece model."""
    for package, module in (("sentencepiece", "sentencepiece"), ("protobuf", "google.protobuf")):
        try:
            installed = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            installed = False
        if not installed:
            raise ResourceError(
                f"{file} needs the {package} package to be converted: pip install 'qcompile[sentencepiece]'"
            )


def _check_tokenizer(directory: Path, files: dict[str, bytes]) -> None:
    """Raise UsageError for files that could be stored but not used."""
    if "tokenizer.json" in files:
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # tokenizers raises plain Exception
            raise UsageError(f"{directory / 'tokenizer.json'} is not a tokenizer: {error}") from error
    if "tokenizer_config.json" in files:
        read_json(directory / "tokenizer_config.json")
    try:
        files.get("chat_template.jinja", b"").decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{directory / 'chat_template.jinja'} is not text in UTF-8: {error}") from error
