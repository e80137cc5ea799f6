"""The text that a model writes itself: what its draft head meets when it is used."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qcompile.clock import Progress, silent
from qcompile.errors import ResourceError, UnsupportedError, UsageError
from qcompile.heads.target import HeadTarget

WRITTEN = "continued.safetensors"
"""The file in the output folder that holds what the model has written of an unfinished training's text."""
_TOKENS = "tokens"
_SAVE_SECONDS = 60.0


def continued(
    target: HeadTarget,
    windows: Tensor,
    kept: int,
    *,
    batch: int,
    output: Path,
    identity: str = "",
    progress: Progress = silent,
) -> Tensor:
    """The first `kept` tokens of each window, and the target's greedy choices after them: int64 [windows, length].

    `batch` windows are written at a time. Those that an interrupted run has written into the folder `output` are taken
    from there. An end-of-text token is a token as others are. Raises UsageError, UnsupportedError, ResourceError.
    """
    if not 0 < kept < windows.shape[1]:
        raise UsageError(f"--continue-after {kept}: give 1 to {windows.shape[1] - 1}, as a piece has one token more")
    key = _key(windows, kept, identity)
    done = [tokens] if (tokens := _read(output, key)) is not None else []
    written = sum(map(len, done))
    saved = time.monotonic()
    try:
        for part in windows[written:].split(batch):
            progress("writing text", written, len(windows))
            done.append(_continue(target, part, kept))
            written += len(part)
            if time.monotonic() - saved > _SAVE_SECONDS:
                _save(output, key, torch.cat(done))
                saved = time.monotonic()
    except KeyboardInterrupt:
        if done:
            _save(output, key, torch.cat(done))
        raise
    result = torch.cat(done)
    if len(windows) > batch:
        _save(output, key, result)
    return result


@torch.no_grad()
def _continue(target: HeadTarget, part: Tensor, kept: int) -> Tensor:
    """One part of the windows, written to its end. Raises UnsupportedError if the model has no cache of its text."""
    tokens = part[:, :kept].to(target.output_weight.device)
    rows: list[Tensor] = [tokens]
    known: dict[str, Any] = {}
    for _ in range(part.shape[1] - kept):
        out = target.module(tokens, use_cache=True, **known)
        known = {"past_key_values": getattr(out, "past_key_values", None)}
        if known["past_key_values"] is None:
            kind = target.config.model_type
            raise UnsupportedError(f"model type {kind} has no cache that continues a text: leave out --continue-after")
        tokens = out.logits[:, -1:].argmax(-1)
        rows.append(tokens)
    return torch.cat(rows, 1).cpu()


def _key(windows: Tensor, kept: int, identity: str) -> str:
    digest = hashlib.sha256(f"{identity} {kept} {tuple(windows.shape)}".encode())
    digest.update(windows.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _read(output: Path, key: str) -> Tensor | None:
    """What an earlier run has written; None if nothing. Raises UsageError if it is of other text, or unreadable."""
    path = output / WRITTEN
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            same = (file.metadata() or {}).get("key") == key
            tokens: Tensor = file.get_tensor(_TOKENS)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be read: remove it to begin again") from error
    if not same:
        raise UsageError(f"{path} is of a training with another model, text or options: give another folder")
    return tokens


def _save(output: Path, key: str, tokens: Tensor) -> None:
    """Keep what is written, atomically. Raises ResourceError if that fails."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        partial = output / f"{WRITTEN}.partial"
        save_file({_TOKENS: tokens}, partial, {"key": key})
        partial.replace(output / WRITTEN)
    except (OSError, SafetensorError) as error:
        raise ResourceError(f"cannot keep the text in {output}: {error}") from error
