"""`run-batch`: requests of a file are answered as the server answers them, each once, also over several runs."""

from __future__ import annotations

import asyncio
import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qcompile.__main__ import main
from qcompile.errors import UsageError
from qcompile.runtime.server import batches

Capture = pytest.CaptureFixture[str]


def code_of(*arguments: object) -> int:
    """Exit code of `qcompile ARGUMENTS`, in this process."""
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    return int(exit.value.code or 0)


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """A line of a batch."""
    asked = {"prompt": "def main(", "max_tokens": 4, "temperature": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": asked}


def write(path: Path, *lines: Any) -> Path:
    """A file of these lines; texts as they are."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def results(path: Path) -> dict[str | None, dict[str, Any]]:
    """The results of a file by custom_id, of which there may be one each."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    result = {line["custom_id"]: line for line in lines}
    assert len(result) == len(lines)
    return result


def test_each_request_is_answered_once(tiny_artifact: Callable[[str], Path], tmp_path: Path, capsys: Capture) -> None:
    out, results_file = tiny_artifact("w4a8"), tmp_path / "results.jsonl"
    run = ("run-batch", out, tmp_path / "batch.jsonl", "-o", results_file, "--threads", 1, "--name", "tiny", "--json")
    first, second = request("first", model="tiny"), request("second", prompt=["import os", "x"], max_tokens=2)
    other, chat = request("other", model="gpt"), request("chat", "/v1/chat/completions")
    lines = (first, "{", second, other, chat, request("nowhere", "/v1/nothing"), {"custom_id": "bare"})
    write(tmp_path / "batch.jsonl", *lines)
    assert code_of(*run) == 2
    captured = capsys.readouterr()
    counts = json.loads(captured.out)
    assert (counts["completed"], counts["kept"], counts["failed"], counts["completion_tokens"]) == (2, 0, 5, 8)
    assert "5 of 7 requests failed" in captured.err and len(captured.err.splitlines()) == 1
    result = results(results_file)
    statuses = {name: line["response"]["status_code"] for name, line in result.items() if line["response"]}
    assert statuses == {"first": 200, "second": 200, "other": 404, "chat": 400, "nowhere": 404}
    assert "line 2: not a JSON object" in result[None]["error"]["message"]
    assert "line 7: method" in result["bare"]["error"]["message"]
    alone = json_run(capsys, out)
    assert result["first"]["response"]["body"]["choices"][0]["text"] == alone["text"]
    assert len(result["second"]["response"]["body"]["choices"]) == 2

    # Mended, and goes on: what is answered stays as it is, bit for bit.
    before = {name: results_file.read_text().splitlines()[at] for at, name in enumerate(result)}
    write(tmp_path / "batch.jsonl", first, second, request("other", model="tiny"))
    with results_file.open("a") as file:
        file.write('{"custom_id": "cut off')
    assert code_of(*run) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["completed"], counts["kept"], counts["failed"]) == (1, 2, 0)
    lines_after = results_file.read_text().splitlines()
    assert before["first"] in lines_after and before["second"] in lines_after
    assert results(results_file).keys() == {"first", "second", "other"}
    assert code_of(*run) == 0 and results_file.read_text().splitlines() == lines_after  # no model is loaded for nothing
    assert json.loads(capsys.readouterr().out)["kept"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch.jsonl", "results.jsonl"]


def json_run(capsys: Capture, out: Path) -> Any:
    """What `run --json` says to the prompt of `request`."""
    assert code_of("run", out, "--prompt", "def main(", "--max-tokens", 4, "--threads", 1, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_files_that_are_not_of_this_batch_are_left_alone(tmp_path: Path, capsys: Capture) -> None:
    """All of that is found before the model, which does not exist, is loaded."""

    def refused(code: int, file: Path, output: Path) -> str:
        assert code_of("run-batch", tmp_path / "none", file, "-o", output) == code
        return capsys.readouterr().err

    batch, output = write(tmp_path / "batch.jsonl", request("a")), tmp_path / "results.jsonl"
    assert "no such file" in refused(2, tmp_path / "missing", output)
    assert "is empty" in refused(2, write(tmp_path / "empty.jsonl", "", " "), output) and not output.exists()
    answered = {"id": "x", "custom_id": "b", "response": {"status_code": 200, "body": {}}, "error": None}
    for content, why in ((answered, "'b', which is no request here"), ({"text": "mine"}, "line 1 is no result")):
        kept = write(output, content).read_text()
        assert why in refused(2, batch, output) and output.read_text() == kept
    output.write_bytes(b"\xff\n")
    assert "line 1 is no result" in refused(2, batch, output)
    write(output, answered | {"custom_id": "a"})
    with output.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "being written by another run" in refused(5, batch, output)
    assert "cannot write" in refused(5, batch, tmp_path / "no" / "results.jsonl")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"custom_id": ""}, "custom_id"),
        ({"custom_id": 3}, "custom_id"),
        ({"method": "GET"}, "method"),
        ({"url": "http://elsewhere/v1/completions"}, "url"),
        ({"body": []}, "body"),
        ({"body": {"stream": True}}, "body.stream"),
    ],
)
def test_lines_that_are_no_requests(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=f"^{why}: "):
        batches.parse(request("a") | changed)


def test_requests_run_at_once_and_a_bug_ends_one_only() -> None:
    running, most = 0, 0

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        nonlocal running, most
        body = json.loads((await receive())["body"])
        if body["number"] == 3:
            raise KeyError("three")
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"plain text"})

    async def ask(ended: Callable[[], bool]) -> list[dict[str, Any]]:
        lines = [batches.BatchLine(str(number), "/v1/x", {"number": number}) for number in range(20)]
        return [result async for result in batches.answers(app, lines, 5, ended)]

    outcome = {result["custom_id"]: result["response"] for result in asyncio.run(ask(lambda: False))}
    assert len(outcome) == 20 and most == 5 and outcome["0"]["body"] == "plain text"
    assert outcome["3"]["status_code"] == 500 and "KeyError" in outcome["3"]["body"]["error"]["message"]
    assert asyncio.run(ask(lambda: True)) == []
