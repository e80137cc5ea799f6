"""ExportedProgram -> Graph: weights by name, wrappers that only set a mode inlined, the trace's assertions dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from qcompile.checkpoints.loaders import Loader, TensorLoader
from qcompile.errors import UnsupportedError
from qcompile.graph import Graph, ModelInfo, WeightStore

INLINED = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Higher-order operators that only set a mode, which is irrelevant for inference unless it switches autocast on."""
WRAPPER = "module."
"""Prefix of weight names after exporting through a wrapper module."""
CPU = torch.device("cpu")


def import_program(
    program: ExportedProgram, loaders: dict[str, Loader], info: ModelInfo, wrapper: str = WRAPPER
) -> Graph:
    """The program as a Graph: weights by name in the store, mode wrappers inlined, the trace's assertions dropped.

    `loaders` maps the names of parameters and buffers, without the prefix `wrapper` of the program's names.
    """
    store = WeightStore()
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    nodes = {node.name: node for node in program.graph.nodes}
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind.name == "USER_INPUT":
            values[node] = _copy(graph, node, values)
        elif node.users:
            name = str(spec.target).removeprefix(wrapper)
            values[node] = _weight(graph, store, node, spec, name, program, loaders)
    results = [result for result in _inline(graph, program.graph_module, values) if result is not None]
    if len(results) != 1:
        raise UnsupportedError(f"the exported program has {len(results)} outputs; a model must return logits alone")
    graph.output(results[0])
    return Graph(graph, store, info, "import")


def _weight(
    graph: fx.Graph,
    store: WeightStore,
    node: fx.Node,
    spec: Any,
    name: str,
    program: ExportedProgram,
    loaders: dict[str, Loader],
) -> fx.Node:
    value = node.meta["val"]
    constant = program.constants.get(str(spec.target))
    if spec.kind.name not in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
        raise UnsupportedError(f"input {node.name} of the exported program is a {spec.kind.name.lower()}")
    if name not in store:
        if name in loaders:
            load_value = loaders[name]
        elif isinstance(constant, Tensor) and constant.device.type != "meta":
            load_value = TensorLoader(name, constant)
        else:
            raise UnsupportedError(f"constant {name} of the exported program has no value")
        if isinstance(load_value, TensorLoader):
            load_value.require(value)
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        mask = load_value.mask if isinstance(load_value, TensorLoader) else None
        few_bits, stored = getattr(load_value, "few_bits", False), getattr(load_value, "stored", None)
        store.add(name, value.shape, dtype, load_value, mask, few_bits, stored)
    made = graph.create_node("get_attr", name)
    made.meta["val"] = value
    return made


def _copy(graph: fx.Graph, node: fx.Node, values: dict[fx.Node, Any]) -> fx.Node:
    copied = graph.node_copy(node, lambda n: values[n])
    copied.meta = {key: node.meta[key] for key in ("val", "stack_trace", "nn_module_stack") if key in node.meta}
    copied.args = tuple(CPU if isinstance(arg, torch.device) else arg for arg in copied.args)
    copied.kwargs = {key: CPU if key == "device" else arg for key, arg in copied.kwargs.items()}
    return copied


def _inline(graph: fx.Graph, module: fx.GraphModule, values: dict[fx.Node, Any]) -> Any:
    """Copy the nodes of `module` after its inputs, with higher-order mode wrappers replaced by their bodies."""
    for node in module.graph.nodes:
        if node in values or node.op == "placeholder" or is_check(node):
            continue
        if node.op == "get_attr":
            values[node] = getattr(module, str(node.target))
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], lambda n: values[n])
        elif getattr(node.target, "__name__", "") in INLINED:
            values[node] = _inline_call(graph, node, values)
        elif getattr(node.target, "__name__", "") == "getitem" and isinstance(values[node.args[0]], (list, tuple)):
            values[node] = values[node.args[0]][node.args[1]]
        else:
            values[node] = _copy(graph, node, values)
    raise UnsupportedError("the exported program has no output")


def is_check(node: fx.Node) -> bool:
    """Whether `node` is only an assertion about the trace."""
    name = getattr(node.target, "__name__", str(node.target))
    return not node.users and ("assert" in name or name.startswith("sym_constrain"))


def _inline_call(graph: fx.Graph, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    body_node = next(a for a in node.args if isinstance(a, fx.Node) and isinstance(values.get(a), fx.GraphModule))
    body = values[body_node]
    name = getattr(node.target, "__name__", "")
    if "autocast" in name and node.args[2]:  # (device type, dtype, enabled, cache enabled, body, *inputs)
        raise UnsupportedError(f"node {node.name}: autocast rounds, where the model is compiled in float32")
    actual = node.args[node.args.index(body_node) + 1 :]
    formal = [n for n in body.graph.nodes if n.op == "placeholder"]
    inner = {place: values[a] if isinstance(a, fx.Node) else a for place, a in zip(formal, actual, strict=True)}
    return _inline(graph, body, inner)


def weights_read(program: ExportedProgram, wrapper: str = WRAPPER) -> set[str]:
    """Names, without the prefix `wrapper`, of the parameters and buffers that the program uses: values or shapes."""
    nodes = {node.name: node for node in program.graph.nodes}
    read = (spec for spec in program.graph_signature.input_specs if nodes[spec.arg.name].users)
    return {str(spec.target).removeprefix(wrapper) for spec in read if spec.target is not None}


_PRODUCTS = {"aten.mm.default": 1, "aten.matmul.default": 1, "aten.addmm.default": 2}
"""Products by a matrix [inputs, outputs], and which of their arguments it is."""


def input_major(program: ExportedProgram, wrapper: str = WRAPPER) -> set[str]:
    """Names, without the prefix `wrapper`, of the matrices [inputs, outputs] that the program multiplies by."""
    nodes = {node.name: node for node in program.graph.nodes}
    names = set()
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        places = [(user, _PRODUCTS.get(str(user.target))) for user in node.users]
        if spec.target and places and all(at is not None and user.args[at] is node for user, at in places):
            names.add(str(spec.target).removeprefix(wrapper))
    return names


def count_parameters(program: ExportedProgram) -> int:
    """Number of parameters that the program reads, with tied ones counted once."""
    nodes = {node.name: node for node in program.graph.nodes}
    parameters = (spec for spec in program.graph_signature.input_specs if spec.kind.name == "PARAMETER")
    used = {spec.target for spec in parameters if nodes[spec.arg.name].users}
    held = program.state_dict
    return sum(value.numel() for value in {id(held[n]): held[n] for n in used if n in held}.values())


def vocabulary(program: ExportedProgram) -> int:
    output = next(node for node in program.graph.nodes if node.op == "output").args[0]
    values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in output if node is not None]
    logits = values[0] if len(values) == 1 and isinstance(values[0], Tensor) else None
    if logits is None or logits.dim() != 3 or not isinstance(logits.shape[-1], int):
        raise UnsupportedError("a model must return logits [batch, tokens, vocabulary] and nothing else")
    return int(logits.shape[-1])
