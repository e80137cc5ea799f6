"""What Python code can read from its variables: numbers, texts, and sizes of containers, however deep they lie."""

from __future__ import annotations

import array
import itertools
import operator
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
Part = tuple[str, Any]


class Length(int):
    """The length of a container."""


def readable(roots: Mapping[str, Any], opaque: tuple[type, ...]) -> dict[str, Any]:
    """Numbers, texts and `Length`s that can be read from `roots`, by path, but not through tensors and `opaque`."""
    values: dict[str, Any] = {}
    seen: dict[int, Any] = {}  # held, so that no other object gets their identity
    queue = deque(roots.items())
    while queue:
        path, value = queue.popleft()
        if isinstance(value, _PLAIN):
            values[path] = value
        elif isinstance(value, _SYMBOLIC):
            values[path] = str(value)
        elif id(value) not in seen and not isinstance(value, (Tensor, ModuleType, *opaque)):
            seen[id(value)] = value
            if (kind := _container(value)) is not None:
                values[path] = Length(kind.__len__(value))
            queue.extend((f"{path}{name}", part) for name, part in _parts(value))
    return values


def _parts(value: Any) -> list[Part]:
    """What `value` holds, each with the text that accesses it."""
    kind = _container(value)
    if kind is dict:
        return [*((f"[{key!r}]", part) for key, part in dict.items(value)), *_of_object(value)]
    if kind in (set, frozenset):
        return [("{}", str(sorted(map(repr, kind.__iter__(value))))), *_of_object(value)]
    if kind is not None:
        return [*((f"[{index}]", part) for index, part in enumerate(kind.__iter__(value))), *_of_object(value)]
    if isinstance(value, np.ndarray | np.generic):
        return [("", f"{value.shape} {value.dtype} {value.tobytes()!r}")]
    if isinstance(value, bytearray | array.array):
        return [("", bytes(value))]
    if isinstance(value, Iterator):
        return _of_iterator(value)
    if isinstance(value, type):
        kept = {name: part for name, part in vars(value).items() if isinstance(part, (*_PLAIN, *_CONTAINERS))}
        return [(f".{name}", part) for name, part in kept.items() if not name.startswith("__")]
    if isinstance(value, FunctionType | MethodType | BuiltinFunctionType | partial):
        return _of_function(value)
    return _of_object(value)


def _container(value: Any) -> Any:
    """The built-in container type of `value`; None for other values.

    Its methods, called as functions of the type, do not run code of a subclass, which may do anything.
    """
    return next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)


def _of_iterator(value: Iterator[Any]) -> list[Part]:
    """How far an iterator has come."""
    if isinstance(value, GeneratorType):
        return [(f".{name}", part) for name, part in (value.gi_frame.f_locals if value.gi_frame else {}).items()]
    if type(value).__module__ not in ("builtins", "itertools", "collections"):
        return _of_object(value)
    known = repr(value) if isinstance(value, itertools.count) else operator.length_hint(value, -1)
    return [(" (an iterator)", known)]


def _of_function(value: Any) -> list[Part]:
    """What a function keeps from call to call."""
    if isinstance(value, partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if isinstance(value, BuiltinFunctionType | MethodType):
        return [(".__self__", value.__self__), (".__func__", getattr(value, "__func__", None))]
    cells = []
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            cells.append((f".{name}", cell.cell_contents))
        except ValueError:  # it is empty
            continue
    return [
        *cells,
        (".__defaults__", value.__defaults__),
        (".__kwdefaults__", value.__kwdefaults__),
        *_of_object(value),
    ]


def _of_object(value: Any) -> list[Part]:
    """The attributes of an object, unless it is torch's own."""
    if type(value).__module__.partition(".")[0] == "torch" and not isinstance(value, nn.Module):
        return []
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    held = [(f".{name}", getattr(value, name)) for name in slots if hasattr(value, name)]
    return held + [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]
