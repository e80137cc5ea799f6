"""Traces kept between builds: found again only where nothing that decided them has changed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from qcompile import pipeline
from qcompile.checkpoints import frontend, traces
from qcompile.cli import doctor

LLAMA = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=1,
    vocab_size=128,
    max_position_embeddings=64,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCOMPILE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What was traced, in order."""
    seen: list[Any] = []
    load = frontend.load
    monkeypatch.setattr(frontend, "load", lambda model, **source: (seen.append(model), load(model, **source))[1])
    yield seen


def saved(config: Any, folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def digests(root: Path) -> dict[str, str]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_an_artifact_from_a_kept_trace_is_the_same_bytes(tmp_path: Path, imports: list[Any]) -> None:
    model = saved(LLAMA, tmp_path / "model")
    built = []
    for name in ("first", "again"):
        pipeline.build(model, tmp_path / name, recipe="qserve")
        built.append(digests(tmp_path / name))
    assert len(imports) == 1 and built[0] == built[1]


def test_weights_are_read_anew(tmp_path: Path, imports: list[Any]) -> None:
    model = saved(LLAMA, tmp_path / "model")
    result = []
    for seed in (0, 1):
        saved(LLAMA, model, seed)
        weights = pipeline.plan(model).graphs[0].weights
        name = next(name for name in weights.entries if "embed" in name)
        result.append(weights[name])
        assert torch.equal(result[-1], load_file(model / "model.safetensors")[name])
    assert len(imports) == 1 and not torch.equal(*result)


def test_another_configuration_software_or_set_of_weights_is_traced(
    tmp_path: Path, imports: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(LLAMA, tmp_path / "model")
    pipeline.plan(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    changed = pipeline.plan(model).graphs[0].calls("rms_norm")[0].args[2]
    assert len(imports) == 2 and changed == 0.5
    weights = load_file(model / "model.safetensors")
    save_file({name: value.half() for name, value in weights.items()}, model / "model.safetensors", {"format": "pt"})
    pipeline.plan(model)
    assert len(imports) == 3
    shutil.copytree(model, tmp_path / "other name")
    assert pipeline.plan(tmp_path / "other name").graphs[0].info.name == "other name" and len(imports) == 4
    monkeypatch.setattr(traces, "_source_digest", lambda: b"other code")
    pipeline.plan(model)
    assert len(imports) == 5
    pipeline.plan(model)
    assert len(imports) == 5


def test_what_depends_on_values_is_not_kept(tmp_path: Path, imports: list[Any]) -> None:
    """GPT-2 stores its weights transposed; weights said to be tied are compared where a checkpoint has both."""
    gpt2 = saved(GPT2Config(n_embd=64, n_head=4, n_layer=1, vocab_size=128, n_positions=64), tmp_path / "gpt2")
    tied = saved(LlamaConfig(**LLAMA.to_diff_dict() | {"tie_word_embeddings": True}), tmp_path / "tied")
    weights = load_file(tied / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tied / "model.safetensors", {"format": "pt"})
    for model in (gpt2, tied):
        for _ in range(2):
            pipeline.plan(model)
    assert len(imports) == 4 and not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_damaged_trace_is_made_again(tmp_path: Path, imports: list[Any]) -> None:
    model = saved(LLAMA, tmp_path / "model")
    pipeline.plan(model)
    (kept,) = (tmp_path / "cache").rglob("*.safetensors")
    whole = kept.read_bytes()
    for damage in (b"", whole[: len(whole) // 2], whole.replace(b"rms_norm", b"rms_nrom")):
        kept.write_bytes(damage)
        pipeline.plan(model)
        assert kept.read_bytes() == whole
    assert len(imports) == 4


def test_doctor_finds_traces_and_builds_find_its(tmp_path: Path, imports: list[Any]) -> None:
    model = saved(LLAMA, tmp_path / "model")
    result = [doctor.examine(str(model), "cpu", "w4a8", {}, None, allow_remote=False).as_json() for _ in range(2)]
    assert len(imports) == 1 and result[0] == result[1]
    pipeline.plan(model, allow_remote=True)  # its own code may have changed
    assert len(imports) == 2


def test_builds_that_check_their_passes_trace_anew(tmp_path: Path, imports: list[Any]) -> None:
    model = saved(LLAMA, tmp_path / "model")
    pipeline.build(model, tmp_path / "out", recipe="w4a8", check_passes=True)
    pipeline.build(model, tmp_path / "again", recipe="w4a8", check_passes=True)
    assert len(imports) == 2  # every pass is checked then, raising too
