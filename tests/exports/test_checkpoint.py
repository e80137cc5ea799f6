"""Artifacts written as checkpoints: what our reader and transformers read is what the artifact computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from qcompile import check, pipeline
from qcompile.artifact.export import Sequence
from qcompile.artifact.layout import CONFIG_FILE
from qcompile.artifact.packed_weights import PackedWeights
from qcompile.checkpoints.configuration import read_config
from qcompile.checkpoints.stored import formats
from qcompile.codegen.cpu import compiler
from qcompile.errors import UnsupportedError, UsageError
from qcompile.exports import checkpoint
from qcompile.exports.layout import pack_words
from qcompile.exports.origins import origins
from qcompile.exports.parameters import Parameters
from qcompile.exports.plan import ExportPlan
from qcompile.exports.tensors import Tensors
from tests.conftest import SAMPLE
from tests.support.graphs import decoder

ALIKE = 2e-5
"""Sums of float32 in another order; the weights are the same numbers."""
numbers = Tensors._numbers
UNCHANGED = {f"{name}.enabled": "false" for name in ("rotate", "fold_norms", "smooth_attention")}
"""Options that leave the values of weights to rounding alone."""
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])


def save_model(path: Path, **other: Any) -> Path:
    """A Llama of 2 layers with random bfloat16 weights, and a tokenizer."""
    settings = {
        "vocab_size": 160,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**settings | other)).to(torch.bfloat16)
    for name, value in made.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(value, 0.5, 1.5)
    made.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SAMPLE / name, path / name)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def built(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """Artifacts by recipe, with kernels that are not compiled: exports read weights and graphs only."""
    made: dict[str, Path] = {}

    def build(recipe: str, source: Path | None = None, **options: Any) -> Path:
        key = f"{recipe} {source} {options}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("artifact") / "out"
            exact = {"cache.format": "kv32"} | options.pop("options", {})
            pipeline.build(source or model, made[key], recipe=recipe, options=exact, **options)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "compile", lambda source, target, given_up: b"")
        yield build


def logits(artifact: Path) -> Tensor:
    """Logits [T, vocab] of an artifact's weights for IDS, without the rounding of activations."""
    with torch.no_grad():
        return Sequence(artifact).unrounded()(IDS[0])


def read_back(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint in float32 by our own reader of stored formats."""
    stored = formats.open_checkpoint(folder)
    return {name: stored.load(name) for name in stored}


def by_transformers(folder: Path) -> Tensor:
    """Logits [T, vocab] of transformers' model with the numbers of a checkpoint, for IDS."""
    return by_numbers(folder, read_back(folder))


def by_numbers(folder: Path, tensors: dict[str, Tensor]) -> Tensor:
    """Logits [T, vocab] of transformers' model of a folder's configuration with these tensors, for IDS."""
    config = LlamaConfig.from_pretrained(folder)
    config.__dict__.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    result = plain.load_state_dict(tensors, strict=False)
    assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}
    with torch.no_grad():
        return plain(IDS).logits[0]


def tensors_of(artifact: Path) -> Tensors:
    """The tensors of the checkpoint in an artifact."""
    weights, parameters = PackedWeights(artifact), Parameters(read_config(artifact / "source"))
    rows = parameters.assigned(origins(weights.graph, weights.row_shapes), {})
    return Tensors(weights, rows, parameters.shapes, {})


def parts(artifact: Path) -> dict[str, list[Tensor]]:
    """The parts of the rounded weights in groups of an artifact, by name of node."""
    weights = PackedWeights(artifact)
    values = {node.name: weights.value(node) for node in weights.graph.calls("quantize_weight")}
    return {name: value for name, value in values.items() if len(value) == 3}


HELD = [
    ("w4a16", "compressed-tensors"),
    ("w4a16", "gptq"),
    ("w4a16", "awq"),
    ("w4a16-g32", "compressed-tensors"),
    ("w4a16-g32", "gptq"),
    ("w4a16-g32", "awq"),
    ("w8a8", "compressed-tensors"),
    ("w8a8-g32", "compressed-tensors"),
    ("mxfp4", "compressed-tensors"),
    ("nvfp4", "compressed-tensors"),
]


@pytest.mark.parametrize(("recipe", "format"), HELD)
def test_a_checkpoint_holds_the_weights_of_the_artifact(
    recipe: str, format: str, built: Callable[..., Path], tmp_path: Path
) -> None:
    artifact, out = built(recipe), tmp_path / "out"
    written = checkpoint.write(artifact, out, format)
    assert (written.rounded, written.floats) == (14, 7)
    if recipe == "w8a8":
        assert "activations: int8_g128 in the artifact, int8 in the checkpoint's configuration" in written.notes
    assert check.max_relative_error(by_transformers(out), logits(artifact)) < ALIKE
    result, tensors = read_back(out), tensors_of(artifact)
    for name in tensors.rows:
        assert torch.equal(result[name], tensors.floats(name)), name
        for kind in tensors.formats(name):
            if recipe != "nvfp4":  # its scale of a tensor is that of joined projections
                assert torch.equal(kind.quantize(result[name])[0], tensors.parts(name)["codes"]), name


def test_a_checkpoint_is_built_with_the_same_codes(built: Callable[..., Path], tmp_path: Path) -> None:
    artifact = built("w4a16")
    checkpoint.write(artifact, tmp_path / "out", "compressed-tensors")
    again = parts(built("w4a16", tmp_path / "out"))
    for name, (codes, scale, zero) in parts(artifact).items():
        result = again[name]
        assert torch.equal(result[0], codes) and torch.equal(result[2], zero), name
        torch.testing.assert_close(result[1], scale, rtol=3e-7, atol=0)  # of products that float32 rounds


def test_a_configuration_does_not_say_how_the_model_was_stored_before() -> None:
    """Wherever the model's own configuration said it."""
    nothing = Tensors(None, {}, {}, {})  # type: ignore[arg-type]
    plan = ExportPlan(nothing, layout=None, rounded=[], floats=[], ignored=[], head=None, untied=None, notes=[])
    said = {"quantization_config": {"quant_method": "awq"}, "compression_config": {}}
    assert plan.configured({"a": 1, **said, "text_config": {"b": 2, **said}}) == {"a": 1, "text_config": {"b": 2}}


def test_a_head_that_differs_is_no_longer_tied(built: Callable[..., Path], tmp_path: Path) -> None:
    written = checkpoint.write(built("w4a16"), tmp_path / "a", "compressed-tensors")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config["quantization_config"]["ignore"] == ["lm_head"]
    assert written.notes[0].startswith("lm_head.weight: w8_sym_channel")
    checkpoint.write(built("w4a16", head_dtype="bf16"), tmp_path / "b", "compressed-tensors")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in read_back(tmp_path / "b")
    shared = built("w4a16", options={"assign_precision.embedding": "int8"})
    checkpoint.write(shared, tmp_path / "c", "compressed-tensors")
    assert json.loads((tmp_path / "c" / "config.json").read_text())["tie_word_embeddings"] is True


FOLDED = {"fold_norms.enabled": "true", "rotate.enabled": "true", "smooth.enabled": "true"}


@pytest.mark.parametrize(
    ("recipe", "options"), [("qserve", {}), ("nested", {}), ("w2t16", {}), ("mixllm", UNCHANGED), ("w8a8", FOLDED)]
)
def test_any_weights_are_written_as_floats(
    recipe: str, options: dict[str, str], built: Callable[..., Path], tmp_path: Path
) -> None:
    """Also where passes have changed them together: `qserve` rotates heads of values, FOLDED the residual stream."""
    artifact = built(recipe, options=options)
    assert checkpoint.write(artifact, tmp_path / "out", "hf").rounded == 0
    with torch.no_grad():
        made = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(IDS).logits[0]
    assert check.max_relative_error(made, logits(artifact)) < ALIKE
    norm = read_back(tmp_path / "out")["model.norm.weight"]
    assert bool((norm == 1).all()) == (
        ("fold_norms.enabled" in options and options is not UNCHANGED) or recipe == "qserve"
    )


def test_changed_weights_are_checked(
    built: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed weights are refused if the checkpoint's operators do not compute the same function with them."""
    artifact = built("w8a8", options=FOLDED)
    checkpoint.write(artifact, tmp_path / "rounded", "compressed-tensors")
    assert check.max_relative_error(by_transformers(tmp_path / "rounded"), logits(artifact)) < ALIKE
    monkeypatch.setattr(Tensors, "_numbers", lambda self, piece, shape: 1.1 * numbers(self, piece, shape))
    with pytest.raises(UnsupportedError, match=r"computes other logits \(by \d"):
        checkpoint.write(artifact, tmp_path / "out", "hf")
    with pytest.raises(UnsupportedError, match=r"node hadamard\w* rotates activations .* rotate.online=false"):
        checkpoint.write(built("w4a4", options={"rotate.online": "true"}), tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


def test_what_a_format_cannot_hold_is_named(built: Callable[..., Path], model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UnsupportedError, match=r"v_proj.weight is in qoq_g128, and compressed-tensors holds w4_asym"):
        checkpoint.write(built("qserve", options=UNCHANGED), out, "compressed-tensors")
    with pytest.raises(
        UnsupportedError, match=r"_proj.weight: \d+ of its \d+ rows have 8 bits \(\d+, .*\), the others 4"
    ):
        checkpoint.write(built("mixllm", options=UNCHANGED), out, "awq")
    odd = save_model(tmp_path / "odd", hidden_size=64, num_hidden_layers=1)
    with pytest.raises(UnsupportedError, match="has 64 inputs, and compressed-tensors holds multiples of 128"):
        checkpoint.write(built("w4a16", odd), out, "compressed-tensors")
    pipeline.build(decoder(layers=1), tmp_path / "module", recipe="w8a8")
    with pytest.raises(UnsupportedError, match=CONFIG_FILE):
        checkpoint.write(tmp_path / "module", out, "hf")
    with pytest.raises(UsageError, match=r"gguff is unknown; .*hf"):
        checkpoint.write(built("w4a16"), out, "gguff")
    with pytest.raises(UsageError, match="exists: choose another"):
        checkpoint.write(built("w4a16"), model, "hf")
    (tmp_path / "kept.gguf").write_text("of somebody")
    with pytest.raises(UsageError, match=r"kept.gguf exists: choose another file"):
        checkpoint.write(built("w4a16"), tmp_path / "kept.gguf", "gguf")
    assert (tmp_path / "kept.gguf").read_text() == "of somebody"
    assert not out.exists() and not list(tmp_path.glob(".out*"))


def test_weights_are_split_over_files(
    built: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.write(built("w8a8"), tmp_path / "one", "compressed-tensors")
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 100_000)
    checkpoint.write(built("w8a8"), tmp_path / "many", "compressed-tensors")
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 2
    one, many = read_back(tmp_path / "one"), read_back(tmp_path / "many")
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.parametrize("dim", [0, 1])
def test_codes_are_packed_in_order(dim: int) -> None:
    codes = torch.randint(0, 16, (19, 13), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    words = pack_words(codes, dim)
    assert words.dtype == torch.int32 and words.shape[dim] == -(-codes.shape[dim] // 8)
    for row in range(19):
        for column in range(13):
            place = (row, column)[dim]
            at = [row, column]
            at[dim] //= 8
            assert (int(words[*at]) >> (4 * (place % 8))) & 15 == codes[row, column]
