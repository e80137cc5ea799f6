"""The tokens that a draft head proposes, as an artifact lists them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qcompile.artifact.hashes import listed_file
from qcompile.errors import ArtifactError


def head_tokens(
    root: Path, files: Mapping[str, dict[str, Any]], stage: Mapping[str, Any], vocabulary: int
) -> NDArray[np.int32] | None:
    """The target's tokens that the head of a draft stage proposes, by their numbers in the head; None if these are the
    same.

    `files` are those of the artifact at `root`, and the target has `vocabulary` tokens. Raises ArtifactError.
    """
    name = stage.get("tokens")
    if name is None:
        if stage["vocab_size"] != vocabulary:
            raise ArtifactError(f"{root}: a draft head of {stage['vocab_size']} tokens has no list of them")
        return None
    content = listed_file(root, dict(files), name) or b""
    whole = len(content) == 4 * stage["vocab_size"]
    tokens = np.frombuffer(content if whole else b"", np.int32)
    if not whole or not ((tokens >= 0) & (tokens < vocabulary)).all():
        raise ArtifactError(f"{root}: {name} does not list tokens of the model; build it again")
    return tokens
