"""Outputs of a request on their way to the task that waits for them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qcompile.errors import QCompileError
from qcompile.runtime.engine.samples import PromptSamples
from qcompile.runtime.outputs import RequestOutput

Cancelled = Callable[[int, Sequence[str]], None]
"""Takes the numbers of a prompt that was cancelled: its tokens, and how its samples ended."""
CLOSING = "the server is closing"
"""What clients are told if their answers end because the server does."""


class Checked(Protocol):
    """What is needed of a service."""

    def check(self) -> None:
        """Raise ResourceError if the engine has ended."""


@dataclass(eq=False)
class Mailbox:
    """The outputs of `count` prompts that a task on `loop` has not read yet.

    A slow reader misses intermediate outputs, but no text: there is at most one unread output for each prompt.
    """

    count: int
    loop: asyncio.AbstractEventLoop
    event: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something to read."""
    error: QCompileError | None = None
    needs_text: bool = True
    _grown: dict[int, RequestOutput] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, samples: PromptSamples) -> None:
        """Take the outputs of a prompt, in the engine's thread; the reader must be woken afterwards."""
        self.keep(samples.output())

    def keep(self, output: RequestOutput) -> None:
        """Take an output, as `put` does."""
        with self._lock:
            self._grown[output.request_id] = output

    def fail(self, error: QCompileError) -> None:
        """Take the error that has ended the prompts."""
        self.error = error

    def take(self) -> list[RequestOutput]:
        """Take the unread outputs, in the order of the prompts."""
        with self._lock:
            grown, self._grown = self._grown, {}
        return [grown[number] for number in sorted(grown)]


class Answer:
    """The outputs of a request. Iterate over it once; `cancel`, or dropping it, cancels unfinished prompts."""

    def __init__(self, service: Checked, mailbox: Mailbox, drop: Callable[[], object]) -> None:
        self._service, self._mailbox = service, mailbox
        self.cancel = weakref.finalize(self, drop)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        mailbox = self._mailbox
        unfinished = mailbox.count
        while unfinished:
            self._service.check()  # the engine may have ended before it took the request
            await mailbox.event.wait()
            mailbox.event.clear()
            if mailbox.error:
                raise mailbox.error
            for output in mailbox.take():
                unfinished -= output.finished
                yield output
        self.cancel()


def wake_all(mailboxes: Iterable[Mailbox]) -> None:
    """Wake the readers, all of an event loop in one call: each call costs as much as handing over an output."""
    events: dict[asyncio.AbstractEventLoop, dict[asyncio.Event, None]] = {}
    for mailbox in mailboxes:
        events.setdefault(mailbox.loop, {})[mailbox.event] = None
    for loop, some in events.items():
        try:
            loop.call_soon_threadsafe(_set, some)
        except RuntimeError:  # if the loop is closed, nobody waits
            if not loop.is_closed():
                raise


def _set(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()
