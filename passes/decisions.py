"""Decisions about precision: a linear's formats, which a pass stores in node.meta["precision"], stand from then on.

The formats are a dict {"weight": name, "activation": name}; one of them may be missing, and `assign_precision` adds it.
"""

from __future__ import annotations

import re

from torch import fx

from qcompile.graph import Graph


def keep_precision(old: fx.Node, new: fx.Node) -> None:
    """Give the linear `new` the precision that an earlier pass decided for `old`, from which it is made, if any."""
    if "precision" in old.meta:
        new.meta["precision"] = old.meta["precision"]


def changed_decisions(graph: Graph, after: Graph, said: tuple[str, ...]) -> tuple[str, ...]:
    """Notes on precisions that were decided in `graph` and that a pass changed or lost; `after` is the pass's result.

    A pass that does so has its reasons, but users must hear of it: nodes that its own notes `said` name are left out.
    From `quantize` on, precisions describe gemms, and drafts change them on purpose.
    """
    decided = {node.name: formats_of(node) for node in graph.nodes if formats_of(node)}
    if not decided or (graph.stage, after.stage) != ("raise", "raise"):
        return ()
    told = set(re.findall(r"\w+", " ".join(said)))
    changes: dict[str, str] = {}
    for node in after.nodes:
        formats = formats_of(node)
        if any(formats.get(part) != format for part, format in decided.get(node.name, {}).items()):
            changes[node.name] = f"now {_text(formats)}"
    known, left = {node.name for node in graph.nodes}, {node.name for node in after.nodes}
    made = [node for node in after.calls("linear", "expert_linear") if node.name not in known]
    now = [formats_of(node) for node in made]
    if {} in now:
        gone = [name for name, formats in decided.items() if name not in left and formats not in now]
        changes |= dict.fromkeys(gone, "replaced by linears without it")
    return tuple(
        f"node {name}: an earlier pass decided {_text(decided[name])}, {change}"
        for name, change in changes.items()
        if name not in told
    )


def formats_of(node: fx.Node) -> dict[str, str]:
    """The formats of weights and activations that were decided for a linear; empty if none were."""
    precision = node.meta.get("precision") or {}
    return {part: precision[part] for part in ("weight", "activation") if part in precision}


def _text(formats: dict[str, str]) -> str:
    return " x ".join(formats.values()) or "undecided"
