"""Sizes in a configuration, checked before transformers divides by them: each error names the field and its value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qcompile.errors import UsageError, shown

HEADS, GROUPS = "num_attention_heads", "num_key_value_heads"
POSITIVE: Mapping[str, int] = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "moe_intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 16,  # some types make a list of them; see MOST_LAYERS
    HEADS: 1 << 16,
    GROUPS: 1 << 16,
    "head_dim": 1 << 16,
    "v_head_dim": 1 << 16,
    "max_position_embeddings": 1 << 24,  # Llama 4 has 10 million
    "num_experts_per_tok": 1 << 16,
}
"""Fields that are at least 1 and less than these, far beyond any model's: memory is allocated for them.

Types that name a field otherwise say so in attribute_map.
"""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
COUNT = re.compile(r"(num|n)_\w+|\w+_(size|dim|layers|heads|rank)")
"""Names of other whole numbers, which may be 0 for none, but not negative."""
PERIOD = re.compile(r"\w+_(step|period|interval|pattern|multiple)|\w+_every_n_layers")
"""Names of whole numbers by which layers repeat."""
EPSILON = re.compile(r"(\w+_)?(eps|epsilon)")
DIVISOR = re.compile(
    r"\w*rope_theta|rotary_emb_base|factor|beta_fast|beta_slow|original_max_position_embeddings|query_pre_attn_scalar"
)
"""Names of numbers that are inverted, or of which a logarithm or a root is taken."""


def check_sizes(path: Path, raw: Mapping[str, Any], classes: Mapping[str, Any]) -> None:
    """Raise UsageError naming the first field of the configuration `raw` in the file `path` that no model has.

    `classes` are transformers' configurations by model type: they say how the type names fields, and its defaults.
    """
    for place, part in _text_parts(raw):
        kind = classes[part["model_type"]] if part.get("model_type") in classes else None
        fields = _Fields(f"{path}: {place}", part, getattr(kind, "attribute_map", {}))
        dense = any(fields.size(name) == 0 for name in EXPERTS)  # without experts, none are chosen
        for name, limit in POSITIVE.items():
            unused = fields.size(name) == 0 and ((dense and name in CHOSEN) or getattr(kind, fields.name(name), 1) == 0)
            if not unused:  # 0 as a type's own default: its models do not read the field
                fields.require_positive(name, limit)
        for name, value in part.items():
            _check_number(f"{path}: {place}{name}", name, value)
        for name in ("rope_parameters", "rope_scaling"):
            _check_rope(f"{path}: {place}{name}", part.get(name))
        _check_heads(fields)
        _check_experts(fields)


def _text_parts(raw: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The configuration and those inside it that have a vocabulary, each with the prefix of its fields."""
    yield "", raw
    for name, part in raw.items():
        if isinstance(part, dict) and name.endswith("_config") and "vocab_size" in part:
            yield f"{name}.", part


class _Fields:
    """Fields of one configuration by their usual names; errors give the name in the file."""

    def __init__(self, place: str, part: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self._place, self._part, self._names = place, part, names

    def name(self, usual: str) -> str:
        """The name of the field in the file."""
        other = self._names.get(usual, usual)
        return other if other in self._part else usual

    def given(self, usual: str) -> Any:
        """The field as the file has it, or None."""
        return self._part.get(self.name(usual))

    def size(self, usual: str) -> int | None:
        """The field if it is one whole number; None if it is missing, null or a list."""
        value = self.given(usual)
        return value if type(value) is int else None

    def wrong(self, usual: str, reason: str) -> UsageError:
        """The error that the field is wrong."""
        return UsageError(f"{self._place}{self.name(usual)} {reason}")

    def require_positive(self, usual: str, limit: int) -> None:
        """Raise UsageError unless the field, or each entry of its list, is from 1 to below `limit`, or missing.

        A file may have it by both of its names: models then read either.
        """
        for name in dict.fromkeys((self.name(usual), usual)):
            given = self._part.get(name)
            for value in given if isinstance(given, list) else [given]:
                if value is None:
                    continue
                if type(value) is not int or value < 1:
                    raise UsageError(f"{self._place}{name} must be positive, is {shown(value)}")
                if value >= limit:
                    raise UsageError(f"{self._place}{name} must be less than {limit}, is {shown(value)}")


def _check_number(place: str, name: str, value: Any) -> None:
    """Refuse negative counts and sizes, and numbers that are none."""
    counts = COUNT.fullmatch(name) and not name.endswith("_id")
    odd = isinstance(value, str | float) or (isinstance(value, bool) and name.startswith(("num_", "n_")))
    if counts and odd and value != "auto":
        raise UsageError(f"{place} must be a whole number, is {shown(value)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        raise UsageError(f"{place} is {value}; it must be a number")
    if name == "partial_rotary_factor" and not 0 < value <= 1:
        raise UsageError(f"{place} must be above 0 and at most 1, is {shown(value)}")
    if (EPSILON.fullmatch(name) or counts) and value < 0:
        raise UsageError(f"{place} must not be negative, is {shown(value)}")
    if (DIVISOR.fullmatch(name) or PERIOD.fullmatch(name)) and value <= 0:
        raise UsageError(f"{place} must be positive, is {shown(value)}")


def _check_rope(place: str, given: Any) -> None:
    """Refuse bases and factors of rotary embeddings that are not positive numbers, also by type of layer."""
    for name, value in given.items() if isinstance(given, dict) else ():
        where = f"{place}.{name}"
        if isinstance(value, dict):
            _check_rope(where, value)
        elif name in ("rope_type", "type") and not isinstance(value, str):
            raise UsageError(f"{where} must be a name, is {shown(value)}")
        elif DIVISOR.fullmatch(str(name)) and value is not None and not _is_positive(value):
            raise UsageError(f"{where} must be a positive number, is {shown(value)}")
        elif isinstance(value, list) and str(name).endswith("factor") and not all(map(_is_positive, value)):
            raise UsageError(f"{where} must hold positive numbers, is {shown(value)}")
        elif name == "partial_rotary_factor" and value is not None and not (_is_positive(value) and value <= 1):
            raise UsageError(f"{where} must be above 0 and at most 1, is {shown(value)}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _check_heads(fields: _Fields) -> None:
    """Refuse heads of queries that no number of them shares each head of keys."""
    heads, groups = fields.size(HEADS), fields.size(GROUPS)
    if heads and groups and heads % groups:
        raise fields.wrong(HEADS, f"must be a multiple of {fields.name(GROUPS)} {groups}, is {heads}")


def _check_experts(fields: _Fields) -> None:
    """Refuse more experts for a token than there are, and groups of experts that do not fit."""
    for name in EXPERTS:
        if isinstance(fields.given(name), list):
            raise fields.wrong(name, f"must be a whole number, is {shown(fields.given(name))}")
    present: Sequence[str] = [name for name in EXPERTS if fields.size(name)]
    experts = sum(fields.size(name) or 0 for name in (*present[:1], "zero_expert_num"))
    for name in CHOSEN:
        chosen = fields.size(name)
        if present and chosen and chosen > experts:
            raise fields.wrong(name, f"must be at most {fields.name(present[0])} {experts}, is {chosen}")
    groups, kept = fields.size("n_group"), fields.size("topk_group")
    if present and groups and experts % groups:
        raise fields.wrong("n_group", f"must divide {fields.name(present[0])} {experts}, is {groups}")
    if groups and kept and kept > groups:
        raise fields.wrong("topk_group", f"must be at most n_group {groups}, is {kept}")
