"""Front end: turns a checkpoint, an nn.Module or an ExportedProgram into a Graph of ATen operators (stage `import`).

Weights are not read here: the graph names them, and its store knows how to load them.
"""

from __future__ import annotations

import copy
import difflib
import gc
import inspect
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from qcompile.checkpoints import eager, state
from qcompile.checkpoints.checkpoint import require_finite
from qcompile.errors import UnsupportedError, UsageError
from qcompile.graph import Graph, ModelInfo, WeightStore

EXAMPLE_BATCH, EXAMPLE_TOKENS = 2, 7
"""Sizes of the example inputs for tracing; both dimensions stay dynamic."""

INLINED = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Higher-order operators that only set a mode, which is irrelevant for inference unless it switches autocast on."""

WRAPPER = "module."
"""Prefix of weight names after exporting through a wrapper module."""

CPU = torch.device("cpu")
Loader = Callable[[], Tensor]


def load(
    model: str | Path | nn.Module | ExportedProgram,
    *,
    example_inputs: Sequence[Tensor] | None = None,
    max_position: int | None = None,
    name: str | None = None,
    allow_remote: bool = False,
    weights: bool = True,
    layers: int | None = None,
) -> Graph:
    """Read `model`, a Hugging Face checkpoint (directory or hub name), an nn.Module, or an ExportedProgram.

    A module takes token ids int64 [B, T], and positions int64 [B, T] if two `example_inputs` are given, and returns
    logits [B, T, V]; `max_position` is its context length. `allow_remote` permits a checkpoint's own Python code to
    run. Without `weights`, a configuration suffices, and the model may be truncated to `layers` layers. Raises
    UsageError or UnsupportedError with a message of one line.
    """
    if isinstance(model, (str, Path)):
        from qcompile.checkpoints import huggingface

        if example_inputs is not None or max_position is not None:
            raise UsageError("example_inputs and max_position are for modules: a checkpoint's configuration has both")
        with hurried():
            return huggingface.load(model, name=name, allow_remote=allow_remote, weights=weights, layers=layers)
    given: object = model
    if not isinstance(given, nn.Module | ExportedProgram):
        kind = given.__name__ if isinstance(given, type) else f"of type {type(given).__name__}"
        raise UsageError(f"the model must be a path, a name, an nn.Module or an ExportedProgram, and is {kind}")
    if max_position is None:
        raise UsageError("max_position is needed with a module: the longest sequence it can hold")
    least = 2 if isinstance(model, ExportedProgram) else EXAMPLE_TOKENS + 1
    if type(max_position) is not int or max_position < least:
        raise UsageError(f"max_position must be a whole number of at least {least}, not {max_position!r}")
    if isinstance(model, ExportedProgram):
        program, name = model, name or "exported"
        _require_range(program, max_position)
        _require_positions(program, program.example_inputs)
        loaders, wrapper = program_loaders(program), ""
    else:
        if example_inputs is None:
            raise UsageError("example_inputs is needed with an nn.Module: (token_ids,) or (token_ids, positions)")
        name = name or type(model).__name__
        program = export_module(model, example_inputs, max_position)
        loaders, wrapper = module_loaders(model), WRAPPER
    info = ModelInfo(name, _vocabulary(program), max_position, None, (), count_parameters(program))
    return import_program(program, loaders, info, wrapper)


_ARGUMENTS = inspect.signature(load).parameters


def check_arguments(caller: Callable[..., Any], source: Mapping[str, Any]) -> None:
    """Raise TypeError if `load` does not take one of `source`, further arguments of `caller`; it suggests another."""
    for name in source:
        if name not in _ARGUMENTS:
            known = [*inspect.signature(caller).parameters, *_ARGUMENTS]
            near = difflib.get_close_matches(name, [other for other in known if other != name], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"{caller.__name__}() got an unexpected keyword argument {name!r}{hint}")


def export(watch: Callable[..., state.Watched], inputs: Sequence[Tensor], name: str, longest: int) -> ExportedProgram:
    """torch.export of what `watch` makes, a module of `*inputs`, all [B, T]; B and T < `longest` stay dynamic.

    Raises UnsupportedError, with one line about the model `name`, if it cannot be traced, or keeps state that matters.
    """
    changed: list[str] = []
    program = _traced(watch(report=changed.append), inputs, name, longest)
    if changed and not state.alike(program, _traced(watch(settle=True), inputs, name, longest)):
        raise UnsupportedError(f"{name} changes its {changed[0]} when it runs, and then computes something else")
    return program


def _traced(module: nn.Module, inputs: Sequence[Tensor], name: str, longest: int) -> ExportedProgram:
    # Tables with as many rows as the longest sequence specialize that length, so the trace excludes it.
    batch, tokens = torch.export.Dim("batch", max=1 << 16), torch.export.Dim("tokens", max=longest - 1)
    try:
        return _exported(module, inputs, batch, tokens)
    except (UnsupportedError, UsageError, MemoryError):
        raise
    except Exception as error:  # torch.export raises whatever the traced code raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if reason.startswith("Constraints violated"):
            if torch.__version__ < "2.13" and (program := _export_by_example(module, inputs, longest)):
                return program
            reason = "it does not take any batch and number of tokens"
        elif reason.startswith("Could not guard on data-dependent expression"):
            reason = "it branches on the values of its inputs, as rotary embeddings scaled by length do"
        raise UnsupportedError(f"{name} cannot be exported: {reason}") from error


def _exported(module: nn.Module, inputs: Sequence[Tensor], batch: Any, tokens: Any) -> ExportedProgram:
    shapes = tuple({0: batch, 1: tokens} for _ in inputs)
    with torch.no_grad(), hurried(), quiet():
        return torch.export.export(module, tuple(inputs), dynamic_shapes=(shapes,), strict=False)


def _export_by_example(module: nn.Module, inputs: Sequence[Tensor], longest: int) -> ExportedProgram | None:
    """Export with sizes as dynamic as the trace permits; None if it adds a guard that may not hold.

    Before 2.13, torch adds guards for comparisons of strides that always hold.
    """
    import sympy

    dynamic: Any = torch.export.Dim.DYNAMIC
    try:
        program = _exported(module, inputs, dynamic(max=1 << 16), dynamic(max=longest - 1))
    except MemoryError:
        raise
    except Exception:  # as above; the caller reports the error of the first attempt
        return None
    taken = program.graph_signature.user_inputs
    shapes = [node.meta["val"].shape for node in program.graph.nodes if node.op == "placeholder" and node.name in taken]
    environment = shapes[0][1].node.shape_env
    batch, tokens = sympy.symbols("batch tokens", integer=True, positive=True)
    sizes = {size.node.expr: known for shape in shapes for size, known in zip(shape, (batch, tokens), strict=True)}
    sizes |= {one: sizes[same] for one, same in environment.replacements.items() if same in sizes}
    return program if all(always(guard.expr, sizes) for guard in environment.guards) else None


def always(condition: Any, sizes: Mapping[Any, Any]) -> bool:
    """Whether `condition`, a SymPy expression, holds for all values of its symbols, which `sizes` renames."""
    import sympy
    from torch.utils._sympy.functions import Min

    least = condition.xreplace(dict(sizes)).replace(lambda part: isinstance(part, Min), lambda m: sympy.Min(*m.args))
    return bool(sympy.simplify(least) == sympy.true)


@contextmanager
def hurried() -> Iterator[None]:
    """Disable cyclic garbage collection and source lines of traced operators; saves a third of import and trace time.

    Errors still name the module of a node, which costs nothing.
    """
    config: Any = fx.config
    lines, collecting = getattr(config, "do_not_emit_stack_traces", None), gc.isenabled()
    if lines is not None:  # torch before 2.13 has no such option
        config.do_not_emit_stack_traces = True
    gc.disable()
    try:
        yield
    finally:
        if lines is not None:
            config.do_not_emit_stack_traces = lines
        if collecting:
            gc.enable()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress what torch prints about a failing trace, including the graph so far, unless TORCH_LOGS is set."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    before, said = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)  # torch's loggers have their own handlers
    try:
        with redirect_stderr(said):
            yield
        sys.stderr.write(said.getvalue())
    finally:
        logging.disable(before)


def export_module(module: nn.Module, example_inputs: Sequence[Tensor], longest: int) -> ExportedProgram:
    """Export `module` in evaluation mode, in float32 on the CPU; tensors of other types or devices are copied."""
    tensors = [value for value in example_inputs if isinstance(value, Tensor)]
    fit = all(value.dtype == torch.int64 and value.dim() == 2 for value in tensors)
    if not (fit and 1 <= len(tensors) <= 2 and len(tensors) == len(example_inputs)):
        raise UsageError("example_inputs must be int64 [batch, tokens]: token ids, and positions if it takes them")
    ids = [torch.zeros(EXAMPLE_BATCH, EXAMPLE_TOKENS, dtype=torch.int64) for _ in tensors]
    shadow = _Shadow(module)
    eager.warm_up(shadow.make(), ids)
    program = export(lambda **how: state.Watched(shadow.make(), **how), ids, type(module).__name__, longest)
    _require_positions(program, example_inputs)
    eager.require_same(shadow.make(), program, len(ids), _vocabulary(program))
    return program


def _require_range(program: ExportedProgram, max_position: int) -> None:
    """Refuse a program that was traced for part of the sizes that occur: others may take another branch."""
    import sympy

    node = next(node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
    shape = node.meta["val"].shape
    if len(shape) != 2 or any(isinstance(size, int) for size in shape):
        return  # raising refuses it
    for size, what in zip(shape, ("sequences", "tokens"), strict=True):
        known = program.range_constraints.get(size.node.expr)
        if known is None and not size.node.expr.is_Symbol:
            raise UnsupportedError(f"the exported program takes no number of {what} but {size.node.expr}")
        if known is not None and known.lower > 2:  # from 2 on is how torch.export writes any size
            raise UnsupportedError(
                f"the exported program takes at least {known.lower} {what}; export it for any number"
            )
        if known is not None and what == "tokens" and known.upper < max_position - 1:
            limit = f"give a max_position of at most {int(known.upper) + 1}"
            raise UnsupportedError(f"the exported program takes at most {known.upper} tokens; {limit}")
    batch, tokens = (size.node.expr for size in shape)
    lengths = sorted({*range(2, 513), *(2**p + d for p in range(9, 31) for d in (-1, 0, 1)), max_position - 1})
    for guard in shape[1].node.shape_env.guards:
        for length in lengths[: lengths.index(max_position - 1) + 1]:
            if guard.expr.xreplace({batch: sympy.Integer(2), tokens: sympy.Integer(length)}) == sympy.false:
                raise UnsupportedError(f"the exported program does not take {length} tokens: it needs {guard.expr}")


def _require_positions(program: ExportedProgram, examples: Any) -> None:
    """Refuse a second input that is not the positions of the tokens, such as a mask of what is padding."""
    given = [value for value in tree_leaves(examples) if isinstance(value, Tensor)]
    taken = [node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    if not len(given) == len(taken) == 2 or given[1].dim() != 2 or given[1].is_meta:
        return
    if all(_is_check(user) or "sym_size" in str(user.target) for user in taken[1].users):
        return  # whatever it is, its values are not read
    second = given[1].cpu()
    if second.dtype == torch.bool or (second != torch.arange(second.shape[1])).any():
        raise UsageError(
            "the second of example_inputs must be the positions 0, 1, 2, ... of the tokens: no mask is taken, nor"
            " another input"
        )


def _moved(tensor: Tensor) -> Tensor:
    return tensor.detach().to(CPU, torch.float32 if tensor.is_floating_point() else tensor.dtype)


class _Shadow:
    """Makes copies of a module in evaluation mode whose tensors are on the CPU, and float32 if floating-point.

    They share parameters and buffers that need no conversion with the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._memo: dict[int, Any] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            moved = _moved(tensor)
            shown = nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved
            self._memo[id(tensor)] = shown
        kept = [value for value in state.collect(module).values() if isinstance(value, Tensor)]
        self._kept = [value for value in kept if id(value) not in self._memo]

    def make(self) -> nn.Module:
        """A copy in the state of the module. Raises UnsupportedError if it holds something that cannot be copied."""
        own = {id(value): _moved(value).clone() for value in self._kept}  # as nothing keeps a run from writing to them
        try:
            return copy.deepcopy(self._module, self._memo | own).eval()
        except MemoryError:
            raise
        except Exception as error:  # attributes raise whatever they like
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UnsupportedError(f"{type(self._module).__name__} cannot be copied: {reason}") from error


def module_loaders(module: nn.Module) -> dict[str, Loader]:
    """Loaders of all parameters and buffers of an exported `module`, by their names in the program."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: TensorLoader(name, value) for name, value in named}


def program_loaders(program: ExportedProgram) -> dict[str, Loader]:
    """Loaders of all parameters and buffers of `program`, by name."""
    try:
        named = {**dict(program.named_parameters()), **dict(program.named_buffers())}
    except KeyError as error:
        raise UsageError(f"the exported program's state_dict has no {error.args[0]}, which its graph reads") from None
    if wrong := [name for name, value in named.items() if not isinstance(value, Tensor)]:
        raise UsageError(
            f"weight {wrong[0]} of the exported program is no tensor, but {type(named[wrong[0]]).__name__}"
        )
    return {name: TensorLoader(name, value) for name, value in named.items()}


@dataclass(frozen=True)
class TensorLoader:
    """Loads `value` on the CPU; floating-point values are converted to float32 and must be finite."""

    name: str
    value: Tensor

    def require(self, traced: Tensor) -> None:
        """Raise UsageError unless `value` can stand where the trace had `traced`: it may have been replaced since."""
        if self.value.is_meta or self.value.layout != torch.strided:
            raise UsageError(f"weight {self.name} is sparse or has no values; give a dense tensor")
        if self.value.shape != traced.shape:
            shapes = f"has shape {list(self.value.shape)}, the model needs {list(traced.shape)}"
            raise UsageError(f"weight {self.name} {shapes}")
        if self.value.is_floating_point() != traced.is_floating_point():
            raise UsageError(f"weight {self.name} is of type {self.value.dtype}, the model needs {traced.dtype}")

    def __call__(self) -> Tensor:
        found = self._value()
        if found.is_floating_point():
            require_finite(self.name, found)
        return found

    def mask(self) -> Tensor:
        """The value as a mask, which may be infinite where nothing is visible."""
        found = self._value()
        if found.is_floating_point():
            require_finite(self.name, found.masked_fill(found.isinf(), 0.0))
        return found

    def _value(self) -> Tensor:
        found = self.value.detach().cpu()
        return found.float() if found.is_floating_point() else found


def count_parameters(program: ExportedProgram) -> int:
    """Number of parameters that the program reads, with tied ones counted once."""
    used = {spec.target for spec in program.graph_signature.input_specs if spec.kind.name == "PARAMETER"}
    held = program.state_dict
    return sum(value.numel() for value in {id(held[n]): held[n] for n in used if n in held}.values())


def _vocabulary(program: ExportedProgram) -> int:
    output = next(node for node in program.graph.nodes if node.op == "output").args[0]
    values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in output if node is not None]
    logits = values[0] if len(values) == 1 and isinstance(values[0], Tensor) else None
    if logits is None or logits.dim() != 3 or not isinstance(logits.shape[-1], int):
        raise UnsupportedError("a model must return logits [batch, tokens, vocabulary] and nothing else")
    return int(logits.shape[-1])


# ---- ExportedProgram -> Graph ----------------------------------------------------------------------


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
        store.add(name, value.shape, dtype, load_value, mask)
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
        if node in values or node.op == "placeholder" or _is_check(node):
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


def _is_check(node: fx.Node) -> bool:
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
