"""Prompts, sampling parameters and token numbers as callers give them, checked and in one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from qcompile.errors import UsageError
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.params import SamplingParams

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
EmbeddedPrompts: TypeAlias = Any
"""A tensor or an array of floating-point numbers [tokens, width], or a list of such."""
Params = SamplingParams | Sequence[SamplingParams] | None


def as_list(prompts: Prompts) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = plain(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise UsageError(f"prompts must be a text or a list, not {type(prompts).__name__}")
    if not prompts:
        raise UsageError("no prompt given: give at least one")
    if are_tokens(prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def embeddings(given: Any) -> list[FloatArray]:
    """Prompts given as embeddings: [tokens, width], or a list of such, of floating-point numbers, in float32."""
    listed = list(given) if isinstance(given, list | tuple) else [given]
    if not listed:
        raise UsageError("prompt_embeds is empty: give at least one prompt")
    return [_embedding(one) for one in listed]


def _embedding(given: Any) -> FloatArray:
    """The embeddings [tokens, width] of one prompt: a tensor on any device or an array."""
    if hasattr(given, "detach"):  # a tensor; numpy has no bfloat16
        given = given.detach().cpu()
        given = given.float().numpy() if given.is_floating_point() else given.numpy()
    if not isinstance(given, np.ndarray) or not np.issubdtype(given.dtype, np.floating):
        what = given.dtype if isinstance(given, np.ndarray) else type(given).__name__
        raise UsageError(f"prompt_embeds must be tensors or arrays of floating-point numbers, not {what}")
    if given.ndim != 2 or not len(given):
        raise UsageError(f"prompt_embeds must be [tokens, width], and have shape {list(given.shape)}")
    with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, which is refused
        made = np.array(given, np.float32, order="C")  # a copy, as the caller may change its own
    if not np.isfinite(made).all():
        raise UsageError("prompt_embeds hold NaN or infinite values, or too large ones for float32")
    return made


def plain(value: Any) -> Any:
    """An array or a tensor as a list, anything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def are_tokens(values: Sequence[Any]) -> bool:
    """Whether all are integers, Python's or numpy's."""
    return all(type(value) is int or isinstance(value, np.integer) for value in values)


def params_for(
    count: int, params: Params, options: dict[str, Any], defaults: Mapping[str, Any]
) -> list[SamplingParams]:
    """The sampling parameters of each of `count` prompts.

    options: fields of SamplingParams in place of `params`. defaults: fields that hold if they are not in `options`.
    """
    if options:
        if params is not None:
            raise UsageError("give SamplingParams or keywords, not both")
        unknown = [name for name in options if name not in SamplingParams.__dataclass_fields__]
        if unknown:
            raise UsageError(f"unknown sampling option {unknown[0]!r}")
    if params is None:
        params = SamplingParams(**{**defaults, **options})
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise UsageError("params must be SamplingParams, or a list of them")
    if len(params) != count:
        raise UsageError(f"{len(params)} SamplingParams for {count} prompts: give one, or one for each")
    return list(params)


def token_rows(token_ids: Any) -> list[list[int]]:
    """Token numbers [batch, tokens] of any type, as lists of equal length."""
    try:
        rows = [list(plain(row)) for row in plain(token_ids)]
    except TypeError:
        raise UsageError("token_ids must be [batch, tokens]: a list of lists of token numbers") from None
    if not rows or not rows[0]:
        raise UsageError("token_ids is empty: give at least one token")
    if any(len(row) != len(rows[0]) for row in rows):
        raise UsageError("token_ids must have rows of one length")
    if not all(map(are_tokens, rows)):
        raise UsageError("token_ids must be whole numbers")
    return rows
