"""Passes of other packages: found by module and class, or by entry point, and placed among the passes of a build."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any

from qcompile.errors import UsageError, shown, suggestion
from qcompile.passes.base import Pass
from qcompile.plugins.entries import entries

_FORM = "write module:Class, or the name of an installed pass, and perhaps @after=PASS"


@dataclass(frozen=True)
class ExtraPass:
    """A pass of another package, by the text `spec` that names it, and the pass `after` which it runs."""

    spec: str
    kind: type[Pass]
    after: str

    def made(self, values: dict[str, object]) -> Pass:
        """The pass, with `values` for its fields; a field `enabled` is True unless they say otherwise."""
        names = [field.name for field in fields(self.kind)]
        return self.kind(**{name: True for name in names if name == "enabled"} | values)


def extra_pass(spec: str, own: Sequence[str] = ()) -> ExtraPass:
    """The pass that `module:Class@after=PASS` or `NAME@after=PASS` names. Raises UsageError.

    own: the names of qcompile's passes, for messages.
    It runs after `raise` unless the text says otherwise. Its module is imported.
    """
    target, at, after = spec.partition("@")
    anchor = after.removeprefix("after=")
    if not target or (at and (anchor == after or not anchor)):
        raise UsageError(f"pass {spec}: {_FORM}")
    kind = _imported(spec, target) if ":" in target else _installed(target, own)
    if not (isinstance(kind, type) and issubclass(kind, Pass) and is_dataclass(kind)):
        raise UsageError(f"pass {spec}: {shown(kind)} is no dataclass that inherits from qcompile.passes.base.Pass")
    if not isinstance(getattr(kind, "name", None), str) or inspect.isabstract(kind):
        raise UsageError(f"pass {spec}: the class needs a `name` and a method `run`")
    for field in fields(kind):
        if field.default is MISSING:
            raise UsageError(f"pass {spec}: field {field.name} needs a default")
    return ExtraPass(spec, kind, anchor or "raise")


def _imported(spec: str, target: str) -> Any:
    module, _, name = target.partition(":")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # the module's own code runs, and may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(f"pass {spec} cannot be imported: {reason}") from error


def _installed(name: str, own: Sequence[str]) -> Any:
    known = entries("qcompile.passes")
    if name not in known:
        if name in own:
            raise UsageError(f"pass {name} is a part of qcompile already: --set {name}.FIELD=VALUE sets what it does")
        there = (
            f"there are {', '.join(known)}{suggestion(name, known)}"
            if known
            else f"no package adds any{suggestion(name, own)}"
        )
        raise UsageError(f"pass {name} is not installed; {there}. {_FORM[0].upper()}{_FORM[1:]}")
    return known[name].load()


def check_names(extra: Sequence[ExtraPass], known: Iterable[str]) -> None:
    """Raise UsageError for two passes of one name."""
    taken = set(known)
    for one in extra:
        if one.kind.name in taken:
            raise UsageError(f"pass {one.spec}: there is a pass {one.kind.name} already")
        taken.add(one.kind.name)


def placed(passes: Sequence[Pass], extra: Sequence[tuple[str, Pass]]) -> tuple[Pass, ...]:
    """`passes` with each (after, pass) of `extra` after the pass of that name; those of one place in their order.

    Raises UsageError for a place that there is not.
    """
    result = list(passes)
    last: dict[str, str] = {}
    for after, rewrite in extra:
        names = [one.name for one in result]
        if after not in names:
            there = f"there are {', '.join(names)}{suggestion(after, names)}"
            raise UsageError(f"pass {rewrite.name} is to run after {after}, which is no pass; {there}")
        result.insert(names.index(last.get(after, after)) + 1, rewrite)
        last[after] = rewrite.name
    return tuple(result)


def check_stages(passes: Sequence[Pass], extra: Collection[str]) -> None:
    """Raise UsageError if one of the passes `extra`, by name, stands where it does not accept the graph's stage."""
    stage, before = "import", ""
    for rewrite in passes:
        if rewrite.name in extra and rewrite.requires and stage not in rewrite.requires:
            wanted = " or ".join(rewrite.requires)
            raise UsageError(f"pass {rewrite.name} needs a graph at stage {wanted}; after {before} it is at {stage}")
        stage, before = (rewrite.ensures if rewrite.wanted else None) or stage, rewrite.name
