"""All weight formats, by name."""

from __future__ import annotations

from qcompile.errors import UsageError
from qcompile.formats.asymmetric import W4_ASYM_G128
from qcompile.formats.floats import BF16, F32
from qcompile.formats.mixed import MIX_4_8
from qcompile.formats.mxfp4 import MXFP4
from qcompile.formats.nested import NESTED_4, NESTED_8_4
from qcompile.formats.qoq import QOQ_CHANNEL, QOQ_G128
from qcompile.formats.symmetric import W8_SYM_CHANNEL
from qcompile.formats.weight import WeightFormat

STORED_FORMATS: dict[str, WeightFormat] = {
    format.name: format
    for format in (F32, BF16, W8_SYM_CHANNEL, W4_ASYM_G128, QOQ_G128, QOQ_CHANNEL, MXFP4, NESTED_8_4, MIX_4_8)
}
"""Formats that tensors of an artifact can have."""
WEIGHT_FORMATS: dict[str, WeightFormat] = {**STORED_FORMATS, NESTED_4.name: NESTED_4}
"""Formats that a linear can have: those, and formats that read part of another one's tensors."""


def weight_format(name: str) -> WeightFormat:
    """The weight format called `name`. Raises UsageError if there is none."""
    if name not in WEIGHT_FORMATS:
        raise UsageError(f"weight format {name} is unknown; there are {', '.join(WEIGHT_FORMATS)}")
    return WEIGHT_FORMATS[name]
