"""What the host writes for the kernels that sample."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from qcompile.artifact.abi import GpuSamplingOptions
from qcompile.runtime.cuda.sampling import DeviceSampling
from qcompile.runtime.sampling.inputs import GREEDY, SamplingInputs
from qcompile.runtime.sampling.masks import Grammar, Masks
from tests.codegen.gpu.test_masks import Remainders
from tests.support.fake_driver import FakeDriver


def test_options_written_together_are_those_written_one_by_one() -> None:
    driver: Any = FakeDriver()
    sampling = DeviceSampling(driver, 8)
    masks = Masks(Grammar(Remainders(), frozenset(), None, Remainders).start(), 2)
    inputs = [
        SamplingInputs(0.7, 0.9, -3.5, 40, 11, [0.25, 0.5]),
        GREEDY,
        GREEDY._replace(first=7, masks=masks),
        SamplingInputs(1.5, 1.0, -math.inf, 0, 3, [0.125], masks=masks),
    ]
    numbers = np.ctypeslib.as_array(sampling._host)
    written = []
    for together in (True, False):
        numbers[:] = 9
        if together:
            ends = sampling._write_draws(inputs)
        else:
            ends = GpuSamplingOptions(uniforms_at=sampling._first)
            for index, each in enumerate(inputs):
                ends = sampling._write_sequence(index, each, ends)
        assert ends == GpuSamplingOptions(uniforms_at=sampling._first + 3)
        fields = len(GpuSamplingOptions._fields)
        written.append((numbers[: fields * len(inputs)].tolist(), numbers[sampling._first :][:4].tolist()))
    assert written[0] == written[1] and written[0][1] == [0.25, 0.5, 0.125, 9]
    sampling.free()
    assert not driver.memory
