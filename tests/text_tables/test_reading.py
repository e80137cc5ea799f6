"""Tables of texts: Parquet, Arrow files and streams, and folders as Dataset.save_to_disk writes them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from qcompile import texts
from qcompile.errors import ResourceError, UsageError
from qcompile.runtime.evaluate import read_documents
from qcompile.text_tables.reading import documents, is_table

TEXTS = ["one", "", "zwei \u00e4\n", "3"]


def stream(path: Path, columns: dict[str, Any]) -> Path:
    """An Arrow stream in two batches, as save_to_disk writes files."""
    table = pyarrow.table(columns)
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path


def saved(folder: Path, names: list[Any], **more: Any) -> Path:
    """A folder as save_to_disk writes it, of which state.json lists `names`."""
    folder.mkdir()
    state = {"_data_files": [{"filename": name} for name in names], "_indices_files": None} | more
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_all_forms_have_the_same_texts(tmp_path: Path) -> None:
    columns = {"id": [1, 2, 3, 4], "text": TEXTS}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=2)
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), pyarrow.table(columns).schema) as writer:
        writer.write_table(pyarrow.table(columns))
    folder = saved(tmp_path / "set", ["data-0.arrow", "data-1.arrow"])
    stream(folder / "data-0.arrow", {"text": TEXTS[:3]})
    stream(folder / "data-1.arrow", {"text": pyarrow.array(TEXTS[3:], pyarrow.large_string())})
    for path in (tmp_path / "a.parquet", tmp_path / "a.arrow", stream(tmp_path / "s", columns), folder):
        texts.check(path, tables=True)
        assert is_table(path)
        assert documents(path) == read_documents(path) == TEXTS


def test_what_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("PAR")
    assert not any(map(is_table, (tmp_path, tmp_path / "plain", tmp_path / "none")))


def test_without_the_package_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        ResourceError, match=r"need the package pyarrow .*: pip install 'qcompile\[parquet\]', or give JSON"
    ):
        documents(stream(tmp_path / "s", {"text": TEXTS}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda at: stream(at / "s", {"body": ["a"]}), "has no column text: it has 'body'"),
        (lambda at: stream(at / "s", {"text": ["a", None]}), "row 2: column text has None in place of a text"),
        (lambda at: stream(at / "s", {"text": [1]}), "row 1: column text has 1 in place of a text"),
        (lambda at: saved(at / "d", ["../s"]), "'../s' is no file of this folder"),
        (lambda at: saved(at / "d", [7]), "7 is no file of this folder"),
        (lambda at: saved(at / "d", [], _indices_files=[{"filename": "i"}]), "holds a choice of rows"),
        (lambda at: saved(at / "d", [], _data_files=3), "does not list the files of a dataset"),
    ],
)
def test_refused(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        documents(make(tmp_path))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p"
    parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    whole = path.read_bytes()
    for size in (4, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UsageError, match="is no table that pyarrow reads"):
            documents(path)


def test_a_dataset_of_parts_names_them(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    for part in ("train", "test"):
        saved(tmp_path / part, [])
    with pytest.raises(UsageError, match="several parts: give one of them: test, train"):
        documents(tmp_path)
