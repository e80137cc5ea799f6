"""Sends the requests of an API's table to a server with a scripted model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.server.test_tools import Say
from tests.support.compatibility import Api, RefusedRequest, row
from tests.support.fake import FakeLibrary


def rows_of(api: Api, client: Any, say: Say, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of a table. Each request must be refused with one line, or its reply must show what was asked for."""
    computes = FakeLibrary._run
    plain = api.asked(client, dict(api.base))
    assert not isinstance(plain, RefusedRequest), plain
    rows = []
    for name in api.fields:
        for probe in api.probes[name]:
            if probe.says is not None:
                say(probe.says)
            reply = api.asked(client, api.request(name, probe))
            monkeypatch.setattr(FakeLibrary, "_run", computes)
            if isinstance(reply, RefusedRequest):
                assert reply.status in (None, 400, 404) and "\n" not in reply.message, (name, probe.value, reply)
            elif probe.shows:
                assert probe.shows(reply, plain), (name, probe.value, reply)
            rows.append(row(name, probe, reply))
    return rows
