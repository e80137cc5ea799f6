"""Graphs for people: as text with one line per operator, or as a self-contained SVG drawing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from torch import Tensor, fx

from qcompile import ops
from qcompile.errors import ResourceError, escaped
from qcompile.graph import Graph

ROW, LANE, BOX, MARGIN = 34, 26, 250, 24
"""Sizes of a drawing in pixels: height of a row, width of a lane and of a box, and the margin."""

COLORS = {
    "linear": "#cfe3ff",
    "gemm": "#cfe3ff",
    "gated_linear": "#cfe3ff",
    "attention": "#ffdfb8",
    "kv_attention": "#ffdfb8",
    "rope_append": "#ffe9cf",
    "norm_quantize": "#d9f2d9",
    "rms_norm": "#d9f2d9",
    "layer_norm": "#d9f2d9",
    "add": "#f3d9f2",
}


def to_text(graph: Graph) -> str:
    """One line per operator on activations: name, operator, arguments, shape. Weights are shown where they are used."""
    lines = [f"graph {graph.info.name} at {graph.stage}"]
    lines += [f"  {node.name}: {_shape(node)}" for node in graph.inputs]
    for node in _activations(graph):
        arguments = ", ".join(_argument(graph, argument) for argument in node.args)
        lines.append(f"  {node.name} = {_kind(node)}({arguments}) -> {_shape(node)}{_notes(node)}")
    results = graph.output.args[0]
    lines.append(f"  return {_argument(graph, results)}")
    return "\n".join(lines) + "\n"


def dump(graphs: Sequence[Graph], names: Sequence[str], folder: Path) -> None:
    """Write each graph as NN-name.txt and NN-name.svg. Raises ResourceError if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, (graph, name) in enumerate(zip(graphs, names, strict=True), start=1):
            (folder / f"{number:02}-{name}.txt").write_text(to_text(graph), encoding="utf-8")
            (folder / f"{number:02}-{name}.svg").write_text(to_svg(graph), encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write graphs to {folder}: {error.strerror}") from error


def _activations(graph: Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and not graph.is_weight(node)]


def _kind(node: fx.Node) -> str:
    name = ops.name_of(node.target)
    return name or str(getattr(node.target, "__name__", node.target))


def _argument(graph: Graph, argument: Any) -> str:
    if isinstance(argument, fx.Node):
        if not graph.is_weight(argument):
            return argument.name
        if argument.op == "get_attr":
            return str(argument.target)
        inner = ", ".join(_argument(graph, a) for a in argument.args)
        return f"{_kind(argument)}({inner})"
    if isinstance(argument, (list, tuple)):
        return "[" + ", ".join(_argument(graph, a) for a in argument) + "]"
    return f"{argument:g}" if isinstance(argument, float) else str(argument)


def _shape(node: fx.Node) -> str:
    return " ".join(
        f"{str(t.dtype).removeprefix('torch.')}[{', '.join(map(str, t.shape))}]" for t in _tensors(node.meta.get("val"))
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)


def _notes(node: fx.Node) -> str:
    notes = []
    if node.meta.get("precision"):
        notes.append("{weight} x {activation}".format(**node.meta["precision"]))
    if node.meta.get("storage"):
        notes.append("in {buffer} +{offset}".format(**node.meta["storage"]))
    return f"  # {'; '.join(notes)}" if notes else ""


@dataclass(frozen=True)
class _Edge:
    """An edge from row `start` to row `stop` in `lane`, right of the boxes; None between adjacent rows."""

    start: int
    stop: int
    lane: int | None


def to_svg(graph: Graph) -> str:
    """The graph from top to bottom, one row per operator; long edges run in lanes beside the boxes."""
    nodes = [*graph.inputs, *_activations(graph), graph.output]
    rows = {node: row for row, node in enumerate(nodes)}
    edges = _edges(nodes, rows)
    lanes = max((edge.lane + 1 for edge in edges if edge.lane is not None), default=0)
    width = 2 * MARGIN + BOX + lanes * LANE + LANE
    height = 2 * MARGIN + len(nodes) * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        f"<title>{_text(graph.info.name)} at {_text(graph.stage)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *(_draw_edge(edge) for edge in edges),
        *(_draw_node(graph, node, row) for node, row in rows.items()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _edges(nodes: list[fx.Node], rows: dict[fx.Node, int]) -> list[_Edge]:
    """Edges between rows; each long edge takes the first lane that is free over its span."""
    busy: list[int] = []  # the last row up to which each lane is taken
    edges = []
    for node in nodes:
        row = rows[node]
        for source in sorted({rows[n] for n in node.all_input_nodes if n in rows}):
            if source == row - 1:
                edges.append(_Edge(source, row, None))
                continue
            edges.append(_Edge(source, row, 0))
    placed = []
    for edge in sorted(edges, key=lambda e: (e.start, e.stop)):
        if edge.lane is None:
            placed.append(edge)
            continue
        lane = next((i for i, last in enumerate(busy) if last <= edge.start), len(busy))
        busy[lane : lane + 1] = [edge.stop]
        placed.append(_Edge(edge.start, edge.stop, lane))
    return placed


def _middle(row: int) -> float:
    return MARGIN + row * ROW + ROW / 2


def _draw_edge(edge: _Edge) -> str:
    if edge.lane is None:
        x = MARGIN + BOX / 2
        return f'<path d="M{x} {_middle(edge.start)}V{_middle(edge.stop)}" stroke="#555" fill="none"/>'
    box, x = MARGIN + BOX, MARGIN + BOX + LANE * (edge.lane + 0.7)
    start, stop = _middle(edge.start) + 6, _middle(edge.stop) - 6
    return f'<path d="M{box} {start}H{x}V{stop}H{box}" stroke="#999" fill="none"/>'


def _draw_node(graph: Graph, node: fx.Node, row: int) -> str:
    kind = "output" if node.op == "output" else node.name if node.op == "placeholder" else _kind(node)
    color = COLORS.get(kind, "#eeeeee")
    weights = [_argument(graph, a) for a in node.args if isinstance(a, fx.Node) and graph.is_weight(a)]
    top = MARGIN + row * ROW + 3
    label = f"{kind}  {_shape(node)}" if node.op != "output" else kind
    hint = "\n".join([node.name, *weights, _notes(node).strip()]).strip()
    box = f'<rect x="{MARGIN}" y="{top}" width="{BOX}" height="{ROW - 6}" rx="4" fill="{color}" stroke="#777"/>'
    text = f'<text x="{MARGIN + 8}" y="{top + 18}" font-size="11">{_text(label[:46])}</text>'
    return f"<g><title>{_text(hint)}</title>{box}{text}</g>"


def _text(name: str) -> str:
    """A name of the graph as text of a document, which may have no control characters."""
    return escape(escaped(name))
