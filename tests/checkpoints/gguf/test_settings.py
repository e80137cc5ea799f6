"""Settings and tensors of GGUF files that are translated, and those that are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from tokenizers import Tokenizer

from qcompile.checkpoints import hub
from qcompile.checkpoints.gguf import header as headers
from qcompile.checkpoints.gguf import tensors as stored
from qcompile.checkpoints.gguf.configuration import configuration
from qcompile.checkpoints.gguf.header import KINDS, Header, Kind, TensorPlace, read_header
from qcompile.checkpoints.gguf.tokenizer import tokenizer_files
from qcompile.checkpoints.stored import formats
from qcompile.errors import QCompileError, UnsupportedError, UsageError
from tests.checkpoints.gguf.writing import File, Tensor, floats
from tests.support.make_gguf import FILES


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCOMPILE_CACHE", str(tmp_path / "cache"))


def changed(name: str, **metadata: Any) -> Header:
    """The header of the file `name` with other metadata; None removes an entry, and __ stands for a dot."""
    header = read_header(FILES / f"{name}.gguf")
    for key, value in metadata.items():
        header.metadata[key.replace("__", ".")] = value
        if value is None:
            del header.metadata[key.replace("__", ".")]
    return header


def config(name: str, **metadata: Any) -> dict[str, Any]:
    return configuration(changed(name, **metadata), {})


BAD, NO = UsageError, UnsupportedError
REFUSED: dict[str, tuple[str, dict[str, Any], type[QCompileError], str]] = {
    "an unknown architecture": ("llama", {"general__architecture": "rwkv7"}, NO, "'rwkv7' is not read, only llama,"),
    "no architecture": ("llama", {"general__architecture": None}, BAD, "has no general.architecture, a name"),
    "an architecture that is a number": ("llama", {"general__architecture": 3}, BAD, "has no general.architecture"),
    "an unknown setting": ("llama", {"llama__attention__scale": 0.3}, NO, "llama.attention.scale is not read, and may"),
    "no width": ("llama", {"llama__embedding_length": None}, BAD, "llama.embedding_length is missing"),
    "a width in words": ("llama", {"llama__embedding_length": "16"}, BAD, "embedding_length is '16'; a number"),
    "more blocks than tensors": (
        "llama",
        {"llama__block_count": 60_000},
        BAD,
        "is 60000, but the tensors are those of 1",
    ),
    "no heads": ("llama", {"llama__attention__head_count": 0}, BAD, "attention.head_count is 0; a positive whole"),
    "a wrong vocabulary": ("llama", {"llama__vocab_size": 99}, NO, "vocab_size is 99; only 64 is read"),
    "values of another size": ("llama", {"llama__attention__value_length": 4}, NO, "value_length is 4; only 8 is read"),
    "layers that differ": (
        "llama",
        {"llama__attention__head_count": [2, 4]},
        NO,
        "layers differ in llama.attention.head_count",
    ),
    "an unknown scaling": ("llama", {"llama__rope__scaling__type": "odd"}, NO, "rope.scaling.type 'odd' is not read"),
    "more rotated than there is": ("llama", {"llama__rope__dimension_count": 9}, BAD, "dimension_count is 9; heads"),
    "an end that is no number": ("llama", {"tokenizer__ggml__eos_token_id": "x"}, BAD, "eos_token_id is 'x'"),
    "a window without a size": (
        "gemma3",
        {"gemma3__attention__sliding_window": None},
        BAD,
        "sliding_window is missing",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    name, metadata, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        config(name, **metadata)


def test_translated() -> None:
    assert config("llama", llama__attention__head_count_kv=[2, 2])["num_key_value_heads"] == 2
    assert config("llama", llama__rope__freq_base=1e6)["rope_parameters"]["rope_theta"] == 1e6
    assert config("llama", llama__rope__dimension_count=4)["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert config("llama", tokenizer__ggml__eot_token_id=7)["eos_token_id"] == [1, 7]
    header = changed("llama")
    del header.tensors["token_embd.weight"]
    with pytest.raises(UsageError, match=r"no tensor token_embd\.weight, a table"):
        configuration(header, {})


# ---- tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_every_type(tmp_path: Path, kind: Kind) -> None:
    """Random blocks give the numbers that the gguf package gives, also where bands of rows divide them."""
    number = GGMLQuantizationType[kind.name]
    assert GGML_QUANT_SIZES[number] == (kind.block, kind.size) and KINDS[int(number)] == kind
    rows, columns = 5, 3 * kind.block
    data = np.random.default_rng(0).integers(0, 256, (rows, 3 * kind.size), dtype=np.uint8)
    path = tmp_path / "blocks"
    path.write_bytes(b"xyz!" + data.tobytes())
    before, stored.BAND = stored.BAND, 2 * columns
    try:
        value = stored.read("w", TensorPlace(path, kind, (rows, columns), 4, 4 + data.size))
    finally:
        stored.BAND = before
    with np.errstate(all="ignore"):  # random scales may be none
        wanted = dequantize(data, number)
    assert np.array_equal(value.float().numpy(), wanted.astype(np.float32), equal_nan=True)


Edit = Callable[[Header], None]


def renamed(old: str, new: str) -> Edit:
    def edit(header: Header) -> None:
        header.tensors[new] = header.tensors.pop(old)

    return edit


def opened(name: str, monkeypatch: pytest.MonkeyPatch, edit: Edit) -> formats.Checkpoint:
    folder = hub.find(FILES / f"{name}.gguf")

    def read(path: Path) -> Header:
        header = headers.read_header(path)
        edit(header)
        return header

    monkeypatch.setattr(stored, "read_header", read)
    return formats.open_checkpoint(folder)


def test_tensors_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    up = "blk.0.ffn_up.weight"
    with pytest.raises(UnsupportedError, match=r"tensor 'blk\.0\.ffn_sub_norm\.weight' of architecture llama"):
        opened("llama", monkeypatch, renamed(up, "blk.0.ffn_sub_norm.weight"))
    with pytest.raises(UnsupportedError, match=r"tensor 'v\.patch\.weight'"):
        opened("llama", monkeypatch, renamed(up, "v.patch.weight"))
    checkpoint = opened("llama", monkeypatch, renamed(up, "blk.9.ffn_up.weight"))
    with pytest.raises(UsageError, match=r"up_proj\.weight is missing"):
        checkpoint.require("model.layers.0.mlp.up_proj.weight", (8, 16))

    def odd_heads(header: Header) -> None:
        header.metadata["llama.attention.head_count"] = 3

    with pytest.raises(UsageError, match="has 16 rows for 3 heads"):
        opened("llama", monkeypatch, odd_heads)


def test_a_model_in_parts(tmp_path: Path) -> None:
    header = read_header(FILES / "llama.gguf")
    raw = (FILES / "llama.gguf").read_bytes()
    names = sorted(header.tensors)
    kinds = {kind: number for number, kind in KINDS.items()}
    for number in (1, 2):
        chosen = {name: header.tensors[name] for name in names[number - 1 :: 2]}
        tensors = {n: Tensor(p.shape, raw[p.begin : p.end], kinds[p.kind]) for n, p in chosen.items()}
        more = header.metadata if number == 1 else {}
        more = {key: value for key, value in more.items() if value != []} | {"split.count": 2, "split.no": number - 1}
        File(more, tensors).write(tmp_path / f"m-0000{number}-of-00002.gguf")
    whole, parts = hub.find(FILES / "llama.gguf"), hub.find(tmp_path / "m-00001-of-00002.gguf")
    assert parts.name == "m"
    a, b = formats.open_checkpoint(whole), formats.open_checkpoint(parts)
    assert set(a) == set(b) and all(torch.equal(a.load(name), b.load(name)) for name in a)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(UsageError, match=r"m-00002-of-00002\.gguf is missing: m-00001-of-00002.gguf is one of 2"):
        hub.find(tmp_path / "m-00001-of-00002.gguf")
    shutil.copy(tmp_path / "m-00001-of-00002.gguf", tmp_path / "alone.gguf")
    with pytest.raises(UsageError, match="is one of 2 files: give the first"):
        hub.find(tmp_path / "alone.gguf")
    with pytest.raises(UsageError, match=r"split\.count is 'x'; a whole number"):
        hub.find(File(read_header(FILES / "llama.gguf").metadata | {"split.count": "x"}).write(tmp_path / "odd.gguf"))


def test_factors_of_frequencies(tmp_path: Path) -> None:
    header = read_header(FILES / "llama-scaled.gguf")
    given = json.loads((hub.find(FILES / "llama-scaled.gguf") / "config.json").read_text())["rope_parameters"]
    assert given["short_factor"] == given["long_factor"] and given["attention_factor"] == 1.0
    metadata = {key: value for key, value in header.metadata.items() if value != []}
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        file = File(metadata, {"rope_freqs.weight": floats([1.0, wrong]), "token_embd.weight": floats([[1.0]])})
        with pytest.raises(UsageError, match=r"rope_freqs\.weight holds numbers that cannot divide"):
            hub.find(file.write(tmp_path / "m.gguf"))


# ---- tokenizers ------------------------------------------------------------------------------------


def test_how_texts_are_split_is_not_guessed(tmp_path: Path) -> None:
    header = changed("llama", tokenizer__ggml__pre="mine")
    with pytest.raises(UnsupportedError, match="its pre-tokenizer 'mine' splits texts is unknown: put the tokenizer"):
        tokenizer_files(header)
    metadata = {key: value for key, value in header.metadata.items() if value != []}
    raw = (FILES / "llama.gguf").read_bytes()
    tensors = {
        n: Tensor(p.shape, raw[p.begin : p.end], 30 if p.kind.name == "BF16" else 0) for n, p in header.tensors.items()
    }
    path = File(metadata, tensors).write(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedError, match="pre-tokenizer 'mine'"):
        hub.find(path)
    shutil.copy(hub.find(FILES / "llama.gguf") / "tokenizer.json", tmp_path)
    assert (hub.find(path) / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_no_space_before_texts() -> None:
    content = tokenizer_files(changed("mistral", tokenizer__ggml__add_space_prefix=False))["tokenizer.json"]
    tokenizer = Tokenizer.from_str(content.decode())
    assert tokenizer.encode("add", add_special_tokens=False).tokens[0] == "a"
    assert tokenizer.decode(tokenizer.encode(" add").ids) == " add"


def test_tokenizers_that_are_refused() -> None:
    for metadata, error, message in (
        ({"tokenizer__ggml__tokens": 3}, UsageError, "tokens is no list of texts"),
        ({"tokenizer__ggml__bos_token_id": 10**6}, UsageError, "bos_token_id is 1000000; the vocabulary has"),
        ({"tokenizer__ggml__pre": ["llama3"]}, UsageError, r"ggml.pre is \['llama3'\]; a text belongs there"),
        ({"tokenizer__chat_template": 7}, UsageError, "chat_template is 7; a text belongs there"),
        ({"tokenizer__ggml__model": "bert"}, UnsupportedError, "its tokenizer cannot be converted: "),
    ):
        with pytest.raises(error, match=message):
            tokenizer_files(changed("llama", **metadata))
    assert tokenizer_files(changed("llama", tokenizer__ggml__tokens=None)) == {}


def test_the_template_and_what_is_put_around_texts() -> None:
    files = tokenizer_files(changed("llama", tokenizer__ggml__add_bos_token=True, tokenizer__ggml__add_eos_token=True))
    assert files["chat_template.jinja"].startswith(b"{% for m in messages %}")
    tokens = Tokenizer.from_str(files["tokenizer.json"].decode()).encode("def").tokens
    assert (tokens[0], tokens[-1]) == ("<|begin|>", "<|end|>")


# ---- the folder ------------------------------------------------------------------------------------


def test_files_that_are_no_models(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"not a model of anything at all")
    for _ in range(2):
        with pytest.raises(UsageError, match="is no GGUF file"):
            hub.find(path)
    assert not list((tmp_path / "cache").glob("gguf/*"))
    with pytest.raises(UsageError, match=r"absent\.gguf does not exist"):
        hub.check(tmp_path / "absent.gguf")
    with pytest.raises(UsageError, match="is a file, and revisions are those of the hub"):
        hub.find(FILES / "llama.gguf", revision="main")
