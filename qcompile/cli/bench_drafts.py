"""What the drafts of an artifact gain: speed with and without them on the same prompts, and how many are accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile import sample_text
from qcompile.cli.bench import Sizes
from qcompile.cli.load_test.workload import read_prompts
from qcompile.errors import UsageError
from qcompile.runtime.outputs import AUTO

if TYPE_CHECKING:
    from qcompile.runtime.llm import LLM
    from qcompile.runtime.outputs import RequestOutput

Progress = Callable[[str, int, int], None]

_PROMPTS, _PROMPT_TOKENS = 8, 64


def measure(llm: LLM, data: Path | None, sizes: Sizes, progress: Progress) -> dict[str, Any] | None:
    """Speed with and without drafts, of `sizes.tg` tokens after each of a few prompts; None if the model has no drafts.

    The prompts are those of the file `data`, without it the starts of documents of the package's text. They run one at
    a time. The runs are greedy, so that both give the same tokens, and alternate, so that a slow moment of the machine
    falls on both. Raises UsageError for a file without prompts.
    """
    speculation = llm.engine.speculation
    if not speculation.active:
        return None
    gamma = speculation.gamma
    prompts = _prompts(llm, data, sizes.tg)
    runs: dict[int | str, list[RequestOutput]] = {0: [], gamma: []}
    try:
        for done in range(sizes.repeats + 1):
            for each, outputs in runs.items():
                speculation.gamma = each  # type: ignore[assignment]  # a number or AUTO
                answers = [_generate(llm, prompt, sizes) for prompt in prompts]
                if done:  # the first time warms up, and `auto` learns the costs
                    outputs += answers
            progress("measuring drafts", done + 1, sizes.repeats + 1)
    finally:
        speculation.gamma = gamma
    return _figures(gamma, len(prompts), runs[0], runs[gamma])


def _prompts(llm: LLM, data: Path | None, tokens: int) -> list[list[int]]:
    """Prompts as tokens, as far as they leave room for `tokens` tokens more."""
    room = max(1, llm.context - tokens - 1)
    if data is None:
        most = min(_PROMPT_TOKENS, room)
        return [llm.encode(text, cut=True)[:most] for text in sample_text.documents()[:_PROMPTS]]
    asked = read_prompts(data)
    if any(query.given for query in asked):
        raise UsageError(f'{data} has "messages": they are for --serve, give lines with a "prompt" or a "text"')
    return [llm.encode(query.prompt, cut=True)[-room:] for query in asked]


def _generate(llm: LLM, prompt: list[int], sizes: Sizes) -> RequestOutput:
    """One greedy output of `sizes.tg` tokens."""
    return llm.generate([prompt], temperature=0, max_tokens=sizes.tg, ignore_eos=True, lora=sizes.adapter)[0]


def _figures(
    gamma: int | str, prompts: int, plain: Sequence[RequestOutput], drafted: Sequence[RequestOutput]
) -> dict[str, Any]:
    """What `bench --json` reports as `drafts`. The first token of each output belongs to its prompt."""
    from qcompile.runtime.outputs import SpeculationMetrics

    total = SpeculationMetrics()
    for output in drafted:
        if (one := output.speculation) is not None:
            total.rounds += one.rounds
            total.drafted = [a + b for a, b in zip(total.drafted, one.drafted, strict=True)]
            total.accepted = [a + b for a, b in zip(total.accepted, one.accepted, strict=True)]
    speeds = [_speed(plain), _speed(drafted)]
    return {
        "gamma": "auto" if gamma == AUTO else gamma,
        "prompts": prompts,
        "tokens": sum(len(output.outputs[0].token_ids) for output in drafted),
        "plain_tokens_per_second": speeds[0],
        "drafted_tokens_per_second": speeds[1],
        "gain": speeds[1] / speeds[0],
        "rounds": total.rounds,
        "acceptance_rate": total.acceptance_rate,
        "tokens_per_round": total.tokens_per_round,
        "accepted_per_position": total.accepted_per_position,
    }


def _speed(outputs: Sequence[RequestOutput]) -> float:
    """Tokens per second after the first tokens."""
    tokens = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    return tokens / max(sum(output.metrics.decode_seconds for output in outputs), 1e-9)


def as_text(figures: dict[str, Any]) -> str:
    """The figures in two lines."""
    plain, drafted = figures["plain_tokens_per_second"], figures["drafted_tokens_per_second"]
    speeds = f"{drafted:.1f} tokens/s with drafts, {plain:.1f} without: {figures['gain']:.2f} times"
    if figures["acceptance_rate"] is None:
        return f"drafts (gamma {figures['gamma']}): {speeds}; nothing was drafted, as plain steps are faster"
    places = ", ".join(f"{share:.2f}" for share in figures["accepted_per_position"])
    return (
        f"drafts (gamma {figures['gamma']}): {speeds}\n"
        f"accepted {figures['acceptance_rate']:.3f} of them (by position {places}), "
        f"{figures['tokens_per_round']:.2f} tokens a round"
    )
