"""The command `run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from qcompile.cli import console
from qcompile.cli.models import opened
from qcompile.cli.options import Adapting, Building, DraftedLoading, Json, Sampling, Source, command
from qcompile.cli.replies import result_of, show

if TYPE_CHECKING:
    from qcompile.runtime.llm import LLM
    from qcompile.runtime.sampling.params import SamplingParams


@command
def run(
    out: Source,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", metavar="TEXT", help="Text to continue; `-` reads standard input.")
    ],
    sampling: Sampling,
    building: Building,
    loading: DraftedLoading,
    adapting: Adapting,
    json: Json = False,
) -> None:
    """Generate text. Prints the prompt and its continuation to stdout as they come, the speed to stderr.

    \b
    Example:
      qcompile run samples/pycode-26m --prompt "def main("
      qcompile run out/pycode --prompt "def main(" --max-tokens 64
    """
    params = sampling.params(adapting.chosen())
    text = console.everything() if prompt == "-" else prompt
    with opened(out, building, loading, lora=adapting.named()) as (llm, _):
        _run_prompt(llm, text, params, json)


def _run_prompt(llm: LLM, prompt: str, params: SamplingParams, as_json: bool) -> None:
    """Generate from one prompt and print it: text as it comes, or one JSON document at the end."""
    stream = llm.stream(prompt, params)  # refuses the prompt before any of it is printed
    if not as_json:
        console.show_generated(prompt)
    last = show(stream, quiet=as_json)
    result = result_of(last, llm.engine.speculation.active, llm.engine.speculation.chooser)
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
    console.note(
        f"[{prompted} in {result['prefill_seconds'] * 1e3:.1f} ms, {len(result['token_ids'])} generated{note}]"
    )
