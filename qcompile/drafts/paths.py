"""Which paths draft for which.

A path is one program of the artifact. The first path is the target model. Each path after it proposes tokens to the
path before it: first the drafts that the recipe derives from the target, then separate draft models in the order given,
and last prompt lookup, which needs no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from qcompile import ops
from qcompile.artifact.describe import KernelFiles
from qcompile.calibration import Calibration, CalibrationSource
from qcompile.checkpoints import remarks
from qcompile.checkpoints.tokenizer_files import other_tokenizer
from qcompile.clock import Clock
from qcompile.codegen.lower import lower
from qcompile.codegen.packing import WeightTable
from qcompile.codegen.program import Program
from qcompile.drafts.heads import MTP, EagleSource, HeadSource, ModuleSource
from qcompile.errors import UnsupportedError, UsageError
from qcompile.formats.kv import kv_format
from qcompile.graph import Graph, ModelInfo
from qcompile.heads.layout import is_head
from qcompile.heads.reading import HeadFile
from qcompile.passes.base import Pass, PassRecord, run_passes
from qcompile.passes.cache import behind_cache
from qcompile.passes.rewrite import ImportOptions, Rewritten, rewrite
from qcompile.recipes import RecipeDraft
from qcompile.report.figures import DraftFigures
from qcompile.targets import Target

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
    token of its texts (None if there is none). `tokens` are the target's tokens that a draft head proposes, int32 by
    their numbers in the head; None if these are the same. `others` are the graphs of the path of ranks 1 and up, if all
    ranks of a divided model compute it, and `ranks` the programs of all of them.
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
    tokens: bytes | None = None
    others: Sequence[Graph] = ()
    ranks: Sequence[Program] = ()

    @property
    def files(self) -> dict[str, bytes]:
        """The path's files of other kinds than programs and kernels, by name."""
        files = {"tokenizer.json": self.tokenizer, "tokens.bin": self.tokens}
        return {f"{self.name}/{name}": content for name, content in files.items() if content}

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
            **({"ranks": [[places[name] for name in one.weights] for one in self.ranks]} if self.ranks else {}),
            "max_position": self.program.max_position,
            "kv": None if self.shares_cache else self.program.cache_facts,
            "passes": [record.facts for record in self.passes],
            **({"tokenizer": f"{self.name}/tokenizer.json"} if self.tokenizer else {}),
            **({"features": self.program.features} if self.program.reads_features else {}),
            **({"tokens": f"{self.name}/tokens.bin"} if self.tokens else {}),
            "vocab_size": self.program.vocab_size,
            "bos_token_id": self.start,
        }


# ---- drafts that the recipe derives from the target ---------------------------------------------------


RecipeDrafts = Sequence[tuple[RecipeDraft, tuple[Pass, ...]]]
"""The drafts of a recipe, each with the passes that derive it from the quantized graph."""


Divide = Callable[[Sequence[Graph], Sequence[Pass]], list[Graph]]
"""The last graphs of ranks 1 and up, from those of rank 0 after each pass (passes/rank_graphs.py)."""


def recipe_paths(
    drafts: RecipeDrafts, quantized: Graph, table: WeightTable, clock: Clock, divide: Divide
) -> list[DraftPath]:
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
        others = divide([quantized, *graphs], passes)
        paths.append(DraftPath(name, program, graphs, records, True, draft.gamma, draft.threshold, others=others))
    return paths


# ---- drafts that the user asks for ---------------------------------------------------------------------


class DraftPasses(NamedTuple):
    """The passes of a separate draft model and of a draft head, for `target`."""

    target: Target
    separate: tuple[Pass, ...]
    head: tuple[Pass, ...]


@dataclass(frozen=True)
class Drafts:
    """The drafts of a build: the recipe's, separate models that `passes` compile, and whether lookup is the last.

    Or `head` is the only draft, or the only one before lookup.
    """

    recipe: RecipeDrafts
    models: tuple[Any, ...]
    passes: tuple[Pass, ...]
    lookup: bool
    head: HeadDraft | None = None

    @staticmethod
    def of(drafts: str | Path | Sequence[Any], recipe: RecipeDrafts, passes: DraftPasses, model: Any) -> Drafts:
        """The drafts of `model` in the form that `build` takes, after those of the recipe.

        Raises UsageError if lookup is not the last, UnsupportedError for a draft head that cannot draft.
        """
        listed = (drafts,) if isinstance(drafts, str | Path) else tuple(drafts)
        if LOOKUP in listed[:-1]:
            raise UsageError(f"{LOOKUP} must be the last draft: it can only draft for others")
        models = tuple(draft for draft in listed if draft != LOOKUP)
        named = [draft for draft in models if isinstance(draft, str | Path)]
        heads = [draft for draft in named if draft == MTP or is_head(Path(draft))]
        if heads:
            lookup, own = LOOKUP in listed, heads[0] == MTP
            check_company(heads[0], passes.target, bool(recipe), len(models) > 1, lookup)
            source: HeadSource = ModuleSource.of(model) if own else EagleSource(HeadFile.open(Path(heads[0])))
            return Drafts(recipe, (), passes.separate, lookup, HeadDraft(source, passes.head))
        return Drafts(recipe, models, passes.separate, LOOKUP in listed)

    @property
    def any(self) -> bool:
        """Whether there are drafts."""
        return bool(self.recipe or self.models or self.lookup or self.head)

    def unknown_to_ranks(self, kind: str) -> str:
        """The drafts that processes of a divided model cannot run on a target of a `kind`; empty if there are none.

        All ranks compute the drafts of a recipe, and the first process looks up. On CPUs it has other models and heads
        for itself.
        """
        return f"draft models and heads on {kind} targets" if kind != "cpu" and (self.models or self.head) else ""

    def remarks(self, said: tuple[str, ...]) -> tuple[str, ...]:
        """The remarks `said` of the target, but for that on a module which drafts."""
        used = self.head is not None and isinstance(self.head.source, ModuleSource)
        return remarks.without_module(said) if used else said

    def of_target(self, passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
        """`passes` of the target model, and that by which it returns what a draft head reads."""
        return passes if self.head is None else behind_cache(passes, self.head.target_pass)


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


@dataclass(frozen=True)
class HeadDraft:
    """A draft head that `passes` compile."""

    source: HeadSource
    passes: tuple[Pass, ...]
    name: ClassVar[str] = "draft1"
    origin: ClassVar[str] = "draft1."

    @property
    def target_pass(self) -> Pass:
        """The pass by which a step of the target returns what the head reads."""
        return self.source.target_pass(self.origin)

    def check(self, graph: Graph, records: Sequence[PassRecord]) -> None:
        """Raise UnsupportedError if the head cannot draft for the target with this step `graph`."""
        named = f"draft {self.source.argument}"
        changed = [record.name for record in records if record.name in self.source.changing and record.fired]
        if changed:
            raise UnsupportedError(
                f"{named} reads hidden states as the model has them, which {changed[0]} changes: take a "
                "recipe without it, such as w4a8"
            )
        formats = {kv_format(ops.operand(node, "format")).hierarchical for node in graph.calls("rope_append")}
        if True in formats:
            raise UnsupportedError(f"{named}: heads do not draft over hierarchical caches yet")

    def path(self, graphs: list[Graph], records: Sequence[PassRecord], table: WeightTable, clock: Clock) -> DraftPath:
        """The head as a path, for the target with these `graphs` after each pass, the first of them raised."""
        self.check(graphs[-1], records)
        raised = next(graph for graph in graphs if graph.stage == "raise")
        tokens = self.source.tokens(raised.info.vocab_size)
        raising, *passes = behind_cache(self.passes, self.source.own_pass())
        own, done = run_passes(self.source.graph(raised, self.origin, raising, clock), tuple(passes), clock)
        if own[-1].calls("conv_step", "recurrence_step"):
            raise UnsupportedError(
                f"draft {self.source.argument}: heads with recurrent states of their own do not draft"
            )
        program = lower(own[-1], table)
        packed = None if tokens is None else tokens.numpy().tobytes()
        return DraftPath(self.name, program, own, done, False, *SEPARATE_DRAFT, tokens=packed)


def check_company(head: str | Path, target: Target, recipe: bool, others: bool, lookup: bool) -> None:
    """Raise UnsupportedError if `head` cannot draft among a `recipe`'s drafts or `others`, or lookup on `target`."""
    if recipe:
        raise UnsupportedError(
            f"draft {head} is a draft head, and the recipe has a draft of its own: "
            "take a recipe without one, such as w8a8"
        )
    if lookup and target.kind != "cpu":
        raise UnsupportedError(f"draft {head} is a draft head: no drafts follow a head on {target.name} yet")
    if others:
        raise UnsupportedError(f"draft {head} is a draft head: only {LOOKUP} can follow it, no other drafts yet")


# ---- all drafts -----------------------------------------------------------------------------------------


def draft_paths(
    model: Any,
    rewritten: Rewritten,
    drafts: Drafts,
    options: ImportOptions,
    table: WeightTable,
    clock: Clock,
    divide: Divide,
) -> list[DraftPath]:
    """The drafts of the target `model`, in order: the recipe's, then the separate models, or a head.

    `rewritten` are the target's graphs and passes, and `options` say how it was imported. `divide` makes the graphs of
    a recipe's draft for other ranks. Raises QCompileError.
    """
    graphs, records = rewritten
    if drafts.head is not None:
        return [drafts.head.path(graphs, records, table, clock)]
    whole = (graph for graph in graphs if graph.stage == "quantize" and not graph.calls("all_reduce"))
    quantized = [*whole][-1]  # drafts are divided after they are derived: groups of a row's inputs stay whole
    paths = recipe_paths(drafts.recipe, quantized, table, clock, divide)
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
