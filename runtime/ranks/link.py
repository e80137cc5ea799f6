"""How rank 0 and another rank that a launcher has started talk: packets of JSON over a Unix socket.

The socket lies in a folder that only its user can enter, and both ends ask the kernel who is at the other one.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qcompile.errors import ResourceError, UsageError

_MOST_BYTES = 1 << 16
_MOST_DESCRIPTORS = 8
_MOST_PATH = 100
"""Bytes of a Unix socket's path: the kernel takes 107."""


class Packet(NamedTuple):
    """What one `send` has sent; the receiver closes the descriptors."""

    content: dict[str, Any]
    descriptors: list[int]


class Link:
    """One end of a connection. pid, uid: of the process at the other end, by the kernel."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid, self.uid, _ = struct.unpack("3i", credentials)

    def fileno(self) -> int:
        """The number of the socket, for `select`."""
        return self._socket.fileno()

    def send(self, content: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a packet. Raises OSError if the other end is closed."""
        socket.send_fds(self._socket, [json.dumps(content).encode()], list(descriptors))

    def receive(self, seconds: float | None = None) -> Packet | None:
        """The next packet; None if the other end is closed. Raises TimeoutError after `seconds`."""
        self._socket.settimeout(seconds)
        close = socket.MSG_CMSG_CLOEXEC
        try:
            text, descriptors, *_ = socket.recv_fds(self._socket, _MOST_BYTES, _MOST_DESCRIPTORS, close)
        except ConnectionError:
            return None
        finally:
            self._socket.settimeout(None)
        return Packet(json.loads(text), descriptors) if text else None

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def free(place: Path) -> bool:
    """Remove the socket at `place`, which a process that was killed has left. Returns whether no process listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(place))
        except OSError:
            place.unlink(missing_ok=True)
            return True
    return False


def place_of(run: str) -> Path:
    """The path of the socket at which the ranks of a run meet, in a folder of this user alone.

    Raises ResourceError if that is not to be had, UsageError if the path is too long.
    """
    folder = Path(tempfile.gettempdir()) / f"qcompile-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"cannot make {folder}, where ranks meet: {error.strerror}; set TMPDIR") from error
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ResourceError(f"{folder}, where ranks meet, is not this user's alone: remove it, or set TMPDIR")
    place = folder / f"ranks-{hashlib.sha256(run.encode()).hexdigest()[:16]}"
    if len(os.fsencode(place)) > _MOST_PATH:
        raise UsageError(f"{place} is too long for the path of a socket: set TMPDIR to a shorter folder")
    return place
