"""Defaults of sampling parameters that a checkpoint recommends, in its generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qcompile.errors import UsageError
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.special_tokens import json_object

NAME = "generation_config.json"
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(root: Path, files: dict[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that the artifact at `root` recommends; empty if it recommends none.

    files: those of the artifact's manifest. Raises ArtifactError for a file that is no JSON object, UsageError for
    values that SamplingParams refuses.
    """
    config = json_object(root, files, NAME)
    defaults = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except UsageError as error:
        raise UsageError(f'{root / NAME}: {error}; generation_config "none" ignores the file') from error
    return defaults
