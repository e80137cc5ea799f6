"""Plots that commands write to files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.errors import ResourceError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")
STYLE: Any = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "qcompile"}


def check(path: Path) -> None:
    """Raise UsageError unless a plot can be written at `path`, before anything is measured."""
    if path.suffix not in FORMATS:
        raise UsageError(f"--plot {path}: its name must end in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}")


def save(figure: Figure, path: Path) -> None:
    """Write the plot. Raises ResourceError if it cannot be written."""
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}") from error
