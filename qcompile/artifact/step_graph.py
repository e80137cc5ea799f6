"""Reads the step graph of an artifact that nobody trusts, and proves what its kernels rely on.

The graph is data: nodes of known operators with numbers and words. Shapes are inferred again, and each operator is
computed once on zeros by its reference, which fails or has another shape where operands do not fit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from qcompile import check, ops
from qcompile.artifact.hashes import listed_file
from qcompile.artifact.layout import ADAPTERS_FILE, Manifest
from qcompile.artifact.packed_weights import STEP
from qcompile.errors import ArtifactError, QCompileError, UnsupportedError, UsageError, escaped
from qcompile.formats.floats import TABLE_TYPES
from qcompile.formats.kv import PAGE_TOKENS
from qcompile.formats.states import StateLayout
from qcompile.graph import Graph, WeightStore
from qcompile.ops.recurrent_step import layer_state

_WORD = re.compile(r"\w*")
_MOST_NUMBERS = 1 << 28
"""Most numbers of an input of the step on which operators are computed."""
_UNPROVED = (
    *("expert_gemm", "pick", "near_share", "bound_choice", "every_expert", "gather_features"),
    *("all_gather", "lora_shrink", "lora_expand", "gate_rows", "read_features", "write_features"),
)
"""Operators that index memory by computed values or by weights, or that need other GPUs, adapters or drafts: what they
rely on is not proved."""
_TABLES = ("query_table", "table", "key_bias")
"""Operands with a row for each position, of operators on heads."""
_APPENDS = ("rope_append", "kv_append")
_STEP_OPERANDS = {
    "positions": "step_positions",
    "sequence": "step_sequence",
    "block_table": "step_block_table",
    "state_slots": "step_state_slots",
    "certain": "step_certain",
    "rows": "step_output_rows",
}
"""Operands by which kernels find rows of memory, and the input of the step that each must be."""


def read_step(root: Path, manifest: Manifest) -> Graph:
    """The step graph of the artifact at `root`, with shapes, without the plan of its memory, and without weights.

    Raises ArtifactError for a graph that is damaged or does not fit together, and UnsupportedError for operators
    for which that is not proved.
    """
    if ADAPTERS_FILE in manifest["files"]:
        raise UnsupportedError(f"{root}: kernels with places for adapters are not rebuilt")
    content = listed_file(root, manifest["files"], STEP)
    if content is None:
        raise ArtifactError(f"{root}: {STEP} is missing; build it again")
    with foreign_graph(root):
        graph = _graph(json.loads(content), manifest)
        _check_words(graph)
        _check_places(graph)
        _check_step_operands(graph)
        _check_ranks(graph, len(manifest["runtime"].get("ranks") or [0]))
        _check_operators(root, graph)
        _check_tables(root, graph)
        inputs = _inputs(graph)
        graph.infer([value.to("meta") for value in inputs])
        check.check(graph)
        _Proof(graph).run(*inputs)
        _check_cache(graph)
        _check_rows(graph)
    return graph


@contextmanager
def foreign_graph(root: Path) -> Iterator[None]:
    """Makes any exception that a graph of somebody else leads to an ArtifactError; the user has not caused it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, QCompileError) and not isinstance(error, UsageError):
            raise
        line = escaped(f"{type(error).__name__}: {error}".partition("\n")[0][:200])
        raise ArtifactError(f"{root}: {STEP} does not fit together: {line}") from error


def _graph(document: dict[str, Any], manifest: Manifest) -> Graph:
    """The graph of a document, with the facts of the manifest, which was checked."""
    weights = WeightStore()
    document["model"] = dict(manifest["model"])
    for item in document["nodes"]:
        if item["op"] == "get_attr":
            [(shape, kind)] = item["shapes"]
            weights.add(str(item["target"]), _sizes(shape), _dtype(kind), _without_values)
    graph = Graph.from_json(json.dumps(document), weights)
    if graph.stage != "cache":
        raise ValueError(f"it is at stage {graph.stage}")
    shapes = {item["name"]: item["shapes"] for item in document["nodes"]}
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = _placeholder(shapes[node.name])
        packed = node.meta.pop("packed", {})
        node.meta.pop("storage", None)
        node.meta.pop("precision", None)
        if packed.get("kind") == "table" and (table := _table(node)).op == "get_attr":
            weights.entries[str(table.target)].stored = TABLE_TYPES[packed["dtype"]]
    return graph


def _without_values() -> Tensor:
    raise UnsupportedError("kernels that depend on the values of weights are not rebuilt: take another recipe")


def _table(node: fx.Node) -> fx.Node:
    """The weight of which a table of embeddings has rows or columns."""
    while ops.name_of(node.target) == "take_spans":
        node = ops.operand(node, "w")
    return node


def _sizes(shape: list[Any]) -> list[int]:
    if not all(type(size) is int and 0 <= size < 1 << 31 for size in shape):
        raise ValueError(f"a weight has the shape {shape}")
    return shape


def _dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}[name]


def _placeholder(shapes: list[Any]) -> Tensor:
    [(shape, kind)] = shapes
    return torch.empty(_sizes(shape), dtype=_dtype(kind), device="meta")


def _check_words(graph: Graph) -> None:
    """Raise ValueError for a text among operands that is not a word: formats and kinds become parts of the source."""
    for node in graph.nodes:
        for item in _items(list(node.args)):
            if isinstance(item, str) and not _WORD.fullmatch(item):
                raise ValueError(f"node {node.name} has an operand {item!r}")


def _check_places(graph: Graph) -> None:
    """Raise ValueError for a whole number below 0: references count such places from the end, kernels do not."""
    for node in graph.nodes:
        if below := [item for item in _items(list(node.args)) if type(item) is int and item < 0]:
            raise ValueError(f"node {node.name} has an operand {below[0]}")


def _check_step_operands(graph: Graph) -> None:
    """Raise ValueError for another value where kernels rely on an input of the step that the runtime has checked."""
    for node in graph.calls():
        for name, wanted in _STEP_OPERANDS.items():
            if not ops.has_operand(node, name):
                continue
            given = ops.operand(node, name)
            if not isinstance(given, fx.Node) or given.op != "placeholder" or given.target != wanted:
                raise ValueError(f"node {node.name} has another operand {name} than {wanted}")


def _check_ranks(graph: Graph, ranks: int) -> None:
    """Raise ValueError unless the graph sums over `ranks` ranks, and over none if there is one: all wait for all."""
    summed = {ops.operand(node, "ranks") for node in graph.calls("all_reduce")}
    if summed != ({ranks} if ranks > 1 else set()):
        raise ValueError(f"it sums over {sorted(summed)} ranks, and {ranks} are to run it")


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _items(item)
    else:
        yield value


def _check_operators(root: Path, graph: Graph) -> None:
    if unproved := graph.calls(*_UNPROVED):
        node = unproved[0]
        raise UnsupportedError(
            f"{root}: node {node.name}: kernels of {ops.name_of(node.target)} are not rebuilt, as nothing proves that "
            "they stay within their memory"
        )


def _check_tables(root: Path, graph: Graph) -> None:
    for node in graph.calls("rope_append", "rope_heads", "kv_attention"):
        if any(ops.named(node).get(name) is not None for name in _TABLES):
            raise UnsupportedError(f"{root}: node {node.name}: kernels with tables by position are not rebuilt")


def _check_rows(graph: Graph) -> None:
    """Raise ValueError unless there is an embedding and a logit for each token, and an embedding for each position."""
    rows = {"step_token_ids": graph.info.vocab_size, "step_positions": graph.info.max_position}
    for node in graph.calls("embedding"):
        has, index = ops.operand(node, "weight").meta["val"].shape[0], str(ops.operand(node, "ids").target)
        if has < rows[index]:
            raise ValueError(f"node {node.name} has {has} rows of {rows[index]}")
    logits: Any = graph.output.args[0]
    if (has := logits[0].meta["val"].shape[-1]) != graph.info.vocab_size:
        raise ValueError(f"there are {has} logits for a vocabulary of {graph.info.vocab_size}")


def _inputs(graph: Graph) -> list[Tensor]:
    """A step of three rows of two sequences, two of which give logits, over an empty cache and empty states."""
    shapes = {str(node.target): node.meta["val"].shape for node in graph.inputs}
    layers, keys_and_values, _, heads, width = shapes["step_cache"]
    two = torch.arange(2)
    given = {
        "step_token_ids": torch.zeros(3, dtype=torch.int64),
        "step_positions": torch.tensor([0, 1, 0]),
        "step_sequence": torch.tensor([0, 0, 1]),
        "step_block_table": two[:, None],
        "step_output_rows": two + 1,
        "step_cache": _zeros(layers, keys_and_values, 2 * PAGE_TOKENS, heads, width),
        "step_state_slots": two,
        "step_certain": torch.tensor([2, 1]),
    }
    if "step_states" in shapes:
        given["step_states"] = _zeros(2, shapes["step_states"][1])
    return [given[str(node.target)] for node in graph.inputs]


def _zeros(*shape: int) -> Tensor:
    if int(np.prod([float(size) for size in shape])) > _MOST_NUMBERS:
        raise ValueError(f"an input has the shape {list(shape)}")
    return torch.zeros(shape)


class _Proof(fx.Interpreter):
    """Computes each operator on activations by its reference, with weights of zeros.

    The sum over ranks is this rank's part: of zeros, all parts are.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(torch.nn.Module(), garbage_collect_values=True, graph=graph.fx)
        self._weights = {node for node in graph.nodes if graph.is_weight(node)}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator returns."""
        if ops.name_of(target) == "all_reduce":
            return args[0].clone()
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node, which must have the shape inferred."""
        if n in self._weights:
            return _map(n.meta["val"], lambda t: torch.zeros((), dtype=t.dtype).expand(t.shape))
        with torch.no_grad():
            value = super().run_node(n)
        if n.op == "call_function" and _map(value, _kind) != _map(n.meta["val"], _kind):
            raise ValueError(f"node {n.name} has {_map(value, _kind)} instead of {_map(n.meta['val'], _kind)}")
        return value


def _map(value: Any, change: Any) -> Any:
    return [change(each) for each in value] if isinstance(value, (list, tuple)) else change(value)


def _kind(value: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(value.shape), value.dtype


def _check_cache(graph: Graph) -> None:
    """Raise ValueError unless each layer of the cache is appended to once, and layers have states of their own.

    The size of a layer is that of what is appended.
    """
    shapes = {str(node.target): node.meta["val"].shape for node in graph.inputs}
    layers = shapes["step_cache"][0]
    appended = sorted(ops.operand(node, "layer") for node in graph.calls(*_APPENDS))
    if appended != list(range(layers)):
        raise ValueError(f"layers {appended} of {layers} of the cache are written")
    sizes = {ops.operand(node, "layer"): _kept(node) for node in graph.calls(*_APPENDS)}
    for node in graph.calls("kv_attention"):
        read = ops.operand(node, "kv_heads") or shapes["step_cache"][3], ops.operand(node, "q").meta["val"].shape[-1]
        if read != sizes.get(ops.operand(node, "layer")):
            raise ValueError(f"node {node.name} reads heads {read} of a layer that does not have them")
    nodes = graph.calls("conv_step", "recurrence_step")
    states = StateLayout(tuple(layer_state(node) for node in nodes))
    offsets = [ops.operand(node, "offset") for node in nodes]
    if nodes and (offsets != list(states.offsets) or shapes["step_states"][1] != states.slot_numbers):
        raise ValueError(f"states begin at {offsets} of {shapes['step_states'][1]} numbers")


def _kept(node: fx.Node) -> tuple[int, int]:
    """(KV heads, head size) of what `node` appends to its layer of the cache."""
    if ops.name_of(node.target) == "rope_append":
        return ops.operand(node, "kv_heads"), ops.operand(node, "head_dim")
    shape = ops.operand(node, "k").meta["val"].shape
    return int(shape[-2]), int(shape[-1])
