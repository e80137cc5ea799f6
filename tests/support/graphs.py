"""Small raised graphs, written by hand, for tests of passes and code generation."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx

import qcompile
from qcompile import ops
from qcompile.formats.kv import kv_format
from qcompile.graph import Graph
from qcompile.testing import Begun
from qcompile.testing import decoder as decoder
from qcompile.testing import sequence_inputs as sequence_inputs


def recurrent(
    *,
    vocab: int = 50,
    hidden: int = 48,
    heads: int = 4,
    key_heads: int = 2,
    key_dim: int = 8,
    value_dim: int = 16,
    width: int = 4,
    layers: int = 2,
    by_key: bool = False,
    rates: str = "heads",
    gain: bool = True,
    delta: bool = True,
    attention: bool = True,
    bias: bool = True,
    rank: int = 0,
    unit_keys: bool = False,
    attended: int = 32,
) -> Graph:
    """A decoder at stage `raise`, of blocks with a convolution and a recurrence, and if `attention`, then attention.

    Two heads of attention have `attended` features together.

    `rates`: "heads", "keys" (a rate for each head and key feature) or "" (none). With `rank`, decay and gain are linear
    in slices of that many features of one wider value. `unit_keys`: q and k have length 1. Otherwise the length of keys
    grows with `key_dim`, and with many features the states of the delta rule grow without bound.
    """
    begun = Begun(vocab)
    graph, ids, weight = begun.graph, begun.ids, begun.weight

    def linear(x: fx.Node, name: str, n: int) -> fx.Node:
        return graph.call("linear", x, weight(name, n, x.meta["val"].shape[-1]))

    def mixed_by_state(y: fx.Node, n: int) -> fx.Node:
        sizes = [key_heads * key_dim] * 2 + [heads * value_dim]
        wide = linear(y, f"qkv{n}", sum(sizes))
        taps = weight(f"taps{n}", sum(sizes), width)
        wide = graph.call("causal_conv", wide, taps, weight(f"tap_bias{n}", sum(sizes)) if bias else None)
        wide = graph.call("scale", graph.call("unary", wide, "silu"), 0.5)  # the delta rule needs short keys
        ends = [sizes[0], 2 * sizes[0], sum(sizes)]
        parts = zip([0, *ends[:-1]], ends, (key_heads, key_heads, heads), strict=True)
        q, k, v = (
            graph.call("split_heads", graph.call("slice_features", wide, start, end), count)
            for start, end, count in parts
        )
        if unit_keys:
            q, k = (graph.call("scale", graph.call("rms_norm", t, None, 1e-6), key_dim**-0.5) for t in (q, k))
        sources = [y, y]
        if rank:
            low = graph.call("unary", linear(y, f"low{n}", 3 * rank), "silu")
            sources = [graph.call("slice_features", low, start, start + rank) for start in (0, rank)]
        raw = linear(sources[0], f"decay{n}", heads * key_dim if by_key else heads)
        positive = graph.call("unary", raw, "sigmoid")  # times a negative rate: states fade
        decay = positive if rates else graph.call("scale", positive, -1.0)
        decay = graph.call("split_heads", decay, heads) if by_key else decay
        shape = (heads, key_dim) if rates == "keys" else (heads,)
        fading = -1.5 * torch.rand(shape, generator=begun.generator)
        rate = begun.kept(f"rates{n}", fading) if rates else None
        strength = graph.call("unary", linear(sources[1], f"gain{n}", heads), "sigmoid") if gain else None
        return graph.call("merge_heads", graph.call("linear_recurrence", q, k, v, decay, rate, strength, delta))

    def mixed_by_attention(y: fx.Node, n: int) -> fx.Node:
        q, k, v = (graph.call("split_heads", linear(y, f"{name}{n}", attended), 2) for name in ("aq", "ak", "av"))
        return graph.call("merge_heads", graph.call("attention", q, k, v, 0.25))

    x = graph.call("embedding", ids, weight("embed", vocab, hidden))
    for n in range(layers):
        mixers = (mixed_by_state, mixed_by_attention) if attention else (mixed_by_state,)
        for kind, mixer in enumerate(mixers):
            y = mixer(graph.call("rms_norm", x, None, 1e-6), 2 * n + kind)
            x = graph.call("add", x, linear(y, f"o{2 * n + kind}", hidden))
    graph.fx.output(linear(graph.call("rms_norm", x, None, 1e-6), "head", vocab))
    return graph


def latent(
    *,
    vocab: int = 50,
    hidden: int = 48,
    heads: int = 3,
    plain: int = 16,
    turned: int = 16,
    narrow: int = 16,
    rank: int = 24,
    odd: str = "",
    window: int = 0,
    softcap: float = 0.0,
    more_scores: bool = False,
) -> Graph:
    """A decoder of one attention at stage `raise`, its queries, keys and values out of normalized values of `rank`.

    Heads of queries and keys have `turned` features ahead of `plain` ones, the keys' turned ones alike in all heads;
    those of values have `narrow`. `odd` names what keeps keys and values from being linear in one latent: "biased k",
    "biased v", "normed k", "own turn" (turned features of each head's own), "other v" (of other low values), "late
    turn" (of queries, after a scale), "slow turn" (of queries, by other angles). `more_scores`: with sinks and biases
    of keys.
    """
    begun = Begun(vocab)
    graph, ids, positions, kept, weight = begun.graph, begun.ids, begun.positions, begun.kept, begun.weight

    def linear(x: fx.Node, name: str, n: int) -> fx.Node:
        bias = [weight(f"{name}.bias", n)] if odd == f"biased {name}" else []
        return graph.call("linear", x, weight(name, n, x.meta["val"].shape[-1]), *bias)

    size = turned + plain
    inv_freq_values = 10000.0 ** -(torch.arange(0, turned, 2) / turned)
    inv_freq = kept("inv_freq", inv_freq_values)
    common = torch.arange(turned).expand(heads, -1) + torch.arange(heads)[:, None] * (
        turned if odd == "own turn" else 0
    )
    of_head = torch.cat((heads * plain + common, torch.arange(heads * plain).view(heads, -1)), 1)
    x = graph.call("embedding", ids, weight("embed", vocab, hidden))
    y = graph.call("rms_norm", x, None, 1e-6)
    low = [graph.call("rms_norm", linear(y, f"{n}a", rank), weight(f"{n}n", rank), 1e-6) for n in ("q", "kv")]
    up = linear(low[1], "k", heads * plain)
    up = graph.call("rms_norm", up, None, 1e-6) if odd == "normed k" else up
    turning = linear(y, "kr", turned * (heads if odd == "own turn" else 1))
    k = graph.call("gather_features", [up, turning], kept("index", of_head.flatten()))
    v = linear(low[0 if odd == "other v" else 1], "v", heads * narrow)
    q, k, v = (graph.call("split_heads", t, heads) for t in (linear(low[0], "q", heads * size), k, v))
    q = graph.call("scale", q, 0.5) if odd == "late turn" else q
    slow = kept("slow", inv_freq_values / 2) if odd == "slow turn" else inv_freq
    q, k = (graph.call("rope", t, positions, each, 1.0, False) for t, each in ((q, slow), (k, inv_freq)))
    more = begun.more_scores(heads, more_scores, more_scores)
    mixed = graph.call("merge_heads", graph.call("attention", q, k, v, size**-0.5, window, softcap, **more))
    x = graph.call("add", x, linear(mixed, "o", hidden))
    graph.fx.output(linear(graph.call("rms_norm", x, None, 1e-6), "head", vocab))
    return graph


def step_inputs(
    ids: torch.Tensor,
    cache: torch.Tensor | None,
    graph: Graph,
    start: int = 0,
    states: torch.Tensor | None = None,
    certain: int | None = None,
) -> list[torch.Tensor]:
    """Inputs of a step that carries all of ids [batch, tokens] at positions from `start`, every row's logits wanted.

    If the graph has states, sequence i has slot batch - i, and `certain` leading positions are final (None: all).
    """
    shapes = {str(node.target): node.meta["val"].shape for node in graph.inputs}
    batch, tokens = ids.shape
    positions = (torch.arange(tokens) + start).repeat(batch)
    sequence = torch.arange(batch).repeat_interleave(tokens)
    pages = max(2, -(-(start + tokens) // 64))
    table = torch.arange(batch * pages).reshape(batch, pages).flip(0)  # pages out of order, on purpose
    if cache is None:
        layers, _, _, kv_heads, head_dim = shapes["step_cache"]
        cache = torch.full((layers, 2, batch * pages * 64, kv_heads, head_dim), float("nan"))
    inputs = [ids.flatten(), positions, sequence, table, torch.arange(batch * tokens), cache]
    if "step_states" in shapes:
        if states is None:
            states = torch.full((batch + 1, shapes["step_states"][1]), float("nan"))
        final = start + tokens if certain is None else certain
        inputs += [batch - torch.arange(batch), torch.full((batch,), final), states]
    return inputs


def logits_whatever_the_step(artifact: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits f32 [B, T, vocab] of an artifact for ids [B, T], the same bits in steps of 1, 3, 17 and all tokens."""
    with qcompile.load(artifact, threads=2) as llm:
        logits: torch.Tensor = llm.logits(ids)
        for chunk in (1, 3, 17):
            assert torch.equal(llm.logits(ids, chunk=chunk), logits)
    return logits


def loss_of_keys(graph: Graph, text: torch.Tensor) -> float:
    """Mean square of what rounding to 4 bits does to the scores of the first attention, over `text` [batch, tokens]."""
    probe = graph.clone()
    probe.output.args = (list(probe.calls("attention")[0].args[:2]),)
    q, k = probe.run(text, torch.arange(text.shape[1]).expand_as(text))
    error = kv_format("kv4").round_trip(k) - k
    return float(torch.einsum("bthd,bshd->bhts", q, error.repeat_interleave(2, 2)).square().mean())


def tied(graph: Graph) -> Graph:
    """The decoder with its embedding's table as the weight of the head."""
    (table,) = (ops.operand(node, "weight") for node in graph.calls("embedding"))
    head = graph.calls("linear")[-1]
    head.replace_input_with(ops.operand(head, "weight"), table)
    return graph
