"""The tokenizer and the configuration of a checkpoint, as an artifact stores them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.artifact.layout import CONFIG_FILE
from qcompile.checkpoints import tekken_files
from qcompile.checkpoints.checkpoint import read_json
from qcompile.checkpoints.hub import find
from qcompile.checkpoints.sentencepiece_files import corrected
from qcompile.checkpoints.tokenizer_sources import OWN, source_of
from qcompile.errors import ResourceError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
_CONVERTERS: dict[str, tuple[tuple[str, str], ...]] = {
    "tokenizer.model": (("sentencepiece", "sentencepiece"), ("protobuf", "google.protobuf")),
    "tiktoken.model": (("tiktoken", "tiktoken"),),
}
"""Packages and their modules that transformers needs to read a file."""
_INSTALL = {
    "sentencepiece": "pip install 'qcompile[sentencepiece]'",
    "protobuf": "pip install 'qcompile[sentencepiece]'",
    "tiktoken": "pip install tiktoken",
}


def tokenizer_files(model: str | Path) -> dict[str, bytes]:
    """The tokenizer of a checkpoint, by file name, as an artifact stores it; empty if there is none.

    A checkpoint with a tokenizer in another form gets the tokenizer.json that transformers converts it to. Raises
    UsageError, UnsupportedError (it cannot be converted), ResourceError (a package is missing for that).
    """
    directory = find(model)
    for name in TOKENIZER_FILES:
        if (directory / name).exists() and not (directory / name).is_file():
            raise UsageError(f"{directory / name} is no plain file")
    files = {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).is_file()}
    source = source_of(directory)
    if source not in (None, OWN):
        files[OWN] = _converted(directory, source)
    _check_tokenizer(directory, files)
    return files


def configuration_files(model: str | Path) -> dict[str, bytes]:
    """The configuration of a checkpoint, by its name in an artifact, which exports need; empty if there is none."""
    path = find(model) / "config.json"
    return {CONFIG_FILE: path.read_bytes()} if path.is_file() else {}


def load_tokenizer(model: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint, as its artifact has it. Raises ResourceError if there is none."""
    content = tokenizer_files(model).get(OWN)
    if content is None:
        raise ResourceError(f"{find(model) / OWN} is missing: calibration text needs the model's tokenizer")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def other_tokenizer(model: Any, draft: Any) -> bytes | None:
    """The tokenizer.json of `draft` if both are checkpoints with one and it differs from the model's; else None."""
    if not all(isinstance(source, (str, Path)) for source in (model, draft)):
        return None
    own, other = (tokenizer_files(source).get("tokenizer.json") for source in (model, draft))
    return other if own is not None and other is not None and own != other else None


def _converted(directory: Path, source: str) -> bytes:
    """The tokenizer.json that is made of the file `source` in `directory`, by transformers unless it is tekken.json."""
    path = directory / source
    if source == "tekken.json":
        try:
            return tekken_files.converted(path)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UnsupportedError(f"{path} cannot be converted: {why}; save the tokenizer as {OWN}") from error
    _check_converters(path)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    try:
        # None would let transformers ask the terminal whether to run the checkpoint's code
        given = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        backend = given.backend_tokenizer
        lost = _lost(path, backend)
        content: bytes = backend.to_str(pretty=False).encode()
        if source == "tokenizer.model":
            content = corrected(path, content)
    except Exception as error:  # the converters may raise anything
        why = _first_line(error)
        if "trust_remote_code" in str(error) and (code := _own_code(directory)):
            why = f"its class is code of {code}, which is not run"
        raise UnsupportedError(f"{path} cannot be converted: {why}; save the tokenizer as {OWN}") from error
    if lost is not None:
        raise UnsupportedError(f"{path} cannot be converted: transformers {lost}; save the tokenizer as {OWN}")
    return content


def _own_code(directory: Path) -> str | None:
    """The module of the checkpoint that has the tokenizer's class; None if there is none."""
    settings = directory / "tokenizer_config.json"
    named = read_json(settings).get("auto_map") if settings.is_file() else None
    of_tokenizer = named.get("AutoTokenizer") if isinstance(named, dict) else named
    classes = of_tokenizer if isinstance(of_tokenizer, list) else [of_tokenizer]
    modules = [each.rpartition(".")[0] for each in classes if isinstance(each, str)]
    return f"{modules[0]}.py" if modules else None


def _first_line(error: Exception) -> str:
    """What a converter says in one line. A line that only begins a list is what transformers says of a class for other
    files than there are."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].strip()
    if line.endswith(":"):
        return "its class reads other files (tokenizer_class of tokenizer_config.json)"
    return line


def _lost(path: Path, backend: Any) -> str | None:
    """What the converted tokenizer lacks of the file `path`; None for nothing. A converter may not know the file."""
    if path.name == "vocab.json":
        for token, number in read_json(path).items():
            if backend.token_to_id(token) != number:
                return f"gives token {token!r} the number {backend.token_to_id(token)}, and the file {number}"
    size = backend.get_vocab_size()
    if path.name == "tiktoken.model" and size < (stated := sum(1 for line in path.read_bytes().split(b"\n") if line)):
        return f"finds {size} tokens, and the file has {stated}"
    return None


def _check_converters(file: Path) -> None:
    """Raise ResourceError if a package is missing that transformers needs to read `file`."""
    for package, module in _CONVERTERS.get(file.name, ()):
        try:
            installed = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            installed = False
        if not installed:
            raise ResourceError(f"{file} needs the {package} package to be converted: {_INSTALL[package]}")


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
