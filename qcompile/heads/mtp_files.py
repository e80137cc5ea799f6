"""Modules for multi-token prediction (MTP) that checkpoints bring beside the model (DeepSeek-V3, arXiv 2412.19437).

A module is a decoder layer like one of the model's. It reads the embedding of the next token and the model's final
hidden state, each normalized, joined and projected to the width of the model. transformers does not load the module, so
it is known by the names of its tensors in public checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from qcompile.checkpoints.checkpoint import Checkpoint
from qcompile.errors import UnsupportedError, UsageError

EMBEDDING_NORM, HIDDEN_NORM, FUSION, FINAL_NORM = "embedding norm", "hidden norm", "fusion", "final norm"
OUTPUT, EMBEDDING = "output", "embedding"
ROLES = (EMBEDDING_NORM, HIDDEN_NORM, FUSION, FINAL_NORM)
"""The tensors that every module has beside those of its layer."""


@dataclass(frozen=True)
class MtpNames:
    """How a kind of checkpoint names its modules.

    `place` matches the beginning of the names in a module, `layer` is what follows it in the names of its decoder
    layer, and `roles` maps roles to names. `hidden_first`: the hidden state is joined before the embedding.
    """

    place: re.Pattern[str]
    layer: str
    roles: Mapping[str, str]
    hidden_first: bool = False


NAMINGS = (
    MtpNames(  # DeepSeek-V3, GLM-4.5: a decoder layer more than the model has
        re.compile(r"^(.*\blayers\.\d+\.)eh_proj\.weight$"),
        "",
        {
            EMBEDDING_NORM: "enorm.weight",
            HIDDEN_NORM: "hnorm.weight",
            FUSION: "eh_proj.weight",
            FINAL_NORM: "shared_head.norm.weight",
            OUTPUT: "shared_head.head.weight",
            EMBEDDING: "embed_tokens.weight",
        },
    ),
    MtpNames(  # Qwen3-Next, Qwen3.5
        re.compile(r"^(.*\bmtp\.)fc\.weight$"),
        "layers.0.",
        {
            EMBEDDING_NORM: "pre_fc_norm_embedding.weight",
            HIDDEN_NORM: "pre_fc_norm_hidden.weight",
            FUSION: "fc.weight",
            FINAL_NORM: "norm.weight",
        },
    ),
    MtpNames(  # MiMo
        re.compile(r"^(.*\bmtp_layers\.\d+\.)input_proj\.weight$"),
        "",
        {
            EMBEDDING_NORM: "token_layernorm.weight",
            HIDDEN_NORM: "hidden_layernorm.weight",
            FUSION: "input_proj.weight",
            FINAL_NORM: "final_layernorm.weight",
        },
        hidden_first=True,
    ),
)
"""How checkpoints name their modules."""


@dataclass(frozen=True)
class MtpModule:
    """The first module in a checkpoint directory.

    `roles` are the names of its tensors by role, `layer` those of its decoder layer, by the names of the same tensors
    in the layer of the model that is like it. `model_layer` is how the names of that layer begin.
    """

    directory: Path
    roles: Mapping[str, str]
    layer: Mapping[str, str]
    model_layer: str
    hidden_first: bool

    @staticmethod
    def find(directory: Path, checkpoint: Checkpoint) -> MtpModule:
        """The first module of `checkpoint` in `directory`, from the headers of its files.

        Raises UsageError if it has none or lacks a tensor, UnsupportedError if no layer of the model is like its own.
        """
        first = next(iter(_places(checkpoint)), None)
        if first is None:
            raise UsageError(f"draft mtp: {directory} has no module for multi-token prediction that is known")
        naming, place = first
        named = {role: place + name for role, name in naming.roles.items()}
        roles = {role: name for role, name in named.items() if name in checkpoint}
        if missing := next((named[role] for role in ROLES if role not in roles), None):
            raise UsageError(f"draft mtp: tensor {missing} is missing from {directory}")
        width = checkpoint.entries[roles[HIDDEN_NORM]].shape
        if len(width) != 1:
            raise UsageError(f"tensor {roles[HIDDEN_NORM]} has shape {list(width)}, a norm needs a number per feature")
        for role, shape in {FUSION: (*width, 2 * width[0]), EMBEDDING_NORM: width, FINAL_NORM: width}.items():
            checkpoint.require(roles[role], shape)
        begin = place + naming.layer
        own = [name.removeprefix(begin) for name in checkpoint if name.startswith(begin) and name not in named.values()]
        model_layer = _like(checkpoint, begin, own)
        layer = {model_layer + name: begin + name for name in own}
        return MtpModule(directory, roles, layer, model_layer, naming.hidden_first)


def module_tensors(checkpoint: Checkpoint) -> set[str]:
    """The names of the tensors of all modules in `checkpoint`."""
    places = tuple(place for _, place in _places(checkpoint))
    return {name for name in checkpoint if name.startswith(places)} if places else set()


def _places(checkpoint: Checkpoint) -> Iterator[tuple[MtpNames, str]]:
    """The modules: their naming, and how the names of their tensors begin; in the order of their numbers."""
    places = [(naming, match[1]) for naming in NAMINGS for name in checkpoint if (match := naming.place.match(name))]
    yield from sorted(places, key=lambda item: [int(part) for part in re.findall(r"\d+", item[1])])


def _like(checkpoint: Checkpoint, begin: str, own: list[str]) -> str:
    """How the names begin of the model's last layer with the tensors `own` of the module's layer, in their shapes."""
    others = {match[1] for name in checkpoint if (match := re.match(r"^(.*\blayers\.\d+\.)", name))} - {begin}
    for other in sorted(others, key=lambda place: [int(part) for part in re.findall(r"\d+", place)], reverse=True):
        held = {name.removeprefix(other) for name in checkpoint if name.startswith(other)}
        if held == set(own) and all(
            checkpoint.entries[other + name].shape == checkpoint.entries[begin + name].shape for name in own
        ):
            return other
    raise UnsupportedError(f"draft mtp: no layer of the model has the tensors of {begin}* in the same shapes")
