"""What the manifest of an artifact must hold before anything is read from it.

The seal says that no bit changed since the manifest was written, not that this version of qcompile wrote it. So
the keys that loading, inspecting and running use are checked here, with their types; others may be there too.
"""

from __future__ import annotations

from typing import Any

from qcompile.errors import ArtifactError

# A type, a list of one shape for each item, or a dict: of names, or {str: shape} for any names.
Shape = Any

SHAPE: Shape = {
    "bits_per_weight": float,
    "files": {str: {"bytes": int, "sha256": str}},
    "model": {"name": str, "vocab_size": int, "max_position": int, "parameters": int, "eos_token_ids": [int]},
    "passes": [{"name": str, "fired": int, "options": dict, "notes": list}],
    "qcompile_version": str,
    "recipe": {"name": str, "options": dict},
    "runtime": {
        "abi": int,
        "library": str,
        "max_tokens": int,
        "vocab_size": int,
        "kv": {"format": str, "layers": int, "page_bytes": int, "page_tokens": int},
        "weights": [{"name": str, "file": str, "offset": int, "bytes": int}],
    },
    "target": {"name": str, "isa": str, "requires": [str]},
    "versions": {str: str},
}


def check_shape(value: object, shape: Shape = SHAPE, place: str = "manifest") -> None:
    """ArtifactError naming the first part of `value` that is missing or of another type than `shape` says."""
    kind = shape if isinstance(shape, type) else type(shape)
    right = (int, float) if kind is float else kind
    if not isinstance(value, right) or (isinstance(value, bool) and kind is not bool):
        raise ArtifactError(f"{place} is not {_a(kind)}; build the artifact again with this qcompile")
    if isinstance(shape, list):
        for number, item in enumerate(value):  # type: ignore[var-annotated, arg-type]
            check_shape(item, shape[0], f"{place}[{number}]")
    if isinstance(shape, dict):
        _check_keys(value, shape, place)


def _check_keys(value: Any, shape: dict[Any, Shape], place: str) -> None:
    if str in shape:
        shape = dict.fromkeys(value, shape[str])
    for name, inner in shape.items():
        if name not in value:
            raise ArtifactError(f"{place} lacks {name}; build the artifact again with this qcompile")
        check_shape(value[name], inner, f"{place}.{name}")


def _a(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "an object"}[kind]
