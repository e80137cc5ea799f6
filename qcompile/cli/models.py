"""A model given in place of an artifact: built into the user's cache when it is first needed, and found there later."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile import __version__
from qcompile.artifact import kept, reader, rebuilt
from qcompile.artifact.layout import MANIFEST
from qcompile.checkpoints import hub
from qcompile.checkpoints.contents import check_form
from qcompile.checkpoints.gguf.files import is_file as is_gguf
from qcompile.checkpoints.identity import identity
from qcompile.checkpoints.model_names import name_of
from qcompile.cli import calibrating, console, machine, refusals
from qcompile.cli.estimate import Estimate
from qcompile.cli.options import Building, Loading, divided
from qcompile.errors import ArtifactError, UsageError
from qcompile.plugins.entries import installed
from qcompile.recipe_files.resolved import Resolved, resolve
from qcompile.recipes import parse_options
from qcompile.targets import get_target

if TYPE_CHECKING:
    from qcompile.artifact.rebuilt import RebuiltKernels
    from qcompile.pipeline import BuildReport
    from qcompile.runtime.llm import LLM


@dataclass(frozen=True)
class Artifact:
    """An artifact to load, the name of its model for people and clients, and whether it is of the user's cache.

    foreign: whether its own machine code is not to be loaded, but compiled again from its graph.
    """

    path: Path
    name: str
    kept: bool
    foreign: bool = False


@contextlib.contextmanager
def opened(given: str, building: Building, loading: Loading, **more: Any) -> Iterator[tuple[LLM, Artifact]]:
    """The model of the artifact or model `given`, loaded, and its artifact. `more` are arguments of `load`.

    An artifact in the cache that turns out to be damaged is built again.
    """
    artifact = artifact_to_load(given, building, loading)
    start = time.monotonic()
    more |= {"kernels": _rebuilt(artifact.path)} if artifact.foreign else {}
    try:
        llm = loading.load(artifact.path, **more)
    except ArtifactError as error:
        if not artifact.kept:
            raise
        console.note(f"qcompile: {error}")
        artifact = artifact_of(given, replace(building, rebuild=True), loading.tensor_parallel_size)
        llm = loading.load(artifact.path, **more)
    if unlisted := reader.unlisted_files(artifact.path, llm.manifest["files"]):
        others = f" and {len(unlisted) - 1:,} more" if unlisted[1:] else ""
        console.note(f"qcompile: {artifact.path} has files that its manifest does not list: {unlisted[0]}{others}")
    console.detail(f"loaded {artifact.path} in {time.monotonic() - start:.2f} s")
    with llm:
        yield llm, artifact


def _rebuilt(path: Path) -> RebuiltKernels:
    """The kernels of an artifact, compiled from its graph unless the user's cache has them."""
    if (known := rebuilt.recall(path, reader.read_checked_manifest(path))) is not None:
        return known
    with console.Progress() as progress, _few_collections():
        progress("import", 0, 1)
        from qcompile import pipeline  # waits for torch

        return pipeline.rebuild(path, progress)


def artifact_to_load(given: str, building: Building, loading: Loading) -> Artifact:
    """`artifact_of` for these options of loading, which are checked before anything is built. Raises QCompileError."""
    loading.arguments()
    if loading.require_signature is not None and not (Path(given) / MANIFEST).is_file():
        raise UsageError(
            f"{given} is no artifact that could be signed, and a signature is required: make one by `qcompile build` "
            "and `qcompile sign`"
        )
    return artifact_of(given, building, loading.tensor_parallel_size)


def artifact_of(given: str, building: Building, ranks: int | None = None) -> Artifact:
    """The artifact `given`, or that of the model `given`, which is built now unless the cache has it.

    A model is built for `ranks` processes that run it together.
    `given` is the directory of an artifact or a checkpoint, or a name on the model hub. Raises QCompileError.
    """
    if not given:
        raise UsageError("the model's name is empty: give an artifact, a checkpoint directory, or a name on the hub")
    path = Path(given)
    if (path / MANIFEST).is_file():
        _check_unused(given, building)
        name = kept.KeptArtifact(path.resolve().parent).about.get("model") or path.resolve().name
        return Artifact(path, name, False, building.rebuild)
    request = _Request.of(given, building, divided(ranks))
    place = request.place
    console.detail(f"place in the cache: {place.folder}")
    if building.rebuild or not place.ready:
        with place.locked(lambda: console.note(f"qcompile: another command builds {given}: waiting for it")):
            if building.rebuild or not place.ready:
                request.build()
    place.use()
    return Artifact(place.artifact, request.name, True)


def _check_unused(given: str, building: Building) -> None:
    """Refuse options of building for an artifact, which they cannot change."""
    if unused := building.given("rebuild"):
        raise UsageError(f"{given} is an artifact, which is built already: {unused} is for models")


@dataclass(frozen=True)
class _Request:
    """A checkpoint in `directory`, named `name`, and all that decides what is built of it."""

    name: str
    directory: Path
    recipe: Resolved
    target: str
    allow_remote: bool
    reason: str
    place: kept.KeptArtifact

    @classmethod
    def of(cls, given: str, building: Building, more: dict[str, str]) -> _Request:
        """What the options and `more` options of passes ask for, and what fits this machine where they do not say."""
        options, remote = parse_options(building.options or []) | more, building.allow_remote_code
        device = _device(building)
        refusals.check_formats(building.recipe or "w8a8", building.target or "cpu", None, options)
        directory, name = _checkpoint(given, building)
        target, recipe, reason = building.target or "", building.recipe or "", ""
        if not (target and recipe):
            here = machine.this_machine(device)
            fit = machine.fit(here, directory)
            target, recipe = target or fit.target, recipe or fit.recipe
            if not building.recipe:
                reason = f" fits {here.text()}: {fit.reason} (--recipe chooses another)"
        with console.Progress() as progress:
            content = identity(directory, progress)
        facts = get_target(target).facts
        chosen = resolve(recipe, options)
        if chosen.passes:  # their code may change while their names stay
            raise UsageError(f"recipe {chosen.name} names passes of other packages: `qcompile build` it first")
        formats = chosen.name if chosen.is_plain else chosen.text()
        fields = dict(chosen.options)
        key = {"checkpoint": content, "recipe": formats, "target": facts, "options": fields, "remote code": remote}
        if fields or not chosen.is_plain:  # formats of other packages may be among them
            key |= {"packages": installed()} if installed() else {}
        return cls(name, directory, chosen, target, remote, reason, kept.place(name, key))

    def build(self) -> None:
        """Build the artifact into its place."""
        recipe = f"recipe {self.recipe.name}{self.reason}"
        console.note(f"qcompile: building {self.name} for target {self.target}; {recipe}")
        kept.remove_unfinished()
        estimate = Estimate(machine.count_weights(self.directory))
        with console.Progress(estimate) as progress, _few_collections():
            progress("import", 0, 1)
            report = self._compiled(progress)
        estimate.finish()
        for remark in report.remarks:
            console.note(f"qcompile: {remark}")
        size = console.byte_size(self.place.bytes)
        took = f"{sum(report.seconds.values()):.1f} s"
        console.note(f"qcompile: built in {took}, {size}, kept in {self.place.folder} (see `qcompile cache`)")

    def _compiled(self, progress: console.Progress) -> BuildReport:
        """Import the compiler, which waits for torch, and run it."""
        from qcompile import pipeline

        self.place.describe(
            {
                "model": self.name,
                "checkpoint": os.fsdecode(self.directory.resolve()),
                "recipe": self.recipe.name,
                "target": self.target,
                "options": dict(self.recipe.options),
                "qcompile": __version__,
            }
        )
        text = calibrating.text_for(self.recipe, self.directory)
        more: dict[str, Any] = {"calib": text, "progress": progress, "allow_remote": self.allow_remote}
        target, recipe = self.target, self.recipe
        return pipeline.build(
            str(self.directory), self.place.artifact, target=target, recipe=recipe, name=self.name, **more
        )


def _device(building: Building) -> str:
    """The kind of device to look for: the target's, if there is one. Raises UsageError if the options disagree."""
    if building.device not in machine.DEVICES:
        raise UsageError(f"--device {building.device}: write one of {', '.join(machine.DEVICES)}")
    if building.target is None:
        return building.device
    device = "cpu" if get_target(building.target).kind == "cpu" else "gpu"
    if building.device not in ("auto", device):
        raise UsageError(f"--device {building.device}: target {building.target} is for another device")
    return device


def _checkpoint(given: str, building: Building) -> tuple[Path, str]:
    """The directory of the checkpoint `given`, which is fetched if it is on the hub, and its name."""
    path = Path(given)
    if path.is_dir():
        if not (path / "config.json").is_file():
            check_form(path)
            raise UsageError(f"{given} is neither an artifact (no {MANIFEST}) nor a checkpoint (no config.json)")
    elif not (is_gguf(path) or hub.is_name(given)):
        raise UsageError(f"{given}: no such artifact directory or checkpoint{', but a file' if path.is_file() else ''}")
    with console.Progress() as progress:
        remote, revision, token = building.allow_remote_code, building.revision, building.token
        directory = hub.find(given, remote, revision=revision, token=token, progress=progress)
    return directory, name_of(directory)


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Imports and traces are not garbage: looking for it would take half a second."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
