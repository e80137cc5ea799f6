"""A server that is asked for more than it can do refuses the rest at once: a short form of benchmarks/overload.py.

It asks for twice the capacity: more requests would keep the client busy, which shares a process with the server here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import qcompile
from qcompile.cli.load_test.client import Endpoint
from tests.runtime.server.test_server import serving
from tests.support.overload import EXTRAS, campaign


def test_what_is_too_much_is_refused_at_once(tiny_artifact: Callable[[str], Path]) -> None:
    with (
        qcompile.load(tiny_artifact("w4a8"), threads=1, max_batch=4) as llm,
        serving(llm, max_waiting=2) as client,
    ):
        endpoint = Endpoint(f"http://127.0.0.1:{client.port}", "tiny", extras=EXTRAS)
        phases = asyncio.run(campaign(endpoint, 24, clients=6, seconds=(0.25, 0.4), rest=0.1, too_much=2.0))
    assert all(one.wrong == 0 and not one.lost and one.answered for one in phases.values())
    assert phases["capacity"].refused == [] and len(phases["overload"].refused) > 3
    assert phases["overload"].refused[-1] < 1
