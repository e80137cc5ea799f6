"""Kernels of an artifact for two processes are compiled again, and both load these in place of the artifact's own."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qcompile
from qcompile import pipeline
from qcompile.artifact import layout
from qcompile.artifact.packed_weights import STEP
from qcompile.artifact.reader import read_checked_manifest, read_manifest
from qcompile.artifact.rebuilt import recall_same
from qcompile.errors import ArtifactError, ResourceError
from tests.artifact.test_rebuilt import HOSTILE, node, sealed_again, tokens_of
from tests.conftest import MadeOnce
from tests.support.ranks import TWO, small

PROMPTS = [[5, 6, 7], list(range(40))]


@pytest.fixture
def copy(made_once: MadeOnce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact for two processes, and an empty cache for what is rebuilt of it."""
    artifact = made_once("two-ranks-f32", lambda path: pipeline.build(small(), path, recipe="f32", options=TWO))
    monkeypatch.setenv("QCOMPILE_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(artifact, tmp_path / "copy")


def test_no_rank_loads_a_hostile_library(copy: Path, tmp_path: Path) -> None:
    tokens, mark = tokens_of(copy, PROMPTS), tmp_path / "mark"
    library = read_manifest(copy)["runtime"]["library"]
    honest = (copy / library).read_bytes()
    source = HOSTILE.replace("MARK", str(mark))
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(copy / library)]
    subprocess.run(command, input=source.encode(), check=True)
    sealed_again(copy, library)
    kernels = qcompile.rebuild(copy)
    assert kernels.libraries == {library: honest}
    assert tokens_of(copy, PROMPTS, kernels=kernels) == tokens and not mark.exists()
    manifest = read_checked_manifest(copy)
    assert recall_same(copy, manifest, "") is None
    assert recall_same(copy, manifest, kernels.digest) == kernels
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ResourceError, match="has its rebuilt kernels no more: load it again"):
        recall_same(copy, manifest, kernels.digest)


def resealed(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the section `runtime` of the manifest."""
    manifest = read_manifest(root)
    change(manifest["runtime"])
    manifest["sha256"] = layout.seal(manifest)
    (root / layout.MANIFEST).write_bytes(layout.canonical_json(manifest))


def test_ranks_that_do_not_fit_the_graph_are_refused(copy: Path) -> None:
    """All processes wait for all in a sum, and read weights of the sizes that the kernels have."""
    runtime = read_manifest(copy)["runtime"]
    resealed(copy, lambda runtime: runtime["ranks"].append(runtime["ranks"][1]))
    with pytest.raises(ArtifactError, match=r"sums over \[2\] ranks, and 3 are to run it"):
        qcompile.rebuild(copy)
    resealed(copy, lambda runtime: runtime.pop("ranks"))
    with pytest.raises(ArtifactError, match=r"sums over \[2\] ranks, and 1 are to run it"):
        qcompile.rebuild(copy)
    sizes = [entry["bytes"] for entry in runtime["weights"]]
    other = list(runtime["ranks"][1])
    largest = max(other, key=sizes.__getitem__)
    other[other.index(largest)] = min(other, key=sizes.__getitem__)
    resealed(copy, lambda own: own.update(ranks=[runtime["ranks"][0], other]))
    with pytest.raises(ArtifactError, match="its graph does not fit its weights"):
        qcompile.rebuild(copy)


def test_sums_over_other_ranks_are_refused(copy: Path) -> None:
    graph = json.loads((copy / STEP).read_text())
    sums = node(graph, "all_reduce")
    sums["args"][-1] = 3
    (copy / STEP).write_text(json.dumps(graph))
    sealed_again(copy, STEP)
    with pytest.raises(ArtifactError, match=r"sums over \[2, 3\] ranks, and 2 are to run it"):
        qcompile.rebuild(copy)
