"""The schema of an artifact's manifest, checked before anything is read from it.

The hash proves that no bit changed since the manifest was written, but not that this version of qcompile wrote it. So
the keys that loading, inspecting and running use are checked here for presence, type and range; other keys are
allowed.

pydantic was measured in place of `check_shape`, and is not used. On a Xeon, importing it takes 80 ms of processor time
and creating models for this schema 30 ms, where all imports of `qcompile.load` take 175 ms; the check of a manifest
with 2,000 weights takes 4 ms either way. Its errors would need a translation to one line that names the key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from qcompile.errors import ArtifactError

# A type, Whole, Maybe, a list with the shape of each item, or a dict: of names, or {str: shape} for any names.
Shape = Any


@dataclass(frozen=True)
class Whole:
    """An integer from `least` to `most`."""

    least: int = 0
    most: int = 1 << 60


@dataclass(frozen=True)
class Maybe:
    """A key that may be missing or null."""

    shape: Shape


_COUNT = Whole(1, (1 << 31) - 1)
_KV: Shape = {
    "format": str,
    "layers": Whole(),
    "page_bytes": Whole(),
    "page_tokens": _COUNT,
    "ring_tokens": Maybe(Whole(0, 1 << 20)),
    "slot_bytes": Maybe(Whole()),
    "state_format": Maybe(str),
}

SHAPE: Shape = {
    "bits_per_weight": float,
    "files": {str: {"bytes": Whole(), "sha256": str}},
    "model": {
        "name": str,
        "vocab_size": _COUNT,
        "max_position": _COUNT,
        "stated_position": Maybe(_COUNT),
        "parameters": int,
        "bos_token_id": Maybe(int),
        "eos_token_ids": [int],
        "left_out": Maybe({str: Whole()}),
        "embeds_scale": Maybe(float),
        "adapters": Maybe({str: float}),
        "remarks": Maybe([str]),
    },
    "passes": [{"name": str, "fired": int, "options": dict, "notes": list}],
    "qcompile_version": str,
    "recipe": {"name": str, "options": dict},
    "runtime": {
        "abi": int,
        "library": str,
        "max_tokens": Whole(1, 1 << 16),
        "max_outputs": Maybe(Whole(1, 1 << 16)),
        "vocab_size": _COUNT,
        "kv": _KV,
        "weights": [{"name": str, "file": str, "offset": Whole(), "bytes": Whole()}],
        "levels": Maybe([dict]),
        "ranks": Maybe([[Whole()]]),
    },
    "embedding": Maybe({"bits": _COUNT, "error": float, "shared": bool}),
    "stored_weights": Maybe(
        {
            "weights": Whole(),
            "kept": Whole(),
            "changed": Whole(),
            "rows_kept": float,
            "error": float,
            "worst": {str: float},
        }
    ),
    "target": {"name": str, "isa": str, "requires": [str]},
    "tuned": Maybe(
        {"acceptance": float, "table": [{"batch": _COUNT, "context": Whole(), "plain": float, "rounds": {str: float}}]}
    ),
    "versions": {str: str},
}

_GAMMA = re.compile("[1-9][0-9]?")

_LOOKUP: Shape = {"lookup": _COUNT, "gamma": _COUNT}
_PATH: Shape = {
    "path": str,
    "library": str,
    "gamma": _COUNT,
    "threshold": float,
    "max_position": _COUNT,
    "vocab_size": _COUNT,
    "bos_token_id": Maybe(int),
    "tokenizer": Maybe(str),
    "tokens": Maybe(str),
    "features": Maybe(_COUNT),
    "kv": Maybe(_KV),
    "passes": Maybe([{"name": str, "fired": int, "options": dict}]),
    "weights": [Whole()],
    "ranks": Maybe([[Whole()]]),
}


def check_manifest(manifest: dict[str, Any], place: str = "manifest") -> None:
    """Raise ArtifactError naming the first part of a manifest that is missing, of a wrong type, or out of range."""
    check_shape(manifest, SHAPE, place)
    runtime = manifest["runtime"]
    begin = manifest["model"].get("bos_token_id")
    if begin is not None and not 0 <= begin < runtime["vocab_size"]:
        raise ArtifactError(f"{place}.model.bos_token_id {begin} is outside the vocabulary; build it again")
    if (runtime["kv"].get("ring_tokens") or 0) % (3 * runtime["kv"]["page_tokens"]):
        raise ArtifactError(f"{place}.runtime.kv.ring_tokens is not three groups of whole pages; build it again")
    weights = Whole(0, len(runtime["weights"]) - 1)
    check_shape(runtime, {"ranks": Maybe([[weights]])}, f"{place}.runtime")
    for number, stage in enumerate(runtime.get("levels") or []):
        shape = _LOOKUP if "lookup" in stage else _PATH | {"weights": [weights], "ranks": Maybe([[weights]])}
        check_shape(stage, shape, f"{place}.runtime.levels[{number}]")
        _check_ranks(
            stage.get("ranks"), runtime.get("ranks"), stage.get("weights"), f"{place}.runtime.levels[{number}]"
        )
    _check_ranks(runtime.get("ranks"), runtime.get("ranks"), None, f"{place}.runtime")
    if tuned := manifest.get("tuned"):
        _check_times(tuned["table"], f"{place}.tuned.table")


def _check_ranks(
    own: list[list[int]] | None, ranks: list[list[int]] | None, first: list[int] | None, place: str
) -> None:
    """Raise ArtifactError unless a path's weights by rank, `own`, are as many for each of the model's `ranks`.

    first: the weights of rank 0, if they are known.
    """
    if own is None:
        return
    counts = {len(weights) for weights in own}
    if len(own) != len(ranks or []) or len(counts) > 1 or (first is not None and own[0] != first):
        raise ArtifactError(f"{place}.ranks does not have as many weights for each process; build it again")


def _check_times(table: list[dict[str, Any]], place: str) -> None:
    """Raise ArtifactError unless times are positive and all entries have the same gammas."""
    for number, entry in enumerate(table):
        if not all(0 < seconds < 1e9 for seconds in (entry["plain"], *entry["rounds"].values())):
            raise ArtifactError(f"{place}[{number}] holds a time outside 0 to 1e9 seconds; build the artifact again")
    gammas = {frozenset(entry["rounds"]) for entry in table}
    if len(gammas) != 1 or not all(_GAMMA.fullmatch(gamma) for gamma in gammas.pop()):
        raise ArtifactError(f"{place} does not have the same gammas in all entries; build the artifact again")


def check_shape(value: object, shape: Shape = SHAPE, place: str = "manifest") -> None:
    """Raise ArtifactError naming the first part of `value` that is missing or does not match `shape`."""
    if isinstance(shape, Whole):
        if not isinstance(value, int) or isinstance(value, bool) or not shape.least <= value <= shape.most:
            what = f"a whole number between {shape.least} and {shape.most}"
            raise ArtifactError(f"{place} is not {what}; build the artifact again with this qcompile")
        return
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
        if isinstance(inner, Maybe):
            if value.get(name) is None:
                continue
            inner = inner.shape
        if name not in value:
            raise ArtifactError(f"{place} lacks {name}; build the artifact again with this qcompile")
        check_shape(value[name], inner, f"{place}.{name}")


def _a(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "an object"}[kind]
