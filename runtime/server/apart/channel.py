"""Messages between two processes on a socket: JSON, each behind its length."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

Message = Sequence[Any]
"""The name of what is told or asked, and its operands: values of JSON."""
_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 4 << 20
"""What a socket holds while its reader is busy. The kernel may give less."""


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a channel: the first one sends, the second one receives."""
    sends, receives = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end, option in ((sends, socket.SO_SNDBUF), (receives, socket.SO_RCVBUF)):
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    return sends, receives


def encoded(message: Message) -> bytes:
    """A message as it is sent. Numbers keep their bits, those that are not finite too."""
    content = json.dumps(message, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    return _LENGTH.pack(len(content)) + content


class Sender:
    """The end of a channel that sends. Several threads may use it; a message waits while the channel is full."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message. Nothing happens if the other process has ended: the other channel tells that."""
        content = encoded(message)
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(content)


class Received:
    """Puts the bytes that come together to messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, content: bytes) -> Iterator[list[Any]]:
        """Add bytes, and yield the messages that are complete."""
        self._bytes += content
        start, size = 0, len(self._bytes)
        while size - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, start)
            end = start + _LENGTH.size + length
            if end > size:
                break
            yield json.loads(self._bytes[start + _LENGTH.size : end])
            start = end
        del self._bytes[:start]
