"""Checkpoints and artifacts that try to have files opened that are not theirs, or code run, each in its own way.

A trap changes a folder. Beside it lies a copy, `outside`, of which nothing may be opened: its files are good ones, so
that what opens one of them would go on.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qcompile.artifact.layout import MANIFEST, canonical_json, seal

Trap = Callable[[Path, Path], object]
CODE = "import pathlib\npathlib.Path(__file__).with_name('RAN').touch()\n"
WEIGHTS = "model.safetensors"


class _Touches:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch '{self._path}'",))


def _change(path: Path, **values: Any) -> None:
    given = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(given | values))


def _pickled(folder: Path, outside: Path, beside: bool) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Touches(folder / "RAN")))
    if not beside:
        (folder / WEIGHTS).unlink()


def _index(folder: Path, place: str) -> None:
    (folder / WEIGHTS).unlink()
    weights = {"model.embed_tokens.weight": place}
    _change(folder / f"{WEIGHTS}.index.json", weight_map=weights, metadata={"total_size": 1})


def _link(folder: Path, outside: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside / name)


def _linked(name: str) -> Trap:
    return lambda folder, outside: _link(folder, outside, name)


def _pipe(name: str) -> Trap:
    return lambda folder, outside: ((folder / name).unlink(), os.mkfifo(folder / name))


def _code(folder: Path, outside: Path, type_: str) -> None:
    (folder / "modeling_x.py").write_text(CODE)
    names = {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.M"}
    _change(folder / "config.json", model_type=type_, auto_map=names)


def _tokenizer_code(folder: Path, outside: Path) -> None:
    (folder / "tokenization_x.py").write_text(CODE)
    names = {"AutoTokenizer": ["tokenization_x.T", "tokenization_x.T"]}
    _change(folder / "tokenizer_config.json", tokenizer_class="T", auto_map=names)


def _template(text: str) -> Trap:
    return lambda folder, outside: (folder / "chat_template.jinja").write_text(text.replace("OUTSIDE", str(outside)))


CHECKPOINTS: dict[str, Trap] = {
    "good": lambda folder, outside: None,
    "pickled weights": lambda folder, outside: _pickled(folder, outside, beside=False),
    "pickled weights beside good ones": lambda folder, outside: _pickled(folder, outside, beside=True),
    "an index above the folder": lambda folder, outside: _index(folder, f"../outside/{WEIGHTS}"),
    "an index with an absolute path": lambda folder, outside: _index(folder, str(outside / WEIGHTS)),
    "weights that are a link": _linked(WEIGHTS),
    "a tokenizer that is a link": _linked("tokenizer.json"),
    "a configuration that is a link": _linked("config.json"),
    "weights that are a pipe": _pipe(WEIGHTS),
    "code for an unknown type": lambda folder, outside: _code(folder, outside, "unknown_type"),
    "code for a known type": lambda folder, outside: _code(folder, outside, "llama"),
    "code on the hub": lambda folder, outside: _change(
        folder / "config.json", model_type="unknown_type", auto_map={"AutoConfig": "some/one--modeling_x.C"}
    ),
    "code for a tokenizer": _tokenizer_code,
    "a tokenizer file elsewhere": lambda folder, outside: _change(
        folder / "tokenizer_config.json",
        tokenizer_file=str(outside / "tokenizer.json"),
        vocab_file=str(outside / "tokenizer.json"),
        name_or_path=str(outside),
    ),
    "a template that includes a file": _template("{% include 'OUTSIDE/config.json' %}{{ messages[0]['content'] }}"),
    "a template that asks for Python": _template("{{ cycler.__init__.__globals__.os.popen('id').read() }}"),
}
"""Traps of checkpoints. `good` is none."""


def _manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_bytes(canonical_json(seal(manifest)))


def _renamed(folder: Path, place: str) -> None:
    """Have the manifest name the tokenizer by another path."""
    _manifest(folder, lambda manifest: manifest["files"].update({place: manifest["files"].pop("tokenizer.json")}))


def _library(folder: Path, place: str) -> None:
    _manifest(folder, lambda manifest: manifest["runtime"].update(library=place))


ARTIFACTS: dict[str, Trap] = {
    "good": lambda folder, outside: None,
    "a file above the folder": lambda folder, outside: _renamed(folder, "../outside/tokenizer.json"),
    "a file by its absolute path": lambda folder, outside: _renamed(folder, str(outside / "tokenizer.json")),
    "a library above the folder": lambda folder, outside: _library(folder, "../outside/kernels/cpu/model.so"),
    "a library by its absolute path": lambda folder, outside: _library(folder, str(outside / "kernels/cpu/model.so")),
    "a library that is a link": _linked("kernels/cpu/model.so"),
    "a tokenizer that is a link": _linked("tokenizer.json"),
    "weights that are a link": _linked("weights-00000.safetensors"),
    "weights that are a pipe": _pipe("weights-00000.safetensors"),
    "a template that is added": _template("{% include 'OUTSIDE/qcompile.json' %}"),
    "a pickle that is added": lambda folder, outside: _pickled(folder, outside, beside=True),
}
"""Traps of artifacts. `good` is none."""


def trapped(good: Path, trap: Trap, folder: Path, name: str) -> Path:
    """A copy of a good checkpoint or artifact in `folder`, with a trap; beside it lies `outside`."""
    shutil.copytree(good, folder / "outside", dirs_exist_ok=True)
    shutil.copytree(good, folder / name)
    trap(folder / name, folder / "outside")
    return folder / name


def ran(folder: Path) -> bool:
    """Whether code of a trap ran."""
    return any(folder.rglob("RAN"))
