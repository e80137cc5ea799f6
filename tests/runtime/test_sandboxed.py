"""The process for templates and grammars yields to others once a request takes much processor time."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest

from qcompile.runtime import sandboxed
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
        worker.ask(asked(render="bomb", values={}, most=100), 1.0)
    assert lowered == [19] and usual < 19


def test_usual_requests_keep_the_priority() -> None:
    """The first request starts the process and the second compiles the template: neither is slow."""
    worker = Worker()
    usual = os.getpriority(os.PRIO_PROCESS, os.getpid())
    assert worker.ask(asked(templates={"x": "{{ values }}"}), 30.0) == {}
    for _ in range(3):
        assert worker.ask(asked(render="x", values={"values": 7}, most=100), 30.0) == {"text": "7"}
        assert worker.alive and os.getpriority(os.PRIO_PROCESS, worker._process.pid) == usual


def test_a_process_with_the_lowest_priority_ends_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot get its priority back, and later requests would wait behind all other work."""
    worker = Worker()
    slow = "{% for a in range(99999) %}{% for b in range(8) %}{% endfor %}{% endfor %}x"
    assert worker.ask(asked(templates={"x": slow}), 30.0) == {}
    monkeypatch.setattr(sandboxed, "_USUAL_SECONDS", 0.02)
    monkeypatch.setattr(sandboxed, "_LOOK_SECONDS", 0.01)
    assert worker.ask(asked(render="x", values={}, most=100), 30.0) == {"text": "x"}
    assert not worker.alive


def test_a_process_that_waits_keeps_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a request takes long without taking processor time."""
    worker = Worker()
    assert worker.ask(asked(templates={"x": "{{ values }}"}), 30.0) == {}
    assert worker.ask(asked(render="x", values={"values": 7}, most=100), 30.0) == {"text": "7"}
    monkeypatch.setattr(sandboxed, "_USUAL_SECONDS", 0.05)
    monkeypatch.setattr(sandboxed, "_LOOK_SECONDS", 0.01)
    worker._process.send_signal(signal.SIGSTOP)
    timer = threading.Timer(0.2, worker._process.send_signal, [signal.SIGCONT])
    timer.start()
    assert worker.ask(asked(render="x", values={"values": 7}, most=100), 30.0) == {"text": "7"}
    timer.join()
    assert worker.alive


def test_an_ended_process_has_no_priority() -> None:
    worker = Worker()
    worker._end()
    worker._yield()
