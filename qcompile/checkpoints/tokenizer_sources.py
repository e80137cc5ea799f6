"""The files from which a checkpoint's tokenizer is read. Imported before torch."""

from __future__ import annotations

from pathlib import Path

OWN = "tokenizer.json"
"""The file that is used as it is."""
CONVERTED = {
    "tokenizer.model": ("tokenizer.model",),
    "tekken.json": ("tekken.json",),
    "tiktoken.model": ("tiktoken.model",),
    "vocab.json": ("vocab.json", "merges.txt"),
}
"""Files that transformers converts, by the one that errors name, in the order in which they are looked for."""
PATTERNS = ("tokenizer.model", "tiktoken.model", "merges.txt")
"""Names of the files among these that are no JSON."""


def source_of(directory: Path) -> str | None:
    """The file in `directory` that has its tokenizer, used or converted; None if there is none."""
    if (directory / OWN).is_file():
        return OWN
    complete = (name for name, files in CONVERTED.items() if all((directory / file).is_file() for file in files))
    return next(complete, None)
