"""Raise: rewrite the ATen operators of torch.export as qcompile:: operators over token-major tensors.

How it works
------------
`raise_graph` (walk.py) visits the ATen graph once, in order. For each node it asks the rules of the node's operator, in
the order of `HANDLERS` below, what the result means; the first answer counts. A meaning is one of

- `Value` (values.py): features of one raised tensor, linearly combined, or a function of the position. Views, slices,
  concatenations and rotary embeddings only change the Value and add no operator to the raised graph;
- `Constant` (facts.py): computed from parameters and numbers only, evaluated where a rule needs it;
- `Opaque` (facts.py): no rule applied. That is no error yet: the parts of a norm, a mask or a softmax stay opaque until
  the last operator of the pattern is reached. If an operator needs the meaning, the model is refused with the name of
  the first opaque node. Subclasses hold what a few rules share, such as `Chosen` in experts.py.

A rule is a function `handler(facts, build, node, a)`:

- `facts` (facts.py) is what is known of the ATen graph: `facts.known[node]`, `facts.value(node)`,
  `facts.require(node, reader)`, `facts.number(node)`, `facts.shape(node)`;
- `build` (builder.py) adds to the raised graph: `build.call(name, ...)` an operator, `build.weight(node)` a weight,
  `build.emit(value, sizes, node)` the raised tensor [B, T, ...] that a Value describes;
- `node` is the ATen node, and `a` its arguments by schema name (nodes.py).

It returns the meaning of the result, or None if it does not apply; then the next rule is tried. It raises
`unsupported(node, reason)` if it recognizes the node and cannot compile it. Rules match operators and dataflow, never
the names of modules, classes or parameters.

How to add a rule
-----------------
For an ATen operator that is missing, or for another way to write a known operation:

1. Write the handler in the file of its concept: layout, selection, concatenation, memory (copies and views);
   embeddings, positions, rotary, lengths, complex_numbers (functions of the position); token_tables (functions of the
   token's number); elementwise, activations, norms, formulas, linear; attention, fused_attention, written_attention,
   token_bias, masks; recurrent, decays; routers, one_by_one, experts, scattered, sorted_pairs. A pattern is
   recognized from its last operator, with `is_call`, `strip` and `both_orders` of nodes.py.
2. Add it to the line of its operator in `HANDLERS`: special cases first, the general rule last.
3. Test in tests/passes/raising/ that a module with it has the same logits and the expected operators, and that similar
   modules which differ in one point (another factor, order or dimension) are refused or right (test_near_misses.py).

Rules build the operators of qcompile/ops/. A new one gets its schema, fake kernel and torch reference there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.raising import (
    activations,
    attention,
    complex_numbers,
    concatenation,
    decays,
    elementwise,
    embeddings,
    experts,
    formulas,
    fused_attention,
    layout,
    lengths,
    linear,
    memory,
    norms,
    one_by_one,
    positions,
    recurrent,
    routers,
    scattered,
    selection,
    sorted_pairs,
    token_shift,
    token_tables,
    written_attention,
)
from qcompile.passes.raising.walk import Handler, raise_graph

_COPY: tuple[Handler, ...] = (complex_numbers.copy, layout.copy)
_MULTIPLY: tuple[Handler, ...] = (
    complex_numbers.multiply,
    positions.scale_by_position,
    positions.weight_by_position,
    scattered.scaled_inputs,
    norms.product_norm,
    experts.scale_slots,
    activations.gelu,
    activations.quick_gelu,
    activations.mish,
    elementwise.multiply,
)
_DIVIDE: tuple[Handler, ...] = (
    sorted_pairs.tokens,
    routers.normalize,
    elementwise.divide,
    norms.quotient_norm,
    elementwise.quotient,
)
_MATMUL: tuple[Handler, ...] = (
    scattered.expert_linear,
    experts.expert_linear,
    linear.matmul,
    positions.outer_matmul,
    formulas.token_product,
    written_attention.written_attention,
)
_CAT: tuple[Handler, ...] = (
    sorted_pairs.joined,
    norms.norms_of_heads,
    one_by_one.join_slots,
    concatenation.cat,
    concatenation.cat_several,
)

HANDLERS: Mapping[str, tuple[Handler, ...]] = {
    # copies and casts
    "_to_copy": _COPY,
    "alias": (memory.alias, *_COPY),
    "clone": _COPY,
    "contiguous": _COPY,
    "detach": _COPY,
    "to": _COPY,
    "type_as": _COPY,
    "dropout": (layout.copy,),
    "feature_dropout": (layout.copy,),
    "lift_fresh_copy": (layout.copy,),
    # views
    "_unsafe_view": (layout.view,),
    "broadcast_to": (layout.expand,),
    "expand": (layout.expand,),
    "expand_as": (layout.expand,),
    "flatten": (layout.view,),
    "mT": (layout.transpose_last,),
    "numpy_T": (layout.transpose_last,),
    "permute": (layout.permute,),
    "reshape": (layout.view,),
    "reshape_as": (layout.view,),
    "squeeze": (layout.view,),
    "swapaxes": (layout.transpose,),
    "t": (layout.transpose_last,),
    "transpose": (layout.transpose,),
    "unflatten": (layout.view,),
    "unsqueeze": (complex_numbers.unsqueeze, layout.unsqueeze),
    "view": (layout.view,),
    "view_as": (layout.view,),
    "view_as_complex": (complex_numbers.view_as_complex,),
    "view_as_real": (complex_numbers.view_as_real,),
    # parts of tensors
    "chunk": (selection.split,),
    "getitem": (selection.getitem,),
    "index": (sorted_pairs.in_order, experts.chosen_weights, embeddings.index_rows, selection.index),
    "index_select": (embeddings.index_select_rows, selection.index_select),
    "narrow": (memory.part, selection.narrow),
    "repeat": (scattered.repeat_for_experts, selection.repeat),
    "repeat_interleave": (experts.repeat_tokens, selection.repeat_interleave),
    "select": (selection.select,),
    "slice": (memory.part, embeddings.first_rows, recurrent.padded_conv, token_shift.cut_padded, selection.slice_),
    "split": (selection.split,),
    "split_with_sizes": (
        sorted_pairs.parts,
        selection.split,
    ),
    "tensor_split": (selection.split,),
    "tile": (scattered.repeat_for_experts, selection.repeat),
    "unbind": (
        sorted_pairs.single_counts,
        selection.split,
    ),
    # tensors from parts
    "cat": _CAT,
    "concat": _CAT,
    "concatenate": _CAT,
    "constant_pad_nd": (concatenation.pad, token_shift.padded),
    "copy": (memory.overwrite,),
    "empty": (memory.empty,),
    "empty_like": (memory.empty,),
    "new_empty": (memory.empty,),
    "pad": (concatenation.pad, token_shift.padded),
    "slice_scatter": (memory.scatter,),
    "stack": (concatenation.stack,),
    # tables and functions of the position
    "arange": (positions.arange,),
    "cos": (positions.trigonometric,),
    "embedding": (embeddings.embedding,),
    "full": (positions.uniform,),
    "full_like": (positions.uniform,),
    "ger": (positions.outer,),
    "new_full": (positions.uniform,),
    "new_ones": (positions.uniform,),
    "ones": (positions.uniform,),
    "ones_like": (positions.uniform,),
    "outer": (positions.outer,),
    "polar": (complex_numbers.polar,),
    "sin": (positions.trigonometric,),
    # arithmetic
    "add": (
        elementwise.add_expanded_bias,
        lengths.add_to_largest,
        elementwise.shift,
        experts.expert_bias,
        elementwise.add,
        positions.add_by_position,
    ),
    "clamp": (routers.clamp_choice, elementwise.clamp),
    "clamp_max": (routers.clamp_choice, elementwise.clamp),
    "clamp_min": (routers.clamp_choice, elementwise.clamp),
    "div": _DIVIDE,
    "gt": (lengths.is_longer,),
    "mul": _MULTIPLY,
    "multiply": _MULTIPLY,
    "neg": (elementwise.negate,),
    "pow": (activations.squared_relu, formulas.power),
    "reciprocal": (formulas.power,),
    "rsub": (elementwise.shift_negated,),
    "rsqrt": (formulas.power,),
    "sqrt": (formulas.power,),
    "square": (activations.squared_relu, formulas.power),
    "sub": (elementwise.shift, elementwise.add),
    "true_divide": _DIVIDE,
    "where": (
        lengths.decided_where,
        activations.xielu,
        activations.written_softplus,
        token_tables.where,
    ),
    # reductions over features
    "mean": (formulas.mean,),
    "std": (formulas.deviation,),
    "var": (formulas.deviation,),
    # activations and norms
    "elu": (activations.activation,),
    "exp": (activations.activation,),
    "gelu": (activations.activation,),
    "layer_norm": (norms.layer_norm,),
    "log_sigmoid": (activations.log_sigmoid,),
    "mish": (activations.activation,),
    "native_layer_norm": (norms.layer_norm,),
    "relu": (activations.activation,),
    "rms_norm": (norms.rms_norm,),
    "sigmoid": (activations.activation,),
    "silu": (activations.activation,),
    "softplus": (activations.activation,),
    "tanh": (activations.activation,),
    # products with weights, and attention
    "addmm": (linear.addmm,),
    "baddbmm": (linear.baddbmm,),
    "bmm": _MATMUL,
    "einsum": (linear.einsum,),
    "linear": (
        sorted_pairs.product,
        linear.linear,
    ),
    "matmul": _MATMUL,
    "mm": (linear.matmul, positions.outer_matmul, written_attention.written_attention),
    "qcompile::attention": (attention.attention,),
    "qcompile::within": (lengths.within,),
    "scaled_dot_product_attention": (fused_attention.sdpa,),
    # recurrent layers
    "conv1d": (recurrent.conv_of_padded,),
    "qcompile::causal_conv": (recurrent.causal_conv,),
    "qcompile::log_decay": (decays.log_decay,),
    "qcompile::linear_recurrence": (recurrent.linear_recurrence,),
    # experts
    "index_add": (sorted_pairs.add_back,),
    "sort": (sorted_pairs.sort,),
    "_softmax": (one_by_one.shares, routers.softmax),
    "amax": (routers.best, lengths.largest_position),
    "argmax": (routers.best,),
    "gather": (one_by_one.share_of_best, routers.pick, embeddings.gather_rows),
    "masked_fill": (routers.limit_groups, one_by_one.hide_far, token_tables.masked_fill),
    "max": (one_by_one.best_left, routers.best, lengths.largest_position),
    "scatter": (scattered.scatter, one_by_one.hide_chosen, sorted_pairs.marks),
    "softmax": (one_by_one.shares, routers.softmax),
    "sum": (sorted_pairs.counts, scattered.sum_experts, experts.sum_slots, formulas.mean),
    "topk": (routers.topk,),
}
"""The rules of each ATen operator, in the order in which they are tried."""


@dataclass(frozen=True)
class Raise(Pass):
    """ATen to qcompile:: operators; raises UnsupportedError with the node if there is no equivalent."""

    name: ClassVar[str] = "raise"
    requires: ClassVar[tuple[str, ...]] = ("import",)
    ensures: ClassVar[str] = "raise"

    def run(self, graph: Graph) -> PassResult:
        raised, notes = raise_graph(graph, HANDLERS)
        return PassResult(raised, len(raised.calls()), notes)
