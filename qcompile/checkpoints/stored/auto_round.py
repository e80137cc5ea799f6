"""Weights as AutoRound stores them (intel/auto-round, auto_round/export and inference/convert_model.py).

The tensors are those of other tools, and `packing_format` says of which: the configuration is read as one of theirs.

- `auto_round:auto_gptq`: GPTQ with zero points less one. `auto_round` and `auto_round:gptqmodel`: as they are.
- `auto_round:auto_awq`: AWQ. `auto_round:llm_compressor`: compressed-tensors, MXFP4, MXFP8 and NVFP4.

`extra_config` has settings of single modules, by their names or by patterns that are searched for in names; a name
comes before patterns, and of patterns the first decides. Modules with 16 bits or more are stored as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from qcompile.checkpoints.stored.groups import Find, one_of
from qcompile.errors import UnsupportedError, UsageError, shown

METHOD = "auto-round"
GPTQ = {"auto_round:auto_gptq": "gptq", "auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2"}
"""Packings of GPTQ, and the `checkpoint_format` that each is."""
AWQ, COMPRESSED = "auto_round:auto_awq", "auto_round:llm_compressor"
FLOATS = {
    ("mx_fp", 4): ("mxfp4-pack-quantized", "group"),
    ("mx_fp", 8): ("mxfp8-quantized", "group"),
    ("nv_fp", 4): ("nvfp4-pack-quantized", "tensor_group"),
}
"""By type and bits, the format of compressed-tensors and what its scales belong to."""
STORED = ("bits", "group_size", "sym")
WHOLE = 16
"""The fewest bits of a module that is stored as it is."""
IGNORED = ("act_", "scale_dtype", "fixed_by_user", "in_blocks")
"""Beginnings of settings of modules that do not change how weights are stored: the recipe rounds activations."""
OF_PATTERNS = re.compile(r"[*^$|()\[\]?+\\]")
"""Letters that a name of a module does not have."""
Reader = Callable[[dict[str, Any]], Find]


def auto_round(quantization: dict[str, Any], gptq: Reader, awq: Reader, compressed: Reader) -> Find:
    """The reader for a checkpoint with this `quantization_config`. Raises UnsupportedError, UsageError."""
    packing = quantization.get("packing_format")
    packing = one_of(METHOD, "packing_format", packing, (*GPTQ, AWQ, COMPRESSED))
    for key in ("rotation_config", "super_bits", "dynamic"):
        if quantization.get(key):
            raise UnsupportedError(f"{METHOD} weights with {key} are not read")
    if packing == COMPRESSED:
        return compressed(_as_compressed(quantization))
    one_of(METHOD, "data_type", quantization.get("data_type") or "int", ("int",))
    shared = {"bits": quantization.get("bits"), "group_size": quantization.get("group_size")}
    shared["dynamic"] = dict(_rules(quantization.get("extra_config") or {}))
    if packing == AWQ:
        symmetric = one_of(METHOD, "sym", quantization.get("sym"), (True, False))
        return awq(shared | {"zero_point": not symmetric, "version": "gemm"})
    return gptq(shared | {"sym": quantization.get("sym"), "checkpoint_format": GPTQ[packing]})


def _rules(modules: Any) -> list[tuple[str, dict[str, Any]]]:
    """`extra_config` as GPTQModel's `dynamic` has it: patterns of the beginnings of names, the first decides."""
    if not isinstance(modules, dict):
        raise UsageError(f"extra_config of {METHOD} weights is {shown(modules)}; settings of modules belong there")
    names, patterns = [], []
    for key, stated in modules.items():
        changes = _changes(key, stated)
        rule = "-:" if changes is None else "+:"
        if OF_PATTERNS.search(key):
            patterns.append((f"{rule}(?:.*)(?:{key})", changes or {}))
        else:
            names.append((f"{rule}{re.escape(key)}$", changes or {}))
    return names + patterns


def _changes(name: str, stated: Any) -> dict[str, Any] | None:
    """The settings of a module that say how it is stored; None if it is stored as it is."""
    if not isinstance(stated, dict):
        raise UsageError(f"extra_config of {METHOD} weights: {shown(name)} has {shown(stated)}, and no settings")
    bits = stated.get("bits")
    if isinstance(bits, int) and bits >= WHOLE:
        return None
    one_of(METHOD, "data_type", stated.get("data_type") or "int", ("int",))
    for key, value in stated.items():
        if key not in (*STORED, "data_type") and not key.startswith(IGNORED) and value is not None:
            raise UnsupportedError(f"{METHOD} weights with {shown(key)} for {shown(name)} are not read")
    return {key: stated[key] for key in STORED if stated.get(key) is not None}


def _as_compressed(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors that is stored in the same tensors."""
    bits, kind = quantization.get("bits"), str(quantization.get("data_type"))
    known = [
        (format, of) for (begin, width), (format, of) in FLOATS.items() if kind.startswith(begin) and width == bits
    ]
    if not known:
        raise UnsupportedError(f"{METHOD} weights of {shown(kind)} in {shown(bits)} bits ({COMPRESSED}) are not read")
    for rule, _ in _rules(quantization.get("extra_config") or {}):
        if not rule.startswith("-:"):
            raise UnsupportedError(f"{METHOD} weights ({COMPRESSED}) are not read where modules differ: {shown(rule)}")
    weights = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": known[0][1]}
    weights["group_size"] = quantization.get("group_size")
    return {"format": known[0][0], "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
