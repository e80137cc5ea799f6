"""torch.export of modules for tests."""

from __future__ import annotations

from typing import Any

import torch


def dynamic_size(name: str, **bounds: int) -> Any:
    """A dynamic size for torch.export, with `min` and `max` as bounds; has the name where torch permits it.

    Before 2.13, torch adds guards on strides that always hold, and an export with a named size fails at any guard.
    """
    if torch.__version__ < "2.13":
        return torch.export.Dim.DYNAMIC(**bounds)
    return torch.export.Dim(name, **bounds)
