"""Calibration text: what is taken of it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers

from qcompile import sample_text
from qcompile.calibration import Calibration, CalibrationSource, open_source, read
from qcompile.checkpoints.tokenizer_files import load_tokenizer
from qcompile.errors import ResourceError, UsageError
from tests.conftest import SAMPLE
from tests.support.graphs import decoder

TOKENIZER = load_tokenizer(SAMPLE)
MODEL: Any = {"bos": None, "vocabulary": 10, "context": 64}
WORDS = "".join(f"def add{i}(a, b):\n    return a + {i * i} * b\n" for i in range(40))


def sample(path: Path, **options: int) -> Calibration:
    settings = {"bos": 0, "vocabulary": 8192, "samples": 3, "length": 32, "seed": 0} | options
    return read(path, TOKENIZER, **settings)  # type: ignore[arg-type]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "calib.jsonl"
    path.write_text("\n".join(json.dumps({"text": WORDS + str(i)}) for i in range(5)) + "\n")
    return path


def test_lines_are_json_behind_a_mark_and_around_other_ends_of_lines(text: Path) -> None:
    """A mark before UTF-8 must not make them plain text, nor a line separator within a text two lines."""
    lines = [json.dumps({"text": WORDS.replace("return", "\u2028\x85")}, ensure_ascii=False) for _ in range(3)]
    text.write_text("\r\n".join(lines), encoding="utf-8")
    plain = sample(text).tokens
    text.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    assert torch.equal(sample(text).tokens, plain)
    assert '"text"' not in TOKENIZER.decode(plain.flatten().tolist())
    for wrong in ('{"text": "\\ud800"}', '{"text": 3}', '{"text": null}', "{}"):
        text.write_text(lines[0] + "\n" + wrong)
        with pytest.raises(UsageError, match='line 2: not a JSON object with a "text"'):
            sample(text)


def test_samples_are_windows_of_the_joined_documents(text: Path) -> None:
    stream: list[int] = []
    for i in range(5):
        stream += [0, *TOKENIZER.encode(WORDS + str(i), add_special_tokens=False).ids]
    result = sample(text)
    assert result.tokens.shape == (3, 32) and result.source == "calib.jsonl"
    windows = [stream[i : i + 32] for i in range(0, len(stream) - 31, 32)]
    places = [windows.index(row) for row in result.tokens.tolist()]
    assert places == sorted(places)
    assert sample(text, samples=10**6).tokens.tolist() == windows
    assert torch.equal(sample(text).tokens, result.tokens)
    assert not torch.equal(sample(text, seed=1).tokens, result.tokens)


def test_an_array_holds_the_same_documents(text: Path) -> None:
    """Read as plain text, its syntax would be in the samples; also on several lines, and under any name."""
    plain = sample(text, samples=10**6).tokens
    texts = [WORDS + str(i) for i in range(5)]
    objects = [{"text": each} for each in texts]
    for items in (json.dumps(objects), json.dumps(objects, indent=1), json.dumps(texts), " \n" + json.dumps(objects)):
        text.write_text(items)
        assert torch.equal(sample(text, samples=10**6).tokens, plain)
    text.write_text(json.dumps(objects[0], indent=1))
    assert sample(text, samples=10**6).tokens[0].tolist() == plain[0].tolist()


def test_what_only_looks_like_json_is_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "calib.txt"
    path.write_text("[1] " + WORDS)
    assert sample(path).tokens.shape == (3, 32)
    with pytest.raises(UsageError, match="line 1: not a JSON object"):
        sample(path.rename(tmp_path / "calib.json"))


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder: give plain text, JSON lines"):
        sample(tmp_path)


def test_a_table_holds_the_same_documents(text: Path, tmp_path: Path) -> None:
    documents = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    path = tmp_path / "calib.parquet"
    parquet.write_table(pyarrow.table({"text": documents, "more": list(range(len(documents)))}), path)
    assert torch.equal(sample(path).tokens, sample(text).tokens)


def test_documents_that_begin_with_the_first_token_get_no_second(text: Path) -> None:
    plain = sample(text, samples=10**6).tokens
    begin = TOKENIZER.id_to_token(0)
    text.write_text("\n".join(json.dumps({"text": begin + WORDS + str(i)}) for i in range(5)))
    assert torch.equal(sample(text, samples=10**6).tokens, plain)


def test_plain_text_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "calib.txt"
    path.write_text(WORDS)
    first = sample(path, samples=10**6).tokens.flatten().tolist()
    assert first == [0, *TOKENIZER.encode(WORDS, add_special_tokens=False).ids][: len(first)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'{"text": ""}\n', "is empty"),
        (b'{"text": "short"}\n', r"too short: it has \d+ tokens, one sample takes 32"),
        (b"\xff\xfe\x00bytes", "not text: byte 0 is not UTF-8"),
        (b"zero\0bytes", "holds zero bytes"),
        (b'{"text": "a"}\n{"body": "b"}\n', 'line 2: not a JSON object with a "text"'),
        (b'{"text": "a"}\nplain\n', "line 2: not a JSON object"),
        (b'[{"text": "a"}, {"body": "b"}]', 'item 2: not a JSON object with a "text"'),
        (b'{\n"body": "b"\n}', 'not a JSON object with a "text"'),
        (b"PK\3\4", "is a zip file: give plain text, JSON lines"),
        (b"PAR1\x15\x04", "is no table that pyarrow reads"),
    ],
)
def test_refused_with_the_reason(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "calib"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        sample(path)


def test_tokens_outside_the_vocabulary_are_refused(text: Path) -> None:
    with pytest.raises(UsageError, match="outside the model's vocabulary of 10"):
        sample(text, vocabulary=10)
    with pytest.raises(UsageError, match="holds token 10, outside"):
        open_source(CalibrationSource(torch.tensor([[1, 10]])), None, **MODEL)


FOREIGN = "天地玄黄 宇宙洪荒 日月盈昃 辰宿列张 " * 40
WORDS_KNOWN = {"<unk>": 3, "def": 4, "add": 5, "return": 6}


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel(WORDS_KNOWN, unk_token="<unk>"),  # says so
        models.WordLevel(WORDS_KNOWN, unk_token="missing"),  # gives up
        models.BPE(dict(zip("defadreturn", range(11), strict=True)), []),  # drops what it does not know
    ],
)
def test_text_that_the_tokenizer_does_not_know_is_refused(tmp_path: Path, model: models.Model) -> None:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "calib.txt"
    path.write_text(FOREIGN)
    with pytest.raises(UsageError, match=r"calib\.txt is outside the vocabulary: "):
        read(path, tokenizer, bos=0, vocabulary=16, length=8)
    path.write_text("def add return " * 20)
    assert read(path, tokenizer, bos=0, vocabulary=16, length=8).tokens.shape[0] >= 7


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_a_seed_that_no_generator_takes_is_refused(text: Path, seed: int) -> None:
    with pytest.raises(UsageError, match="must be from 0"):
        sample(text, seed=seed)


def test_refusals_of_missing_things(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read calibration text"):
        sample(tmp_path / "missing")
    with pytest.raises(UsageError, match="give token ids"):
        open_source(CalibrationSource("text"), None, **MODEL)
    with pytest.raises(ResourceError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="takes token ids"):
        Calibration(torch.zeros(0, 4, dtype=torch.int64))
    for type_ in (torch.int32, torch.uint8, torch.bool, torch.float32):
        with pytest.raises(UsageError, match="takes token ids int64"):
            open_source(CalibrationSource(torch.ones(2, 4, dtype=type_)), None, **MODEL)
    for length in (1, 65):
        with pytest.raises(UsageError, match=f"have {length} tokens; they may have 2 to 64"):
            open_source(CalibrationSource(torch.ones(2, length, dtype=torch.int64)), None, **MODEL)


def test_results_of_other_samples_of_the_same_text_are_not_taken() -> None:
    tokens, graph = torch.arange(32), decoder(layers=1)
    one, two = (Calibration(tokens.view(shape)).fingerprint(graph.content(), "") for shape in ((4, 8), (8, 4)))
    assert one != two


def test_the_sample_text_gives_samples_for_any_context() -> None:
    documents = sample_text.documents()
    assert len(documents) > 30 and all(text.strip() for text in documents) and sum(map(len, documents)) > 100_000
    result = sample(sample_text.FOLDER, samples=128, length=1024)
    assert result.describe()["source"] == "the sample text" and 30 <= len(result.tokens) <= 60
    assert result.tokens.shape[1] == 1024 and int(result.tokens[0, 0]) == 0
