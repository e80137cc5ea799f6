"""API keys: which one a request sends, and whether it is one of the server's."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from starlette.datastructures import Headers

from qcompile.errors import UsageError


def key_of(headers: Headers) -> bytes:
    """The API key that a request sends, as bytes of UTF-8; empty without one."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":  # names of schemes are case-insensitive
        given = headers.get("x-api-key", "")
    # The framework decodes headers as Latin-1, but keys are UTF-8.
    return given.strip().encode("latin-1")


def admits(keys: Sequence[bytes], sent: bytes) -> bool:
    """Whether a request with the key `sent` may come in: it is one of the keys, or none is required."""
    return not keys or bool(sum(secrets.compare_digest(sent, key) for key in keys))  # looks at each, in equal time


def check_sleep(keys: Sequence[bytes]) -> None:
    """Raise UsageError unless clients need one of `keys`, so that they may let the model sleep.

    Its endpoints take no body: without a key, scripts of any web page in a browser of this machine could ask them.
    """
    if not keys:
        raise UsageError("--enable-sleep lets clients stop the model from answering: give an API key (--api-key)")


def as_bytes(given: str | Iterable[str] | None) -> list[bytes]:
    """One key, several, or None for none, as bytes of UTF-8."""
    return [key.encode() for key in ([given] if isinstance(given, str) else given or ())]
