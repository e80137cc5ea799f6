"""What exports read of an artifact: its weights as tensors of the checkpoint, and the checkpoint's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcompile.artifact.layout import CONFIG_FILE
from qcompile.artifact.packed_weights import PackedWeights
from qcompile.artifact.plain_files import read_plain
from qcompile.artifact.reader import read_manifest
from qcompile.checkpoints.checkpoint import read_json
from qcompile.checkpoints.configuration import read_config
from qcompile.errors import UnsupportedError
from qcompile.exports.folded import neutral_numbers
from qcompile.exports.origins import origins
from qcompile.exports.parameters import Parameters
from qcompile.exports.tensors import Tensors
from qcompile.graph import Graph, WeightStore

RAISED = "graphs/model.json"
"""The graph of the model before all passes that change it."""


@dataclass(frozen=True)
class ArtifactSource:
    """An artifact at `root`: its packed weights, and `tensors`, those of the checkpoint that they hold.

    `config` is the checkpoint's config.json, `settings` the same as transformers reads it, `parameters` the tensors of
    its model, and `model` what the manifest says of it.
    """

    root: Path
    weights: PackedWeights
    tensors: Tensors
    parameters: Parameters
    config: dict[str, Any]
    settings: Any
    model: dict[str, Any]


def open_artifact(root: Path) -> ArtifactSource:
    """The artifact at `root`. Raises UsageError or ArtifactError if there is none that is intact.

    Raises UnsupportedError if it was not built from a checkpoint with a configuration, or does not hold its tensors.
    """
    weights = PackedWeights(root)
    if not (root / CONFIG_FILE).is_file():
        raise UnsupportedError(
            f"export: {root} keeps no {CONFIG_FILE}, as artifacts of modules and of earlier versions do not; "
            "build it again from a checkpoint"
        )
    settings = read_config((root / CONFIG_FILE).parent)
    parameters = Parameters(settings)
    folded = neutral_numbers(Graph.from_json(read_plain(root / RAISED).decode(), WeightStore()))
    rows = parameters.assigned(origins(weights.graph, weights.row_shapes), folded)
    missing = [name for name in parameters.shapes if not any(other in rows for other in parameters.alike(name))]
    tensors = Tensors(weights, rows, parameters.shapes, {name: folded[name] for name in missing})
    config, model = read_json(root / CONFIG_FILE), read_manifest(root)["model"]
    return ArtifactSource(root, weights, tensors, parameters, config, settings, model)
