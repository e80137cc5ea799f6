"""All passes in the order in which they run, and the options of each: a recipe's settings, overridden by the user's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from qcompile import recipes
from qcompile.errors import UsageError, shown
from qcompile.formats.kv import kv_format
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import Pass
from qcompile.passes.cache import Cache
from qcompile.passes.calibration.calibrate import Calibrate
from qcompile.passes.calibration.learn_rounding import LearnRounding
from qcompile.passes.calibration.salience import Salience
from qcompile.passes.center_keys import CenterKeys
from qcompile.passes.extra import ExtraPass, check_names, check_stages, extra_pass, placed
from qcompile.passes.fold_norms import FoldNorms
from qcompile.passes.fuse import Fuse
from qcompile.passes.latent import Latent
from qcompile.passes.lora import Lora
from qcompile.passes.merge import Merge
from qcompile.passes.plan_memory import PlanMemory
from qcompile.passes.quantize import Quantize
from qcompile.passes.raising import Raise
from qcompile.passes.reorder import Reorder
from qcompile.passes.rotate import Rotate
from qcompile.passes.rotate_keys import RotateKeys
from qcompile.passes.rules import Rules
from qcompile.passes.shard import Shard
from qcompile.passes.smooth import Smooth
from qcompile.passes.smooth_attention import SmoothAttention
from qcompile.passes.speculate import Speculate
from qcompile.passes.split import Split
from qcompile.recipe_files.resolved import Resolved
from qcompile.targets import get_target

PASSES: tuple[type[Pass], ...] = (
    Raise,
    Split,
    FoldNorms,
    Rotate,
    Smooth,
    Latent,
    CenterKeys,
    SmoothAttention,
    RotateKeys,
    Reorder,
    Rules,
    AssignPrecision,
    Merge,
    Salience,
    Quantize,
    Speculate,
    Calibrate,
    LearnRounding,
    Shard,
    Cache,
    Fuse,
    Lora,
    PlanMemory,
)
"""All passes, in the order in which they run."""


def configure(
    settings: recipes.Settings, options: Mapping[str, str], added: Sequence[ExtraPass] = ()
) -> tuple[Pass, ...]:
    """The passes with a recipe's settings, overridden by the user's `pass.field=value` or `field=value` options.

    Passes `added` from other packages have their places among them. Raises UsageError listing the valid choices for an
    unknown pass or field, or a value of the wrong type.
    """
    kinds = (*PASSES, *(one.kind for one in added))
    defaults = {kind.name: {field.name: field.default for field in fields(kind)} for kind in kinds}
    values = recipes.apply_options(settings, defaults, options)
    passes = [kind(**values.get(kind.name, {})) for kind in PASSES]
    return placed(passes, [(one.after, one.made(values.get(one.kind.name, {}))) for one in added])


@dataclass(frozen=True)
class Schedule:
    """The passes of a build: those of `recipe`, and `extra` ones, which run after `raise`.

    `target` is the name of the target that salience measures costs for. Raises UsageError for an extra pass that cannot
    run.
    """

    recipe: Resolved
    target: str
    extra: tuple[Pass, ...] = ()

    def __post_init__(self) -> None:
        for rewrite in self.extra:
            _check_extra_pass(rewrite)

    @property
    def options(self) -> dict[str, str]:
        """The user's options of passes, as texts."""
        return dict(self.recipe.options)

    @property
    def _settings(self) -> recipes.Settings:
        return self.recipe.settings(get_target(self.target).kind)

    @cached_property
    def added(self) -> tuple[ExtraPass, ...]:
        """The passes of other packages that the recipe names. Raises UsageError."""
        own = [kind.name for kind in PASSES]
        added = tuple(extra_pass(spec, own) for spec in self.recipe.passes)
        check_names(added, [*own, *(rewrite.name for rewrite in self.extra)])
        return added

    def model_passes(self) -> tuple[Pass, ...]:
        """The passes of the target model, `raise` first.

        Raises UsageError for an unknown option, and for an option of `speculate` if the recipe makes no draft.
        """
        passes = _configured(self._settings, self.options, self.target, self.added)
        unused = [option for option in self.options if option.startswith(f"{Speculate.name}.")]
        if unused and not self.recipe.drafts:
            name = self.recipe.name
            raise UsageError(f"option {unused[0]}: recipe {name} derives no draft from the model; take one that does")
        passes = passes[:1] + self.extra + passes[1:]
        check_stages(passes, [one.kind.name for one in self.added])
        return passes

    def recipe_drafts(self) -> Iterator[tuple[recipes.RecipeDraft, tuple[Pass, ...]]]:
        """The recipe's drafts, each with the passes from `speculate` on that derive it from the quantized graph.

        That graph has gone through passes of other packages that stand before `cache`.
        """
        for draft in self.recipe.drafts:
            settings = self._settings | draft.settings(self.recipe.head)
            passes = configure(settings, _of_target(self.target) | self.options, self.added)
            names = [rewrite.name for rewrite in passes]
            done = {one.kind.name for one in self.added if names.index(one.kind.name) < names.index(Cache.name)}
            kept = [rewrite for rewrite in passes[names.index(Speculate.name) :] if rewrite.name not in done]
            yield (
                draft,
                tuple(rewrite.for_draft() if isinstance(rewrite, Cache | Lora) else rewrite for rewrite in kept),
            )


def scheduled(recipe: Resolved, target: str, passes: Sequence[Pass | str]) -> Schedule:
    """The schedule of a recipe and further passes: objects, or texts that name them (passes/extra.py)."""
    named = [one for one in passes if isinstance(one, str)]
    objects = tuple(one for one in passes if not isinstance(one, str))
    return Schedule(recipe.changed({}, passes=named), target, objects)


def separate_draft_passes(target: str) -> tuple[Pass, ...]:
    """The passes of a separate draft model for a target: those of its own recipe, whatever the target model's."""
    return _configured(_plain_settings(recipes.DRAFT_RECIPE, target), {}, target)


def draft_head_passes(target: str) -> tuple[Pass, ...]:
    """The passes of a draft head for a target: those of its own recipe."""
    return _configured(_plain_settings(recipes.HEAD_RECIPE, target), {}, target)


def _plain_settings(recipe: str, target: str) -> recipes.Settings:
    """The settings of the recipe called `recipe` for a target, as it is."""
    return recipes.get_recipe(recipe).settings(kind=get_target(target).kind)


def _configured(
    settings: recipes.Settings, options: Mapping[str, str], target: str, added: Sequence[ExtraPass] = ()
) -> tuple[Pass, ...]:
    """`configure` with the options of passes that depend on the target.

    GPUs have no kernels for hierarchical caches of heads as large as latents.
    """
    kind = get_target(target).kind
    passes = configure(settings, {**_of_target(target), **options}, added)
    (cache,) = (rewrite for rewrite in passes if isinstance(rewrite, Cache))
    if kind == "cpu" or not kv_format(cache.format).hierarchical:
        return passes
    return tuple(replace(rewrite, enabled=False) if isinstance(rewrite, Latent) else rewrite for rewrite in passes)


def _of_target(target: str) -> dict[str, str]:
    """The options of passes that depend on the target."""
    kind = get_target(target).kind
    return {"salience.target": target, "latent.kind": kind, "shard.head": str(kind == "cuda").lower()}


def _check_extra_pass(rewrite: object) -> None:
    """Raise UsageError if `rewrite` cannot run as an additional pass."""
    if not isinstance(rewrite, Pass):
        raise UsageError(f"passes must be instances of Pass, not {shown(rewrite)}")
    if rewrite.name in [kind.name for kind in PASSES]:
        raise UsageError(f"pass {rewrite.name} runs anyway: give its fields in options")
    if not rewrite.wanted:
        raise UsageError(f"pass {rewrite} is not enabled: give it with enabled=True")
