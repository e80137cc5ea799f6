"""Perplexity of a model before and after quantization, on a short excerpt of its calibration text, for the report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qcompile.graph import Graph
from qcompile.passes.calibration.trial import loss

TOKENS = 2048
"""Tokens of text to measure on, at least one sample: as many as outliers are measured on."""

_DIGITS = 4
"""Digits after the point: the last bits depend on the number of threads, and builds shall be equal."""


def compare(graphs: Sequence[Graph]) -> dict[str, float | int] | None:
    """{"before", "after", "tokens"}; None without calibration text. `graphs` are the graphs after each pass.

    Before is the first graph in floating point, after the last one over whole sequences that computes the whole model,
    and not a rank's part: weights and activations are rounded, the KV cache is not.
    """
    floats = [graph for graph in graphs if graph.stage == "raise"]
    rounded = [graph for graph in graphs if graph.stage == "quantize" and not graph.calls("all_reduce", "all_gather")]
    if not floats or not rounded or floats[0].calibration is None:
        return None
    tokens = floats[0].calibration.excerpt(TOKENS)
    before, after = loss(floats[0], tokens), loss(rounded[-1], tokens, finest=True)
    return {
        "before": round(math.exp(before), _DIGITS),
        "after": round(math.exp(after), _DIGITS),
        "tokens": tokens.numel() - len(tokens),
    }
