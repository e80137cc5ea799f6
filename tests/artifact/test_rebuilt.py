"""Kernels are compiled again from an artifact's graph: machine code of the artifact is never loaded, whatever it is."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qcompile
from qcompile import SamplingParams
from qcompile.artifact import layout
from qcompile.artifact.packed_weights import STEP
from qcompile.artifact.reader import read_manifest
from qcompile.cli.options import Building
from qcompile.codegen.cpu import compiler
from qcompile.errors import ArtifactError, UnsupportedError
from tests.cli.test_app import Capture, code_of, refusal

Build = Callable[[str], Path]
Change = Callable[[dict[str, Any]], object]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = ["import os\n", "class Reader:\n"]
HOSTILE = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) { FILE* f = fopen("MARK", "w"); if (f) fclose(f); }
"""


@pytest.fixture
def copy(tiny_artifact: Build, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_artifact("w4a8"), tmp_path / "copy")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, but with compiled libraries of all tests: compiling one takes seconds."""
    compile_all = compiler.compile
    shared = compiler.user_cache.cache_dir()

    def compiled(*arguments: Any) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QCOMPILE_CACHE", str(shared))
            return compile_all(*arguments)

    monkeypatch.setattr(compiler, "compile", compiled)
    monkeypatch.setenv("QCOMPILE_CACHE", str(tmp_path / "cache"))


def sealed_again(root: Path, *changed: str) -> None:
    """Write the hashes of changed files into the manifest, as who makes a hostile artifact does."""
    manifest = read_manifest(root)
    for name in changed:
        content = (root / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["sha256"] = layout.seal(manifest)
    (root / layout.MANIFEST).write_bytes(layout.canonical_json(manifest))


def tokens_of(path: Path, prompts: Any = PROMPTS, **options: Any) -> list[list[int]]:
    with qcompile.load(path, threads=1, max_batch=2, **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


def test_a_hostile_library_is_not_loaded(copy: Path, tmp_path: Path) -> None:
    tokens, mark = tokens_of(copy), tmp_path / "mark"
    library = read_manifest(copy)["runtime"]["library"]
    honest = (copy / library).read_bytes()
    source = HOSTILE.replace("MARK", str(mark))
    subprocess.run(
        [compiler.find(), "-shared", "-fPIC", "-x", "c", "-", "-o", copy / library], input=source.encode(), check=True
    )
    sealed_again(copy, library)
    kernels = qcompile.rebuild(copy)
    assert kernels.libraries == {library: honest}
    assert tokens_of(copy, kernels=kernels) == tokens and not mark.exists()
    with pytest.raises(AttributeError):  # it has no function of a model
        tokens_of(copy)
    assert mark.exists()


def test_rebuilt_kernels_are_kept_for_the_artifact(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = qcompile.rebuild(copy)
    monkeypatch.setattr(compiler, "compile", lambda *arguments: pytest.fail("compiled again"))
    assert qcompile.rebuild(copy) == kernels
    (copy / "README").write_text("x")
    sealed_again(copy, "README")
    with pytest.raises(ArtifactError, match="was replaced after its kernels were rebuilt"):
        qcompile.load(copy, kernels=kernels)
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        qcompile.rebuild(copy)


def node(graph: dict[str, Any], target: str, number: int = 0) -> dict[str, Any]:
    return [each for each in graph["nodes"] if each["target"] == target][number]


def replaced(graph: dict[str, Any], target: str, old: Any, new: Any, number: int = 0) -> None:
    args = node(graph, target, number)["args"]
    args[args.index(old)] = new


def wider(graph: dict[str, Any], target: str, column: int, by: int) -> None:
    """Make the shape of the first input or weight with this beginning of a name larger."""
    shapes = next(each for each in graph["nodes"] if str(each["target"]).startswith(target))["shapes"]
    shapes[0][0][column] += by


def embeddings(graph: dict[str, Any]) -> str:
    """The weight that embeds tokens."""
    name = node(graph, "embedding")["args"][1]["node"]
    return str(next(each for each in graph["nodes"] if each["name"] == name)["target"])


CHANGES: dict[str, tuple[Change, str]] = {
    "source in an operand": (
        lambda graph: replaced(graph, "gemm", "store", 'store; system("x")'),
        "has an operand 'store; system",
    ),
    "an unknown operator": (lambda graph: node(graph, "gemm").update(target="system"), "operator system"),
    "an operator of another stage": (lambda graph: node(graph, "gemm").update(target="attention"), "does not fit"),
    "an epilogue that does not exist": (lambda graph: replaced(graph, "gemm", "store", "other"), "KeyError: 'other'"),
    "a vocabulary in words": (lambda graph: node(graph, "gemm", -1)["args"].append("8192;"), "operand"),
    "a wider input of a product": (lambda graph: wider(graph, "model.layers.0.mlp.down_proj", 1, 128), "does not fit"),
    "a wider output of a product": (lambda graph: wider(graph, "model.layers.0.mlp.down_proj", 0, 128), "does not fit"),
    "a longer norm": (lambda graph: wider(graph, "model.norm", 0, 16), "does not fit"),
    "an embedding without its last rows": (lambda graph: wider(graph, embeddings(graph), 0, -16), "does not fit"),
    "a product that writes more than its result": (
        lambda graph: node(graph, "gemm")["args"].__setitem__(-1, node(graph, "gemm")["args"][-1] - 64),
        "does not fit together",
    ),
    "a layer of the cache for two": (
        lambda graph: node(graph, "rope_append", 1)["args"].__setitem__(12, 0),
        r"layers \[0, 0.* of the cache are written",
    ),
    "more heads in the cache": (lambda graph: wider(graph, "step_cache", 3, 1), "does not fit its cache"),
    "a layer before the first of the cache": (
        lambda graph: node(graph, "kv_attention")["args"].__setitem__(5, -1),
        "kv_attention.* has an operand -1",
    ),
    "tokens as positions": (
        lambda graph: replaced(graph, "kv_attention", {"node": "step_positions"}, {"node": "step_token_ids"}),
        "kv_attention.* has another operand positions than step_positions",
    ),
    "no sequence": (
        lambda graph: replaced(graph, "rope_append", {"node": "step_sequence"}, None),
        "rope_append.* has another operand sequence than step_sequence",
    ),
    "more KV heads than the cache has": (
        lambda graph: node(graph, "kv_attention")["args"].__setitem__(15, 1 << 20),
        "kv_attention.* reads heads .1048576",
    ),
    "fewer layers in the cache": (lambda graph: wider(graph, "step_cache", 0, -1), "does not fit together"),
    "a size that is no number": (
        lambda graph: node(graph, "step_cache").update(shapes=[[["x"] * 5, "float32"]]),
        "shape",
    ),
    "memory without an end": (
        lambda graph: wider(graph, "step_cache", 2, 0) or wider(graph, "step_cache", 4, 1 << 30),
        "shape",
    ),
    "no nodes": (lambda graph: graph.pop("nodes"), "does not fit together: KeyError"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_graph_that_does_not_fit_is_refused(name: str, copy: Path) -> None:
    change, reason = CHANGES[name]
    graph = json.loads((copy / STEP).read_text())
    change(graph)
    (copy / STEP).write_text(json.dumps(graph))
    sealed_again(copy, STEP)
    with pytest.raises(ArtifactError, match=reason):
        qcompile.rebuild(copy)


def test_each_token_has_an_embedding(copy: Path) -> None:
    manifest = read_manifest(copy)
    for part in ("model", "runtime"):
        manifest[part]["vocab_size"] += 1
    manifest["sha256"] = layout.seal(manifest)
    (copy / layout.MANIFEST).write_bytes(layout.canonical_json(manifest))
    with pytest.raises(ArtifactError, match=r"node embedding has \d+ rows of \d+"):
        qcompile.rebuild(copy)


def test_what_is_not_rebuilt_is_refused(copy: Path, tiny_artifact: Build) -> None:
    drafted = tiny_artifact("qspec")
    kernels = qcompile.rebuild(drafted)
    with pytest.raises(UnsupportedError, match=r"kernels of draft1 are not rebuilt: load without drafts \(gamma 0\)"):
        qcompile.load(drafted, kernels=kernels)
    assert tokens_of(drafted, kernels=kernels, gamma=0) == tokens_of(drafted)
    manifest = read_manifest(copy)
    for part, key, value, reason in (
        ("target", "kind", "cuda", "for CPUs only, and these are for"),
        ("target", "isa", "odd", "target cpu is not one of this version"),
        ("files", layout.ADAPTERS_FILE, manifest["files"][STEP], "kernels with places for adapters are not rebuilt"),
    ):
        changed = manifest | {part: manifest[part] | {key: value}}
        changed["sha256"] = layout.seal(changed)
        (copy / layout.MANIFEST).write_bytes(layout.canonical_json(changed))
        with pytest.raises(UnsupportedError, match=reason):
            qcompile.rebuild(copy)


def test_commands_rebuild_kernels_of_artifacts(copy: Path, capsys: Capture) -> None:
    library = copy / read_manifest(copy)["runtime"]["library"]
    library.write_bytes(b"no library")
    sealed_again(copy, str(library.relative_to(copy)))
    run = ("run", copy, "--prompt", "x", "--max-tokens", "2", "--threads", "1")
    assert code_of(*run, "--rebuild") == 0
    capsys.readouterr()
    assert "library cannot be opened" in refusal(capsys, 6, *run)
    assert "start `qcompile serve --rebuild`" in refusal(capsys, 2, "bench", copy, "--serve", "--rebuild")
    assert Building(rebuild=True).given("rebuild") is None
