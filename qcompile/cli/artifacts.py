"""The commands that read an artifact without running it: `inspect`, `verify` and `export`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from qcompile.cli import console, environment
from qcompile.cli.options import Artifact, Json, RequireSignature, command


@command
def inspect(
    out: Artifact,
    passes: Annotated[bool, typer.Option("--passes", help="List the passes: options, count, error, seconds.")] = False,
    json: Json = False,
) -> None:
    """Show the contents of an artifact: recipe, target, bits per weight, passes, sizes.

    \b
    Example:
      qcompile inspect out/pycode
      qcompile inspect out/pycode --passes
    """
    from qcompile.cli import inspect as contents

    if passes:
        listed = contents.passes(out)
        console.print_json(listed) if json else console.show(contents.passes_as_text(listed))
        return
    summary = contents.summary(out)
    console.print_json(summary) if json else console.show(contents.as_text(summary))


@command
def verify(out: Artifact, require_signature: RequireSignature = None, json: Json = False) -> None:
    """Check every file of an artifact against its hash, and who signed it; exits with 6 and names the damaged files.

    \b
    Example:
      qcompile verify out/pycode
      qcompile verify out/pycode --require-signature release.pub
    """
    from qcompile.artifact import reader
    from qcompile.artifact.hashes import damaged
    from qcompile.artifact.signature import check_signature, signature_state, signature_text, trusted_keys

    environment.check_not_empty(environment.REQUIRE_SIGNATURE)
    trusted = None if require_signature is None else trusted_keys(require_signature)
    manifest, problems = reader.examine(out)
    if manifest and trusted is not None and not problems:
        check_signature(out, manifest, trusted)
    state = manifest and signature_state(out, manifest)
    if json:
        console.print_json({"ok": not problems, "problems": problems, "signature": state})
    elif not problems:
        console.show(f"{out}: every file is as built; {signature_text(state)}")
    if problems:
        reader.read_manifest(out)  # raises an error of its own if the manifest is damaged, or there is no artifact
        raise damaged(out, problems)


@command
def export(
    out: Artifact,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", help="MLIR file, or new checkpoint folder, to write.")
    ],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="A checkpoint: compressed-tensors, gptq, awq, gguf or hf. MLIR: linalg, torch-mlir.",
        ),
    ] = "linalg",
    tokens: Annotated[int, typer.Option("--tokens", min=1, metavar="N", help="Input tokens of MLIR.")] = 16,
    json: Json = False,
) -> None:
    """Write an artifact for other programs: its weights as a checkpoint, or its graph as MLIR.

    \b
    Example:
      qcompile export out/pycode --format compressed-tensors -o pycode-w4a16
      qcompile export out/pycode --format linalg -o pycode.mlir
    """
    from qcompile.artifact.export import FORMATS

    written = (_mlir if format in FORMATS else _checkpoint)(out, output, format, tokens)
    console.print_json(written) if json else _show_export(written)


def _mlir(out: Path, output: Path, format: str, tokens: int) -> dict[str, Any]:
    from qcompile.artifact import export as exporting

    size = exporting.write(out, output, format, tokens)
    return {"path": str(output), "format": format, "tokens": tokens, "bytes": size}


def _checkpoint(out: Path, output: Path, format: str, tokens: int) -> dict[str, Any]:
    from qcompile.exports import checkpoint

    return {"path": str(output), "format": format} | asdict(checkpoint.write(out, output, format))


def _show_export(written: dict[str, Any]) -> None:
    console.show(f"{written['path']}: {console.byte_size(written['bytes'])}")
    for note in written.get("notes", ()):
        console.show(f"  {note}")
