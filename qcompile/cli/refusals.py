"""Wrong requests to compile a model that can be refused at once: before torch is imported, which takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from qcompile import recipes, targets
from qcompile.artifact.destination import check_replaceable
from qcompile.artifact.layout import MANIFEST
from qcompile.checkpoints import hub
from qcompile.checkpoints.contents import check_checkpoint
from qcompile.cli.pass_fields import pass_fields
from qcompile.errors import UsageError, suggestion
from qcompile.recipe_files.resolved import Resolved, resolve

NO_MODELS = ("lookup", "mtp")
"""The drafts that have no folder: a lookup, and the module of the checkpoint (qcompile/drafts)."""


def check_formats(
    recipe: str, target: str, head: str | None, options: Mapping[str, str], passes: Sequence[str] = ()
) -> Resolved:
    """The recipe. Refuses unknown ones, targets, output heads, passes and fields, and values of the wrong type.

    Modules of `passes` may be in the current folder, as those of Python's `-m` are.
    """
    targets.get_target(target)
    chosen = resolve(recipe, options, head, passes)
    if any(":" in spec for spec in passes) and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    known = pass_fields()
    fields = dict(chosen.options)
    if chosen.passes:  # fields of their own are known when they are imported
        fields = {name: text for name, text in fields.items() if name.rpartition(".")[0] in known}
    recipes.apply_options(chosen.settings(), known, fields)
    return chosen


def check_models(model: str, drafts: Sequence[str] = ()) -> None:
    """Refuse what is neither a checkpoint directory nor may be a name on the model hub."""
    for name in (model, *(draft for draft in drafts if draft not in NO_MODELS)):
        hub.check(name)
        if (Path(name) / MANIFEST).is_file():
            raise UsageError(f"{name} is an artifact, built already: give the folder of a model")
        check_checkpoint(Path(name))


def check_output(output: Path) -> None:
    """Refuse a place that cannot become an artifact."""
    check_replaceable(Path(os.path.realpath(output)))


def check_pass(option: str, name: str | None, recipe: Resolved) -> None:
    """Refuse the name of a pass that does not exist; `option` takes it. Passes of other packages are not known yet."""
    known = pass_fields()
    if name is not None and name not in known and not recipe.passes:
        hint = suggestion(name, known)
        raise UsageError(f"{option} {name}: there is no such pass; there are {', '.join(known)}{hint}")
