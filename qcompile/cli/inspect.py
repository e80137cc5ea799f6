"""The contents of an artifact, from its manifest alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qcompile.artifact.layout import MANIFEST, PASSES_FILE
from qcompile.artifact.plain_files import read_plain
from qcompile.artifact.reader import read_checked_manifest
from qcompile.artifact.signature import signature_state, signature_text
from qcompile.cli import console
from qcompile.errors import ArtifactError
from qcompile.report import stored_weights

_MEASURED = ("max_relative_error", "seconds")
"""What --check measures of a pass."""


def summary(path: Path) -> dict[str, Any]:
    """What `inspect --json` prints.

    `sizes` are bytes: of all files, weights, kernels, other files, of one token in the caches of all paths, and of the
    recurrent states of one request if there are any. `drafts` have the bytes per token of their own caches.
    """
    manifest = read_checked_manifest(path)
    files: dict[str, dict[str, Any]] = manifest["files"]
    kv = manifest["runtime"]["kv"]
    sizes = {"weights": 0, "kernels": 0, "other": (path / MANIFEST).stat().st_size}
    for name, entry in files.items():
        kind = "weights" if name.startswith("weights-") else "kernels" if name.startswith("kernels/") else "other"
        sizes[kind] += entry["bytes"]
    sizes["total"] = sum(sizes.values())
    stages = manifest["runtime"].get("levels") or []
    drafts = [_stage(stage) for stage in stages]
    sizes["kv_per_token"] = _per_token(kv) + sum(draft.get("kv_per_token", 0) for draft in drafts)
    if slots := sum(place.get("slot_bytes") or 0 for place in (kv, *(stage.get("kv") or {} for stage in stages))):
        sizes["states_per_request"] = slots
    return {
        "model": manifest["model"],
        "recipe": manifest["recipe"],
        "target": manifest["target"],
        "bits_per_weight": manifest["bits_per_weight"],
        "stored_weights": manifest.get("stored_weights"),
        "embedding": manifest.get("embedding"),
        "kv": kv,
        "drafts": drafts,
        "tuned": manifest.get("tuned"),
        "passes": manifest["passes"],
        "sizes": sizes,
        "versions": {"qcompile": manifest["qcompile_version"], **manifest["versions"]},
        "signature": signature_state(path, manifest),
        "files": {name: entry["bytes"] for name, entry in files.items()},
    }


def _stage(stage: dict[str, Any]) -> dict[str, Any]:
    """A draft stage in short: a path with the target's cache or its own, a draft head, or a lookup."""
    if "lookup" in stage:
        return {"kind": "lookup", "gamma": stage["gamma"]}
    entry = {"kind": stage["path"], "gamma": stage["gamma"], "cache": "shared", "weights": len(stage["weights"])}
    entry["passes"] = stage.get("passes") or []
    if stage.get("features"):
        entry |= {"head": True, "drafted_vocabulary": stage["vocab_size"]}
    return entry | {"cache": "own", "kv_per_token": _per_token(stage["kv"])} if stage.get("kv") else entry


def _per_token(kv: dict[str, Any]) -> int:
    """Bytes of one token in the cache that a manifest describes by `kv`."""
    size: int = kv["page_bytes"] // kv["page_tokens"]
    return size


def passes(path: Path) -> list[dict[str, Any]]:
    """What `inspect --passes --json` prints: {path, name, options, fired, notes, max_relative_error, seconds} of each.

    The target's passes (path "model") come first, then those of drafts. The last two values are None unless the
    artifact was built with --check, which does not measure drafts.
    """
    manifest = read_checked_manifest(path)
    paths = {"model": manifest["passes"]}
    paths |= {stage["path"]: stage.get("passes") or [] for stage in _drafting(manifest)}
    measured = _measured(path)
    return [
        {"path": path, "notes": []}
        | entry
        | {key: measured.get(entry["name"], {}).get(key) if path == "model" else None for key in _MEASURED}
        for path, listed in paths.items()
        for entry in listed
    ]


def _measured(path: Path) -> dict[str, dict[str, float | None]]:
    """What --check measured, by pass; empty without --check. No hash covers the file, so its content is not trusted."""
    try:
        listed = json.loads(read_plain(path / PASSES_FILE, within=path))
        return {
            entry["name"]: {key: None if entry[key] is None else float(entry[key]) for key in _MEASURED}
            for entry in listed
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ArtifactError(f"{path}: {PASSES_FILE} is damaged ({error}); delete it or build again") from error


def _drafting(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The draft stages that are paths."""
    return [stage for stage in manifest["runtime"].get("levels") or [] if "path" in stage]


def passes_as_text(listed: list[dict[str, Any]]) -> str:
    """`passes` as a table in text."""
    rows = []
    for entry in listed:
        options = ", ".join(f"{name}={value}" for name, value in entry["options"].items())
        error, seconds = entry["max_relative_error"], entry["seconds"]
        measured = ["-" if error is None else f"{error:.1e}", "-" if seconds is None else f"{seconds:.2f}"]
        name = entry["name"] if entry["path"] == "model" else f"{entry['path']}: {entry['name']}"
        rows.append([name, str(entry["fired"]), *measured, options])
    text = console.table(["pass", "fired", "max error", "seconds", "options"], rows, words=("options",))
    return text if any(e["seconds"] is not None for e in listed) else f"{text}\nbuild with --check to measure errors"


def as_text(contents: dict[str, Any]) -> str:
    """`summary` as text."""
    model, recipe, target, sizes = contents["model"], contents["recipe"], contents["target"], contents["sizes"]
    base = f" (from {recipe['base']})" if recipe.get("base") else ""
    options = base + "".join(f" {name}={value}" for name, value in recipe["options"].items())
    passes = "".join(f"  {_pass_line(entry)}\n" for entry in contents["passes"])
    for draft in contents["drafts"]:
        lines = "".join(f"  {_pass_line(entry)}\n" for entry in draft.get("passes", ()))
        passes += f"passes of {draft['kind']}\n{lines}" if lines else ""
    drafts = ", ".join(_draft_text(draft) for draft in contents["drafts"])
    states = f", recurrent states in {form}" if (form := contents["kv"].get("state_format")) else ""
    rows = [[name.replace("_", " "), console.byte_size(size)] for name, size in sizes.items()]
    return (
        f"model    {model['name']}, {model['parameters']:,} parameters, vocabulary {model['vocab_size']}, "
        f"context {console.context_text(model['max_position'], model.get('stated_position'))}\n"
        f"{console.left_out(model.get('left_out') or {})}"
        f"{console.remarks(model.get('remarks') or ())}"
        f"{_adapters(model.get('adapters') or {})}"
        f"recipe   {recipe['name']}{options}\n"
        f"target   {target['name']} ({target['isa']})\n"
        f"signed   {_signer(contents['signature'])}\n"
        f"weights  {contents['bits_per_weight']:.2f} bits per weight of the linears\n"
        f"{_stored(contents['stored_weights'], contents['embedding'])}"
        f"cache    {contents['kv']['format']}{states}\n"
        f"drafts   {drafts or 'none'}\n"
        f"passes\n{passes}"
        f"sizes\n{_indented(console.table(['', ''], rows))}"
    )


def _signer(state: dict[str, Any] | None) -> str:
    """Who signed the artifact, if that is certain."""
    return "no" if state is None else signature_text(state).removeprefix("signed ")


def _stored(facts: dict[str, Any] | None, embedding: dict[str, Any] | None) -> str:
    """Lines about the weights that the checkpoint stores in few bits, and a rounded embedding; empty without any."""
    texts = filter(None, (stored_weights.sentence(facts), stored_weights.embedding_sentence(embedding)))
    return "".join(f"stored   {text}\n" for text in texts)


def _adapters(merged: dict[str, float]) -> str:
    """A line about the adapters merged into the weights; empty if there are none."""
    named = ", ".join(name if factor == 1 else f"{name} times {factor:g}" for name, factor in merged.items())
    return f"adapters {named}\n" if named else ""


def _draft_text(draft: dict[str, Any]) -> str:
    own = f", {console.byte_size(draft['kv_per_token'])} per token" if "kv_per_token" in draft else ""
    head = f"draft head for {draft['drafted_vocabulary']} tokens, " if draft.get("head") else ""
    return f"{draft['kind']} ({head}{draft['cache']} cache{own})" if "cache" in draft else str(draft["kind"])


def _pass_line(entry: dict[str, Any]) -> str:
    options = ", ".join(f"{name}={value}" for name, value in entry["options"].items())
    return f"{entry['name']} {entry['fired']}" + (f" ({options})" if options else "")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines() if line)
