"""Which paths draft for which.

A path is one program of the artifact. The first path is the target model. Each path after it proposes tokens to the
path before it: first the drafts that the recipe derives from the target, then separate draft models in the order given,
and last prompt lookup, which needs no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qcompile.artifact.describe import KernelFiles
from qcompile.calibration import Calibration, CalibrationSource
from qcompile.checkpoints.tokenizer_files import other_tokenizer
from qcompile.clock import Clock
from qcompile.codegen.lower import lower
from qcompile.codegen.packing import WeightTable
from qcompile.codegen.program import Program
from qcompile.errors import UnsupportedError, UsageError
from qcompile.graph import Graph, ModelInfo
from qcompile.heads.layout import is_head
from qcompile.passes.base import Pass, PassRecord, run_passes
from qcompile.passes.rewrite import ImportOptions, rewrite
from qcompile.recipes import RecipeDraft
from qcompile.report.figures import DraftFigures

LOOKUP = "lookup"
"""A draft without a model: it proposes what followed an earlier occurrence of the text's suffix (prompt lookup)."""

LOOKUP_STAGE = {"lookup": 8, "gamma": 7}
"""The longest suffix to look up, and the number of tokens to copy where a model would draft."""

SEPARATE_DRAFT = (4, 0.0)
"""Gamma and threshold of a separate draft model."""

REENCODING_DRAFT = (4, 0.4)
"""Gamma and threshold of a draft model with another tokenizer: its uncertain tokens are rarely the target's."""


@dataclass(frozen=True)
class DraftPath:
    """A draft path: its program, and the graph after each pass that led to it.

    `gamma` and `threshold` are described in recipes.RecipeDraft. If the path `shares_cache`, it reads and writes the
    target's KV cache. `tokenizer` is its tokenizer.json if that differs from the target's, and `start` is the first
    token of its texts (None if there is none).
    """

    name: str
    program: Program
    graphs: list[Graph]
    passes: list[PassRecord]
    shares_cache: bool
    gamma: int
    threshold: float
    tokenizer: bytes | None = None
    start: int | None = None

    @property
    def figures(self) -> DraftFigures:
        """The path for report.json."""
        program = json.loads(self.program.to_json())
        return DraftFigures(self.name, program, self.shares_cache, [record.facts for record in self.passes])

    def stage(self, kernels: KernelFiles, places: Mapping[str, int]) -> dict[str, Any]:
        """The path's entry in the manifest; `places` has the index of each packed weight by name."""
        return {
            "path": self.name,
            "library": kernels.library(self.name),
            "gamma": self.gamma,
            "threshold": self.threshold,
            "weights": [places[name] for name in self.program.weights],
            "max_position": self.program.max_position,
            "kv": None if self.shares_cache else self.program.cache_facts,
            "passes": [record.facts for record in self.passes],
            **({"tokenizer": f"{self.name}/tokenizer.json"} if self.tokenizer else {}),
            "vocab_size": self.program.vocab_size,
            "bos_token_id": self.start,
        }


# ---- drafts that the recipe derives from the target ---------------------------------------------------


RecipeDrafts = Sequence[tuple[RecipeDraft, tuple[Pass, ...]]]
"""The drafts of a recipe, each with the passes that derive it from the quantized graph."""


def recipe_paths(drafts: RecipeDrafts, quantized: Graph, table: WeightTable, clock: Clock) -> list[DraftPath]:
    """The recipe's drafts, derived from the target's `quantized` graph: they share its weights and its cache.

    Raises UsageError if the options make a draft equal to the target.
    """
    paths: list[DraftPath] = []
    for draft, passes in drafts:
        graphs, records = run_passes(quantized, passes, clock)
        program = lower(graphs[-1], table)
        if not records[0].fired and not program.kv.hierarchical:
            raise UsageError("the recipe's draft is the target itself: set other speculate options")
        name = f"draft{len(paths) + 1}"
        paths.append(DraftPath(name, program, graphs, records, True, draft.gamma, draft.threshold))
    return paths


# ---- drafts that the user asks for ---------------------------------------------------------------------


@dataclass(frozen=True)
class Drafts:
    """The drafts of a build: the recipe's, separate models that `passes` compile, and whether lookup is the last."""

    recipe: RecipeDrafts
    models: tuple[Any, ...]
    passes: tuple[Pass, ...]
    lookup: bool

    @staticmethod
    def of(drafts: str | Path | Sequence[Any], recipe: RecipeDrafts, passes: tuple[Pass, ...]) -> Drafts:
        """The drafts in the form that `build` takes, after those of the recipe.

        Raises UsageError if lookup is not the last, UnsupportedError for a draft head.
        """
        listed = (drafts,) if isinstance(drafts, str | Path) else tuple(drafts)
        for draft in listed:
            if isinstance(draft, str | Path) and is_head(Path(draft)):
                raise UnsupportedError(
                    f"draft {draft} is a draft head, which reads hidden states of the model: heads are not compiled yet"
                )
        if LOOKUP in listed[:-1]:
            raise UsageError(f"{LOOKUP} must be the last draft: it can only draft for others")
        return Drafts(recipe, tuple(draft for draft in listed if draft != LOOKUP), passes, LOOKUP in listed)


@dataclass(frozen=True)
class SeparateDraft:
    """A separate draft model that `passes` compile, and its tokenizer.json if that differs from the target's.

    `alone` says whether it is the only draft.
    """

    model: Any
    passes: tuple[Pass, ...]
    tokenizer: bytes | None
    alone: bool

    @property
    def depth(self) -> tuple[int, float]:
        """Gamma and threshold."""
        return SEPARATE_DRAFT if self.tokenizer is None else REENCODING_DRAFT

    def calibration(self, given: CalibrationSource | None, known: Calibration | None) -> CalibrationSource | None:
        """What to calibrate the draft on: the text `given` for the build, or the tokens `known` for the target.

        Token ids mean nothing to a draft with another tokenizer, so such a draft is calibrated only on a text.
        """
        text = given is not None and not isinstance(given.given, torch.Tensor)
        if self.tokenizer is not None or (text and isinstance(self.model, (str, Path))):
            return given if text else None
        return CalibrationSource(known.tokens) if known else None

    def check(self, info: ModelInfo, target: ModelInfo) -> None:
        """Raise UnsupportedError if the draft with the facts `info` cannot propose tokens to the target."""
        if self.tokenizer is not None and not self.alone:
            raise UnsupportedError(f"draft {info.name} has another tokenizer: it can only draft alone")
        if self.tokenizer is None and info.vocab_size != target.vocab_size:
            raise UnsupportedError(f"draft {info.name} has {info.vocab_size} tokens, the model {target.vocab_size}")

    def path(self, name: str, target: Graph, options: ImportOptions, table: WeightTable, clock: Clock) -> DraftPath:
        """The draft as a path called `name`; `target` is the quantized graph of the target model."""
        how = ImportOptions({}, self.calibration(options.calib, target.calibration), kept=options.kept)
        graphs, records = rewrite(self.model, self.passes, how, clock)
        info = graphs[-1].info
        self.check(info, target.info)
        program = lower(graphs[-1], table, f"{name}.")
        if self.tokenizer is not None and program.states.layers:
            raise UnsupportedError(
                f"draft {info.name} has recurrent states and another tokenizer, which do not go together"
            )
        return DraftPath(name, program, graphs, records, False, *self.depth, self.tokenizer, info.bos_token_id)


# ---- all drafts -----------------------------------------------------------------------------------------


def draft_paths(
    model: Any, graphs: list[Graph], drafts: Drafts, options: ImportOptions, table: WeightTable, clock: Clock
) -> list[DraftPath]:
    """The drafts of the target `model`, in order: the recipe's, then the separate models.

    `graphs` are the target's after each pass, and `options` say how the target was imported. Raises QCompileError.
    """
    quantized = [graph for graph in graphs if graph.stage == "quantize"][-1]
    paths = recipe_paths(drafts.recipe, quantized, table, clock)
    alone = not paths and len(drafts.models) + drafts.lookup == 1
    for other in drafts.models:
        draft = SeparateDraft(other, drafts.passes, other_tokenizer(model, other), alone)
        paths.append(draft.path(f"draft{len(paths) + 1}", quantized, options, table, clock))
    return paths


# ---- the manifest --------------------------------------------------------------------------------------


def draft_stages(
    paths: Sequence[DraftPath], lookup: bool, kernels: KernelFiles, weights: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The draft stages in the manifest (`runtime.levels`): an entry for each draft path, then one for prompt lookup.

    `weights` is the manifest's runtime.weights, which starts with the target's.
    """
    places = {entry["name"]: index for index, entry in enumerate(weights)}
    return [path.stage(kernels, places) for path in paths] + ([dict(LOOKUP_STAGE)] if lookup else [])
