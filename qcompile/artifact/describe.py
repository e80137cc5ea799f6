"""The manifest of a build, assembled from the facts of its parts.

It has no times and no paths of the build machine, so that two builds of one model are equal.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import qcompile
from qcompile.artifact.layout import Manifest

MAX_STEP_TOKENS = 512
"""Most tokens of one step of the runtime, and most of them with logits, unless the kernels take more."""


@dataclass(frozen=True)
class KernelFiles:
    """Where the kernels of each path are: kernels/<target>, one file per path, named by path and `suffix`.

    `abi` is the version of their interface, and `compiler` the name and version of what compiled them. `most_rows` and
    `most_outputs` are the most rows of a step, and of rows with logits, that they take.
    """

    target: str
    suffix: str
    abi: int
    compiler: str
    most_rows: int = MAX_STEP_TOKENS
    most_outputs: int = MAX_STEP_TOKENS

    @property
    def folder(self) -> str:
        """The folder of the kernels, relative to the artifact."""
        return f"kernels/{self.target}"

    def library(self, path: str) -> str:
        """The file of kernels that the runtime opens for a path."""
        return f"{self.folder}/{path}{self.suffix}"

    def placed(self, files: Mapping[str, str | bytes]) -> dict[str, str | bytes]:
        """The compiled files by their paths in the artifact."""
        return {f"{self.folder}/{name}": content for name, content in files.items()}


def runtime(
    kernels: KernelFiles,
    weights: list[dict[str, Any]],
    stages: Sequence[Mapping[str, Any]],
    vocab_size: int,
    kv: Mapping[str, Any],
    ranks: Sequence[Sequence[int]] = (),
) -> dict[str, Any]:
    """The section that the runtime loads by: `weights` are from ArtifactWriter.add_weights, and `stages` from
    drafts.draft_stages.

    A draft stage's `weights` are indices into the list of all weights, which starts with the target's; its `kv` is null
    if the path uses the target's cache. `ranks` are such indices for each of several processes that run the model.
    """
    return {
        "abi": kernels.abi,
        "library": kernels.library("model"),
        "levels": list(stages),
        "weights": weights,
        "max_tokens": kernels.most_rows,
        "max_outputs": kernels.most_outputs,
        "vocab_size": vocab_size,
        "kv": dict(kv),
        **({"ranks": [list(indices) for indices in ranks]} if ranks else {}),
    }


def makers() -> dict[str, str]:
    """The versions of qcompile, torch and Python, for people."""
    return {"qcompile": qcompile.__version__, "torch": torch.__version__, "Python": platform.python_version()}


def versions(kernels: KernelFiles) -> Manifest:
    """The versions of qcompile and of the software that made the artifact."""
    return {
        "qcompile_version": qcompile.__version__,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "compiler": kernels.compiler,
        },
    }
