"""Python state of modules: numbers, texts, containers and tensors that a module keeps and changes when it runs.

A trace has their values at the time of tracing. It therefore computes what the module does only if the module does not
change them, or computes the same whether or not they have changed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from qcompile.errors import UnsupportedError

State = dict[str, Any]
"""Values by path, such as `layers.0.seen`: numbers and texts, lengths of containers, and tensors."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_DEEPEST = 8
_ABSENT = object()
_OVERWRITES = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
"""Operators that do not read the operand that they write to."""


class _Length(int):
    """The length of a container, in a State."""


class Watched(nn.Module):
    """Calls `module` with positional inputs, which gives all models the same varargs signature in torch.export.

    It calls `report` with the path of state that a run changes. With `settle`, it runs the module twice, returns the
    second result, and raises UnsupportedError if the second run changes numbers or containers as well.
    """

    def __init__(self, module: nn.Module, report: Callable[[str], Any] = str, settle: bool = False) -> None:
        super().__init__()
        self.module = module
        self.report = report  # not an attribute that tells: torch.export restores attributes after the trace
        self.settle = settle

    def forward(self, *inputs: Tensor) -> Any:
        with _restored(self.module):
            return self._watch(*inputs)

    def _watch(self, *inputs: Tensor) -> Any:
        name, before, registered = type(self.module).__name__, collect(self.module), _registered(self.module)
        result = self.run(*inputs)
        after = collect(self.module)
        if changed := _difference(before, after):
            self.report(changed)
        if self.settle:
            result = self.run(*inputs)
            if again := _difference(_shapes(after), _shapes(collect(self.module))):
                raise UnsupportedError(
                    f"{name} changes its {again} each time it runs, and a compiled model keeps no such state:"
                    " take it out of forward"
                )
        if replaced := _difference(registered, _registered(self.module)):
            raise UnsupportedError(f"{name} replaces its tensor {replaced} when it runs")
        return result

    def run(self, *inputs: Tensor) -> Any:
        """What the module computes of `inputs`."""
        return self.module(*inputs)


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of `module` and its submodules afterwards: a trace's tensors have no use later."""
    kept = [(owner, dict(vars(owner))) for owner in module.modules()]
    try:
        yield
    finally:
        for owner, attributes in kept:
            vars(owner).clear()
            vars(owner).update(attributes)


def collect(module: nn.Module) -> State:
    """The state of `module` and its submodules, except registered parameters and buffers."""
    collected: State = {}
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for name, value in _attributes(owner):
            _collect(f"{path}.{name}".removeprefix("."), value, collected, seen)
    return collected


def _attributes(owner: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes of a module, and numbers among the attributes of its class."""
    for name, value in vars(owner).items():
        if name not in _OF_TORCH:
            yield name, value
    for name, value in vars(type(owner)).items():
        if isinstance(value, int | float) and not name.startswith("__"):
            yield name, value


def _collect(path: str, value: Any, collected: State, seen: set[int], depth: int = 0) -> None:
    if isinstance(value, (Tensor, *_PLAIN)):
        collected[path] = value
    elif isinstance(value, _SYMBOLIC):
        collected[path] = str(value)
    elif isinstance(value, np.ndarray | np.generic):
        collected[path] = (value.shape, str(value.dtype), value.tobytes())
    elif id(value) not in seen and depth < _DEEPEST:
        seen.add(id(value))
        if isinstance(value, dict | list | tuple | set | frozenset | deque):
            collected[path] = _Length(len(value))
        for name, part in _parts(value):
            _collect(f"{path}{name}", part, collected, seen, depth + 1)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """The items of a container or a plain object, each with the text that accesses it."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, list | tuple | deque):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [("{}", str(sorted(map(repr, value))))]
    kept = {} if isinstance(value, _CODE) else getattr(value, "__dict__", {})
    return [(f".{name}", part) for name, part in kept.items()]


def _registered(module: nn.Module) -> State:
    """All parameters and buffers by name, tied ones under each of their names."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return dict(named)


def _shapes(state: State) -> State:
    """The state with the shapes of tensors in their place."""
    return {path: tuple(map(str, value.shape)) if isinstance(value, Tensor) else value for path, value in state.items()}


def _difference(before: State, after: State) -> str | None:
    """The path of a value that differs, or None."""
    return next((path for path in {**after, **before} if not _same(before, after, path)), None)


def _same(before: State, after: State, path: str) -> bool:
    was, now = (state.get(path, _ABSENT) for state in (before, after))
    if was is now or type(was) is not type(now) or isinstance(was, Tensor):
        return was is now
    return bool(was == now or (was != was and now != now))  # NaN is not itself


# ---- whether two programs compute the same ------------------------------------------------------------


def alike(one: ExportedProgram, other: ExportedProgram) -> bool:
    """Whether the outputs of both programs are the same operators of the same inputs, weights and constants."""
    numbers: dict[Any, int] = {}
    return _outputs(one, numbers) == _outputs(other, numbers)


def _outputs(program: ExportedProgram, numbers: dict[Any, int]) -> str:
    """The outputs as text, with a number for each distinct expression; `numbers` has the numbers given so far."""
    numbering: dict[fx.Node, int] = {}
    inputs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}

    def refer(item: Any) -> str:
        return str(fx.node.map_arg(item, lambda node: f"%{numbering[node]}"))

    for node in program.graph.nodes:
        if node.op == "output":
            return refer(node.args[0])
        if node.op == "placeholder":
            key: Any = _input(program, inputs[node.name])
        elif node.op == "get_attr":
            key = _attribute(getattr(program.graph_module, str(node.target)))
        else:
            read = (_kind(node), *node.args[1:]) if node.target in _OVERWRITES else node.args
            key = (str(node.target), refer(read), refer(node.kwargs))
        numbering[node] = (
            numbering[node.all_input_nodes[0]] if _casts_nothing(node) else numbers.setdefault(key, len(numbers))
        )
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            numbering |= dict.fromkeys(node.all_input_nodes[:1], numbering[node])  # later reads see the new value
    raise AssertionError("an exported program has an output")


def _attribute(value: Any) -> Any:
    """A key of what a program holds besides its inputs: of a graph its code, of a specification of trees its text."""
    return value.code if isinstance(value, fx.GraphModule) else (type(value).__name__, repr(value))


def _kind(node: fx.Node) -> str:
    """The type and shape of a result, the same for all symbols."""
    value = node.meta["val"]
    return str((value.dtype, [size if isinstance(size, int) else "" for size in value.shape]))


def _casts_nothing(node: fx.Node) -> bool:
    """Whether `node` returns its operand unchanged, as a cast to the operand's own type does."""
    source: Any = node.args[0] if str(node.target).startswith("aten.to.") else None
    return isinstance(source, fx.Node) and source.meta["val"].dtype == node.meta["val"].dtype


def _input(program: ExportedProgram, spec: Any) -> Any:
    """A key of an input: constants by their values, as each run makes its own."""
    constant = program.constants.get(str(spec.target))
    if spec.kind.name != "CONSTANT_TENSOR" or not isinstance(constant, Tensor) or constant.device.type == "meta":
        return (spec.kind.name, spec.target or spec.arg.name)
    data = constant.detach().cpu().contiguous()
    return (data.shape, data.dtype, hashlib.sha256(data.reshape(-1).view(torch.uint8).numpy().tobytes()).digest())
