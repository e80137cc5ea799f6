"""Which sampling parameters a model supports."""

from __future__ import annotations

from collections.abc import Sequence

from qcompile.errors import UsageError, shown
from qcompile.runtime.sampling.params import SamplingParams


def check_supported(params: SamplingParams, vocab: int, has_tokenizer: bool) -> None:
    """Raise UsageError for parameters that a model with a vocabulary of this size does not support."""
    if params.stops and not has_tokenizer:
        raise UsageError("this artifact has no tokenizer: stop texts cannot be found in its output")
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        if (worst := max(getattr(params, name) or (-1,))) >= vocab:
            raise UsageError(f"{name} has token {worst}, outside the model's vocabulary of {vocab}")


def check_adapter(name: str | None, known: Sequence[str]) -> None:
    """Raise UsageError if a request names an adapter that was not loaded."""
    if name is not None and name not in known:
        told = f"there are {', '.join(known)}" if known else "none was loaded (load(lora=...))"
        raise UsageError(f"there is no adapter {shown(name)}: {told}")
