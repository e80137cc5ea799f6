"""How Python runs in a process that only serves."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH_SECONDS = 1e-3
"""How long a thread may keep Python's lock while another thread waits for it. A request's thread releases the lock for
several system calls, and would wait 5 ms (Python's default) for the engine's thread after each."""
_YOUNG_OBJECTS = 10_000
"""New objects after which garbage is looked for. With Python's 700, a step of 256 requests would do so once, and with
it go through many of a model's objects, which are no garbage as long as the server runs: these are left out (frozen).
"""


@contextmanager
def python_of_a_server() -> Iterator[None]:
    """Settings of Python for a process that only serves: when threads switch, and when garbage is collected."""
    interval, thresholds, frozen = sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.freeze()
    gc.set_threshold(max(_YOUNG_OBJECTS, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        if not frozen:  # else what another has frozen is not told apart
            gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
