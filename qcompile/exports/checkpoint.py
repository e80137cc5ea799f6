"""Write an artifact's weights as a checkpoint that other engines load: a folder with weights, configuration, tokenizer.

Linears are stored as the format of the checkpoint stores weights of ours, to the bit. What it cannot hold is refused,
except for the output head, which becomes floating-point numbers.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qcompile.artifact import swap
from qcompile.artifact.export import FORMATS as MLIR
from qcompile.artifact.layout import disk_errors
from qcompile.checkpoints.checkpoint import INDEX, SINGLE
from qcompile.checkpoints.configuration import read_config
from qcompile.checkpoints.tokenizer_files import TOKENIZER_FILES
from qcompile.errors import ResourceError, UnsupportedError, UsageError, suggestion
from qcompile.exports import gguf_model
from qcompile.exports.agreement import require_same
from qcompile.exports.parameters import Parameters
from qcompile.exports.plan import LAYOUTS, Exported, make_plan
from qcompile.exports.source import open_artifact

SHARD_BYTES = 4 << 30
GGUF = "gguf"


def write(root: Path, out: Path, format: str) -> Exported:
    """Write the artifact at `root` as a checkpoint in `format`, GGUF or one of plan.LAYOUTS.

    `out` is a new folder, or with GGUF a file.

    Raises UsageError or ArtifactError if there is no intact artifact, or `out` exists; UnsupportedError with the tensor
    for what the format cannot hold; ResourceError if the disk is full.
    """
    if format not in (*LAYOUTS, GGUF):
        known = [*LAYOUTS, GGUF, *MLIR]
        raise UsageError(f"--format {format} is unknown; there are {', '.join(known)}{suggestion(format, known)}")
    if format == GGUF:
        return gguf_model.write(open_artifact(root), out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists: choose another directory for the checkpoint")
    source = open_artifact(root)
    tensors = source.tensors
    plan = make_plan(format, tensors, source.parameters)
    config = plan.configured(source.config)
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
                require_same(source.weights, tensors, made, source.model["vocab_size"])
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
    index_file = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index_file, indent=2) + "\n", encoding="utf-8")
    return total


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
