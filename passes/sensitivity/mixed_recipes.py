"""Recipes of mixes: a rule for each unit that the base recipe would round otherwise."""

from __future__ import annotations

import glob
from dataclasses import replace

from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.sensitivity.mixes import Mix, bits_of_mix
from qcompile.recipe_files.resolved import Resolved
from qcompile.recipe_files.rules import Rule, rule_of
from qcompile.recipes import RECIPES
from qcompile.targets import get_target


def mixed_recipe(recipe: Resolved, target: str, mix: Mix, loss: str, name: str) -> Resolved:
    """`recipe` with a rule for each unit that it would round otherwise than `mix`. loss: what it loses, as text."""
    usual = recipe.settings(get_target(target).kind)["assign_precision"] | {
        option.rpartition(".")[2]: text
        for option, text in recipe.options
        if option.rpartition(".")[0] in ("", AssignPrecision.name)
    }
    rules: dict[str, Rule] = {}
    for unit, pair in mix.items():
        head = "head" in unit.roles
        weight, activation = (usual["head" if head else "weight"], usual["head_activation" if head else "activation"])
        if (weight, activation) == (pair.weight, pair.activation):
            continue
        label, number = unit.name, 1
        while label in rules:
            label, number = f"{unit.name}_{number + 1}", number + 1
        names = [glob.escape(each) for each in unit.names]
        table = {"role": list(unit.roles), "layers": unit.layer, "names": names}
        rules[label] = rule_of(label, table | {"weight": pair.weight, "activation": pair.activation})
    about = f"{bits_of_mix(mix):.3f} bits per weight, mixed by sensitivity ({loss})"
    own = f"{name}-mixed" if name in RECIPES else name
    return replace(recipe, name=own, description=about, rules=tuple(rules.values()))
