"""Check who vouches for an artifact: the ed25519 signature beside its manifest.

The signature covers the manifest's hash. The manifest names every file that is loaded, with its size and SHA-256, so
a signature that holds and hashes that hold prove that all of it is what the owner of the key signed. The file with the
signature is in no manifest: an artifact is signed after it is built, and again by another key without a new build.

A key is written `ed25519:` and 43 characters, the 32 bytes of the public key in URL-safe base64.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.artifact.layout import SIGNATURE, Manifest
from qcompile.artifact.plain_files import open_plain
from qcompile.errors import ArtifactError, ResourceError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

SIGNATURE_VERSION = 1
_PURPOSE = b"qcompile artifact, signature version 1\n"
"""Begins what is signed, so that a signature made for another purpose is none of an artifact."""
_KEY = re.compile(r"ed25519:[A-Za-z0-9_-]{43}(?![A-Za-z0-9_=-])")
_MOST_BYTES = 1 << 16
"""Of a file with a signature, or with public keys."""


@dataclass(frozen=True)
class ArtifactSignature:
    """The content of a signature's file. key: as text. sealed: the hash of the manifest that was signed."""

    key: str
    sealed: str
    signature: bytes

    def as_json(self) -> dict[str, Any]:
        """What the file holds."""
        encoded = base64.b64encode(self.signature).decode()
        return {"key": self.key, "manifest": self.sealed, "signature": encoded, "version": SIGNATURE_VERSION}


def signed_bytes(sealed: str) -> bytes:
    """What the key signs: the purpose, and the hash of the manifest."""
    return _PURPOSE + sealed.encode()


def key_text(key: Ed25519PublicKey) -> str:
    """A public key as text."""
    return "ed25519:" + base64.urlsafe_b64encode(key.public_bytes_raw()).decode().rstrip("=")


def needs_cryptography(error: ImportError) -> ResourceError:
    """The error without the package that computes signatures."""
    return ResourceError(f"signatures need {error.name or 'cryptography'}: pip install 'qcompile[sign]'")


def trusted_keys(given: str | Path) -> tuple[str, ...]:
    """The public keys, as text, that `given` is or names: a key as text, or a file of keys, in PEM or as text.

    Raises UsageError if it holds none, ResourceError if the package that reads PEM is missing.
    """
    if _KEY.fullmatch(str(given)):
        return (str(given),)
    if str(given).startswith("ed25519:"):
        raise UsageError(f"{given} is no public key: 43 characters must follow ed25519:")
    if not str(given).strip():
        raise UsageError("the key of the required signature is empty: give a file with a public key, or the key itself")
    try:
        with open_plain(Path(given)) as file:
            content = file.read(_MOST_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read the public key {given}: {error.strerror or error}") from error
    text = content.decode("ascii", "replace")
    if "PRIVATE KEY-----" in text:
        raise UsageError(f"{given} is a private key, which only `qcompile sign` takes: give the public key")
    if keys := [*_KEY.findall(text), *_keys_of_pem(given, text)]:
        return tuple(keys)
    raise UsageError(f"{given} holds no public key: it must be in PEM, or as text that begins with ed25519:")


def _keys_of_pem(path: str | Path, text: str) -> list[str]:
    """The keys in the blocks of a PEM file. Raises UsageError for one of another kind."""
    blocks = re.findall(r"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", text, re.DOTALL)
    if not blocks:
        return []
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise needs_cryptography(error) from error
    try:
        keys = [load_pem_public_key(block.encode()) for block in blocks]
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} is no public key in PEM: {error}") from error
    wrong = [type(key).__name__ for key in keys if not isinstance(key, Ed25519PublicKey)]
    if wrong:
        raise UsageError(f"{path} holds a key of another kind ({wrong[0]}): artifacts are signed by ed25519 keys")
    return [key_text(key) for key in keys if isinstance(key, Ed25519PublicKey)]


def read_signature(root: Path) -> ArtifactSignature | None:
    """The signature's file of the artifact at `root`, which may not hold; None without one.

    Raises ArtifactError if it is damaged.
    """
    try:
        with open_plain(root / SIGNATURE, within=root) as file:
            result = json.loads(file.read(_MOST_BYTES))
        if result["version"] != SIGNATURE_VERSION:
            raise ArtifactError(f"{root}: {SIGNATURE} is of another version of qcompile: sign the artifact again")
        signature = base64.b64decode(result["signature"], validate=True)
        if _KEY.fullmatch(result["key"]) and isinstance(result["manifest"], str) and len(signature) == 64:
            return ArtifactSignature(result["key"], result["manifest"], signature)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ArtifactError(f"{root}: cannot read {SIGNATURE}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error):
        pass
    raise ArtifactError(f"{root}: {SIGNATURE} is damaged: sign the artifact again")


def signature_problem(manifest: Manifest, result: ArtifactSignature) -> str | None:
    """Why a signature is none of `manifest` by the key that it names; None if it is.

    Raises ResourceError if the package that checks signatures is missing.
    """
    if result.sealed != manifest["sha256"]:
        return (
            f"{SIGNATURE} signs another manifest: the artifact was changed after it was signed, "
            "or this is the signature of another artifact"
        )
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise needs_cryptography(error) from error
    raw = base64.urlsafe_b64decode(result.key.removeprefix("ed25519:") + "=")
    try:
        Ed25519PublicKey.from_public_bytes(raw).verify(result.signature, signed_bytes(result.sealed))
    except (InvalidSignature, ValueError):
        return f"{SIGNATURE} was not made by the key that it names, {result.key}"
    return None


def check_signature(root: Path, manifest: Manifest, trusted: Sequence[str]) -> None:
    """Raise ArtifactError unless one of the keys `trusted` has signed the `manifest` read from `root`.

    The manifest must be what was parsed, its hash checked: the files are then those that its hashes name.
    """
    result = read_signature(root)
    if result is None:
        raise ArtifactError(f"{root} is not signed (no {SIGNATURE}), and a signature is required")
    if result.key not in trusted:
        others = f" or {len(trusted) - 1} others" if len(trusted) > 1 else ""
        raise ArtifactError(f"{root} is signed by {result.key}, and a signature by {trusted[0]}{others} is required")
    if problem := signature_problem(manifest, result):
        raise ArtifactError(f"{root}: {problem}")


def signature_state(root: Path, manifest: Manifest) -> dict[str, Any] | None:
    """Who signed the artifact at `root`, for people: {key, holds, problem}; None if it is not signed.

    holds: None if the package that checks signatures is missing. problem: why it does not hold, or was not checked.
    """
    try:
        result = read_signature(root)
        if result is None:
            return None
        problem = signature_problem(manifest, result)
    except ArtifactError as error:
        return {"key": None, "holds": False, "problem": str(error)}
    except ResourceError as error:
        return {"key": result.key if result else None, "holds": None, "problem": str(error)}
    return {"key": result.key, "holds": problem is None, "problem": problem}


def signature_text(state: dict[str, Any] | None) -> str:
    """`signature_state` as words."""
    if state is None:
        return "not signed"
    if state["holds"]:
        return f"signed by {state['key']}"
    if state["holds"] is None:
        return f"signed by {state['key']}, not checked: {state['problem']}"
    return f"no valid signature: {state['problem']}"
