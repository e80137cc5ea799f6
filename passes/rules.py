"""Rules: the formats that a user's recipe chooses for some of the linears (qcompile/recipe_files/rules.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import fx

from qcompile.errors import PassError, UsageError, suggestion
from qcompile.formats.activations import activation_format
from qcompile.formats.registry import weight_format
from qcompile.graph import Graph
from qcompile.passes.assign_precision import router_linears
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.decisions import formats_of
from qcompile.passes.roles import LinearSite, sites, weight_names
from qcompile.recipe_files.rules import GROUPS, Rule


@dataclass(frozen=True)
class Rules(Pass):
    """Decides the precision of the linears that `rules` select; `assign_precision` decides that of the others.

    Raises UsageError for a rule that selects no linear, and for two rules that choose different formats for one;
    PassError for a linear of which an earlier pass decided otherwise. Routers of experts stay in f32, with a note.
    """

    name: ClassVar[str] = "rules"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        for rule in self.rules:
            try:
                _ = rule.weight and weight_format(rule.weight)
                _ = rule.activation and activation_format(rule.activation)
            except UsageError as error:
                raise UsageError(f"rule {rule.name}: {error}") from None

    @property
    def wanted(self) -> bool:
        return bool(self.rules)

    def options(self) -> dict[str, Any]:
        """The rules as texts."""
        return {"rules": [str(rule) for rule in self.rules]}

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        linears, layers = sites(graph)
        chosen: dict[fx.Node, dict[str, tuple[str, Rule]]] = {}
        for rule in self.rules:
            for site in selected(rule, linears, layers):
                _choose(chosen.setdefault(site.node, {}), rule, site)
        for node, formats in chosen.items():
            node.meta["precision"] = dict(node.meta.get("precision") or {}) | {k: v for k, (v, _) in formats.items()}
        return PassResult(graph, len(chosen), tuple(self._routers(graph)))

    def _routers(self, graph: Graph) -> Iterable[str]:
        """Notes on routers with weights that a rule's pattern matches."""
        for node in sorted(router_linears(graph)):
            names = weight_names(graph, node)
            for rule in (rule for rule in self.rules if rule.names and _named(rule, names)):
                yield f"node {node.name}: rule {rule.name} matches {names[0]}, but routers of experts stay in f32"


def selected(rule: Rule, linears: list[LinearSite], layers: int) -> list[LinearSite]:
    """The linears that a rule selects, of all. Raises UsageError if there are none."""
    numbers = rule.numbers(layers)
    roles = {each for role in rule.roles for each in GROUPS.get(role, (role,))}
    chosen = [
        site
        for site in linears
        if site.layer in numbers and (not roles or roles & set(site.roles)) and _named(rule, site.names)
    ]
    if not chosen:
        raise UsageError(f"rule {rule.name} selects no linear{_hint(rule, linears, layers)}")
    return chosen


def _named(rule: Rule, names: Iterable[str]) -> bool:
    """Whether one of `names` matches a glob of the rule, if it has globs."""
    return not rule.names or any(fnmatchcase(name, glob) for name in names for glob in rule.names)


def _hint(rule: Rule, linears: list[LinearSite], layers: int) -> str:
    """What there is instead of what a rule asks for."""
    roles = dict.fromkeys(role for site in linears for role in site.roles)
    if rule.names and not any(_named(rule, site.names) for site in linears):
        names = [name for site in linears for name in site.names]
        near = suggestion(rule.names[0], names) or (f"; the first is {names[0]}" if names else "")
        return f": no weight of a linear is called {', '.join(rule.names)}{near}"
    return f": the model has {layers} layers and the roles {', '.join(roles)} (see `qcompile recipes FILE MODEL`)"


def _choose(formats: dict[str, tuple[str, Rule]], rule: Rule, site: LinearSite) -> None:
    """Add what `rule` chooses for a linear to the `formats` that other rules chose."""
    earlier = formats_of(site.node)
    for part, format in (("weight", rule.weight), ("activation", rule.activation)):
        if not format:
            continue
        other, by = formats.setdefault(part, (format, rule))
        if other != format:
            raise UsageError(f"rules {by.name} and {rule.name} choose {other} and {format} for the {part} of {site}")
        if earlier.get(part, format) != format:
            reason = f"rule {rule.name} chooses {part} {format}, but an earlier pass decided {earlier[part]}"
            raise PassError(Rules.name, site.node.name, reason)
