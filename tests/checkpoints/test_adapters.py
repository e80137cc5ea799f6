"""LoRA adapters in PEFT's format: how they are read, what they change of a model, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qcompile
from qcompile.checkpoints import frontend
from qcompile.checkpoints.adapters import check_merged, read_adapter
from qcompile.checkpoints.merging import addends, merge
from qcompile.clock import Clock, silent
from qcompile.errors import QCompileError
from qcompile.graph import Graph
from qcompile.passes.raising import Raise
from qcompile.passes.rewrite import ImportOptions, rewrite
from tests.support.adapters import made, merged_logits, pair, product, save

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
HEAD, TABLE, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def imported(tiny_checkpoint: Path) -> Graph:
    return frontend.load(tiny_checkpoint)


@pytest.fixture
def merged(imported: Graph, tmp_path: Path) -> Callable[..., Graph]:
    def merged(tensors: dict[str, Tensor], factor: str = "", **config: Any) -> Graph:
        return merge(imported, addends(f"{save(tmp_path / 'tuned', tensors, **config)}{factor}"))

    return merged


def close(got: Tensor, want: Tensor) -> bool:
    """Equal up to the rounding of a sum to float32."""
    return torch.allclose(got.double(), want, rtol=2**-23, atol=0)


@pytest.mark.parametrize(
    "factor, config, scale",
    [
        ("", {}, 6 / 4),
        ("=0.5", {}, 6 / 8),
        ("=-1", {}, -6 / 4),
        ("", {"use_rslora": True}, 6 / 2),
        ("", {"r": 9, "rank_pattern": {"self_attn.q_proj": 4}}, 6 / 4),
        ("", {"r": 9, "rank_pattern": {r"layers\.\d+\..*q_proj": 4}, "alpha_pattern": {"q_proj": 10}}, 10 / 4),
        ("", {"alpha_pattern": {"proj": 10}}, 6 / 4),  # a pattern stands for a whole part of the path
        ("", {"target_modules": ["q_proj"], "layers_to_transform": [0], "init_lora_weights": "eva"}, 6 / 4),
    ],
)
def test_a_low_rank_change(
    imported: Graph, merged: Callable[..., Graph], factor: str, config: dict[str, Any], scale: float
) -> None:
    tensors = pair(Q, 64, 64)
    graph, name = merged(tensors, factor, **config), f"{Q}.weight"
    assert close(graph.weights[name], imported.weights[name].double() + scale * product(tensors, Q))
    others = [other for other in graph.weights.entries if other != name]
    assert all(graph.weights.entries[other] is imported.weights.entries[other] for other in others)
    assert graph.info.adapters == {"tuned": float(factor[1:] or 1)} and not imported.info.adapters


def test_rows_of_given_lengths(imported: Graph, merged: Callable[..., Graph]) -> None:
    tensors = pair(DOWN, 64, 192) | {f"{DOWN}.lora_magnitude_vector": made(64, seed=3).abs() + 1}
    total = imported.weights[f"{DOWN}.weight"].double() + 6 / 4 * product(tensors, DOWN)
    rows = total / total.norm(dim=1, keepdim=True) * tensors[f"{DOWN}.lora_magnitude_vector"].double()[:, None]
    assert close(merged(tensors, use_dora=True).weights[f"{DOWN}.weight"], rows)


def test_a_table_and_whole_parameters(imported: Graph, merged: Callable[..., Graph]) -> None:
    table = TABLE.removesuffix(".weight")
    a, b = made(4, 8192, seed=4), made(64, 4, seed=5)
    tensors = {
        f"{table}.lora_embedding_A": a,
        f"{table}.lora_embedding_B": b,
        f"{table}.base_layer.weight": made(8192, 64),
    }
    graph = merged(
        tensors | {NORM: made(64, seed=6), HEAD: made(8192, 64, seed=7)}, modules_to_save=["norm", "lm_head"]
    )
    assert close(graph.weights[TABLE], made(8192, 64).double() + 6 / 4 * (b.double() @ a.double()).T)
    assert torch.equal(graph.weights[NORM], made(64, seed=6)) and torch.equal(
        graph.weights[HEAD], made(8192, 64, seed=7)
    )


def test_several_adapters_add_up(imported: Graph, tmp_path: Path) -> None:
    one, two = pair(Q, 64, 64), {name: -2 * value.roll(1) for name, value in pair(Q, 64, 64).items()}
    folders = [save(tmp_path / "one", one), f"{save(tmp_path / 'two', two)}=0.25"]
    want = imported.weights[f"{Q}.weight"].double() + 1.5 * product(one, Q) + 0.375 * product(two, Q)
    graph = merge(imported, addends(folders))
    assert torch.allclose(graph.weights[f"{Q}.weight"].double(), want, rtol=0, atol=1e-6)  # rounded after each
    assert graph.info.adapters == {"one": 1.0, "two": 0.25}


def test_an_artifact_is_the_merged_model(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder, ids = (
        save(tmp_path / "tuned", tensors := pair(Q, 64, 64) | pair(DOWN, 64, 192)),
        torch.tensor([[0, 17, 4000]]),
    )
    plain, want = merged_logits(tiny_checkpoint, {}, ids), merged_logits(tiny_checkpoint, tensors, ids)
    qcompile.build(tiny_checkpoint, tmp_path / "out", recipe="f32", lora=folder)
    manifest = json.loads((tmp_path / "out" / "qcompile.json").read_text())
    with qcompile.load(tmp_path / "out") as llm:
        got = llm.logits(ids)
    assert (got - want).abs().max() < 2e-4 < (want - plain).abs().max()
    assert manifest["model"]["adapters"] == {"tuned": 1.0}


def test_traces_hold_no_adapters(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build with an adapter keeps no trace; later builds, with the adapter or without it, share the model's."""
    monkeypatch.setenv("QCOMPILE_CACHE", str(tmp_path / "cache"))

    def weight(*lora: str) -> Tensor:
        graphs, _ = rewrite(tiny_checkpoint, (Raise(),), ImportOptions(lora=addends(lora)), Clock(silent))
        return graphs[-1].weights[f"{Q}.weight"]

    folder = str(save(tmp_path / "tuned", tensors := pair(Q, 64, 64)))
    traced = weight(folder)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    plain = weight()
    assert list((tmp_path / "cache").rglob("*.safetensors"))
    assert close(traced, plain.double() + 6 / 4 * product(tensors, Q))
    assert torch.equal(weight(folder), traced) and torch.equal(weight(), plain)


def test_a_square_weight_of_columns(tmp_path: Path) -> None:
    """GPT-2 stores weights as [inputs, outputs]; of a square one that is known by the operator that reads it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=60, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    graph = frontend.load(tmp_path / "gpt2")
    square, wide = "transformer.h.0.attn.c_proj", "transformer.h.0.attn.c_attn"
    tensors = pair(square, 32, 32) | pair(wide, 96, 32)
    result = merge(graph, addends(save(tmp_path / "tuned", tensors, fan_in_fan_out=True)))
    for module in (square, wide):
        want = graph.weights[f"{module}.weight"].double() + 6 / 4 * product(tensors, module).T
        assert close(result.weights[f"{module}.weight"], want)
    table = {"lora_embedding_A": made(4, 60), "lora_embedding_B": made(32, 4)}
    tied = save(tmp_path / "tied", {f"transformer.wte.{name}": value for name, value in table.items()})
    with pytest.raises(QCompileError, match=r"transformer.wte.weight, which .*several operators share"):
        merge(graph, addends(tied))


A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


@pytest.mark.parametrize(
    "tensors, config, reason",
    [
        ({}, {"peft_type": "LOHA"}, "peft_type is LOHA"),
        ({}, {"init_lora_weights": "pissa"}, "init_lora_weights is pissa, which changes the model's own weights"),
        ({}, {"alora_invocation_tokens": [5]}, "alora_invocation_tokens is set"),
        ({}, {"target_parameters": ["experts.gate_up_proj"]}, "target_parameters is set"),
        ({}, {"layer_replication": [[0, 2]]}, "layer_replication is set"),
        ({}, {"an_option_of_tomorrow": True}, "an_option_of_tomorrow is set"),
        ({}, {"r": 8}, "q_proj has rank 4, and adapter_config.json says 8"),
        ({}, {"r": "4"}, "r is 4; a rank belongs there"),
        ({}, {"lora_alpha": "6"}, "lora_alpha of .*q_proj is 6; a number belongs there"),
        ({}, {"rank_pattern": {"(": 4}}, r"rank_pattern: '\(' is no pattern"),
        ({}, {"alpha_pattern": {"(q|q)+x": 4}}, r"alpha_pattern: '\(q\|q\)\+x' has over 5 .* or repeats a group"),
        ({}, {"use_dora": True}, "use_dora of adapter_config.json disagree"),
        ({B: None}, {}, "q_proj lacks B: the adapter is incomplete"),
        ({B: made(64, 5)}, {}, "of different ranks"),
        ({B: made(48, 4)}, {}, r"as \[48, 64\], and the model has \[64, 64\]: it was trained for another model"),
        ({A: made(4, 64, 1, 1)}, {}, "is a convolution's"),
        ({A: made(4, 64).int()}, {}, "is of integer type"),
        ({A: made(4, 64) / 0}, {}, "holds NaN or infinite"),
        ({f"{Q}.lora_mobius": made(4)}, {}, "lora_mobius is not a part of LoRA that is read"),
        (
            pair("model.layers.9.self_attn.q_proj", 64, 64),
            {},
            "layers.9.* the model does not read by this name; ",
        ),
        ({f"{Q}.lora_B.bias": made(64)}, {"lora_bias": True}, "q_proj.bias, which the model does not read"),
    ],
)
def test_what_is_refused(
    merged: Callable[..., Graph], tensors: dict[str, Tensor | None], config: dict[str, Any], reason: str
) -> None:
    given = {name: value for name, value in {**pair(Q, 64, 64), **tensors}.items() if value is not None}
    with pytest.raises(QCompileError, match=reason) as refused:
        merged(given, **config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "tensors, config", [({NORM: made(64)}, {}), ({f"{Q}.lora_magnitude_vector": made(64)}, {"use_dora": True})]
)
def test_what_no_factor_scales(
    merged: Callable[..., Graph], tensors: dict[str, Tensor], config: dict[str, Any]
) -> None:
    with pytest.raises(QCompileError, match="with weight 1"):
        merged(pair(Q, 64, 64) | tensors, "=0.5", **config)


def test_folders_that_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = save(tmp_path / "tuned", pair(Q, 64, 64))
    for given, reason in (
        (f"{folder}=half", "'half' is no weight"),
        (f"{folder}=nan", "'nan' is no weight"),
        (str(tmp_path / "none"), "is not a folder"),
        (tiny_checkpoint, "adapter_config.json is missing"),
        ([folder, folder], "the same name"),
    ):
        with pytest.raises(QCompileError, match=reason):
            qcompile.build(tiny_checkpoint, tmp_path / "out", lora=given)  # type: ignore[arg-type]
    with pytest.raises(QCompileError, match=f"is an adapter: build its model with --lora {folder}"):
        qcompile.build(folder, tmp_path / "out")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(QCompileError, match=r"has only adapter_model\.bin"):
        addends(folder)


def test_an_adapter_beside_the_weights(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """transformers applies it: it is merged when asked for, and not dropped without a word."""
    both = save(tmp_path / "both", pair(Q, 64, 64))
    for file in ("config.json", "model.safetensors"):
        shutil.copy(tiny_checkpoint / file, both / file)
    with pytest.raises(QCompileError, match="has an adapter beside its weights"):
        qcompile.build(both, tmp_path / "out")
    check_merged(both, [read_adapter(both)])
