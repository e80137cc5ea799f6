"""Lower the final graph to a Program: one kernel call per operator.

There is one function per operator; an operator without one raises PassError with its name. Buffers are already
assigned (passes/plan_memory.py), so a call is the operator's arguments with buffers for values and names for weights
(lowering_state.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Literal, cast

from torch import fx

from qcompile import ops
from qcompile.codegen.calls import (
    AllGather,
    AllReduce,
    Attention,
    Call,
    Combine,
    Elementwise,
    Embed,
    EveryExpert,
    ExpertGemm,
    Gather,
    Gemm,
    Hadamard,
    Logits,
    Mean,
    Norm,
    NormHeads,
    QuantizeRows,
    RopeAppend,
    RopeHeads,
    Route,
    TakeRows,
)
from qcompile.codegen.fidelity import Fidelity
from qcompile.codegen.kv_layout import KVLayout
from qcompile.codegen.lower_features import read_features, write_features
from qcompile.codegen.lower_lora import gate_rows, lora_expand, lora_shrink
from qcompile.codegen.lower_states import conv_step, recurrence_step
from qcompile.codegen.lowering_state import Lowering
from qcompile.codegen.packing import WeightTable
from qcompile.codegen.program import Program
from qcompile.errors import PassError, UnsupportedError
from qcompile.formats.registry import weight_format
from qcompile.formats.states import StateLayout
from qcompile.graph import Graph
from qcompile.ops.recurrent_step import layer_state


def _embedding(low: Lowering, node: fx.Node) -> Call:
    ids, weight = ops.operand(node, "ids"), ops.operand(node, "weight")
    indices: dict[str, Literal["tokens", "positions"]] = {"step_token_ids": "tokens", "step_positions": "positions"}
    index = indices.get(ids.target)
    if index is None:
        raise PassError("codegen", node.name, "an embedding must be indexed by token ids or positions")
    rounded = ops.name_of(weight.target) == "dequantize"
    table, dtype, row_scale = low.rounded_table(weight) if rounded else (*low.table(weight), None)
    scaled = _only_scaled(node)
    factor = float(ops.operand(scaled, "factor")) if scaled else 1.0
    return Embed(
        node.name,
        out=low.buffer(scaled or node),
        table=table,
        table_dtype=dtype,
        vocab=weight.meta["val"].shape[0],
        scale=factor,
        index=index,
        given=_given_factor(low, node, factor) if index == "tokens" else 0.0,
        row_scale=row_scale,
    )


def _only_scaled(node: fx.Node) -> fx.Node | None:
    """The scaling of an embedding that alone reads it; the embedding's kernel does it then."""
    user = next(iter(node.users), None)
    return user if user is not None and len(node.users) == 1 and ops.name_of(user.target) == "scale" else None


def _given_factor(low: Lowering, node: fx.Node, factor: float) -> float:
    """What multiplies an embedding that a step gives in place of a token's, if tokens have their rows times `factor`.

    0 where a given embedding would not stand for the token's: another operator reads the tokens as well, a pass has
    changed the table other than by rounding it, or the embeddings that transformers takes are scaled in another way.
    """
    tokens, weight = ops.operand(node, "ids"), ops.operand(node, "weight")
    if ops.name_of(weight.target) == "dequantize":  # rounding leaves the basis of embeddings as it was
        weight = ops.operand(ops.operand(weight, "weight"), "w")
    scale = low.graph.info.embeds_scale
    if len(tokens.users) != 1 or weight.op != "get_attr" or scale not in (1.0, factor):
        return 0.0
    return factor / scale


def _norm(low: Lowering, node: fx.Node) -> Call:
    given = ops.named(node)
    styles: dict[str | None, Literal["rms", "layer"]] = {"rms_norm": "rms", "layer_norm": "layer"}
    x = given["x"]
    if x.meta["val"].dim() != 2:
        raise PassError("codegen", node.name, "a norm inside heads has no kernel yet")
    return Norm(
        node.name,
        styles.get(ops.name_of(node.target)) or given["kind"],
        x=low.buffer(x, whole=False),
        out=low.buffer(node),
        eps=given["eps"],
        weight=low.vector(given["weight"]),
        bias=low.vector(given.get("bias")),
        x_offset=low.column(x),
    )


def _norm_heads(low: Lowering, node: fx.Node) -> Call:
    given = ops.operands(node)
    sizes = {w.meta["val"].shape[0] for w in (given.weight, given.bias) if w is not None}
    if len(sizes) > 1:
        raise PassError("codegen", node.name, "its weight and its bias must both be by head, or neither")
    return NormHeads(
        node.name,
        given.kind,
        low.buffer(given.x),
        x_offset=given.offset,
        heads=given.heads,
        width=given.width,
        eps=given.eps,
        weight=low.vector(given.weight),
        bias=low.vector(given.bias),
        by_head=given.heads > 1 and sizes == {given.heads * given.width},
    )


def _quantize(low: Lowering, node: fx.Node) -> Call | None:
    given = ops.operands(node)
    if given.kind == "f32":
        return None
    return QuantizeRows(node.name, x=low.buffer(given.x), out=low.buffer(node))


def _hadamard(low: Lowering, node: fx.Node) -> Call:
    given = ops.operands(node)
    return Hadamard(
        node.name,
        x=low.buffer(given.x),
        out=low.buffer(node),
        block=given.block,
        core=str(low.vector(given.core)),
        core_order=math.isqrt(given.core.meta["val"].shape[0]),
    )


def _activation(x: fx.Node) -> str:
    """Activation type of a gemm's input, as in formats/activations.py."""
    storage = x.meta["storage"]
    return str(storage["activation"] if storage["dtype"] == "q8" else storage["dtype"])


def _gemm(low: Lowering, node: fx.Node) -> Call:
    given = ops.operands(node)
    weight, format, epilogue, activation = given.weight, str(given.format), given.epilogue, _activation(given.x)
    n, k = weight_format(format).shape(weight.meta["val"])
    logits = "storage" not in node.meta
    if logits and epilogue != "store":
        raise PassError("codegen", node.name, f"logits cannot come from a gemm that ends in {epilogue}")
    packed_as: dict[str, Any] = {}
    if weight_format(format).marks_rows:
        weights, mixed = low.mixed(weight, format, epilogue in ops.GATED)
        packed_as = {"blocks": mixed.blocks, "wide": mixed.wide, "runs": mixed.runs}
    else:
        packing, usual = low.packing(weight, format, activation), low.table_of_weights.packing.name(format, activation)
        weights = low.packed(weight, format, activation)
        packed_as = {} if packing == usual else {"packing": packing}
    return Gemm(
        node.name,
        x=low.buffer(given.x),
        format=format,
        n=n,
        k=k,
        weights=weights,
        epilogue="logits" if logits else epilogue,
        out=None if logits else low.buffer(node),
        bias=low.vector(given.bias),
        residual=None if given.residual is None else low.buffer(given.residual),
        **packed_as,
    )


def _rotation(low: Lowering, given: Any) -> dict[str, Any]:
    """What rope_append and rope_heads do to heads alike."""
    return {
        "rotary_dim": 0 if given.inv_freq is None else 2 * given.inv_freq.meta["val"].shape[0],
        "inv_freq": low.vector(given.inv_freq),
        "scaling": given.scaling,
        "interleaved": given.interleaved,
        "center": low.vector(given.center),
        "block": given.block,
    }


def _rope_append(low: Lowering, node: fx.Node) -> Call:
    given = ops.operands(node)
    q_offset, k_offset, *v_offset = given.offsets
    return RopeAppend(
        node.name,
        qkv=low.buffer(given.qkv),
        q_offset=q_offset,
        k_offset=k_offset,
        v_offset=v_offset[0] if v_offset else None,
        heads=given.heads,
        kv_heads=given.kv_heads,
        head_dim=given.head_dim,
        layer=given.layer,
        **_rotation(low, given),
        query_table=low.flat(given.query_table),
        query_weight=low.vector(given.query_weight),
    )


def _rope_heads(low: Lowering, node: fx.Node) -> Call:
    given = ops.operands(node)
    return RopeHeads(
        node.name,
        x=low.buffer(given.x),
        offset=given.offset,
        heads=given.heads,
        head_dim=given.head_dim,
        **_rotation(low, given),
        table=low.flat(given.table),
        weight=low.vector(given.weight),
    )


def _gather(low: Lowering, node: fx.Node) -> Call:
    given = ops.operands(node)
    return Gather(
        node.name,
        sources=tuple(low.buffer(x, whole=False) for x in given.sources),
        offsets=tuple(low.column(x) for x in given.sources),
        widths=tuple(x.meta["val"].shape[-1] for x in given.sources),
        out=low.buffer(node),
        index=low.indices(given.index),
    )


def _attention(low: Lowering, node: fx.Node) -> Call:
    given = ops.operands(node)
    heads, head_dim = given.q.meta["val"].shape[-2:]
    return Attention(
        node.name,
        q=low.buffer(given.q, whole=False),
        q_offset=low.column(given.q),
        out=low.buffer(node),
        heads=heads,
        kv_heads=given.kv_heads or given.cache.meta["val"].shape[-2],
        head_dim=head_dim,
        scale=given.scale,
        layer=given.layer,
        window=given.window,
        chunk=given.chunk,
        softcap=given.softcap,
        sinks=low.vector(given.sinks),
        key_bias=low.flat(given.key_bias),
        center=low.vector(given.center),
        value=None if given.value is None else tuple(given.value),
    )


def _take_rows(low: Lowering, node: fx.Node) -> Call:
    return TakeRows(node.name, x=low.buffer(ops.operand(node, "x")), out=low.buffer(node))


def _elementwise(
    low: Lowering, node: fx.Node, kind: str, x: fx.Node, other: fx.Node | None = None, /, **more: Any
) -> Call:
    """An elementwise call on x and, if given, other; each may be some columns of a buffer."""
    more |= {"x": low.buffer(x, whole=False), "x_offset": low.column(x), "out": low.buffer(node)}
    if other is not None:
        more |= {"other": low.buffer(other, whole=False), "other_offset": low.column(other)}
    return Elementwise(node.name, kind, **more)


def _unary(low: Lowering, node: fx.Node) -> Call:
    return _elementwise(low, node, ops.operand(node, "kind"), ops.operand(node, "x"))


def _curve(low: Lowering, node: fx.Node) -> Call:
    given = ops.operands(node)
    return _elementwise(low, node, str(ops.name_of(node.target)), given.x, weight=low.vector(given.curve))


def _scale(low: Lowering, node: fx.Node) -> Call | None:
    x = ops.operand(node, "x")
    if ops.name_of(x.target) == "embedding" and _only_scaled(x):
        return None  # a part of the embedding
    return _elementwise(low, node, "scale", ops.operand(node, "x"), factor=ops.operand(node, "factor"))


def _shift(low: Lowering, node: fx.Node) -> Call:
    return _elementwise(low, node, "shift", ops.operand(node, "x"), factor=ops.operand(node, "offset"))


def _power(low: Lowering, node: fx.Node) -> Call:
    return _elementwise(low, node, "power", ops.operand(node, "x"), factor=ops.operand(node, "exponent"))


def _mean(low: Lowering, node: fx.Node) -> Call:
    x = ops.operand(node, "x")
    return Mean(node.name, low.buffer(x, whole=False), low.buffer(node), x.meta["val"].shape[-1], low.column(x))


def _mix(low: Lowering, node: fx.Node) -> Call:
    x, weights = ops.operand(node, "x"), ops.operand(node, "weights")
    results, slots = weights.meta["val"].shape[-2:]
    return Combine(node.name, low.buffer(x), low.buffer(node), slots, low.buffer(weights), results)


def _all_reduce(low: Lowering, node: fx.Node) -> Call:
    given = ops.operands(node)
    return AllReduce(node.name, low.buffer(given.x), low.buffer(node), given.ranks)


def _all_gather(low: Lowering, node: fx.Node) -> Call:
    given = ops.operands(node)
    return AllGather(node.name, low.buffer(given.x), given.ranks, given.width)


def _clamp(low: Lowering, node: fx.Node) -> Call:
    given = ops.operands(node)
    return _elementwise(low, node, "clamp", given.x, low=given.low, high=given.high)


def _binary(low: Lowering, node: fx.Node) -> Call:
    kind = str(ops.name_of(node.target))
    a, b = ops.operand(node, "a"), ops.operand(node, "b")
    if low.graph.is_weight(a):
        a, b = b, a
    shapes = a.meta["val"].shape, b.meta["val"].shape
    if len(shapes[0]) != 2 and (low.graph.is_weight(b) or shapes[0] != shapes[1]):
        raise PassError("codegen", node.name, f"{kind} inside heads has no kernel yet")
    if low.graph.is_weight(b):
        return _elementwise(low, node, kind, a, weight=low.vector(b))
    if shapes[0] != shapes[1]:
        if shapes[1] != (shapes[0][0], 1):
            raise PassError("codegen", node.name, f"{kind} of {tuple(shapes[0])} and {tuple(shapes[1])} has no kernel")
        kind += "_row"
    return _elementwise(low, node, kind, a, b)


def _route(low: Lowering, node: fx.Node) -> Call:
    given, kind = ops.named(node), cast(Any, ops.name_of(node.target))
    x, index = given["x"], given.get("index")
    stored = low.graph.is_weight(x)
    return Route(
        node.name,
        kind,
        x=None if stored else low.buffer(x, whole=False),
        out=low.buffer(node),
        width=x.meta["val"].shape[-1],
        x_offset=0 if stored else low.column(x),
        index=None if index is None else low.buffer(index),
        table=low.vector(x) if stored else None,
        **{name: given[name] for name in ("eps", "floor", "groups", "keep", "count", "tolerance") if name in given},
    )


def _bound_choice(low: Lowering, node: fx.Node) -> Call:
    index, last = low.buffer(ops.operand(node, "index")), ops.operand(node, "last")
    return Route(node.name, "bound_choice", x=None, out=low.buffer(node), width=last + 1, index=index)


def _every_expert(low: Lowering, node: fx.Node) -> Call:
    return EveryExpert(node.name, out=low.buffer(node), experts=ops.operand(node, "experts"))


def _expert_gemm(low: Lowering, node: fx.Node) -> Call:
    given = ops.operands(node)
    x, index, weight, format, experts = given.x, given.index, given.weight, given.format, given.experts
    k, slots = x.meta["val"].shape[-1], index.meta["val"].shape[-1]
    # Whole blocks of 16 rows: four experts take a multiple of 64 bytes in every role, so sizes are not rounded up.
    rows = weight.meta["val"][0].shape[0] // experts
    sizes = weight_format(format).packed_bytes(4 * rows, k)
    return ExpertGemm(
        node.name,
        x=low.buffer(x),
        index=low.buffer(index),
        out=low.buffer(node),
        format=format,
        activation=given.activation,
        group=given.group,
        n=given.width,
        rows=rows,
        k=k,
        experts=experts,
        slots=slots,
        x_slots=slots if x.meta["val"].dim() == 3 else 1,
        weights=low.packed(weight, format, given.activation),
        strides={role: size // 4 for role, size in sizes.items()},
        bias=low.vector(given.bias),
        epilogue=given.epilogue,
        limit=given.limit,
        offset=given.offset,
    )


def _combine(low: Lowering, node: fx.Node) -> Call:
    y, scores = ops.operand(node, "y"), ops.operand(node, "factor")
    return Combine(
        node.name,
        x=low.buffer(y),
        out=low.buffer(node),
        slots=y.meta["val"].shape[-2],
        scores=None if scores is None else low.buffer(scores),
    )


_LOWER: dict[str, Callable[[Lowering, fx.Node], Call | None]] = {
    "embedding": _embedding,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "norm_quantize": _norm,
    "norm_heads": _norm_heads,
    "quantize_activation": _quantize,
    "hadamard": _hadamard,
    "hadamard_quantize": _hadamard,
    "gemm": _gemm,
    "rope_append": _rope_append,
    "rope_heads": _rope_heads,
    "gather_features": _gather,
    "kv_attention": _attention,
    "conv_step": conv_step,
    "recurrence_step": recurrence_step,
    "take_rows": _take_rows,
    "unary": _unary,
    **dict.fromkeys(ops.CURVES, _curve),
    "scale": _scale,
    "add": _binary,
    "mul": _binary,
    "clamp": _clamp,
    "shift": _shift,
    "power": _power,
    "mean": _mean,
    "mix": _mix,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    **dict.fromkeys(("softmax", "top_k", "pick", "near_share", "normalize", "limit_groups"), _route),
    "bound_choice": _bound_choice,
    "every_expert": _every_expert,
    "expert_gemm": _expert_gemm,
    "combine": _combine,
    "lora_shrink": lora_shrink,
    "lora_expand": lora_expand,
    "gate_rows": gate_rows,
    "read_features": read_features,
    "write_features": write_features,
}
_VIEWS = ("slice_features", "split_heads", "merge_heads")


def lower(graph: Graph, weights: WeightTable, origin: str = "", fidelity: Fidelity | None = None) -> Program:
    """The program of one step of `graph` (after plan_memory); its weights are added to `weights`.

    All paths of one model are lowered into the same table with the same `origin`; another model has its own, which
    prefixes its weights' names. `fidelity` counts what rounding changes when weights are written. Raises
    PassError naming the node when no kernel supports an operator as used there.
    """
    low = Lowering(graph, weights, origin, fidelity)
    for node in graph.nodes:
        kind = ops.name_of(node.target)
        if node.op != "call_function" or graph.is_weight(node) or kind in _VIEWS or node.target is operator.getitem:
            continue
        if kind not in _LOWER:
            raise PassError("codegen", node.name, f"operator {kind or node.target} has no kernel")
        try:
            call = _LOWER[kind](low, node)
        except PassError:
            raise
        except UnsupportedError as error:  # unsupported weight shape or format: add the node's name
            raise PassError("codegen", node.name, str(error)) from error
        if call is not None:
            low.calls.append(call)
    logits: Any = graph.output.args[0]
    if "storage" in logits[0].meta:
        low.calls.append(Logits("logits", low.buffer(logits[0])))
    return Program(
        graph.info.vocab_size,
        graph.info.max_position,
        tuple(low.buffers.values()),
        tuple(low.calls),
        tuple(low.names),
        _kv_layout(graph),
        StateLayout(tuple(layer_state(node) for node in graph.calls("conv_step", "recurrence_step"))),
        _head(graph),
    )


def _head(graph: Graph) -> str | None:
    """The gemm from which the logits follow, one by one, if its inputs are those of the imported model.

    Passes keep the model's function: where they have not changed the head's weight and bias, its inputs are unchanged.
    """
    logits: Any = graph.output.args[0]
    node: fx.Node = logits[0]
    while ops.name_of(node.target) != "gemm":
        read = [each for each in node.all_input_nodes if not graph.is_weight(each)]
        if len(read) != 1:
            return None
        node = read[0]
    given = ops.operands(node)
    whole = given.weight  # of all ranks
    while ops.name_of(whole.target) == "take_parts":
        whole = ops.operand(whole, "weight")
    weight = ops.operand(whole, "w") if ops.name_of(whole.target) == "quantize_weight" else None
    stored = weight is not None and weight.op == "get_attr" and (given.bias is None or given.bias.op == "get_attr")
    return node.name if stored and given.x.meta["storage"]["rows"] == "outputs" else None


def _kv_layout(graph: Graph) -> KVLayout:
    layers, _, _, kv_heads, head_dim = next(n for n in graph.inputs if n.target == "step_cache").meta["val"].shape
    appends = [ops.operands(node) for node in graph.calls("rope_append")]
    heads = tuple((each.kv_heads, each.head_dim) for each in sorted(appends, key=lambda each: each.layer))
    mixed = any(each != (kv_heads, head_dim) for each in heads)
    reads = graph.calls("kv_attention")
    value = ops.operand(reads[0], "value") if reads else None
    return KVLayout(
        appends[0].format if appends else "kv16",
        layers,
        kv_heads,
        head_dim,
        by_layer=heads if mixed else (),
        value=None if value is None else tuple(value),
    )
