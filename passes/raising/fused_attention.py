"""A rule for torch's scaled_dot_product_attention."""

from __future__ import annotations

import math

from torch import fx

from qcompile.passes.raising import token_bias, values
from qcompile.passes.raising.attention import Scores, build_attention
from qcompile.passes.raising.builder import Builder
from qcompile.passes.raising.facts import Facts, Known
from qcompile.passes.raising.masks import Mask, prove_mask
from qcompile.passes.raising.nodes import Arguments, unsupported


def sdpa(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """scaled_dot_product_attention with a mask that is proven causal."""
    if a.dropout_p:
        raise unsupported(node, "has dropout; export the model in evaluation mode")
    inputs = [values.permute(facts.require(t, f"attention {node}"), (0, 2, 1, 3)) for t in (a.query, a.key, a.value)]
    scale = 1 / math.sqrt(a.query.meta["val"].shape[-1]) if a.scale is None else float(a.scale)
    source = token_bias.source_of(facts, a.attn_mask) if facts.reads_token_ids(a.attn_mask) else None
    given = [] if a.attn_mask is None else [Mask(a.attn_mask, "added", source=source)]
    seen = prove_mask(facts, node, given, a.is_causal)
    if source is not None:
        inputs[:2] = token_bias.extended(facts, build, node, given[0], (inputs[0], inputs[1]), scale)
    made = build_attention(
        facts, build, node, inputs, Scores(scale, seen.window, key_bias=seen.key_bias, chunk=seen.chunk)
    )
    return values.permute(made, (0, 2, 1, 3))
