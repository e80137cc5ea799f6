"""What is a GGUF file. Imported by every command."""

from __future__ import annotations

from pathlib import Path

SUFFIX = ".gguf"
METHOD = "gguf"
"""The `quant_method` in the configuration that a file's folder gets."""


def is_file(model: str | Path) -> bool:
    """Whether `model` is a GGUF file."""
    path = Path(model)
    return path.suffix.lower() == SUFFIX and path.is_file()
