"""Small raised graphs, written by hand, for tests of passes and code generation."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx

import qcompile
from qcompile.formats.kv import kv_format
from qcompile.graph import Graph, ModelInfo, WeightStore


class Begun:
    """A graph at stage `raise` with its inputs, and random weights drawn in the order in which they are asked for."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.graph = Graph(fx.Graph(), WeightStore(), ModelInfo("tiny", vocab, 512, 0, (0,), 0), "raise")
        self.ids, self.positions = (self.graph.fx.placeholder(name) for name in ("token_ids", "positions"))
        for node in (self.ids, self.positions):
            node.meta["val"] = torch.empty(2, 7, dtype=torch.int64, device="meta")

    def kept(self, name: str, value: torch.Tensor) -> fx.Node:
        """A node that reads `value`, the weight `name`."""
        self.graph.weights.add_tensor(name, value)
        node = self.graph.fx.create_node("get_attr", name)
        self.graph.infer_node(node)
        return node

    def weight(self, name: str, *shape: int) -> fx.Node:
        """A random weight that makes numbers about as large as those it is given."""
        return self.kept(name, torch.randn(*shape, generator=self.generator) / shape[-1] ** 0.5)

    def more_scores(self, heads: int, sinks: bool, key_bias: bool) -> dict[str, fx.Node]:
        """Weights among attention's operands, by name."""
        more: dict[str, fx.Node] = {}
        if sinks:
            of_heads = 5.5 + torch.randn(heads, generator=self.generator)  # as much as hundreds of others
            of_heads[0] = 100.0  # more than 2^128 times what others weigh
            more["sinks"] = self.kept("sinks", of_heads)
        if key_bias:
            slope = 2.0 ** -torch.linspace(2, 7, heads)
            of_positions = slope[:, None] * torch.arange(512) + torch.randn(heads, 512, generator=self.generator)
            more["key_bias"] = self.kept("key_bias", of_positions)
        return more


def decoder(
    *,
    vocab: int = 50,
    hidden: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 72,
    layers: int = 2,
    bias: bool | str = False,
    rotary: bool = True,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    capped: bool = False,
    head_norm: str = "",
    late_norms: bool = False,
    act: str = "silu",
    sinks: bool = False,
    key_bias: bool = False,
    seed: int = 0,
) -> Graph:
    """A Llama-shaped decoder at stage `raise`: no norm weights, random everything else.

    `head_norm`: "heads" normalizes q and k head by head, "whole" before they are split. `bias` "q" is on q alone.
    `late_norms`: what a block adds to the residual stream goes through a norm with weights first.
    `capped`: logits are 2 tanh(x / 2). `sinks`: scores in sums alone, the first head's of which leaves nothing of the
    others. `key_bias`: what positions add to scores, to those of the last heads little.
    """
    begun = Begun(vocab, seed)
    graph, ids, positions, weight = begun.graph, begun.ids, begun.positions, begun.weight

    def linear(x: fx.Node, name: str, n: int, k: int) -> fx.Node:
        extra = (weight(f"{name}.bias", n),) if bias is True or (bias and name.startswith(bias)) else ()
        return graph.call("linear", x, weight(name, n, k), *extra)

    def block(y: fx.Node, name: str, k: int) -> fx.Node:
        """What a block adds: its last linear, perhaps normalized."""
        y = linear(y, name, hidden, k)
        return graph.call("rms_norm", y, weight(f"{name}.norm", hidden), 1e-6) if late_norms else y

    def activated(gate: fx.Node, layer: int) -> fx.Node:
        if act != "xielu":
            return graph.call("unary", gate, act)
        return graph.call("xielu", gate, begun.kept(f"curve{layer}", torch.tensor([0.8, 1.3 + layer, 0.5, -1e-6])))

    inv_freq = begun.kept("inv_freq", 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)) if rotary else None
    more = begun.more_scores(heads, sinks, key_bias)
    x = graph.call("embedding", ids, weight("embed", vocab, hidden))
    for layer in range(layers):
        y = graph.call("rms_norm", x, None, 1e-6)
        pair = []
        for name, count in (("q", heads), ("k", kv_heads)):
            t = linear(y, f"{name}{layer}", count * head_dim, hidden)
            if head_norm == "whole":
                t = graph.call("rms_norm", t, weight(f"{name}{layer}.norm", count * head_dim), 1e-6)
            t = graph.call("split_heads", t, count)
            if head_norm == "heads":
                t = graph.call("rms_norm", t, weight(f"{name}{layer}.norm", head_dim), 1e-6)
            pair.append(t)
        q, k = pair
        v = graph.call("split_heads", linear(y, f"v{layer}", kv_heads * head_dim, hidden), kv_heads)
        if inv_freq is not None:
            q, k = (graph.call("rope", t, positions, inv_freq, 1.0, False) for t in (q, k))
        given = {"window": window, "softcap": softcap, "chunk": chunk} | more
        mixed = graph.call("merge_heads", graph.call("attention", q, k, v, head_dim**-0.5, **given))
        x = graph.call("add", x, block(mixed, f"o{layer}", heads * head_dim))
        y = graph.call("rms_norm", x, None, 1e-6)
        gate = activated(linear(y, f"gate{layer}", ffn, hidden), layer)
        product = graph.call("mul", gate, linear(y, f"up{layer}", ffn, hidden))
        x = graph.call("add", x, block(product, f"down{layer}", ffn))
    logits = graph.call("linear", graph.call("rms_norm", x, None, 1e-6), weight("head", vocab, hidden))
    if capped:
        logits = graph.call("scale", graph.call("unary", graph.call("scale", logits, 0.5), "tanh"), 2.0)
    graph.fx.output(logits)
    return graph


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
) -> Graph:
    """A decoder at stage `raise` whose blocks are a convolution with a recurrence, and if `attention`, then attention.

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
        q, k, v = (graph.call("split_heads", linear(y, f"{name}{n}", 32), 2) for name in ("aq", "ak", "av"))
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


def sequence_inputs(
    tokens: int = 7, batch: int = 2, vocab: int = 50, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """token_ids and positions [batch, tokens] for graphs before `cache`."""
    ids = torch.randint(0, vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    return ids, torch.arange(tokens).expand(batch, tokens).contiguous()


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
