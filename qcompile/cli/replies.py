"""What the commands that generate text print: text as it comes, and the facts of a finished reply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from qcompile.cli import console

if TYPE_CHECKING:
    from qcompile.runtime.outputs import RequestOutput
    from qcompile.runtime.speculation.controller import GammaController


def show(stream: Iterator[RequestOutput], quiet: bool) -> RequestOutput:
    """Follow a stream to its end, printing text as it is added unless `quiet`; returns the last output."""
    last = None
    for last in stream:
        if not quiet:
            console.show_generated(last.outputs[0].new_text)
    assert last is not None, "a stream yields at least the finished output"
    return last


def result_of(output: RequestOutput, drafts: bool, controller: GammaController | None = None) -> dict[str, Any]:
    """What `run --json` prints. The first token belongs to prefill, so the decode speed is of the others.

    drafts: whether the model drafts; if it ran no round, the rates are null. `gamma` is that of the last round alone,
    `drafted_per_round` is the mean of all. `auto` says why `controller` chose gamma, if it did.
    """
    from qcompile.runtime.outputs import SpeculationMetrics

    sample, metrics = output.outputs[0], output.metrics
    decoded = len(sample.token_ids) - 1
    timed = decoded > 0 and metrics.decode_seconds > 0
    speculation = output.speculation or (SpeculationMetrics() if drafts else None)
    result: dict[str, Any] = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "prefill_seconds": metrics.prefill_seconds,
        "decode_seconds": metrics.decode_seconds,
        "decode_tokens_per_second": decoded / metrics.decode_seconds if timed else None,
    }
    if speculation:
        rates = ("acceptance_rate", "tokens_per_round", "drafted_per_round", "accepted_per_position")
        names = ("rounds", *rates, "gamma", "draft_seconds", "verify_seconds")
        result |= {name: getattr(speculation, name) for name in names}
    if controller:
        from qcompile.runtime.speculation.explained import explained

        result["auto"] = [facts.json for facts in explained(controller)]
    return result
