"""Signatures: what the owner of a key signed is accepted, all else is refused before anything of it is loaded."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from qcompile.artifact.amend import amend
from qcompile.artifact.layout import MANIFEST, SIGNATURE, SIGNED
from qcompile.artifact.reader import read_manifest, read_same_manifest, verify
from qcompile.artifact.signature import check_signature, signature_state, trusted_keys
from qcompile.artifact.signing import generate_key, private_key, sign
from qcompile.errors import ArtifactError, UsageError
from qcompile.runtime import loader
from qcompile.runtime.load import load
from tests.artifact.test_artifact import write_small
from tests.cli.test_app import Capture, code_of, json_of, refusal

pytest.importorskip("cryptography")
NOBODY = "ed25519:" + "A" * 43


def signed(root: Path, key: Path) -> str:
    """Sign the artifact at `root` with a new key in the file `key`, and return the public key."""
    shown = generate_key(key)
    assert sign(root, private_key(key, lambda: None)) == shown
    return shown


def check(root: Path, *trusted: str) -> None:
    check_signature(root, read_manifest(root), trusted)


def test_what_the_owner_of_the_key_signed_is_accepted(tmp_path: Path) -> None:
    write_small(tmp_path / "out")
    key = signed(tmp_path / "out", tmp_path / "key")
    assert trusted_keys(tmp_path / "key.pub") == trusted_keys(key) == (key,)
    (tmp_path / "keys").write_text(f"# of the team\n{NOBODY}\n{key}\n" + (tmp_path / "key.pub").read_text())
    assert trusted_keys(tmp_path / "keys") == (NOBODY, key, key)
    check(tmp_path / "out", NOBODY, key)
    assert verify(tmp_path / "out") == []
    assert signature_state(tmp_path / "out", read_manifest(tmp_path / "out")) == {
        "key": key,
        "holds": True,
        "problem": None,
    }


def with_key_of(root: Path, key: str) -> None:
    content = json.loads((root / SIGNATURE).read_text())
    (root / SIGNATURE).write_text(json.dumps(content | {"key": key}))


def with_seal_of(root: Path, other: Path) -> None:
    """The signature is another artifact's, and names this one's manifest."""
    content = json.loads((other / SIGNATURE).read_text())
    (root / SIGNATURE).write_text(json.dumps(content | {"manifest": read_manifest(root)["sha256"]}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root, other: (root / SIGNATURE).unlink(), "is not signed"),
        (lambda root, other: amend(root, tuned={"table": []}), "signs another manifest: the artifact was changed"),
        (lambda root, other: shutil.copy(other / SIGNATURE, root / SIGNATURE), "signs another manifest"),
        (with_seal_of, "was not made by the key that it names"),
        (lambda root, other: with_key_of(root, NOBODY), f"signed by {NOBODY}, and a signature by ed25519:"),
        (lambda root, other: (root / SIGNATURE).write_text("[]"), "qcompile.sig is damaged"),
        (lambda root, other: (root / SIGNATURE).write_text("[" * 60000), "qcompile.sig is damaged"),
        (lambda root, other: (root / SIGNATURE).write_text('{"version": 2}'), "of another version"),
        (lambda root, other: ((root / SIGNATURE).unlink(), os.mkfifo(root / SIGNATURE)), "no plain file"),
        (
            lambda root, other: ((root / SIGNATURE).unlink(), (root / SIGNATURE).symlink_to(other / SIGNATURE)),
            "outside of",
        ),
    ],
)
def test_everything_else_is_refused(tmp_path: Path, damage: Callable, message: str) -> None:
    root, other = tmp_path / "out", tmp_path / "other"
    write_small(root), write_small(other, fill=2)
    key = generate_key(tmp_path / "key")
    for each in (root, other):
        sign(each, private_key(tmp_path / "key", lambda: None))
    damage(root, other)
    with pytest.raises(ArtifactError, match=message):
        check(root, key)
    with pytest.raises(ArtifactError):
        check(root, NOBODY)


def test_signing_refuses_what_no_hash_covers(tmp_path: Path) -> None:
    write_small(tmp_path / "out")
    generate_key(tmp_path / "key")
    key = private_key(tmp_path / "key", lambda: None)
    (tmp_path / "out" / "extra").touch()
    with pytest.raises(ArtifactError, match="extra: not in the manifest"):
        sign(tmp_path / "out", key)
    (tmp_path / "out" / "extra").rename(tmp_path / "out" / "config.json")
    with pytest.raises(ArtifactError, match=r"config.json: 0 bytes instead of 2"):
        sign(tmp_path / "out", key)
    (tmp_path / "out" / MANIFEST).write_text("{}")
    with pytest.raises(ArtifactError, match="is damaged"):
        sign(tmp_path / "out", key)


def test_signing_writes_through_no_link(tmp_path: Path) -> None:
    write_small(tmp_path / "out")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out" / SIGNED).symlink_to(tmp_path / "mine")
    check(tmp_path / "out", signed(tmp_path / "out", tmp_path / "key"))
    assert (tmp_path / "mine").read_text() == "mine" and verify(tmp_path / "out") == []


def test_keys_are_their_owner_s_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        generate_key(tmp_path / "key", passphrase="open")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("key", "key.pub")]
    assert modes == [0o600, 0o644] and b"ENCRYPTED" in (tmp_path / "key").read_bytes()
    assert private_key(tmp_path / "key", lambda: "open")
    for wrong, message in (("shut", "the passphrase is wrong"), (None, "is encrypted"), ("", "is encrypted")):
        with pytest.raises(UsageError, match=message):
            private_key(tmp_path / "key", lambda wrong=wrong: wrong)
    for place in ("key", "other"):
        (tmp_path / f"{place}.pub").touch()
        with pytest.raises(UsageError, match="exists: a new key does not replace"):
            generate_key(tmp_path / place)


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric import x25519

    strange = x25519.X25519PrivateKey.generate()
    pem, none = forms.Encoding.PEM, forms.NoEncryption()
    (tmp_path / "strange").write_bytes(strange.private_bytes(pem, forms.PrivateFormat.PKCS8, none))
    public = strange.public_key().public_bytes(pem, forms.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "strange.pub").write_bytes(public)
    (tmp_path / "broken").write_text("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----")
    (tmp_path / "text").write_text(NOBODY + "AA")
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("strange", "is a private key"),
        ("strange.pub", "a key of another kind"),
        ("broken", "is no public key in PEM"),
        ("text", "holds no public key"),
        ("pipe", "no plain file"),
        ("nowhere", "No such file"),
    ):
        with pytest.raises(UsageError, match=message):
            trusted_keys(tmp_path / name)
    with pytest.raises(UsageError, match="is empty"):
        trusted_keys(" ")
    for name, message in (
        ("strange", "a key of another kind"),
        ("strange.pub", "is a public key"),
        ("text", "is no private key in PEM"),
        ("nowhere", "No such file"),
    ):
        with pytest.raises(UsageError, match=message):
            private_key(tmp_path / name, lambda: None)


def test_a_rank_reads_the_manifest_that_was_checked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_small(out)
    sealed = read_manifest(out)["sha256"]
    amend(out, tuned={"table": []})
    with pytest.raises(ArtifactError):
        read_same_manifest(out, sealed)


def test_nothing_is_loaded_of_an_artifact_without_the_signature(
    tmp_path: Path, tiny_artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(tiny_artifact("w4a8"), tmp_path / "copy")
    key = signed(copy, tmp_path / "key")
    load(copy, threads=1, require_signature=tmp_path / "key.pub").close()
    for name in ("load_artifact", "file_problem", "_open_library"):
        monkeypatch.setattr(loader, name, None)
    monkeypatch.setattr("qcompile.runtime.load.open_model", None)
    with pytest.raises(ArtifactError, match=f"is signed by {key}, and a signature by {NOBODY} is required"):
        load(copy, threads=1, require_signature=NOBODY)
    with pytest.raises(UsageError, match="require_signature must be a public key"):
        load(copy, require_signature=7)  # type: ignore[arg-type]


def test_a_swapped_file_is_refused_although_the_signature_holds(
    tmp_path: Path, tiny_artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(tiny_artifact("w4a8"), tmp_path / "copy")
    key = signed(copy, tmp_path / "key")
    library = copy / read_manifest(copy)["runtime"]["library"]
    library.write_bytes(library.read_bytes()[:-1] + b"!")
    monkeypatch.setattr(loader, "_open_library", None)
    with pytest.raises(ArtifactError, match="SHA-256 differs"):
        load(copy, threads=1, require_signature=key)


def test_the_commands(
    capsys: Capture, tmp_path: Path, tiny_artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, key = shutil.copytree(tiny_artifact("w4a8"), tmp_path / "copy"), tmp_path / "key"
    monkeypatch.setenv("QCOMPILE_KEY_PASSPHRASE", "open")
    made = json_of(capsys, "sign", "--generate-key", key, "--encrypt")
    public = made["public"]
    assert json_of(capsys, "verify", copy)["signature"] is None
    assert "is not signed" in refusal(capsys, 6, "verify", copy, "--require-signature", public)
    assert json_of(capsys, "sign", copy, "--key", key) == {"key": made["key"]}
    assert json_of(capsys, "verify", copy, "--require-signature", public)["signature"]["key"] == made["key"]
    assert json_of(capsys, "inspect", copy)["signature"] == {"key": made["key"], "holds": True, "problem": None}
    assert code_of("inspect", copy) == 0 and f"signed   by {made['key']}\n" in capsys.readouterr().out
    prompt = ("--prompt", "x", "--max-tokens", "1", "--threads", "1")
    assert code_of("run", copy, *prompt, "--require-signature", public) == 0
    capsys.readouterr()
    assert "a signature is required" in refusal(capsys, 2, "run", tmp_path, *prompt, "--require-signature", public)
    monkeypatch.setenv("QCOMPILE_REQUIRE_SIGNATURE", NOBODY)
    for command in (("run", copy, *prompt), ("verify", copy), ("tune", copy), ("serve", copy, "--port", "0")):
        assert f"a signature by {NOBODY} is required" in refusal(capsys, 6, *command)
    monkeypatch.setenv("QCOMPILE_REQUIRE_SIGNATURE", "")
    for command in (("run", copy, *prompt), ("verify", copy)):
        assert "QCOMPILE_REQUIRE_SIGNATURE is empty" in refusal(capsys, 2, *command)


def test_misuse_of_sign(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QCOMPILE_KEY_PASSPHRASE", raising=False)
    for arguments, message in (
        ((), "give an artifact and --key FILE"),
        (("out", "--generate-key", tmp_path / "key"), "signs nothing"),
        (("out", "--key", "x", "--encrypt"), "--encrypt is for --generate-key"),
        (("--generate-key", tmp_path / "key", "--encrypt"), "give it in QCOMPILE_KEY_PASSPHRASE"),
    ):
        assert message in refusal(capsys, 2, "sign", *arguments)
    assert not list(tmp_path.iterdir())
