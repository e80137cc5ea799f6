"""What a folder holds in place of a checkpoint that is read: errors name it. Imported before torch."""

from __future__ import annotations

from pathlib import Path

from qcompile.checkpoints.adapter_files import check_model
from qcompile.checkpoints.weight_files import OTHERS, matching
from qcompile.errors import UsageError


def check_checkpoint(directory: Path) -> None:
    """Raise UsageError if the folder `directory` has no config.json, naming the model that it holds in another form."""
    if directory.is_dir() and not (directory / "config.json").exists():
        check_form(directory)
        raise UsageError(f"{directory / 'config.json'} is missing: give a checkpoint directory")


def check_form(directory: Path) -> None:
    """Raise UsageError if the folder `directory`, which has no config.json, holds a model in a form that is known."""
    check_model(directory)
    if files := matching(directory, "*.gguf"):
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise UsageError(
            f"{directory} has no config.json, but GGUF files ({files[0]}{more}): give one, {directory / files[0]}"
        )
    if (directory / "params.json").is_file():
        raise UsageError(
            f"{directory} has no config.json, but params.json: a model in its makers' own layout; "
            "give the one that transformers reads"
        )
    for pattern, what in OTHERS.items():
        if files := matching(directory, pattern):
            raise UsageError(
                f"{directory} has no config.json, but {files[0]}, {what}: give a checkpoint of safetensors"
            )
