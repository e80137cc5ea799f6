"""Tokenizers in the forms that transformers converts, for the artifact and for calibration texts."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer

from qcompile.checkpoints import sentencepiece_files, tokenizer_files
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


PIECES = [*(bytes([byte]) for byte in range(256)), b"ab", b" ab", b"bc", b"abc"]


def tekken(folder: Path, **changes: Any) -> Path:
    """A tekken.json without a list of special tokens, as Mistral has published it, and a piece beyond its size."""
    pieces = [*PIECES, b"beyond"]
    vocab = [{"rank": i, "token_bytes": base64.b64encode(p).decode(), "token_str": None} for i, p in enumerate(pieces)]
    config = {"pattern": r" ?\p{L}+|[^\p{L}]+?", "default_vocab_size": 282, "default_num_special_tokens": 22}
    facts = {"config": config | {"num_vocab_tokens": 261, "version": "v3"}, "vocab": vocab} | changes
    (folder / "tekken.json").write_text(json.dumps(facts))
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    return folder


def test_mistrals_vocabulary_becomes_json(tmp_path: Path) -> None:
    """Pairs are merged by the rank of what they make; special tokens have the first numbers, with fillers."""
    tokenizer = load_tokenizer(tekken(tmp_path))
    assert tokenizer.get_vocab_size() == 282
    for text, pieces in (
        ("ab", [b"ab"]),
        ("abbc", [b"ab", b"bc"]),
        ("abcd", [b"abc", b"d"]),
        ("abc", [b"abc"]),
        ("x ab\n", [b"x", b" ab", b"\n"]),
        ("\u00e9", [b"\xc3", b"\xa9"]),
    ):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == [22 + PIECES.index(piece) for piece in pieces], text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("[INST]ab").ids == [1, 3, 22 + 256]
    assert [tokenizer.id_to_token(number) for number in (0, 2, 19, 20, 21)] == [
        *("<unk>", "</s>", "[TOOL_CONTENT]", "<SPECIAL_20>", "<SPECIAL_21>")
    ]


def test_special_tokens_that_a_file_lists(tmp_path: Path) -> None:
    listed = [{"rank": 0, "token_str": "<mine>", "is_control": True}]
    tokenizer = load_tokenizer(tekken(tmp_path, special_tokens=listed))
    assert tokenizer.encode("<mine>ab").ids == [0, 22 + 256]
    assert tokenizer.id_to_token(1) == "<SPECIAL_1>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {}}, "'default_vocab_size' is missing"),
        ({"vocab": []}, "its vocabulary has no 260 different pieces"),
        (
            {"special_tokens": [{"rank": 0, "token_str": "<SPECIAL_1>"}]},
            "its special tokens are not all different texts",
        ),
        ({"special_tokens": [{"rank": 0, "token_str": "ab"}]}, "'ab' is a special token and a piece of text"),
    ],
)
def test_what_is_no_vocabulary_of_mistral(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=rf"json cannot be converted: {message}.*; save the tokenizer as"):
        load_tokenizer(tekken(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "pieces", "reason"),
    [
        ({"default_num_special_tokens": 10**11}, PIECES, "default_num_special_tokens is 100000000000; a whole number"),
        ({"default_num_special_tokens": -3}, PIECES, "default_num_special_tokens is -3; a whole number from 0 to"),
        ({"default_vocab_size": 1e30}, PIECES, r"default_vocab_size is 1e\+30; a whole number"),
        ({}, [*PIECES[:-1], b"a" * 1025], "a piece of its vocabulary has more than 1,024 bytes"),
    ],
)
def test_sizes_of_a_tekken_file_are_bounded(
    changes: dict[str, Any], pieces: list[bytes], reason: str, tmp_path: Path
) -> None:
    """Each would take memory or time without end."""
    config = {"pattern": r"\p{L}+", "default_vocab_size": len(pieces) + 22, "default_num_special_tokens": 22} | changes
    vocab = [{"rank": i, "token_bytes": base64.b64encode(p).decode()} for i, p in enumerate(pieces)]
    with pytest.raises(UnsupportedError, match=f"tekken.json cannot be converted: {reason}"):
        load_tokenizer(tekken(tmp_path, config=config, vocab=vocab))


def test_tiktoken_needs_its_package(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"YQ== 0\n")
    monkeypatch.setattr(tokenizer_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"tiktoken\.model needs the tiktoken package"):
        tokenizer_files.tokenizer_files(tmp_path)


def sentencepiece_model(folder: Path, **settings: Any) -> Any:
    """A small SentencePiece model of byte-pair encoding beside a configuration of Llama; its processor."""
    lines = [f"    if value_{number} == 'Grüße':\n        return  {number}\n" for number in range(60)]
    written = io.BytesIO()
    usual = {"model_type": "bpe", "vocab_size": 340, "byte_fallback": True, "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        normalization_rule_name="identity",
        user_defined_symbols=["<mine>"],
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **(usual | settings),
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_merged_as_sentencepiece_merges_them(prefix: bool, tmp_path: Path) -> None:
    """transformers left out the space before texts, and merged pieces in the order of their numbers."""
    processor = sentencepiece_model(tmp_path, add_dummy_prefix=prefix)
    tokenizer = load_tokenizer(tmp_path)
    for text in ("if value_1 == 'Grüße':\n        return  2", " x", "\n    é日", "", "return return"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == processor.encode(text), text
        assert tokenizer.decode(ids) == text


def test_tokens_that_differ_from_sentencepiece_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentencepiece_model(tmp_path)
    monkeypatch.setattr(sentencepiece_files, "_set_merges", lambda model, file: model.update(merges=[]))
    with pytest.raises(UnsupportedError, match=r"transformers gives 'two  spaces.* other tokens than sentencep"):
        load_tokenizer(tmp_path)


def test_pieces_of_a_sentencepiece_file_are_bounded() -> None:
    piece = SimpleNamespace(piece="a" * 1025, score=0.0, type=1)
    with pytest.raises(ValueError, match="a piece of its vocabulary has more than 1,024 characters"):
        sentencepiece_files._set_merges({}, SimpleNamespace(pieces=[piece]))
