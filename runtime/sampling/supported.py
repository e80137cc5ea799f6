"""Which sampling parameters a model supports."""

from __future__ import annotations

from qcompile.errors import UsageError
from qcompile.runtime.sampling.params import SamplingParams


def check_supported(params: SamplingParams, vocab: int, has_tokenizer: bool) -> None:
    """Raise UsageError for parameters that a model with a vocabulary of this size does not support."""
    if params.stops and not has_tokenizer:
        raise UsageError("this artifact has no tokenizer: stop texts cannot be found in its output")
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        if (worst := max(getattr(params, name) or (-1,))) >= vocab:
            raise UsageError(f"{name} has token {worst}, outside the model's vocabulary of {vocab}")
