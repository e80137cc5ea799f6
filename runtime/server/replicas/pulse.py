"""Notices a replica that is there but does nothing: a process that is stopped (SIGSTOP), or hangs.

Its socket takes connections all the same, so that requests would wait for ever. It is killed; its requests fail then as
those of a replica that has ended, and it starts again. Answers are counted, not seconds: a machine that was asleep, or
a container that was paused, says nothing about a replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from qcompile.runtime.server.replicas.forwarding import Forwarding
from qcompile.runtime.server.replicas.replica import Replica

PULSE_SECONDS = 1.5
"""How often a replica is looked at."""
ANSWER_SECONDS = 5.0
"""How long it may take to answer."""
MOST_STOPS = 2
"""How often in a row its process may be found stopped before it is killed."""
MOST_SILENCES = 12
"""How often in a row it may not answer before it is killed: a minute. It may have much to do, or wait for the disk."""


async def watch(replica: Replica, forwarding: Forwarding, say: Callable[[str], None]) -> None:
    """Look after a replica for ever. It gets no new requests while `replica.missed` is not 0, if others do answer."""
    while True:
        await asyncio.sleep(PULSE_SECONDS)
        if not replica.working:
            continue
        process = replica.pid
        stopped = replica.stopped()
        alive = not stopped and await forwarding.answers("/health", ANSWER_SECONDS)
        if replica.pid != process or not replica.working:
            continue
        replica.missed = 0 if alive else replica.missed + 1
        if replica.missed >= (MOST_STOPS if stopped else MOST_SILENCES):
            say(f"replica {replica.number} {'is stopped' if stopped else 'does not answer'}, and is killed")
            replica.kill()
