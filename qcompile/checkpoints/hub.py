"""Where a checkpoint is: a local directory, or one fetched from the model hub."""

from __future__ import annotations

from pathlib import Path

from qcompile.errors import UsageError

HUB_PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "chat_template.jinja"]


def is_name(model: str) -> bool:
    """Whether `model`, which is no directory, may be a name on the hub: `organization/model`."""
    return model.count("/") == 1 and not model.startswith((".", "/", "~")) and not Path(model).exists()


def check(model: str | Path) -> None:
    """Raise UsageError unless `model` is a directory, or may be a name on the hub."""
    if not str(model):
        raise UsageError("the model's name is empty: give a checkpoint directory, or a name on the model hub")
    if not (Path(model).is_dir() or is_name(str(model))):
        raise UsageError(f"{model} is not a checkpoint directory")


def find(model: str | Path, allow_remote: bool = False) -> Path:
    """The local directory of `model`: itself if it is one, else fetched from the hub (safetensors only)."""
    check(model)
    path = Path(model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    patterns = [*HUB_PATTERNS, *(["*.py"] if allow_remote else [])]
    try:
        return Path(snapshot_download(str(model), allow_patterns=patterns))
    except Exception as error:  # the hub client raises a family of errors for offline, unknown and gated
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{model} is neither a directory nor reachable on the hub: {reason}") from error
