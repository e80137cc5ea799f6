"""The command `sign`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from qcompile.cli import console
from qcompile.cli.options import Json, command
from qcompile.errors import UsageError

PASSPHRASE = "QCOMPILE_KEY_PASSPHRASE"


@command
def sign(
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="Artifact directory written by `qcompile build`.")
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", help="Private key (ed25519, PKCS #8 in PEM), which may be encrypted."),
    ] = None,
    generate_key: Annotated[
        Path | None,
        typer.Option("--generate-key", metavar="FILE", help="Write a new key to FILE, and its public key to FILE.pub."),
    ] = None,
    encrypt: Annotated[
        bool,
        typer.Option("--encrypt", help=f"Encrypt the new key with a passphrase: of {PASSPHRASE}, or asked for."),
    ] = False,
    json: Json = False,
) -> None:
    """Sign an artifact, so that `--require-signature` of other commands accepts it; or make a key.

    \b
    Example:
      qcompile sign --generate-key release.key
      qcompile sign out/pycode --key release.key
      qcompile run out/pycode --require-signature release.key.pub
    """
    from qcompile.artifact import signing

    if generate_key is not None:
        if out is not None:
            raise UsageError("--generate-key makes a key and signs nothing: sign the artifact by another call")
        word = _passphrase(f"Passphrase for {generate_key}", 2) if encrypt else None
        shown = signing.generate_key(generate_key, word)
        public = f"{generate_key}.pub"
        if json:
            console.print_json({"key": shown, "private": str(generate_key), "public": public})
        else:
            console.show(f"{generate_key}: private key, to be kept secret\n{public}: public key {shown}")
        return
    if out is None or key is None:
        raise UsageError("give an artifact and --key FILE, or --generate-key FILE")
    if encrypt:
        raise UsageError("--encrypt is for --generate-key")
    shown = signing.sign(out, signing.private_key(key, lambda: _passphrase(f"Passphrase of {key}", 1)))
    console.print_json({"key": shown}) if json else console.show(f"{out}: signed by {shown}")


def _passphrase(prompt: str, times: int) -> str | None:
    """The passphrase in the environment, or one that is typed, `times` times; None if there is no terminal."""
    if (given := os.environ.get(PASSPHRASE)) is not None:
        return given
    if not sys.stdin.isatty():
        if times > 1:
            raise UsageError(f"there is no terminal to ask for a passphrase: give it in {PASSPHRASE}")
        return None
    from getpass import getpass

    typed = {getpass(f"{prompt}{', again' * number}: ") for number in range(times)}
    if len(typed) > 1:
        raise UsageError("the passphrases differ")
    return typed.pop()
