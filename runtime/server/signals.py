"""How signals end a server."""

from __future__ import annotations

import signal
from types import FrameType

import uvicorn


class SignalledServer(uvicorn.Server):
    """SIGTERM is how services are ended: `run` returns after it, where other signals are raised again.

    terminated: whether it was SIGTERM.
    """

    terminated = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Heed a signal."""
        if sig == signal.SIGTERM:
            self.should_exit = self.terminated = True
        else:
            super().handle_exit(sig, frame)
