"""The names of models, by the folders that they are in."""

from __future__ import annotations

import os
from pathlib import Path


def name_of(directory: Path) -> str:
    """The name of a checkpoint's model: its folder's name, with bytes that are not text replaced.

    A model from the hub, `models--NAME--MODEL/snapshots/COMMIT`, has its name there: `NAME/MODEL`.
    """
    folder = directory.resolve()
    parts = folder.parent.parent.name.split("--")
    if folder.parent.name == "snapshots" and len(parts) == 3 and parts[0] == "models":
        return "/".join(parts[1:])
    return os.fsencode(folder.name).decode("utf-8", "replace")
