"""What is killed leaves nothing half done: a short form of benchmarks/kill.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import kill


@pytest.mark.exhaustive
def test_clients_of_a_killed_server_see_its_end_and_it_starts_again(tiny_artifact: Callable[[str], Path]) -> None:
    seen = kill.servers(tiny_artifact("w4a8"), 2, random.Random(0))
    assert not seen.faults and seen.kills == 2 and seen.clients == kill.CLIENTS
