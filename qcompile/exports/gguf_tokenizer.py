"""The tokenizer of a checkpoint as GGUF describes it: byte-level BPE with a splitting of texts that llama.cpp names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qcompile.checkpoints.checkpoint import read_json
from qcompile.errors import UnsupportedError

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
THREE_DIGITS, ONE_DIGIT = _WORDS % "{1,3}", _WORDS % ""
SPLITS: dict[tuple[Any, bool], str] = {
    (None, False): "gpt-2",
    (THREE_DIGITS, True): "llama-bpe",
    (THREE_DIGITS, False): "smaug-bpe",
    (ONE_DIGIT, False): "qwen2",
}
"""llama.cpp's names by the expression that splits texts (None: that of GPT-2), and whether words that are tokens are
taken without merges."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens."""


def tokenizer_facts(root: Path, size: int) -> dict[str, Any]:
    """The keys `tokenizer.ggml.*` of the tokenizer at `root`, for a vocabulary of `size` tokens.

    Raises UnsupportedError for a tokenizer that llama.cpp has no name for.
    """
    if not (root / "tokenizer.json").is_file():
        raise UnsupportedError(f"export: {root} has no tokenizer.json, and a gguf file needs a tokenizer")
    document = read_json(root / "tokenizer.json")
    model = document.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UnsupportedError("export: gguf is written for byte-level BPE tokenizers only; --format hf keeps this one")
    split = SPLITS.get((_expression(document.get("pre_tokenizer") or {}), bool(model.get("ignore_merges"))))
    if split is None:
        raise UnsupportedError(
            "export: llama.cpp has no name for how this tokenizer splits texts; --format hf keeps it"
        )
    tokens, types = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    added_ids = [added["id"] for added in document.get("added_tokens") or ()]
    if (most := max([*model["vocab"].values(), *added_ids], default=0)) >= size:
        raise UnsupportedError(f"export: the tokenizer has token {most}, and the model {size} tokens; hf keeps both")
    for token, index in model["vocab"].items():
        tokens[index], types[index] = token, NORMAL
    for added in document.get("added_tokens") or ():
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return {"model": "gpt2", "pre": split, "tokens": tokens, "token_type": types, "merges": merges}


def _expression(document: dict[str, Any]) -> str | bool | None:
    """The expression by which a pre-tokenizer splits texts; False for a pre-tokenizer of another kind."""
    parts = document.get("pretokenizers") or [document]
    *splits, last = parts
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or len(splits) > 1:
        return False
    if not splits:
        return None if last.get("use_regex", True) else False
    (split,) = splits
    right = split.get("type") == "Split" and split.get("behavior") == "Isolated" and not split.get("invert")
    expression: Any = (split.get("pattern") or {}).get("Regex")
    return expression if right and not last.get("use_regex", True) and isinstance(expression, str) else False
