"""Features of rows in a GPU's memory: what the steps of a model return to its draft head, and what a head's read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qcompile.errors import ArtifactError
from qcompile.runtime.cuda.driver import Driver
from qcompile.runtime.cuda.memory import DeviceMemory
from qcompile.runtime.sampling.arrays import FloatArray


class DeviceFeatures:
    """f32 [rows, width] on the GPU, which slices read and write as those of an array; both wait for the GPU."""

    def __init__(self, driver: Driver, address: int, rows: int, width: int) -> None:
        self._driver, self.address = driver, address
        self.shape = (rows, width)
        self.wanted = True
        """Whether steps write them."""
        self._earlier: list[FloatArray] = []

    def begin(self, rows: int) -> int:
        """A call begins, with steps of `rows` rows: forget the rows of the last one. Returns how many it writes."""
        self._earlier.clear()
        return rows if self.wanted else 0

    def move(self, rows: int) -> None:
        """Take the first `rows` rows off the GPU, as the call goes on; its next rows come after them."""
        self._earlier.append(self._read(0, rows))

    def __getitem__(self, place: slice) -> FloatArray:
        moved = sum(map(len, self._earlier))
        start, end = place.start or 0, place.stop
        parts = [np.concatenate(self._earlier)[start : min(end, moved)]] if start < moved else []
        if end > moved:
            parts.append(self._read(max(start - moved, 0), end - moved))
        return np.concatenate(parts)[:: place.step or 1]

    def __setitem__(self, place: slice, features: FloatArray) -> None:
        given = np.ascontiguousarray(features, np.float32)
        self._driver.use()
        self._driver.upload(self._at(place.start or 0), given.ctypes.data, given.nbytes, pinned=False)

    def copy(self, at: int, source: DeviceFeatures, first: int, rows: int) -> None:
        """Queue a copy of `rows` rows of `source` from `first` on, to here from `at` on."""
        self._driver.use()
        self._driver.copy(self._at(at), source._at(first), rows * (self._at(1) - self.address))

    def gather(self, source: DeviceFeatures, spans: Sequence[tuple[int, int]]) -> FloatArray:
        """The rows of `source` in `spans` (first row, number), one after the other; they pass through this memory."""
        parts, at = list[FloatArray](), 0
        for first, many in _joined(spans):
            if at + many > self.shape[0]:
                parts.append(self._read(0, at))
                at = 0
            if many > self.shape[0]:
                parts.append(source._read(first, first + many))
            else:
                self.copy(at, source, first, many)
                at += many
        return np.concatenate([*parts, self._read(0, at)])

    def _read(self, first: int, end: int) -> FloatArray:
        read = np.empty((end - first, self.shape[1]), np.float32)
        self._driver.use()
        self._driver.download(read.ctypes.data, self._at(first), read.nbytes, pinned=False)
        self._driver.synchronize()
        return read

    def _at(self, row: int) -> int:
        return self.address + 4 * row * self.shape[1]


def _joined(spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Spans (first row, number) as few as possible: those that adjoin are one."""
    joined: list[list[int]] = []
    for first, many in spans:
        if joined and sum(joined[-1]) == first:
            joined[-1][1] += many
        elif many:
            joined.append([first, many])
    return joined


def feature_bytes(plan: Mapping[str, Any], rows: int) -> int:
    """Bytes that `allocate_features` takes for steps of `rows` rows."""
    width = plan.get("features", 0)
    return int(4 * rows * (width * (1 + plan["reads_features"]) + 1)) if width else 0


def allocate_features(
    driver: Driver, plan: Mapping[str, Any], memory: DeviceMemory
) -> tuple[DeviceFeatures, DeviceFeatures | None]:
    """The features that steps of a plan return, and those that a head's read, in memory that `memory` frees.

    Raises ArtifactError if the plan has none, and ResourceError.
    """
    if not plan.get("features"):
        raise ArtifactError("the artifact's kernels return no features to a draft head; build it again")
    driver.use()
    rows, width = memory.rows, plan["features"]
    made = []
    for name in ("features", "given")[: 1 + plan["reads_features"]]:
        memory.results[name] = memory.allocate(4 * rows * width, "features")
        made.append(DeviceFeatures(driver, memory.results[name], rows, width))
    if not plan["reads_features"]:
        return made[0], None
    memory.results["feature_rows"] = memory.allocate(4 * rows, "features")
    same = np.arange(rows, dtype=np.int32)
    driver.upload(memory.results["feature_rows"], same.ctypes.data, same.nbytes, pinned=False)
    driver.synchronize()
    return made[0], made[1]
