"""The command `run`, and what generating commands print."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qcompile.cli import console
from qcompile.cli.options import Artifact, DraftedLoading, Json, Sampling, command

if TYPE_CHECKING:
    from qcompile.runtime.llm import LLM
    from qcompile.runtime.outputs import RequestOutput
    from qcompile.runtime.sampling.params import SamplingParams


@command
def run(
    out: Artifact,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", metavar="TEXT", help="Text to continue; `-` reads standard input.")
    ],
    sampling: Sampling,
    loading: DraftedLoading,
    json: Json = False,
) -> None:
    """Generate text. Prints the prompt and its continuation to stdout as they come, the speed to stderr.

    \b
    Example:
      qcompile run out/pycode --prompt "def main(" --max-tokens 64
    """
    params = sampling.params()
    text = console.everything() if prompt == "-" else prompt
    with loading.load(out) as llm:
        _run_prompt(llm, text, params, json)


def _run_prompt(llm: LLM, prompt: str, params: SamplingParams, as_json: bool) -> None:
    """Generate from one prompt and print it: text as it comes, or one JSON document at the end."""
    stream = llm.stream(prompt, params)  # refuses the prompt before any of it is printed
    if not as_json:
        print(prompt, end="", flush=True)
    last = show(stream, quiet=as_json)
    result = result_of(last, llm.engine.speculation.active)
    if as_json:
        console.print_json(result)
        return
    print(flush=True)
    speed = result["decode_tokens_per_second"]
    note = f", {speed:.1f} tokens/s" if speed else ""
    if last.speculation:
        note += f", {last.speculation.tokens_per_round:.2f} tokens a round"
    if llm.threads:
        note += f", {console.counted(llm.threads, 'thread')}"
    prompted = console.counted(len(last.prompt_token_ids), "prompt token")
    console.log(f"[{prompted} in {result['prefill_seconds'] * 1e3:.1f} ms, {len(result['token_ids'])} generated{note}]")


def show(stream: Iterator[RequestOutput], quiet: bool) -> RequestOutput:
    """Follow a stream to its end, printing text as it is added unless `quiet`; returns the last output."""
    last = None
    for last in stream:
        if not quiet:
            print(last.outputs[0].new_text, end="", flush=True)
    assert last is not None, "a stream yields at least the finished output"
    return last


def result_of(output: RequestOutput, drafts: bool) -> dict[str, Any]:
    """What `run --json` prints. The first token belongs to prefill, so the decode speed is of the others.

    drafts: whether the model drafts; if it ran no round, the rates are null.
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
        names = ("rounds", "acceptance_rate", "tokens_per_round", "gamma", "draft_seconds", "verify_seconds")
        result |= {name: getattr(speculation, name) for name in (*names, "accepted_per_position")}
    return result
