"""Modules of a checkpoint that no text reaches, such as a vision tower: the trace of a text reads none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

from torch import Tensor, nn

Parameters = dict[str, Tensor]
"""Parameters by name, tied ones under each of their names."""


def modules(model: nn.Module, read: Set[str]) -> dict[str, Parameters]:
    """The largest submodules of `model` with parameters of which none is in `read`, by path, with their parameters."""
    named = dict(model.named_parameters(remove_duplicate=False))
    reached = {id(named[name]) for name in read if name in named}
    return dict(_unread("", model, reached))


def _unread(path: str, module: nn.Module, reached: Set[int]) -> Iterator[tuple[str, Parameters]]:
    named: Parameters = dict(module.named_parameters(path, remove_duplicate=False))
    if not named:
        return
    if all(id(value) not in reached for value in named.values()):
        yield path, named
        return
    for name, child in module.named_children():
        yield from _unread(f"{path}.{name}".removeprefix("."), child, reached)
    for name, value in module.named_parameters(path, recurse=False):
        if id(value) not in reached:
            yield name, {name: value}


def sizes(unread: dict[str, Parameters], stored: Callable[[str], int] | None = None) -> dict[str, int]:
    """Bytes of each module of `unread`: those that `stored` tells of a parameter, else 2 for each number."""
    every = {}
    for path, parameters in unread.items():
        distinct = {id(value): name for name, value in parameters.items()}.values()
        every[path] = sum(stored(name) if stored else 2 * parameters[name].numel() for name in distinct)
    return {path: size for path, size in every.items() if size}
