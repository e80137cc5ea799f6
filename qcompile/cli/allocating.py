"""Bits that `build` distributes: options of the recipe's own allocation, or the mix of a study of sensitivity."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from qcompile import texts
from qcompile.cli import console
from qcompile.cli.options import BitBudget
from qcompile.errors import UsageError
from qcompile.recipe_files.resolved import Resolved, resolve
from qcompile.recipes import allocation, get_recipe

_AUTO = "auto"
"""The recipe that chooses formats; only with it a study is read."""
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) *(?P<unit>[KMGT]?)(?P<binary>i?)B?", re.IGNORECASE)


def options_of(budget: BitBudget) -> dict[str, str]:
    """The options of passes for a budget. A study's budget is none of them: the recipe that it gives has rules."""
    if budget.study is None:
        if budget.size is not None:
            raise UsageError("--target-size needs --study: it limits the bytes of the mix that a study gives")
        return allocation(budget.bits, budget.rise)
    if budget.rise is not None:
        raise UsageError("--max-perplexity-increase is not for --study: give --target-bits or --target-size")
    if budget.bits is not None and budget.size is not None:
        raise UsageError("--target-bits and --target-size: give one of them, the other follows")
    if budget.size is not None:
        bytes_of(budget.size)
    return {}


def check(budget: BitBudget, recipe: Resolved, head: str | None) -> None:
    """Refuse a study that is no file, and what contradicts one."""
    if budget.study is None:
        return
    texts.check(budget.study)
    if recipe.name != _AUTO:
        raise UsageError(f"--study is for recipe {_AUTO}, which mixes formats: {recipe.name} has formats of its own")
    if head is not None:
        raise UsageError("--head-dtype and --study: the mix of a study chooses the format of the output head, too")


def tell(budget: BitBudget, recipe: Resolved, text: Path | None) -> None:
    """Say by what recipe auto chooses, where no study does."""
    if budget.study is None and recipe.name == _AUTO:
        why = "by salience on the calibration text" if text is not None else "by rounding errors, as no text is given"
        console.note(
            f"qcompile: recipe {_AUTO} gives output features 4 or 8 bits, {why}; --study FILE mixes formats by what "
            "`qcompile sensitivity --json` has measured"
        )


def mixed(budget: BitBudget, model: str, target: str, options: Mapping[str, str]) -> Resolved:
    """The recipe that the study of `budget` gives for `model`; says which it is. Imports torch. Raises UsageError."""
    from qcompile.passes.sensitivity.mixes import bits_for
    from qcompile.passes.sensitivity.saved import read_study

    assert budget.study is not None
    saved = read_study(budget.study)
    local = {"model": Path(model).name} if Path(model).exists() else {}
    saved.require(**local, target=target)
    base = resolve(saved.facts["recipe"], options)
    usual = {(name, field): value for name, field, value in get_recipe(_AUTO).extra}["salience", "target_bits"]
    bits = budget.bits if budget.bits is not None else float(str(usual))
    if budget.size is not None:
        bits = bits_for(saved.losses, bytes_of(budget.size))
    recipe = saved.recipe(base, bits, _AUTO)
    formats = Counter(rule.weight for rule in recipe.rules)
    others = ", ".join(f"{count} x {name}" for name, count in formats.items()) or "none"
    console.note(
        f"qcompile: recipe {_AUTO} takes the mix of {budget.study} for at most {bits:.3f} bits: {recipe.description}; "
        f"rules over {base.name}: {others}"
    )
    return recipe


def bytes_of(size: str) -> int:
    """`500MB`, `1.5GiB` or `1000` in bytes. Raises UsageError."""
    given = _SIZE.fullmatch(size.strip())
    if given is None:
        raise UsageError(f"--target-size {size}: write bytes, such as 500MB or 1.5GiB")
    power = "KMGT".find(given["unit"].upper()) + 1 if given["unit"] else 0
    return int(float(given["number"]) * (1024 if given["binary"] else 1000) ** power)
