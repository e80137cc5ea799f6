"""Files that llama.cpp's converter made: the same logits, tokens and settings as the models that it was given.

tests/support/make_gguf.py made them, with what is expected of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import qcompile
from qcompile.checkpoints import hub, huggingface
from qcompile.checkpoints.configuration import read_config
from qcompile.checkpoints.stored import formats
from qcompile.errors import ResourceError
from tests.cli.test_app import Capture, json_of
from tests.support.make_gguf import FILES, TEXT, TOKENS

EXPECTED: dict[str, Any] = json.loads((FILES / "expected.json").read_text())
CLOSE = 2e-4
"""Of logits up to 40: transformers and this computation sum in different orders."""


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of files in a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QCOMPILE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("name", EXPECTED)
def test_logits(name: str) -> None:
    folder = hub.find(FILES / f"{name}.gguf")
    config = read_config(folder)
    config.__dict__.pop("quantization_config")
    checkpoint = formats.open_checkpoint(folder)
    with torch.device("meta"):
        shape = huggingface.build(config, attention_kind="eager")
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    names = huggingface.huggingface_weights.settle(shape, checkpoint)
    read = set(dict(shape.named_parameters(remove_duplicate=False)))
    loaders = huggingface.huggingface_weights.loaders(shape, checkpoint, names, read)
    with torch.no_grad():
        for key, value in module.named_parameters(remove_duplicate=False):
            value.copy_(loaders[key]())
        result = module(torch.tensor([TOKENS])).logits[0, -1]
    wanted = EXPECTED[name]["logits"][: len(result)]  # some converters leave out rows of no token
    assert len(result) > max(TOKENS)
    assert np.allclose(result.numpy(), wanted, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", EXPECTED)
def test_tokens(name: str) -> None:
    folder = hub.find(FILES / f"{name}.gguf")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert ids == EXPECTED[name]["tokens"]
    assert tokenizer.decode(ids) == TEXT


def test_texts_of_pieces_begin_with_the_first_token() -> None:
    folder = hub.find(FILES / "mistral.gguf")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("add").ids[0] == tokenizer.token_to_id("<s>") == 1
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    assert (facts["bos_token"], facts["eos_token"], facts["add_bos_token"]) == ("<s>", "</s>", True)


def test_a_build(tmp_path: Path, capsys: Capture) -> None:
    """As a user builds it, under the file's name; nothing is copied to the cache but what the header says."""
    path = FILES / "llama.gguf"
    out = tmp_path / "out"
    result = json_of(capsys, "build", path, "-o", out, "--recipe", "f32")
    assert result["path"] == str(out)
    with qcompile.load(out) as llm:
        assert llm.manifest["model"]["name"] == "llama"
        logits = llm.logits([TOKENS])[0][-1]
    assert np.allclose(np.asarray(logits), EXPECTED["llama"]["logits"], rtol=0, atol=CLOSE)
    (link,) = hub.find(path).glob("*.gguf")
    assert link.is_symlink() and link.resolve() == path


def test_doctor_reads_the_file(capsys: Capture) -> None:
    result = json_of(capsys, "doctor", FILES / "qwen3.gguf", "--recipe", "w4a16")
    assert result["exportable"] and result["plan"]["model"] == "qwen3"
    (remark,) = result["plan"]["remarks"]
    assert remark.startswith("weights are stored in few bits (8 in Q8_0): f32 keeps")


def test_blocks_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers and floats do not."""
    from qcompile.checkpoints.gguf import tensors

    monkeypatch.setattr(tensors.importlib.util, "find_spec", lambda name: None)
    tensors.unpacker.cache_clear()
    checkpoint = formats.open_checkpoint(hub.find(FILES / "qwen3.gguf"))
    checkpoint.load("model.norm.weight")
    with pytest.raises(ResourceError, match=r"of type Q8_0 need the gguf package: pip install 'qcompile\[gguf\]'"):
        checkpoint.load("model.layers.0.mlp.up_proj.weight")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes((FILES / "llama.gguf").read_bytes())
    first = hub.find(path)
    assert hub.find(path) == first and first.name == "m"
    path.write_bytes((FILES / "qwen3.gguf").read_bytes())
    assert json.loads((hub.find(path) / "config.json").read_text())["model_type"] == "qwen3"
