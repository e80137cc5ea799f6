"""The files of an adapter's folder, and what tells it from a model's. Imported before torch."""

from __future__ import annotations

from pathlib import Path

from qcompile.errors import UsageError

CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"


def check_model(directory: Path) -> None:
    """Raise UsageError if `directory` holds an adapter and no model."""
    if (directory / CONFIG).is_file() and not (directory / "config.json").exists():
        raise UsageError(f"{directory} is an adapter: build its model with --lora {directory}")
