"""Front end: checkpoints with transformers' own loading rules, and what is refused before anything is built."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qcompile import check
from qcompile.checkpoints import frontend, hub, tokenizer_files
from qcompile.checkpoints.attention_interface import attention
from qcompile.errors import QCompileError, ResourceError, UnsupportedError, UsageError
from qcompile.graph import Graph
from qcompile.passes.base import apply
from qcompile.passes.raising import Raise
from tests.support.cases import first

SAMPLES = Path(__file__).parents[2] / "samples"
SETTINGS: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}


def llama(path: Path, **changes: Any) -> Path:
    """A tiny random Llama saved at `path`, its norms random too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    module = LlamaForCausalLM(LlamaConfig(**SETTINGS | changes))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1, 0.3)
    module.save_pretrained(path)
    return path


def logits(path: Path, ids: Tensor) -> Tensor:
    """What transformers computes in float32."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return module(ids).logits


def agrees(path: Path) -> Graph:
    """Assert that the raised graph of `path` has transformers' logits, and give it."""
    graph = apply(Raise(), frontend.load(path)).graph
    ids = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(11).expand(2, 11)
    assert check.max_relative_error(graph.run(ids, positions), logits(path, ids)) < 3e-6
    return graph


# ---- checkpoints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tie_word_embeddings": True}, marks=pytest.mark.exhaustive),
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 1, "head_dim": 16},
        pytest.param(
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
            marks=pytest.mark.exhaustive,
        ),
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 500.0,
            }
        },
        pytest.param(
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["tied", "untied with biases", "one kv head", "linear rope", "llama3 rope", "yarn rope"],
)
def test_llama(tmp_path: Path, changes: dict[str, Any]) -> None:
    graph = agrees(llama(tmp_path, **changes))
    info = graph.info
    assert (info.vocab_size, info.max_position, info.bos_token_id, info.eos_token_ids) == (61, 128, 1, (2, 3))
    assert info.parameters == sum(t.numel() for t in load_file(tmp_path / "model.safetensors").values())


def test_sliding_window(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**SETTINGS, sliding_window=4)).save_pretrained(tmp_path)
    graph = agrees(tmp_path)
    assert [node.args[4] for node in graph.calls("attention")] == [4]


@pytest.mark.parametrize("present", first(("lm_head.weight",), ["lm_head.weight", "model.embed_tokens.weight"]))
def test_tied_weight_under_either_name(tmp_path: Path, present: str) -> None:
    llama(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[present] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    agrees(tmp_path)


@pytest.mark.parametrize("same", [True, False])
def test_both_tied_names_in_the_file(tmp_path: Path, same: bool) -> None:
    """transformers ties them when the values agree, and keeps both when they do not."""
    llama(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"] = head if same else head.flip(0)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    graph = agrees(tmp_path)
    assert graph.info.parameters == sum(t.numel() for t in tensors.values()) - (head.numel() if same else 0)


@pytest.mark.parametrize("same", [True, False])
def test_a_weight_under_two_names(tmp_path: Path, same: bool) -> None:
    """transformers would choose between different ones by their order in the file."""
    llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["norm.weight"] = tensors["model.norm.weight"] * (1 if same else 2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    if same:
        agrees(tmp_path)
        return
    with pytest.raises(
        UsageError, match=r"tensors .*norm\.weight and .*norm\.weight differ, and both are weight model"
    ):
        frontend.load(tmp_path)


def test_shards_and_half_precision(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    llama(tmp_path / "whole")
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)
    module.save_pretrained(tmp_path / "shards", max_shard_size="12KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    agrees(tmp_path / "shards")


def test_names_without_the_base_prefix(tmp_path: Path) -> None:
    llama(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.removeprefix("model."): value for name, value in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    agrees(tmp_path)


def test_importing_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qcompile.checkpoints.checkpoint import Checkpoint

    llama(tmp_path)
    read: list[str] = []
    raw = Checkpoint.raw
    monkeypatch.setattr(Checkpoint, "raw", lambda self, name: read.append(name) or raw(self, name))
    graph = apply(Raise(), frontend.load(tmp_path)).graph
    assert read == []
    assert graph.weights["model.norm.weight"].shape == (32,)
    assert read == ["model.norm.weight"]


def test_configuration_alone(tmp_path: Path) -> None:
    llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    graph = apply(Raise(), frontend.load(tmp_path, weights=False)).graph
    assert len(graph.calls("attention")) == 1
    with pytest.raises(UnsupportedError, match=r"weight model\.norm\.weight was not given"):
        graph.weights["model.norm.weight"]


# ---- refused checkpoints -------------------------------------------------------------------------------

Edit = Callable[[Path], None]


def config(**changes: Any) -> Edit:
    """An edit of config.json; None removes a key."""

    def edit(path: Path) -> None:
        settings = json.loads((path / "config.json").read_text()) | changes
        settings = {key: value for key, value in settings.items() if value is not None}
        (path / "config.json").write_text(json.dumps(settings))

    return edit


def weights(change: Callable[[dict[str, Tensor]], Any]) -> Edit:
    """An edit of the tensors in the file."""

    def edit(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return edit


NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
REFUSED: dict[str, tuple[Edit, type[QCompileError], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), UsageError, "config.json is missing"),
    "config is garbage": (lambda p: (p / "config.json").write_bytes(b"\xff{"), UsageError, "not readable JSON"),
    "config is a list": (lambda p: (p / "config.json").write_text("[]"), UsageError, "JSON list where an object"),
    "config of no layers": (config(num_hidden_layers=-3), UsageError, "num_hidden_layers must be positive, is -3"),
    "config too deep": (config(num_hidden_layers=1025), UsageError, "it must be from 1 to 1024"),
    "config far too deep": (config(num_hidden_layers=10**8), UsageError, "num_hidden_layers must be less than 65536"),
    "config too wide": (
        config(intermediate_size=10**12),
        UsageError,
        "intermediate_size must be less than 4194304, is 1000000000000",
    ),
    "config without a type": (config(model_type=None), UsageError, "has no model_type"),
    "config with bad values": (config(hidden_size="many"), UsageError, "hidden_size must be positive, is 'many'"),
    "unknown type": (config(model_type="llamma9"), UnsupportedError, "model type llamma9 is unknown"),
    "own code": (
        config(model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Mine"}),
        UnsupportedError,
        "model type mine is unknown to transformers and wants its own code run",
    ),
    "quantized": (
        config(quantization_config={"quant_method": "quip", "bits": 4}),
        UnsupportedError,
        r"already quantized \(quip\)",
    ),
    "encoder": (
        config(model_type="bert", architectures=["BertForMaskedLM"]),
        UnsupportedError,
        "BertForMaskedLM is not a decoder",
    ),
    "encoder-decoder": (
        config(model_type="t5", architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True),
        UnsupportedError,
        "t5 is an encoder-decoder",
    ),
    "token numbers that are none": (config(eos_token_id="</s>"), QCompileError, "eos_token_id"),
    "no length": (config(max_position_embeddings=0), QCompileError, "max_position_embeddings"),
    "missing tensor": (weights(lambda t: t.pop(DOWN)), UsageError, f"tensor {DOWN} is missing"),
    "wrong shape": (
        weights(lambda t: t.update({DOWN: torch.ones(32, 73)})),
        UsageError,
        rf"tensor {DOWN} has shape \[32, 73\], the model needs \[32, 72\]",
    ),
    "integer weight": (
        weights(lambda t: t.update({DOWN: torch.ones(32, 72, dtype=torch.int8)})),
        UnsupportedError,
        f"tensor {DOWN} is of integer type",
    ),
    "pickle": (
        lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin") and None,
        UnsupportedError,
        "only pickled weights",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("case", REFUSED)
def test_refused(saved: Path, tmp_path: Path, case: str) -> None:
    edit, error, message = REFUSED[case]
    shutil.copytree(saved, tmp_path / "model")
    edit(tmp_path / "model")
    with pytest.raises(error, match=message) as caught:
        frontend.load(tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code in (2, 3)


@pytest.mark.parametrize("value", first((float("inf"),), [float("nan"), float("inf")]))
def test_value_that_is_not_finite(saved: Path, tmp_path: Path, value: float) -> None:
    shutil.copytree(saved, tmp_path / "model")
    weights(lambda t: t[DOWN].view(-1)[100:101].fill_(value))(tmp_path / "model")
    graph = apply(Raise(), frontend.load(tmp_path / "model")).graph
    with pytest.raises(UsageError, match=f"weight {DOWN} holds NaN or infinite"):
        graph.run(torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None])


def test_not_a_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere does not exist"):
        frontend.load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="nowhere does not exist"):
        frontend.load("nowhere")


def test_unknown_attention_option() -> None:
    q = torch.zeros(1, 4, 3, 8)
    with pytest.raises(UnsupportedError, match="attention option position_bias"):
        attention(nn.Module(), q, q, q, None, position_bias=q)


# ---- tokenizers ----------------------------------------------------------------------------------------


def test_tokenizer_files() -> None:
    files = tokenizer_files.tokenizer_files(SAMPLES / "pycode-1m")
    assert files["tokenizer.json"] == (SAMPLES / "pycode-1m" / "tokenizer.json").read_bytes()
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}


def test_a_chat_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Where transformers writes it; nothing else says how to talk to the model."""
    (tmp_path / "chat_template.jinja").write_bytes("{{ 'é' }}".encode())
    assert tokenizer_files.tokenizer_files(tmp_path) == {"chat_template.jinja": "{{ 'é' }}".encode()}
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"chat_template\.jinja is not text"):
        tokenizer_files.tokenizer_files(tmp_path)


def test_no_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_files.tokenizer_files(tmp_path) == {}


def test_sentencepiece_model_becomes_json(tmp_path: Path) -> None:
    from sentencepiece import sentencepiece_model_pb2 as pieces

    model = pieces.ModelProto()
    for text, kind in [
        ("<unk>", 2),
        ("<s>", 3),
        ("</s>", 3),
        *((f"<0x{i:02X}>", 6) for i in range(256)),
        ("\u2581ab", 1),
    ]:
        model.pieces.add(piece=text, score=0.0, type=kind)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, True
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    files = tokenizer_files.tokenizer_files(tmp_path)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    assert files == tokenizer_files.tokenizer_files(tmp_path)
    assert json.loads(files["tokenizer.json"])["model"]["vocab"]["\u2581ab"] == 259


@pytest.mark.parametrize(("package", "module"), [("sentencepiece", "sentencepiece"), ("protobuf", "google.protobuf")])
def test_packages_that_convert_are_named(package: str, module: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"a model")
    monkeypatch.setattr(tokenizer_files.importlib.util, "find_spec", lambda name: None if name == module else name)
    with pytest.raises(ResourceError, match=rf"needs the {package} package to be converted: pip install"):
        tokenizer_files.tokenizer_files(tmp_path)


def test_tokenizer_that_cannot_be_converted(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(QCompileError, match=r"tokenizer\.model"):
        tokenizer_files.tokenizer_files(tmp_path)


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(name=name, **options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.find("someone/model") == tmp_path
    assert asked["name"] == "someone/model"
    assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in asked["allow_patterns"])
    assert "chat_template.jinja" in asked["allow_patterns"]

    def offline(name: str, **options: Any) -> str:
        raise OSError("no network\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UsageError, match=r"nor reachable on the hub: no network$"):
        hub.find("someone/model")


def test_a_size_is_checked_by_both_of_its_names() -> None:
    from transformers import GPT2Config

    from qcompile.checkpoints.sizes import check_sizes

    raw = {"model_type": "gpt2", "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64}
    check_sizes(Path("config.json"), raw, {"gpt2": GPT2Config})
    with pytest.raises(UsageError, match=r"config.json: max_position_embeddings must be less than 16777216"):
        check_sizes(Path("config.json"), raw | {"max_position_embeddings": 1 << 26}, {"gpt2": GPT2Config})
    with pytest.raises(UsageError, match=r"config.json: n_positions must be positive, is 0"):
        check_sizes(Path("config.json"), raw | {"n_positions": 0}, {"gpt2": GPT2Config})
