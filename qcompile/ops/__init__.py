"""The `qcompile::` operators: schema, fake kernel, torch reference body and stages of each, in one place.

The graph of every stage consists of these operators, so every stage can be run. Shapes use B batch, T tokens, M rows
of a step (the tokens of all sequences side by side), F features, H heads, D head size, V vocabulary. Leading
dimensions written `...` are free. References favor clarity over speed; generated kernels are tested against them.

`ops.linear` is the overload of qcompile::linear, and likewise for every operator that one of the modules defines. All
modules of this package are imported together with it, so importing any of them defines all operators; what depends on
operators depends on their names and schemas (registry.py, schema.py), not on the modules that define them.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from qcompile.ops.model import CURVES, GATE_BLOCK, GATED, NORMS, POWERS, QUICK, UNARY
from qcompile.ops.registry import DEFINED, STAGES, allowed, name_of, op, reference, with_trait
from qcompile.ops.schema import arguments, has_operand, named, operand, operands, set_operands

for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)

__all__ = [
    "CURVES",
    "DEFINED",
    "GATED",
    "GATE_BLOCK",
    "NORMS",
    "POWERS",
    "QUICK",
    "STAGES",
    "UNARY",
    "allowed",
    "arguments",
    "has_operand",
    "name_of",
    "named",
    "op",
    "operand",
    "operands",
    "reference",
    "set_operands",
    "with_trait",
]


def __getattr__(name: str) -> Any:
    if name not in DEFINED:
        raise AttributeError(f"module 'qcompile.ops' has no attribute {name!r}")
    return DEFINED[name]
