"""Make keys, and sign artifacts by them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from qcompile.artifact import reader
from qcompile.artifact.amend import replace_file
from qcompile.artifact.hashes import damaged
from qcompile.artifact.layout import MANIFEST, SIGNATURE, canonical_json, disk_errors
from qcompile.artifact.plain_files import read_plain
from qcompile.artifact.signature import ArtifactSignature, key_text, needs_cryptography, signed_bytes
from qcompile.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Passphrase = Callable[[], str | None]
"""Asks for the passphrase of a private key; None if there is nobody to ask."""


def generate_key(path: Path, passphrase: str | None = None) -> str:
    """Write a new private key to `path` (PKCS #8 in PEM, for its owner alone), and the public key to `path.pub`.

    passphrase: the private key is encrypted with it; None leaves it as it is. Returns the public key as text. Raises
    UsageError if one of the files exists or the passphrase is empty, ResourceError if it cannot be written.
    """
    if passphrase == "":
        raise UsageError("the passphrase is empty: give one, or none")
    try:
        from cryptography.hazmat.primitives import serialization as forms
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise needs_cryptography(error) from error
    public = path.with_name(f"{path.name}.pub")
    for place in (path, public):
        if place.exists() or place.is_symlink():
            raise UsageError(f"{place} exists: a new key does not replace an older one; choose another path")
    key = Ed25519PrivateKey.generate()
    lock = forms.NoEncryption() if passphrase is None else forms.BestAvailableEncryption(passphrase.encode())
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, lock)
    shown = key.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    _create(path, private, 0o600)
    _create(public, shown, 0o644)
    return key_text(key.public_key())


def _create(path: Path, content: bytes, mode: int) -> None:
    """Write a file that must not exist, with these permissions from the beginning on."""
    with disk_errors(path), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask is
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def private_key(path: Path, passphrase: Passphrase) -> Ed25519PrivateKey:
    """The private key in a file (PKCS #8 in PEM). `passphrase` is asked only if the key is encrypted.

    Raises UsageError if it is no ed25519 key, or the passphrase is missing or wrong.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise needs_cryptography(error) from error
    try:
        content = read_plain(path)
    except OSError as error:
        raise UsageError(f"cannot read the key {path}: {error.strerror or error}") from error
    if b"-----BEGIN PUBLIC KEY-----" in content:
        raise UsageError(f"{path} is a public key: signing takes the private one")
    word = None
    if b"-----BEGIN ENCRYPTED PRIVATE KEY-----" in content:
        word = passphrase()
        if not word:
            raise UsageError(f"{path} is encrypted: give its passphrase in QCOMPILE_KEY_PASSPHRASE, or on a terminal")
    try:
        key = load_pem_private_key(content, word.encode() if word else None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if word:
            raise UsageError(f"{path}: the passphrase is wrong, or the file is damaged") from error
        raise UsageError(f"{path} is no private key in PEM (PKCS #8): make one by `sign --generate-key`") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} is a key of another kind: make an ed25519 key by `sign --generate-key`")
    return key


def sign(path: str | Path, key: Ed25519PrivateKey) -> str:
    """Verify the files of the artifact at `path`, and sign it; an older signature is replaced.

    Returns the public key as text. Raises ArtifactError if the artifact is damaged, has a file that its manifest does
    not name, or is replaced in the meantime; ResourceError if the signature cannot be written.
    """
    root = Path(os.path.realpath(path))
    manifest, problems = reader.examine(root)
    if manifest is None:
        raise ArtifactError(problems[0])
    if problems:
        raise damaged(root, problems)
    sealed = manifest["sha256"]
    shown = key_text(key.public_key())
    made = ArtifactSignature(shown, sealed, key.sign(signed_bytes(sealed)))
    with disk_errors(root / SIGNATURE, "sign a copy of the artifact elsewhere"), ExitStack() as stack:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, folder)
        fcntl.flock(folder, fcntl.LOCK_EX)
        here = Path(f"/proc/self/fd/{folder}")
        if reader.parse_manifest(root, (here / MANIFEST).read_bytes())["sha256"] != sealed:
            raise ArtifactError(f"{root} was changed while it was signed: sign it again")
        replace_file(folder, SIGNATURE, canonical_json(made.as_json()))
    return shown
