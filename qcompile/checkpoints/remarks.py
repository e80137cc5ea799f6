"""What of a checkpoint its model does not use, and what it lacks: it compiles, but more may have been meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from qcompile.checkpoints.checkpoint import INDEX, SINGLE, Checkpoint
from qcompile.errors import shown
from qcompile.heads.mtp_files import module_tensors

_FLOATS = ("F32", "F16", "BF16")
_MODULE = "a module for multi-token prediction"


def of_tokens(stated: Mapping[str, Collection[int]], size: int) -> Iterator[str]:
    """Remarks on tokens by the name of their setting that are outside of a vocabulary of `size` tokens."""
    for name, tokens in stated.items():
        for token in tokens:
            if not 0 <= token < size:
                yield f"{name} {shown(token)} is outside the vocabulary of {size} tokens, and is ignored"


def of_tensors(checkpoint: Checkpoint, unused: Collection[str]) -> Iterator[str]:
    """Remarks on the stored tensors `unused`, which are no weights of the model: modules that draft, and others."""
    modules = module_tensors(checkpoint) & set(unused)
    if modules:
        size = sum(checkpoint.entries[name].bytes for name in modules)
        yield f"{_MODULE} ({size:,} bytes) is no part of the model: `build --draft mtp` drafts with it"
    if others := [name for name in unused if name not in modules]:
        size = sum(checkpoint.entries[name].bytes for name in others)
        count, first = len(others), shown(others[0])
        yield f"{count:,} stored tensors ({size:,} bytes) belong to no weight of the model: {first} for example"


def without_module(said: Collection[str]) -> tuple[str, ...]:
    """The remarks `said` of a model of which the module for multi-token prediction drafts."""
    return tuple(remark for remark in said if not remark.startswith(_MODULE))


def of_types(checkpoint: Checkpoint) -> Iterator[str]:
    """A remark on the types of few bits that the weights of a GGUF file have, by how many weights have them."""
    counts = Counter(kind for kind in checkpoint.kinds.values() if kind not in _FLOATS)
    if counts:
        said = ", ".join(f"{count} in {kind}" for kind, count in counts.most_common())
        yield f"weights are stored in few bits ({said}): f32 keeps their numbers, other recipes may round them again"


def of_files(model: Any, tokenizer: Collection[str]) -> Iterator[str]:
    """Remarks on the files of the checkpoint `model`; `tokenizer` are those of its tokenizer."""
    directory = Path(model)
    if (directory / SINGLE).is_file() and (directory / INDEX).is_file():
        yield f"{SINGLE} is read, and the files that {INDEX} names are not"
    if "tokenizer.json" not in tokenizer:
        yield "the checkpoint has no tokenizer: prompts must be token numbers, and replies are"
