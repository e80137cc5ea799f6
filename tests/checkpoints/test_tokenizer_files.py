"""Tokenizers in the forms that transformers converts, for the artifact and for calibration texts."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from qcompile.checkpoints import tokenizer_files
from qcompile.checkpoints.tokenizer_files import load_tokenizer
from qcompile.checkpoints.tokenizer_sources import source_of
from qcompile.errors import ResourceError, UnsupportedError

LETTERS = ("<|end|>", *(chr(code) for code in range(33, 127)), "\u0120", "ab", "\u0120ab")


def vocabulary(path: Path) -> None:
    """A byte-level vocabulary and its merges in `path`, and a configuration by which transformers knows their form."""
    (path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(LETTERS)}))
    (path / "merges.txt").write_text("#version: 0.2\na b\n\u0120 ab\n")
    (path / "config.json").write_text('{"model_type": "gpt2"}')


def test_vocabulary_and_merges_become_json(tmp_path: Path) -> None:
    vocabulary(tmp_path)
    content = tokenizer_files.tokenizer_files(tmp_path)["tokenizer.json"]
    tokenizer = Tokenizer.from_buffer(content)
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("ab ab").ids] == ["ab", "\u0120ab"]
    assert load_tokenizer(tmp_path).encode("ab ab").ids == tokenizer.encode("ab ab").ids
    (tmp_path / "merges.txt").unlink()  # without it, words would fall into letters
    assert tokenizer_files.tokenizer_files(tmp_path) == {} and source_of(tmp_path) is None


def test_a_vocabulary_that_comes_out_as_another(tmp_path: Path) -> None:
    vocabulary(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    with pytest.raises(UnsupportedError, match=r"vocab\.json cannot be converted: .*"):
        tokenizer_files.tokenizer_files(tmp_path)


def test_a_class_for_other_files_is_named_in_a_whole_sentence(tmp_path: Path) -> None:
    vocabulary(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        UnsupportedError, match=r"reads other files \(tokenizer_class of tokenizer_config\.json\); save"
    ):
        tokenizer_files.tokenizer_files(tmp_path)


def test_code_of_a_checkpoint_is_neither_run_nor_asked_for(tmp_path: Path, monkeypatch: Any) -> None:
    """transformers asks the terminal where it is not told: an answer "y", as by `yes |`, would run the code."""
    vocabulary(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "own"}')
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "y")
    with pytest.raises(
        UnsupportedError, match=r"json cannot be converted: its class is code of own\.py, which is not run;"
    ):
        tokenizer_files.tokenizer_files(tmp_path)
    assert not asked and not (tmp_path / "ran").exists()


def test_mistrals_vocabulary_becomes_json(tmp_path: Path) -> None:
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(("<unk>", "<s>", "</s>"))]
    pieces = [bytes([i]) for i in range(256)] + [b"ab", b" ab"]
    vocab = [{"rank": i, "token_bytes": base64.b64encode(p).decode(), "token_str": None} for i, p in enumerate(pieces)]
    config = {"pattern": r"\p{L}+| ?[^\p{L}]+", "default_vocab_size": 261, "default_num_special_tokens": 3}
    facts = {"config": config | {"num_vocab_tokens": 258, "version": "v3"}, "vocab": vocab, "special_tokens": special}
    (tmp_path / "tekken.json").write_text(json.dumps(facts))
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [256 + 3]


def test_tiktoken_needs_its_package(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"YQ== 0\n")
    monkeypatch.setattr(tokenizer_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"tiktoken\.model needs the tiktoken package"):
        tokenizer_files.tokenizer_files(tmp_path)
