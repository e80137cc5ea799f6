"""Makes the GGUF files of tests/checkpoints/gguf/files with llama.cpp's converter, from random models of transformers.

    python -m tests.support.make_gguf LLAMA_CPP

LLAMA_CPP is a checkout of llama.cpp. `expected.json` gets the logits that transformers computes for each model of the
last of TOKENS, and the tokens that the tokenizer in place of a model's own gives for TEXT.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

FILES = Path(__file__).parents[1] / "checkpoints" / "gguf" / "files"
TOKENS = [1, 17, 60, 25, 12, 12, 3, 44, 30, 9, 2, 58, 41, 7, 19, 33]
TEXT = "def add(a, b):\n    return  a + 12 * b"
SETTINGS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """Rotary embeddings of one kind, trained on 8 tokens."""
    return {"rope_type": kind, "rope_theta": 5000.0, "original_max_position_embeddings": 8, **more}


LISTS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.3, 2.6, 2.9]}
MULTIPLIERS = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-bias-linear": ("llama", {"attention_bias": True, "rope_parameters": rope("linear", factor=4.0)}),
    "llama-scaled": (
        "llama",
        {"rope_parameters": rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)},
    ),
    "mistral": ("mistral", {"sliding_window": None, "vocab_size": 290, "bos_token_id": 1, "eos_token_id": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": rope("yarn", factor=4.0)}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3moe": ("qwen3_moe", EXPERTS | {"mlp_only_layers": []}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 4, "query_pre_attn_scalar": 8, "num_hidden_layers": 2}),
    "gemma3": ("gemma3_text", {"sliding_window": 4, "query_pre_attn_scalar": 8, "num_hidden_layers": 6}),
    "phi3-long": ("phi3", {"original_max_position_embeddings": 8, "rope_parameters": rope("longrope", **LISTS)}),
    "granite": ("granite", MULTIPLIERS | {"logits_scaling": 2.0}),
    "olmo2": ("olmo2", {}),
}
TYPES = {"qwen3": "q8_0"}
"""Types of tensors other than bfloat16; the blocks of Q8_0 have 32 numbers."""
WIDER = {"qwen3": {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}}


def tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 61 tokens, of which two are special."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=61, special_tokens=["<|begin|>", "<|end|>"], initial_alphabet=[])
    backend.train_from_iterator(
        [TEXT] * 4 + ["return add(returned, added)", "class Words(list): pass", "import json as jsons"], trainer
    )
    assert backend.get_vocab_size() == 61
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


def pieces(folder: Path) -> None:
    """A SentencePiece model of 290 tokens with bytes."""
    import sentencepiece

    text = folder / "text"
    text.write_text((TEXT + "\nreturn add(returned, added)\n") * 40)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        model_prefix=str(folder / "tokenizer"),
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
    )


def tokens(folder: Path) -> list[int]:
    """The tokens of TEXT by the tokenizer in `folder`, without transformers."""
    if (folder / "tokenizer.json").is_file():
        return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids)
    import sentencepiece

    return list(sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).encode(TEXT))


def convert(llama: Path) -> Any:
    """llama.cpp's converter, with a name for the tokenizer of 61 tokens, which it does not know."""
    sys.path[:0] = [str(llama), str(llama / "gguf-py")]
    import convert_hf_to_gguf
    from conversion import base, phi

    base.TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    real = base.TextModel._set_vocab_sentencepiece

    def vocabulary(self: Any, **options: Any) -> None:
        if (self.dir_model / "tokenizer.model").is_file():
            real(self, **options)
        else:
            self._set_vocab_gpt2()

    base.TextModel._set_vocab_sentencepiece = vocabulary
    phi.Phi3MiniModel.set_vocab = vocabulary
    return convert_hf_to_gguf


def main() -> None:
    converter = convert(Path(sys.argv[1]))
    shutil.rmtree(FILES, ignore_errors=True)
    FILES.mkdir(parents=True)
    expected: dict[str, Any] = {}
    for name, (kind, changes) in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **SETTINGS | WIDER.get(name, {}) | changes), attn_implementation="eager"
        )
        for value in model.parameters():
            value.data = (value.data if value.dim() > 1 else torch.randn_like(value) * 0.3 + 1).bfloat16().float()
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            model.save_pretrained(folder)
            (pieces if name == "mistral" else tokenizer)(folder)
            path = FILES / f"{name}.gguf"
            sys.argv = ["", "--outtype", TYPES.get(name, "bf16"), "--outfile", str(path), str(folder)]
            converter.main()
            ids = tokens(folder)
        if name in TYPES:
            from gguf import GGUFReader
            from gguf.quants import dequantize

            stored = {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}
            rounded(model, stored)
        with torch.no_grad():
            logits = model.eval()(torch.tensor([TOKENS])).logits[0, -1]
        expected[name] = {"logits": [round(float(x), 5) for x in logits], "tokens": ids}
    (FILES / "expected.json").write_text(json.dumps(expected, separators=(",", ":")))


def rounded(model: Any, stored: dict[str, Any]) -> None:
    """Give `model` the numbers that the file stores; the converter of its type changes no tensor."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH.QWEN3, 1)
    for name, value in model.state_dict().items():
        result = f"{names.get_name(name.removesuffix('.weight'))}.weight"
        if result in stored:  # else tied
            value.copy_(torch.from_numpy(stored[result].copy()).view(value.shape))


if __name__ == "__main__":
    main()
