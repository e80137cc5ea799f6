"""Write an artifact's weights as a checkpoint that other engines load: a folder with weights, configuration, tokenizer.

Linears are stored as the format of the checkpoint stores weights of ours, to the bit. What it cannot hold is refused,
except for the output head, which becomes floating-point numbers.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qcompile.artifact import swap
from qcompile.artifact.export import FORMATS as MLIR
from qcompile.artifact.layout import CONFIG_FILE, disk_errors
from qcompile.artifact.packed_weights import PackedWeights
from qcompile.artifact.plain_files import read_plain
from qcompile.artifact.reader import read_manifest
from qcompile.checkpoints.checkpoint import INDEX, SINGLE, read_json
from qcompile.checkpoints.configuration import read_config
from qcompile.checkpoints.tokenizer_files import TOKENIZER_FILES
from qcompile.errors import ResourceError, UnsupportedError, UsageError, suggestion
from qcompile.exports.agreement import require_same
from qcompile.exports.folded import neutral_numbers
from qcompile.exports.origins import origins
from qcompile.exports.parameters import Parameters
from qcompile.exports.plan import LAYOUTS, make_plan
from qcompile.exports.tensors import Tensors
from qcompile.graph import Graph, WeightStore

SHARD_BYTES = 4 << 30
RAISED = "graphs/model.json"
"""The graph of the model before all passes that change it."""


@dataclass(frozen=True)
class Exported:
    """What was written: bytes of the weights, numbers of rounded and other tensors, and what the reader should know."""

    bytes: int
    rounded: int
    floats: int
    notes: list[str]


def write(root: Path, out: Path, format: str) -> Exported:
    """Write the artifact at `root` as a checkpoint in `format`, one of plan.LAYOUTS, into the new folder `out`.

    Raises UsageError or ArtifactError if there is no intact artifact, or `out` exists; UnsupportedError with the tensor
    for what the format cannot hold; ResourceError if the disk is full.
    """
    if format not in LAYOUTS:
        known = [*LAYOUTS, *MLIR]
        raise UsageError(f"--format {format} is unknown; there are {', '.join(known)}{suggestion(format, known)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists: choose another directory for the checkpoint")
    weights, manifest = PackedWeights(root), read_manifest(root)
    if not (root / CONFIG_FILE).is_file():
        raise UnsupportedError(
            f"export: {root} keeps no {CONFIG_FILE}, as artifacts of modules and of earlier versions do not; "
            "build it again from a checkpoint"
        )
    parameters = Parameters(read_config((root / CONFIG_FILE).parent))
    tensors = _tensors(weights, parameters)
    plan = make_plan(format, tensors, parameters)
    config = plan.configured(read_json(root / CONFIG_FILE))
    place = Path(os.path.realpath(out))
    with disk_errors(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        folder, lock = swap.locked_sibling(place)
    try:
        with disk_errors(place):
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            made = read_config(folder)
            made.__dict__.pop("quantization_config", None)
            if plan.untied and len(Parameters(made).alike(plan.untied)) > 1:
                raise UnsupportedError(
                    f"export: {plan.untied} is rounded, and this model always ties it to another tensor"
                )
            if tensors.changed:
                require_same(weights, tensors, made, manifest["model"]["vocab_size"])
            for name in TOKENIZER_FILES:
                if (root / name).is_file():
                    shutil.copyfile(root / name, folder / name)
            size = _write_weights(folder, plan.stored())
            os.chmod(folder, 0o777 & ~swap.umask())
            swap.install(folder, place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
    return Exported(size, len(plan.rounded), len(plan.floats), plan.notes)


def _tensors(weights: PackedWeights, parameters: Parameters) -> Tensors:
    """The tensors of the checkpoint, as far as the artifact holds them."""
    model = Graph.from_json(read_plain(weights.root / RAISED).decode(), WeightStore())
    folded = neutral_numbers(model)
    rows = parameters.assigned(origins(weights.graph, weights.row_shapes), folded)
    missing = [name for name in parameters.shapes if not any(other in rows for other in parameters.alike(name))]
    return Tensors(weights, rows, parameters.shapes, {name: folded[name] for name in missing})


def _write_weights(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> int:
    """Write `tensors` as safetensors, in several files with an index if they are large. Returns their bytes."""
    shards: list[list[str]] = []
    total = 0
    waiting: dict[str, Tensor] = {}

    def flush() -> None:
        try:
            save_file(waiting, folder / f"{len(shards)}.part", {"format": "pt"})
        except SafetensorError as error:  # the library's own wrapping of errors of the disk
            raise ResourceError(f"{folder}: cannot write weights: {error}") from error
        (folder / f"{len(shards)}.part").chmod(0o666 & ~swap.umask())  # the library makes private files
        shards.append(list(waiting))
        waiting.clear()

    for name, tensor in tensors:
        if waiting and sum(map(_bytes_of, waiting.values())) + _bytes_of(tensor) > SHARD_BYTES:
            flush()
        waiting[name] = tensor.contiguous()
        total += _bytes_of(tensor)
    flush()
    if len(shards) == 1:
        (folder / "0.part").rename(folder / SINGLE)
        return total
    places: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{index}.part").rename(folder / file)
        places |= dict.fromkeys(names, file)
    found = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return total


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
