"""Recipes: named choices of number formats, and the options that override them.

A recipe lists the pass fields that differ from their defaults; `pipeline` creates the passes. So this module knows
passes by name only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from qcompile.errors import UsageError, shown, suggestion

Settings = dict[str, dict[str, object]]
"""Field values by pass name and field name."""


@dataclass(frozen=True)
class RecipeDraft:
    """A draft path of a recipe: its formats, where they differ from the target path's, and how far it looks ahead.

    The fields but the last two are those of passes/speculate.py; by default no linears are `sensitive` (`--set
    speculate.sensitive=4`) and no blocks are left out (`--set speculate.skip=2`). It proposes at most `gamma` tokens at
    once to a path that is itself a draft, and stops after a token with a probability below `threshold`. It shares the
    target's cache.
    """

    weight: str = "same"
    activation: str = "same"
    head: str = "same"
    head_activation: str = "same"
    sensitive: int = 0
    sensitive_weight: str = "same"
    sensitive_activation: str = "same"
    skip: int = 0
    gamma: int = 4
    threshold: float = 0.0

    def settings(self, head: str) -> Settings:
        """The settings of this draft, by pass, for a target with the head `head` (a key of HEADS)."""
        fields: dict[str, object] = {k: v for k, v in asdict(self).items() if k not in ("gamma", "threshold")}
        if self.head == "nested_4" and head != "nested":  # another head has no such part: the draft shares all of it
            fields["head"] = "same"
        return {"speculate": fields | {"enabled": True}}


@dataclass(frozen=True)
class Recipe:
    """Number formats of a whole model: `weight` and `activation` of the linears, the `kv` cache, the output `head`.

    Names are those of formats/registry.py, formats/activations.py and formats/kv.py. `head` is a key of HEADS: int8 per
    channel unless the recipe or the caller chooses another. `calibrated` recipes need calibration text, and `extra`
    sets fields of other passes. Each of `drafts` drafts for the path before it. `cpu_activation` takes the place of
    `activation` on CPUs, in linears and head, where GPUs have no kernels for it ("": the same on both).
    """

    name: str
    description: str
    weight: str
    activation: str
    kv: str
    head: str = "int8"
    calibrated: bool = False
    extra: tuple[tuple[str, str, object], ...] = ()
    drafts: tuple[RecipeDraft, ...] = ()
    cpu_activation: str = ""

    def settings(self, head_dtype: str | None = None, kind: str = "cpu") -> Settings:
        """The settings of this recipe, by pass, for targets of `kind`: cpu or cuda.

        `head_dtype` overrides its head (UsageError if unknown).
        """
        head = head_dtype or self.head
        if head not in HEADS:
            raise UsageError(f"head dtype {head} is unknown; there are {', '.join(HEADS)}{suggestion(head, HEADS)}")
        head_weight, head_activation = HEADS[head]
        replaced = FINE_HEAD if self.activation == "bf16" else {self.activation: self.cpu_activation or self.activation}
        replaced = replaced if kind == "cpu" else {}
        precision: dict[str, object] = {
            "weight": self.weight,
            "activation": replaced.get(self.activation, self.activation),
            "head": head_weight,
            "head_activation": replaced.get(head_activation, head_activation),
        }
        settings: Settings = {"assign_precision": precision, "cache": {"format": self.kv}}
        for name, field, value in self.extra:
            settings.setdefault(name, {})[field] = value
        return settings


HEADS = {
    "int8": ("w8_sym_channel", "int8"),
    "nested": ("nested_8_4", "int8_g128"),
    "bf16": ("bf16", "bf16"),
    "f32": ("f32", "f32"),
}
"""Weight format and activation type of the output head, by the value of `--head-dtype`."""

FINE_HEAD = {"int8": "int8_g128"}
"""By the activation type of a head, that on CPUs in recipes where the other linears read bfloat16 activations. One
scale per token would be nearly half of what an 8-bit head loses. GPUs have no kernels for it."""

EMBEDDINGS = {"auto": "", "int8": "w8_sym_channel"}
"""Weight format of the table of token embeddings, by the value of `--embedding-dtype`; "": the checkpoint's numbers."""

COMPARED = ("w4_asym_g128", "w4_asym_g32", "w8_sym_channel", "bf16")
"""The weight formats that a study of sensitivity compares where none are given."""

QOQ: tuple[tuple[str, str, object], ...] = (
    ("fold_norms", "enabled", True),
    ("fold_norms", "needed", True),
    ("rotate", "enabled", True),
    ("center_keys", "enabled", True),
    ("smooth_attention", "enabled", True),
    ("smooth_attention", "alpha", 0.5),
)
"""QServe 3.2 and B.2.1, and centered keys, which reduce the total loss on pycode-26m by a fifth.
Output modules are not smoothed (B.2.2): after GPTQ that made pycode-26m worse."""

QUAROT: tuple[tuple[str, str, object], ...] = (
    ("fold_norms", "enabled", True),
    ("rotate", "enabled", True),
    ("rotate", "online", True),
)
"""QuaRot 4: required for 4-bit activations."""

RECIPES = {
    r.name: r
    for r in (
        Recipe("f32", "float32 throughout, the reference", "f32", "f32", "kv32", "f32"),
        Recipe("bf16", "bfloat16 weights and activations", "bf16", "bf16", "kv16", "bf16"),
        Recipe(
            "w8a8",
            "8-bit weights per channel, 8-bit activations",
            *("w8_sym_channel", "int8", "kv16"),
            cpu_activation="int8_g128",
        ),
        Recipe(
            "w4a16",
            "4-bit weights in groups of 128, bfloat16 activations",
            *("w4_asym_g128", "bf16", "kv16"),
            extra=(("calibrate", "descent", 4),),
        ),
        Recipe("w4a8", "4-bit weights in groups of 128, 8-bit activations", "w4_asym_g128", "int8", "kv16"),
        Recipe(
            "w4a16-g32",
            "4-bit weights in groups of 32, bfloat16 activations (CPUs)",
            *("w4_asym_g32", "bf16", "kv16"),
            extra=(("calibrate", "descent", 4),),
        ),
        Recipe(
            "w3a16",
            "3-bit weights in groups of 128, bfloat16 activations (CPUs)",
            *("w3_asym_g128", "bf16", "kv16"),
            calibrated=True,
            extra=(("calibrate", "descent", 4),),
        ),
        *(
            Recipe(
                f"w{bits}t16",
                f"trellis-coded {bits}-bit weights in groups of 128, bfloat16 activations (CPUs)",
                *(f"w{bits}_trellis_g128", "bf16", "kv16"),
                calibrated=True,
                extra=(("calibrate", "descent", 1),),
            )
            for bits in (4, 3, 2)
        ),
        Recipe("w4a8-g32", "4-bit weights in groups of 32, 8-bit activations (CPUs)", "w4_asym_g32", "int8", "kv16"),
        Recipe(
            "w8a8-g32",
            "8-bit weights in groups of 32, 8-bit activations (CPUs)",
            *("w8_sym_g32", "int8", "kv16"),
            cpu_activation="int8_g128",
        ),
        Recipe(
            "qserve",
            "QServe's W4A8KV4 with two-level groups of 128",
            "qoq_g128",
            "int8",
            "kv4",
            calibrated=True,
            extra=QOQ,
        ),
        Recipe(
            "qserve-channel",
            "QServe's W4A8KV4 with one scale per channel",
            "qoq_channel",
            "int8",
            "kv4",
            calibrated=True,
            extra=QOQ,
        ),
        Recipe(
            "mixllm",
            "MixLLM's 4-bit weights with the most salient tenth of output features in 8",
            "mix_4_8",
            "int8_g128",
            "kv16",
            calibrated=True,
            extra=(("salience", "enabled", True),),
        ),
        Recipe(
            "auto",
            "4 or 8 bits by output feature: what matters most for its time on the target (--target-bits)",
            "mix_4_8",
            "int8_g128",
            "kv16",
            calibrated=True,
            extra=(("salience", "enabled", True), ("salience", "target_bits", 4.4)),
        ),
        Recipe("mxfp4", "OCP MXFP4 weights, 8-bit activations in groups of 128", "mxfp4", "int8_g128", "kv16"),
        Recipe("nvfp4", "NVFP4 weights, 8-bit activations in groups of 128", "nvfp4", "int8_g128", "kv16"),
        Recipe(
            "w4a4",
            "4-bit weights in groups of 128, clipped 4-bit activations per token",
            "w4_asym_g128",
            "int4_clip",
            "kv16",
            calibrated=True,
            extra=QUAROT,
        ),
        Recipe(
            "w4a4-g128",
            "4-bit weights and activations in groups of 128",
            "w4_asym_g128",
            "int4_g128",
            "kv16",
            calibrated=True,
            extra=QUAROT,
        ),
        Recipe(
            "ml-specqd",
            "bfloat16, drafted by its own MXFP4 copy (ML-SpecQD)",
            *("bf16", "bf16", "kv16", "bf16"),
            drafts=(RecipeDraft("mxfp4", "int8_g128", "w4_asym_g128", "int8"),),
        ),
        Recipe(
            "qspec",
            "4-bit weights, drafted with 8-bit and verified with bfloat16 activations (QSpec)",
            *("w4_asym_g128", "bf16", "kv16"),
            drafts=(RecipeDraft(activation="int8"),),
        ),
        Recipe(
            "qspec-w4a4",
            "4-bit weights, rotated, drafted with 4-bit and verified with bfloat16 activations (QSpec over QuaRot)",
            *("w4_asym_g128", "bf16", "kv16"),
            extra=(("rotate", "enabled", True), ("rotate", "online", True)),
            drafts=(RecipeDraft(activation="int4_g128"),),
        ),
        Recipe(
            "qspec-atom",
            "4-bit weights, drafted with 4-bit activations but for 128 outlier channels in 8 (QSpec over Atom)",
            *("w4_asym_g128", "bf16", "kv16"),
            calibrated=True,
            extra=(("reorder", "enabled", True), ("reorder", "outliers", True)),
            drafts=(RecipeDraft(activation="int4_g128_outlier128"),),
        ),
        Recipe(
            "quantspec",
            "bfloat16 over a hierarchical cache, drafted with 4-bit weights by the cache's upper half (QuantSpec)",
            *("bf16", "bf16", "kv_hier", "bf16"),
            drafts=(
                RecipeDraft(
                    *("w4_asym_g128", "int8", "w8_sym_channel", "int8"),
                    sensitive_weight="w8_sym_channel",
                    sensitive_activation="int8",
                ),
            ),
        ),
        Recipe(
            "quantspec-w8",
            "8-bit weights over a hierarchical cache, drafted with 4-bit ones by the cache's upper half (QuantSpec)",
            *("w8_sym_channel", "int8", "kv_hier"),
            drafts=(RecipeDraft("qoq_g128"),),
        ),
        Recipe(
            "nested",
            "8-bit weights in two planes, drafted by the upper one alone",
            *("nested_8_4", "int8_g128", "kv16", "nested"),
            drafts=(RecipeDraft("nested_4", head="nested_4"),),
        ),
    )
}


DRAFT_RECIPE = "mxfp4"
"""Recipe of a separate draft model."""

HEAD_RECIPE = "w8a8"
"""Recipe of a draft head: it is small, and every wrong draft costs a step of the target."""


def get_recipe(name: str) -> Recipe:
    """The recipe `name`. Raises UsageError listing the known recipes."""
    if name not in RECIPES:
        raise UsageError(f"recipe {name} is unknown; there are {', '.join(RECIPES)}{suggestion(name, RECIPES)}")
    return RECIPES[name]


def parse_options(pairs: list[str]) -> dict[str, str]:
    """`["cache.format=kv8", "rounding=nearest"]` as a dict. Raises UsageError for a pair without name or value."""
    options: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise UsageError(f"--set {pair}: write pass.field=value, for example cache.format=kv8")
        options[name] = value
    return options


def option_texts(options: Mapping[str, object]) -> dict[str, str]:
    """Options as the command line would pass them; programs may pass True, 4 and 0.5 directly."""
    texts: dict[str, str] = {}
    for name, value in options.items():
        if not isinstance(value, str | bool | int | float):
            raise UsageError(f"option {name} must be a text, a number, True or False, not {shown(value)}")
        texts[name] = str(value)
    return texts


def allocation(bits: float | None, rise: float | None) -> dict[str, str]:
    """The options for `--target-bits` and `--max-perplexity-increase`. UsageError for both, or a rise of 0 or less."""
    if bits is not None and rise is not None:
        raise UsageError("--target-bits and --max-perplexity-increase: give one of them, the other follows")
    if rise is not None and not rise > 0:
        raise UsageError(f"--max-perplexity-increase {rise}: write a number above 0, for example 0.05")
    if bits is not None:
        return {"salience.target_bits": str(bits)}
    return {} if rise is None else {"salience.max_perplexity_increase": str(rise)}


def embedding_option(dtype: str | None) -> dict[str, str]:
    """The option for `--embedding-dtype`. Raises UsageError for an unknown type."""
    if dtype is not None and dtype not in EMBEDDINGS:
        hint = suggestion(dtype, EMBEDDINGS)
        raise UsageError(f"embedding dtype {dtype} is unknown; there are {', '.join(EMBEDDINGS)}{hint}")
    return {} if dtype is None else {"assign_precision.embedding": dtype}


def apply_options(
    settings: Settings, fields: Mapping[str, Mapping[str, object]], options: Mapping[str, str]
) -> Settings:
    """`settings` overridden by `options`.

    `fields` holds the defaults of every pass's fields; values are parsed as their types. An option names `pass.field`,
    or a `field` of every pass that has it. Raises UsageError listing what is valid.
    """
    merged = {name: dict(values) for name, values in settings.items()}
    for option, text in options.items():
        for pass_name, field in _targets_of(option, fields):
            value = _read(option, text, fields[pass_name][field])
            merged.setdefault(pass_name, {})[field] = value
    return merged


def _targets_of(option: str, fields: Mapping[str, Mapping[str, object]]) -> list[tuple[str, str]]:
    """The (pass, field) pairs that `option` names."""
    pass_name, dot, field = option.rpartition(".")
    if not dot:
        matches = [(name, option) for name, keys in fields.items() if option in keys]
        if not matches:
            known = ", ".join(f"{name}.{key}" for name, keys in fields.items() for key in keys)
            hint = suggestion(option, [key for keys in fields.values() for key in keys])
            raise UsageError(f"option {option} is a field of no pass; there are {known}{hint}")
        return matches
    if pass_name not in fields:
        hint = suggestion(pass_name, fields)
        raise UsageError(f"option {option}: pass {pass_name} is unknown; there are {', '.join(fields)}{hint}")
    if field not in fields[pass_name]:
        own = f"; there are {', '.join(fields[pass_name])}" if fields[pass_name] else ", nor any other"
        raise UsageError(
            f"option {option}: pass {pass_name} has no field {field}{own}{suggestion(field, fields[pass_name])}"
        )
    return [(pass_name, field)]


def _read(option: str, text: str, default: object) -> object:
    """`text` parsed as the type of `default`: bool, int, float or str."""
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise UsageError(f"option {option}={text}: write true or false")
        return text.lower() == "true"
    if isinstance(default, (int, float)):
        try:
            value = type(default)(text)
            if not math.isfinite(value):
                raise ValueError
            return value
        except ValueError:
            kind = "a whole number" if isinstance(default, int) else "a number"
            raise UsageError(f"option {option}={text}: write {kind}") from None
    return text
