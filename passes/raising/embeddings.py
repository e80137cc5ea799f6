"""Rules for rows of a stored table: token embeddings, and learned embeddings of the position."""

from __future__ import annotations

from torch import fx

from qcompile.passes.raising import values
from qcompile.passes.raising.builder import Builder, feature_sizes
from qcompile.passes.raising.facts import LENGTHS, WHOLE, Constant, Facts, Known, Opaque
from qcompile.passes.raising.nodes import Arguments, operator_name, rounds, unsupported
from qcompile.passes.raising.token_maps import mapped
from qcompile.passes.raising.values import Value, identity


def embedding(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """aten.embedding by token ids or by positions."""
    return _rows(facts, build, a.weight, a.indices)


def index_select_rows(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Tensor.index_select of rows of a table [P, F]."""
    return _rows(facts, build, a.input_, a.index) if a.dim == 0 and a.input_.meta["val"].dim() == 2 else None


def index_rows(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """table[index] of a table [P, F]."""
    if len(a.indices) != 1 or a.indices[0] is None or a.input_.meta["val"].dim() != 2:
        return None
    return _rows(facts, build, a.input_, a.indices[0]) if a.indices[0].meta["val"].dtype in WHOLE else None


def _rows(facts: Facts, build: Builder, table: fx.Node, index: fx.Node) -> Known:
    """Rows of a table: the token embedding, or learned positions; the table starts at their offset."""
    known = facts.known.get(index)
    if not isinstance(facts.known.get(table), Constant):
        return None
    width = int(table.meta["val"].shape[1])
    if isinstance(known, Opaque) and known.node is facts.token_ids:
        return identity(build.call("embedding", build.token_ids, build.weight(table)), ("B", "T", "F"), (width,))
    if isinstance(known, Opaque) and (tokens := mapped(facts, index)) is not None:
        rows = build.chosen_rows(table, tokens, index)
        return identity(build.call("embedding", build.token_ids, rows), ("B", "T", "F"), (width,))
    if not isinstance(known, Value) or known.base is not None or known.sizes:
        return None
    terms = {int(term["kind"]): float(term["coef"]) for term in known.terms}
    offset = terms.pop(values.ONE, 0.0)
    if terms != {values.POSITION: 1.0} or offset < 0 or offset % 1 or not any("T" in dim for dim in known.dims):
        return None
    _require_rows(facts, table, int(table.meta["val"].shape[0] - offset))
    rows = build.rows_from(table, int(offset))
    return identity(build.call("embedding", build.positions, rows), (*known.dims, "F"), (width,))


def first_rows(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """table[: tokens] of a stored table: its rows at the positions. It must have one other dimension."""
    table = a.input_
    if not isinstance(facts.known.get(table), Constant) or a.start not in (0, None) or a.step not in (1, None):
        return None
    dim = a.dim % len(facts.shape(node))
    shape = [int(size) for size in table.meta["val"].shape]
    wide = [d for d in range(len(shape)) if d != dim and shape[d] > 1]
    if facts.shape(node)[dim] != LENGTHS["T"] or len(wide) != 1:
        return None
    _require_rows(facts, table, shape[dim])
    made = build.call("embedding", build.positions, build.matrix(table, dim, wide[0]))
    dims = tuple("T" if d == dim else "F" if d in wide else "" for d in range(len(shape)))
    return identity(made, dims, feature_sizes(made))


def gather_rows(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Rows [B, T, F] of a table [P, F], which may be repeated over the batch, gathered at the position."""
    if a.dim != 1:
        return None
    table: fx.Node = a.input_
    while operator_name(table) in ("repeat", "expand", "to", "unsqueeze") and not rounds(table):
        table = table.args[0]  # type: ignore[assignment]
    if not isinstance(facts.known.get(table), Constant):
        return None
    shape, place = [int(size) for size in table.meta["val"].shape if size != 1], facts.known.get(a.index)
    if len(shape) != 2 or not isinstance(place, Value):
        return None
    moving = place.base is None and len(place.terms) == 1 and (place.terms["kind"] == values.POSITION).all()
    if not moving or (place.terms["coef"] != 1).any() or facts.shape(node) != [LENGTHS["B"], LENGTHS["T"], shape[1]]:
        return None
    _require_rows(facts, table, shape[0])
    rows, columns = (d for d, size in enumerate(table.meta["val"].shape) if size != 1)
    made = build.call("embedding", build.positions, build.matrix(table, rows, columns))
    return identity(made, ("B", "T", "F"), (shape[1],))


def _require_rows(facts: Facts, table: fx.Node, rows: int) -> None:
    """Raise UnsupportedError unless a table over the position has a row for every position of the model's context."""
    if rows < facts.longest:
        raise unsupported(table, f"has fewer rows than the {facts.longest} positions of the model's context")
