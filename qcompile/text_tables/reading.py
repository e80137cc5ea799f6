"""Tables of texts: Parquet and Arrow files, and folders that Dataset.save_to_disk has written.

They are read by pyarrow, an optional package. Only the column `text` is read.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from qcompile.errors import ResourceError, UsageError, shown

COLUMN = "text"
_PARQUET, _ARROW, _STREAM = b"PAR1", b"ARRO", b"\xff\xff\xff\xff"
"""First bytes of a Parquet file, of an Arrow file, and of an Arrow stream, which is what save_to_disk writes."""
_PART, _PARTS = "state.json", "dataset_dict.json"
"""Files by which a folder of save_to_disk is known: of one part, or of several in folders of their own."""
_MOST_BYTES = 1 << 24
"""Size of state.json; a larger one is something else."""


def is_table(path: Path) -> bool:
    """Whether `path` is a folder of save_to_disk, or a file that begins as Parquet and Arrow files do. No pipes."""
    if path.is_dir():
        return any((path / name).is_file() for name in (_PART, _PARTS))
    return path.is_file() and _beginning(path) in (_PARQUET, _ARROW, _STREAM)


def documents(path: Path) -> list[str]:
    """The column `text` of a table. Raises UsageError naming what is wrong, ResourceError without pyarrow."""
    files = _files(path) if path.is_dir() else [path]
    try:
        arrow = importlib.import_module("pyarrow")
        importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ResourceError(
            f"{path}: tables need the package pyarrow ({error}): pip install 'qcompile[parquet]', or give JSON lines "
            'with a "text"'
        ) from error
    return [text for file in files for text in _column(arrow, file)]


def _files(folder: Path) -> list[Path]:
    """The Arrow files of a folder of save_to_disk, in order."""
    if not (folder / _PART).is_file():
        parts = sorted(path.parent.name for path in folder.glob(f"*/{_PART}"))
        raise UsageError(f"{folder} is a dataset of several parts: give one of them: {', '.join(parts) or 'none'}")
    try:
        with (folder / _PART).open("rb") as file:
            state = json.loads(file.read(_MOST_BYTES))
        names = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{folder / _PART} does not list the files of a dataset") from error
    if state.get("_indices_files"):
        raise UsageError(f"{folder} holds a choice of rows: write it by Dataset.flatten_indices().save_to_disk")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise UsageError(f"{folder / _PART}: {shown(name)} is no file of this folder")
    return [folder / name for name in names]


def _column(arrow: Any, file: Path) -> list[str]:
    """The texts of one file."""
    try:
        beginning = _beginning(file)
        if beginning == _PARQUET:
            names = arrow.parquet.read_schema(file).names
            table = arrow.parquet.read_table(file, columns=[COLUMN], partitioning=None) if COLUMN in names else None
        else:
            with arrow.memory_map(str(file)) as source:
                reader = arrow.ipc.open_file if beginning == _ARROW else arrow.ipc.open_stream
                whole = reader(source).read_all()
                names, table = whole.column_names, whole.select([COLUMN]) if COLUMN in whole.column_names else None
        if table is None:
            raise UsageError(f"{file} has no column {COLUMN}: it has {', '.join(map(shown, names)) or 'none'}")
        texts = table.column(0).to_pylist()
    except (arrow.ArrowException, OSError) as error:
        why = (str(error).splitlines() or ["it is damaged"])[0]
        raise UsageError(f"{file} is no table that pyarrow reads: {why}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: column {COLUMN} is not text in Unicode") from error
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise UsageError(f"{file} row {number}: column {COLUMN} has {shown(text)} in place of a text")
    return texts


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)
