"""A GGUF file as a checkpoint's folder: its configuration and tokenizer in the user's cache, and a link to the file.

All that reads checkpoints then reads GGUF files. The folder's name is that of the file, and its place depends on the
file's path, size and times, so a file that changes gets another folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from qcompile.checkpoints.gguf.files import METHOD, SUFFIX
from qcompile.checkpoints.gguf.header import Header, read_header
from qcompile.errors import ResourceError, UnsupportedError, UsageError, shown
from qcompile.user_cache import cache_dir

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_COUNT = "split.count"


def folder_of(path: Path) -> Path:
    """The folder of the GGUF file `path`, made if there is none. Raises QCompileError for a file that is not read."""
    parts = _parts(path)
    name = _PART.fullmatch(path.name)
    folder = cache_dir() / "gguf" / _key(parts) / (name["stem"] if name else path.stem)
    if (folder / "config.json").is_file():
        return folder
    headers = [read_header(part) for part in parts]
    files = _files(headers, path)
    try:
        _write(folder, files, parts)
    except OSError as error:
        raise ResourceError(f"cannot write {folder.parent}: {error.strerror}; set QCOMPILE_CACHE") from error
    return folder


def _parts(path: Path) -> list[Path]:
    """The files of a model that is divided into several, `path` among them; else it alone."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise UsageError(f"{part} is missing: {path.name} is one of {count} files")
    return parts


def _key(parts: list[Path]) -> str:
    digest = hashlib.sha256(_source_digest())
    for part in parts:
        status = part.stat()
        facts = [os.fspath(part.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]
        digest.update(repr(facts).encode("utf-8", "surrogateescape"))
        beside = part.with_name("tokenizer.json")
        digest.update(repr(beside.stat().st_mtime_ns if beside.is_file() else None).encode())
    return digest.hexdigest()[:32]


def _source_digest() -> bytes:
    """Digest of the code that makes folders: another version may make others."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.digest()


def _files(headers: list[Header], path: Path) -> dict[str, bytes]:
    """The files of the folder, by name."""
    from qcompile.checkpoints.gguf.configuration import configuration
    from qcompile.checkpoints.gguf.rotary import rope_tensors
    from qcompile.checkpoints.gguf.tokenizer import tokenizer_files

    first = headers[0]
    count = first.metadata.get(_COUNT, 1)
    if type(count) is not int:
        raise UsageError(f"{first.path}: {_COUNT} is {shown(count)}; a whole number belongs there")
    if count not in (0, len(headers)):
        raise UsageError(f"{first.path} is one of {count} files: give the first, NAME-00001-of-{count:05}.gguf")
    whole = Header(path, first.metadata, {name: place for header in headers for name, place in header.tensors.items()})
    config: dict[str, Any] = configuration(whole, rope_tensors(whole))
    types = Counter(place.kind.name for place in whole.tensors.values())
    quantized = {"quantization_config": {"quant_method": METHOD, "types": types}}  # by which traces of models differ
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
    files = {"config.json": json.dumps(config | quantized, indent=1).encode()}
    files["generation_config.json"] = json.dumps(generation).encode()
    try:
        return files | tokenizer_files(whole)
    except UnsupportedError:
        beside = path.with_name("tokenizer.json")
        if not beside.is_file():
            raise
        return files | {beside.name: beside.read_bytes()}


def _write(folder: Path, files: dict[str, bytes], parts: list[Path]) -> None:
    """Write `folder` whole, so that another process sees all of it or nothing."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent.parent, prefix=".making-"))
    try:
        inner = made / folder.name
        inner.mkdir()
        for name, content in files.items():
            (inner / name).write_bytes(content)
        for number, part in enumerate(parts, start=1):
            (inner / f"model-{number:05}{SUFFIX}").symlink_to(part.resolve())
        try:
            made.rename(folder.parent)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
