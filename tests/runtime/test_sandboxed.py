"""The process for templates and grammars yields to others once a request takes long."""

from __future__ import annotations

import json
import os

import pytest

from qcompile.runtime.sandboxed import EndedError, Worker

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def asked(**request: object) -> bytes:
    return json.dumps(request).encode() + b"\n"


def test_a_request_that_takes_long_has_the_lowest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    process = worker._process.pid
    assert worker.ask(asked(templates={"x": "{{ values }}", "bomb": LOOP}), 30.0) == {}
    usual = os.getpriority(os.PRIO_PROCESS, os.getpid())
    lowered = list[int]()
    kill = worker._process.kill

    def killed() -> None:
        lowered.append(os.getpriority(os.PRIO_PROCESS, process))
        kill()

    monkeypatch.setattr(worker._process, "kill", killed)
    with pytest.raises(EndedError, match="takes more than"):
        worker.ask(asked(render="bomb", values={}, most=100), 0.5)
    assert lowered == [19] and usual < 19


def test_an_ended_process_has_no_priority() -> None:
    worker = Worker()
    worker._end()
    worker._yield()
