"""Which requests a server takes, before their prompts are encoded: a refusal is to take little time."""

from __future__ import annotations

from typing import Protocol

from qcompile.errors import BusyError, UsageError
from qcompile.runtime.sampling.params import SamplingParams


class ChecksParams(Protocol):
    """What is needed of a model."""

    def check(self, params: SamplingParams) -> None:
        """Raise UsageError for parameters that the model does not support."""


def check_admitted(llm: ChecksParams, params: SamplingParams, count: int, held: int, most: int) -> None:
    """Raise UsageError for a request of `count` samples that can never run, and BusyError if there is no room for it.

    held: samples that run or wait. most: how many may.
    """
    if count > most:
        raise UsageError(f"{count} samples in one request: at most {most} may run and wait")
    llm.check(params)
    if held + count > most:
        raise BusyError(f"{held} samples run or wait already, of at most {most}: try again later")
