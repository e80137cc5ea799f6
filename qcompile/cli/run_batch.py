"""The command `run-batch`: answers a file of requests in OpenAI's batch format, and goes on where a run was ended."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from qcompile import texts
from qcompile.cli import console
from qcompile.cli.models import Artifact, opened
from qcompile.cli.options import Answering, Building, Json, ServedLoading, Source, command
from qcompile.errors import ResourceError, UsageError

if TYPE_CHECKING:
    from qcompile.runtime.llm import LLM
    from qcompile.runtime.server.batches import BatchLine

_AHEAD = 16
"""Requests under way beyond those that run: they are encoded meanwhile."""
_WAITING = 1_000_000
"""Samples that may wait: a request of a batch is never refused for that reason."""


@command
def run_batch(
    out: Source,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Requests: JSON lines in OpenAI's batch format.")],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="RESULTS", help="File for the results; results that it has already are kept."
        ),
    ],
    answering: Answering,
    building: Building,
    loading: ServedLoading,
    json: Json = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format: lines with custom_id, method, url and body.

    Results come in the order in which they are completed. If RESULTS exists, requests that it answers are left out.

    \b
    Example:
      qcompile run-batch out/pycode samples/requests.jsonl -o results.jsonl
    """
    texts.check(file)
    try:
        from qcompile.runtime.parsers.formats import check_parsers
        from qcompile.runtime.server import app  # noqa: F401  (before the model is loaded)
    except ModuleNotFoundError as error:
        raise ResourceError(f"run-batch needs {error.name}: pip install 'qcompile[serve]'") from error
    check_parsers(answering.tool_parser, answering.reasoning_parser)
    batch = read(file)
    with results(output, batch) as (written, kept):
        batch.keep(kept)
        if batch.lines:
            opening = opened(out, building, loading, max_batch=answering.max_batch)
            with opening as (llm, artifact), console.Progress() as progress:
                _run(llm, artifact, answering, batch, written, progress)
        for refused in batch.refused:
            _write(written, batch, refused)
    if json:
        console.print_json(batch.facts())
    else:
        console.show(batch.summary(output))
    _check(batch, output)


@dataclass
class Batch:
    """The requests of a file, and how they ended. refused: results of lines that are no requests.

    first_failure: of the first request that failed, its name and the reason.
    """

    lines: list[BatchLine]
    refused: list[dict[str, Any]]
    kept: int = 0
    completed: int = 0
    failed: int = 0
    broken: int = 0
    first_failure: str = ""
    usage: dict[str, int] = field(default_factory=lambda: {"prompt_tokens": 0, "completion_tokens": 0})
    seconds: float = 0.0

    def keep(self, answered: set[str]) -> None:
        """Leave out the requests that an earlier run has answered."""
        before = len(self.lines)
        self.lines = [line for line in self.lines if line.custom_id not in answered]
        self.kept = before - len(self.lines)

    def count(self, result: dict[str, Any]) -> None:
        """Count a result."""
        response = result["response"]
        body = response["body"] if response and isinstance(response["body"], dict) else {}
        if response and response["status_code"] == 200:
            self.completed += 1
            usage = body.get("usage") or {}
            for name, other in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")):
                self.usage[name] += usage.get(name) or usage.get(other) or 0
            return
        self.failed += 1
        self.broken += bool(response and response["status_code"] >= 500)
        error = result["error"] or body.get("error") or {}
        why = error.get("message") if isinstance(error, dict) else None
        self.first_failure = self.first_failure or f"{result['custom_id'] or 'a line'}: {why or 'failed'}"

    def facts(self) -> dict[str, Any]:
        """What `run-batch --json` prints."""
        speed = self.usage["completion_tokens"] / self.seconds if self.seconds else None
        counts = {"completed": self.completed, "kept": self.kept, "failed": self.failed}
        return counts | self.usage | {"seconds": self.seconds, "output_tokens_per_second": speed}

    def summary(self, output: Path) -> str:
        """One line for people."""
        kept = f" and {self.kept} of an earlier run" if self.kept else ""
        line = f"{output}: {console.counted(self.completed, 'answer')}{kept}, {self.failed} failed"
        if self.completed:
            tokens = self.usage["completion_tokens"]
            line += f"; {tokens} tokens in {self.seconds:.1f} s ({tokens / max(self.seconds, 1e-9):.1f} tokens/s)"
        return line


def read(path: Path) -> Batch:
    """The requests of a file. Raises UsageError if it cannot be read or has no line."""
    from qcompile.runtime.server import batches

    try:
        whole = texts.read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    batch, names = Batch([], []), set[str]()
    for number, text in texts.lines(whole):
        value = texts.parsed(text)
        try:
            line = batches.parse(value)
            if line.custom_id in names:
                raise UsageError("custom_id: an earlier line has the same")
        except UsageError as error:
            given = value.get("custom_id") if isinstance(value, dict) else None
            name = given if isinstance(given, str) else None
            batch.refused.append(batches.refusal(name, f"line {number}: {error}"))
            continue
        names.add(line.custom_id)
        batch.lines.append(line)
    if not batch.lines and not batch.refused:
        raise UsageError(f"{path} is empty: give lines of JSON with custom_id, method, url and body")
    return batch


@contextmanager
def results(path: Path, batch: Batch) -> Iterator[tuple[TextIO, set[str]]]:
    """The file of results, open to add to it, and the names of the requests that it answers already.

    Results of requests that failed are dropped, as they are tried again, and so is a line that an interrupted run did
    not complete. Raises UsageError if the file has results of requests that the batch does not have, ResourceError if
    it cannot be written or another run is writing it.
    """
    try:
        with open(path, "a+", encoding="utf-8", errors="replace") as before, _replacing(path, before) as file:
            before.seek(0)
            lines = _answered(path, before.read())
            names = {line.custom_id for line in batch.lines}
            if foreign := [name for name in lines if name not in names]:
                raise UsageError(f"{path} has the result of {foreign[0]!r}, which is no request here: give another -o")
            file.writelines(f"{line}\n" for line in lines.values())
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
            yield file, set(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}") from error


@contextmanager
def _replacing(path: Path, before: TextIO) -> Iterator[TextIO]:
    """A new file beside `path`, open for writing; both are locked, so that no other run writes either."""
    _lock(path, before)
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            _lock(path, file)
            yield file
    finally:
        part.unlink(missing_ok=True)


def _lock(path: Path, file: TextIO) -> None:
    """Raises ResourceError if another run has the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ResourceError(f"{path} is being written by another run: wait for it") from None


def _answered(path: Path, text: str) -> dict[str, str]:
    """The lines of a file of results that answer a request, by the request's name."""
    kept: dict[str, str] = {}
    lines = texts.lines(text)
    for at, (number, line) in enumerate(lines, start=1):
        value = texts.parsed(line)
        if not isinstance(value, dict) or not {"custom_id", "response", "error"} <= value.keys():
            if at == len(lines) and not text.endswith("\n"):
                continue  # cut off by an interruption
            raise UsageError(f"{path} line {number} is no result of a batch: give another file by -o")
        response = value["response"]
        if isinstance(response, dict) and response.get("status_code") == 200:
            kept[str(value["custom_id"])] = line
    return kept


def _run(
    llm: LLM, artifact: Artifact, answering: Answering, batch: Batch, written: TextIO, progress: console.Progress
) -> None:
    """Answer the requests that are left, and write each result as it is completed."""
    from qcompile.runtime.chat import chat_template
    from qcompile.runtime.server import app, batches
    from qcompile.runtime.server.service import Service

    served = app.Served(
        llm,
        answering.name or artifact.name,
        chat_template(artifact.path, llm.manifest["files"]),
        max_waiting=_WAITING,
        tool_parser=answering.tool_parser,
        reasoning_parser=answering.reasoning_parser,
    )
    served.dialogues()  # an unknown parser is refused before the model is lent
    service = Service(llm, served.max_waiting)

    async def answer() -> None:
        total = len(batch.lines)
        progress("answering", 0, total)
        application, done = app.create_app(served, service), 0
        results = batches.answers(application, batch.lines, answering.max_batch + _AHEAD, lambda: service.ended)
        async for result in results:
            _write(written, batch, result)
            done += 1
            progress("answering", done, total)

    start = time.monotonic()
    try:
        asyncio.run(answer())
    finally:
        service.close()
        batch.seconds = time.monotonic() - start
    if service.failure:
        raise service.failure


def _write(written: TextIO, batch: Batch, result: dict[str, Any]) -> None:
    """Write a result so that it is kept whatever happens next, and count it."""
    written.write(json.dumps(result) + "\n")
    written.flush()
    batch.count(result)


def _check(batch: Batch, output: Path) -> None:
    """Raise an error if requests failed: ResourceError for failures of the server, else UsageError."""
    if batch.failed:
        of = batch.failed + batch.completed + batch.kept
        kind = ResourceError if batch.broken else UsageError
        raise kind(f"{batch.failed} of {of} requests failed, see {output}; the first is {batch.first_failure}")
