"""The inputs of sampling on a GPU (codegen/gpu_sample.py): each sequence's options and random numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from qcompile.runtime.cuda_driver import Driver
from qcompile.runtime.sampling import Draws

MOST_DRAWS = 1 << 16
"""Most random numbers of a call."""
_OPTIONS = 8


class CudaDraws:
    """Arrays of float64 on the GPU, with a copy in pinned host memory: 8 options a sequence, then random numbers."""

    def __init__(self, driver: Driver, sequences: int) -> None:
        self._driver, self._first = driver, _OPTIONS * sequences
        items = self._first + MOST_DRAWS
        driver.use()
        self._address = driver.allocate(8 * items, "random numbers")
        try:
            self._host_address = driver.pinned(8 * items)
        except BaseException:
            driver.free(self._address)
            raise
        self._host: Any = (ctypes.c_double * items).from_address(self._host_address)
        self.addresses = {"sampling": self._address, "draws": self._address + 8 * self._first}
        """Address of each array on the GPU."""

    def send(self, draws: Sequence[Draws], outputs: int) -> dict[str, int]:
        """Queue a copy to the GPU of the draws of a call, one for each sequence. Returns the counts of its launches."""
        drawn = any(draw.temperature for draw in draws)
        by_k, by_p = any(draw.top_k for draw in draws), any(draw.top_p < 1 for draw in draws)
        if drawn:
            at = self._first
            for index, draw in enumerate(draws):
                options = (draw.temperature, draw.top_p, draw.min_logit, draw.top_k)
                place = (draw.first, at - self._first, len(draw.uniforms), 0)
                self._host[_OPTIONS * index : _OPTIONS * (index + 1)] = (*options, *place)
                self._host[at : at + len(draw.uniforms)] = draw.uniforms
                at += len(draw.uniforms)
            self._driver.use()
            self._driver.upload(self._address, self._host_address, 8 * at)
        return {name: outputs if on else 0 for name, on in (("sampled", drawn), ("top_k", by_k), ("top_p", by_p))}

    def free(self) -> None:
        """Free the memory on both sides."""
        self._driver.free(self._address)
        self._driver.free_pinned(self._host_address)
