"""LoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

An adapter changes modules of a model, which its tensors name by their paths:

    base_model.model.PATH.lora_A.weight [r, inputs], .lora_B.weight [outputs, r]: adds scale * B A to the weight
    base_model.model.PATH.lora_embedding_A [r, rows], .lora_embedding_B [columns, r]: the same for a table, transposed
    base_model.model.PATH.lora_magnitude_vector [outputs]: the lengths that rows of the sum get then (DoRA)
    base_model.model.PATH.lora_B.bias [outputs]: adds scale * bias to the bias
    base_model.model.PATH.weight, .bias, also after .base_layer: replaces the parameter (`modules_to_save`, `bias`)

`scale` is alpha / r, or alpha / sqrt(r) for rsLoRA. What changes a model in any other way is refused by name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from qcompile.checkpoints.adapter_files import CONFIG, PICKLE, TENSORS, check_model
from qcompile.checkpoints.checkpoint import Checkpoint, Entry, read_header, read_json, require_finite
from qcompile.checkpoints.model_names import name_of
from qcompile.checkpoints.stored.patterns import NamePattern, NamePatterns
from qcompile.errors import UnsupportedError, UsageError

PREFIX = "base_model.model."

_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to initialize A and B (`init_lora_weights`) that leave the model's own weights as they are."""

_WITHOUT_EFFECT = frozenset(
    (
        *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "auto_mapping"),
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "bias"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
        *("fan_in_fan_out", "qalora_group_size", "ensure_weight_tying", "lora_dropout", "inference_mode"),
        *("runtime_config", "megatron_config", "megatron_core"),
    )
)
"""Keys of the configuration that are read here, or say nothing that the tensors do not say."""

_PARTS: Mapping[str, str] = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "table_a",
    ".lora_embedding_B": "table_b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_B.bias": "bias",
}
"""Endings of the names of tensors, and what the tensor is. Before the ending stands the path of its module."""


@dataclass(frozen=True)
class LowRank:
    """scale * B A, a change of a module's weight: a [r, K], b [N, r] of a linear's weight [N, K].

    With `table`, the change of an embedding's table is its transpose, [K, N]. `magnitude` [N] are the lengths of the
    weight's rows after the change, or None.
    """

    a: Tensor
    b: Tensor
    scale: float
    table: bool = False
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """The rank r."""
        return self.a.shape[0]

    def product(self, weight: float) -> Tensor:
        """weight * scale * B A, float64 [N, K], or for a table [K, N]."""
        change = (self.b.double() @ self.a.double()) * (self.scale * weight)
        return change.T if self.table else change


@dataclass(frozen=True)
class Adapter:
    """An adapter as its folder has it: changes of weights by the paths of their modules, and of whole parameters.

    `directory` is the folder. `added` are vectors added to biases, `replaced` the values that parameters get, both by
    parameters' names. `digest` is a hash of both files.
    """

    name: str
    directory: Path
    low_rank: Mapping[str, LowRank]
    added: Mapping[str, Tensor] = field(default_factory=dict)
    replaced: Mapping[str, Tensor] = field(default_factory=dict)
    digest: str = ""


def check_merged(directory: Path, merged: Iterable[Adapter]) -> None:
    """Raise UsageError if the checkpoint `directory` has an adapter that is not among `merged`.

    transformers applies such an adapter when it loads the folder, so the weights alone would be another model.
    """
    if not (directory / CONFIG).is_file() or any(adapter.directory.samefile(directory) for adapter in merged):
        return
    check_model(directory)
    raise UsageError(
        f"{directory} has an adapter beside its weights, {CONFIG}: merge it with --lora {directory}, or remove the file"
    )


def read_adapter(directory: Path) -> Adapter:
    """The adapter in `directory`. Raises UsageError or UnsupportedError, naming the file and the key or tensor."""
    if not directory.is_dir():
        raise UsageError(f"adapter {directory} is not a folder with {CONFIG} and {TENSORS}")
    config = read_json(directory / CONFIG)
    _check_config(directory / CONFIG, config)
    path = directory / TENSORS
    if not path.is_file():
        if (directory / PICKLE).exists():
            raise UnsupportedError(f"{directory} has only {PICKLE}, which is never loaded; save it as safetensors")
        raise UsageError(f"{path} is missing")
    parts, replaced = _sorted_out(path, read_header(path))
    numbers = _by_module(path, config)
    low_rank = {module: _low_rank(path, config, numbers, module, given) for module, given in parts.items()}
    added = {
        f"{module}.bias": given["bias"].double() * low_rank[module].scale
        for module, given in parts.items()
        if "bias" in given
    }
    if not low_rank and not replaced:
        raise UsageError(f"{path} holds no tensors")
    digest = hashlib.sha256((directory / CONFIG).read_bytes() + path.read_bytes()).hexdigest()
    return Adapter(name_of(directory), directory, low_rank, added, replaced, digest)


# ---- the configuration ---------------------------------------------------------------------------------


def _check_config(path: Path, config: dict[str, Any]) -> None:
    """Refuse a configuration that is not LoRA's, or means more than what the tensors say."""
    if (kind := config.get("peft_type")) != "LORA":
        raise UnsupportedError(f"{path}: peft_type is {kind}; only LORA is read")
    start = config.get("init_lora_weights")
    if not isinstance(start, bool | str | None) or start not in _PLAIN_STARTS:
        raise UnsupportedError(
            f"{path}: init_lora_weights is {start}, which changes the model's own weights; save the adapter converted "
            "to plain LoRA (path_initial_model_for_weight_conversion)"
        )
    for key, value in config.items():
        if key not in _WITHOUT_EFFECT and value not in (None, False, [], {}, ""):
            raise UnsupportedError(f"{path}: {key} is set, which is not supported")
    if type(config.get("r")) is not int or config["r"] < 1:
        raise UsageError(f"{path}: r is {config.get('r')}; a rank belongs there")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            raise UsageError(f"{path}: {key} is no object from patterns to numbers")


@dataclass(frozen=True)
class _ByModule:
    """A number of `usual` that some modules have in their own way: of the first of `patterns` that the end of their
    path matches."""

    usual: Any
    patterns: tuple[tuple[NamePattern, Any], ...]

    def of(self, module: str) -> Any:
        """The number of a module."""
        return next((value for pattern, value in self.patterns if pattern.matches(module)), self.usual)


def _by_module(path: Path, config: dict[str, Any]) -> tuple[_ByModule, _ByModule]:
    """The ranks and the alphas of modules. Raises UsageError, UnsupportedError for patterns that are not read."""
    read, result = NamePatterns().read, []
    for key, name in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        place = f"{path.parent / CONFIG}: {name}"
        stated = (config.get(name) or {}).items()
        patterns = ((read(place, text, r"(?:.*\.)?(?:{})$"), value) for text, value in stated)
        result.append(_ByModule(config.get(key), tuple(patterns)))
    return result[0], result[1]


def _scale(path: Path, config: dict[str, Any], numbers: tuple[_ByModule, _ByModule], module: str, rank: int) -> float:
    """The factor of B A in `module`; `rank` is the number of rows of A, `numbers` are ranks and alphas as stated."""
    stated, alpha = (each.of(module) for each in numbers)
    if stated != rank:
        raise UsageError(f"{path}: {module} has rank {rank}, and {CONFIG} says {stated}")
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise UsageError(f"{path.parent / CONFIG}: lora_alpha of {module} is {alpha}; a number belongs there")
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


# ---- the tensors ---------------------------------------------------------------------------------------

_Parts = dict[str, dict[str, Tensor]]


def _sorted_out(path: Path, entries: dict[str, Entry]) -> tuple[_Parts, dict[str, Tensor]]:
    """Parts of changes by the path of their module, and parameters that are replaced by their names."""
    parts: _Parts = {}
    replaced: dict[str, Tensor] = {}
    for stored, entry in entries.items():
        name = stored.removeprefix(PREFIX)
        if not entry.dtype.is_floating_point:
            raise UnsupportedError(f"{path}: tensor {stored} is of integer type {entry.dtype}")
        value = Checkpoint.map(stored, entry).float()
        require_finite(stored, value)
        ending = next((ending for ending in _PARTS if name.endswith(ending)), None)
        if ending is not None:
            parts.setdefault(name.removesuffix(ending), {})[_PARTS[ending]] = value
        elif ".lora_" not in name and name.endswith((".weight", ".bias")):
            replaced[name.replace(".base_layer.", ".")] = value
        else:
            raise UnsupportedError(f"{path}: tensor {stored} is not a part of LoRA that is read")
    return parts, replaced


def _low_rank(
    path: Path, config: dict[str, Any], numbers: tuple[_ByModule, _ByModule], module: str, parts: dict[str, Tensor]
) -> LowRank:
    """The change of the weight of `module`, from its `parts`."""
    table = "table_a" in parts or "table_b" in parts
    names = ("table_a", "table_b") if table else ("a", "b")
    a, b = (parts.get(name) for name in names)
    if a is None or b is None:
        raise UsageError(f"{path}: {module} lacks {'A' if a is None else 'B'}: the adapter is incomplete")
    if a.dim() != 2 or b.dim() != 2:
        raise UnsupportedError(f"{path}: {module} is a convolution's, of shape {list(a.shape)}; linears are read")
    if a.shape[0] != b.shape[1]:
        raise UsageError(f"{path}: {module} has A {list(a.shape)} and B {list(b.shape)}, of different ranks")
    magnitude = parts.get("magnitude")
    if bool(config.get("use_dora")) != (magnitude is not None):
        raise UsageError(f"{path}: {module} and use_dora of {CONFIG} disagree on whether rows have magnitudes")
    if magnitude is not None:
        if table or magnitude.numel() != b.shape[0]:
            raise UnsupportedError(f"{path}: {module} has magnitudes {list(magnitude.shape)}; one for each row is read")
        magnitude = magnitude.flatten()
    return LowRank(a, b, _scale(path, config, numbers, module, a.shape[0]), table, magnitude)
