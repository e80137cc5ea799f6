"""Reads the final hidden states of a step from a GPU's memory (codegen/gpu/hidden.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from qcompile.runtime.cuda.driver import Driver
from qcompile.runtime.cuda.memory import DeviceMemory
from qcompile.runtime.sampling.arrays import FloatArray


def why_not(plan: Mapping[str, Any]) -> str:
    """Why a plan's hidden states cannot be read, and what to do, as the rest of a sentence; "" if they can."""
    if "hidden" not in plan:
        return "it was built by an earlier version of qcompile: build it again"
    if not plan["hidden"]:
        return "passes have changed them: build it with a recipe without rotate, fold_norms and smooth, such as w4a8"
    return ""


def read_hidden(driver: Driver, memory: DeviceMemory, facts: Mapping[str, Any], rows: int) -> FloatArray:
    """The hidden states [rows, width] of the last step's first output rows, in float32, when the GPU has them."""

    def copied(operand: Mapping[str, Any], width: int, dtype: Any) -> Any:
        array = np.empty((rows, width), dtype)
        driver.download(array.ctypes.data, memory.activation(operand), array.nbytes, pinned=False)
        return array

    width, group = facts["width"], facts["group"]
    codes = copied(facts["x"], facts["stride"], np.int8 if facts["scales"] else np.uint16)[:, :width]
    if not facts["scales"]:
        values: FloatArray = (codes.astype(np.uint32) << 16).view(np.float32)  # bf16 is the upper half
        return values
    scale = copied(facts["scale"], facts["scales"], np.float32)
    return codes.astype(np.float32) * (np.repeat(scale, group, 1)[:, :width] if group else scale)
