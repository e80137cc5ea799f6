"""The commands that generate text: `run` and `chat`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import qcompile
from qcompile import console
from qcompile.errors import UsageError

if TYPE_CHECKING:
    from qcompile.runtime.llm import LLM
    from qcompile.runtime.outputs import RequestOutput
    from qcompile.runtime.sampling import SamplingParams

Message = dict[str, str]
Render = Callable[[list[Message]], str]


def gamma_of(text: str) -> int:
    """`--gamma` as `load` takes it."""
    from qcompile.runtime.gamma import AUTO

    if text == "auto":
        return AUTO
    if not text.isdigit():
        raise UsageError(f"--gamma {text}: write a whole number, or auto")
    return int(text)


def run_prompt(
    out: Path, prompt: str, params: SamplingParams, threads: int | None, gamma: int, gpu_share: float, as_json: bool
) -> None:
    """Generate from one prompt and print it: text as it comes, or one JSON document at the end."""
    with qcompile.load(out, threads=threads, gamma=gamma, gpu_memory_utilization=gpu_share) as llm:
        if not as_json:
            print(prompt, end="", flush=True)
        last = _show(llm.stream(prompt, params), quiet=as_json)
    result = result_of(last)
    if as_json:
        console.print_json(result)
        return
    print(flush=True)
    speed = result["decode_tokens_per_second"]
    told = f", {speed:.1f} tokens/s" if speed else ""
    if last.speculation:
        told += f", {last.speculation.tokens_per_round:.2f} tokens a round"
    console.log(
        f"[{len(last.prompt_token_ids)} prompt tokens in {result['prefill_seconds'] * 1e3:.1f} ms, "
        f"{len(result['token_ids'])} generated{told}, {llm.threads} threads]"
    )


def _show(stream: Iterator[RequestOutput], quiet: bool) -> RequestOutput:
    """Follow a stream to its end, printing what is new; the last output."""
    last = None
    for last in stream:
        if not quiet:
            print(last.outputs[0].new_text, end="", flush=True)
    assert last is not None, "a stream yields at least the finished output"
    return last


def result_of(output: RequestOutput) -> dict[str, Any]:
    """What `run --json` prints. The first token belongs to prefill, so the decode speed is of the others."""
    sample, metrics = output.outputs[0], output.metrics
    decoded = len(sample.token_ids) - 1
    timed = decoded > 0 and metrics.decode_seconds > 0
    speculation = output.speculation
    found: dict[str, Any] = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "prefill_seconds": metrics.prefill_seconds,
        "decode_seconds": metrics.decode_seconds,
        "decode_tokens_per_second": decoded / metrics.decode_seconds if timed else None,
    }
    if speculation:
        names = ("acceptance_rate", "tokens_per_round", "gamma", "draft_seconds", "verify_seconds")
        found |= {name: getattr(speculation, name) for name in (*names, "accepted_per_position")}
    return found


def chat_loop(out: Path, params: SamplingParams, threads: int | None, as_json: bool) -> None:
    """Read a line, answer it, until the input ends. History is kept while it fits the context."""
    with qcompile.load(out, threads=threads) as llm:
        template = chat_template(out)
        if not template:
            console.log("No chat template: your text is continued as it stands. Ctrl-D ends.")
        talk = _Talk(llm, template)
        for line in _lines():
            last = _show(llm.stream(talk.prompt(line, params.max_tokens or 1), params), quiet=as_json)
            talk.answered(last.outputs[0].text)
            if as_json:
                console.print_json_line(result_of(last))
            else:
                print(flush=True)


class _Talk:
    """What was said so far. Without a template it is one text that grows."""

    def __init__(self, llm: LLM, template: Render | None) -> None:
        self._llm, self._template = llm, template
        self._messages: list[Message] = []

    def prompt(self, line: str, room: int) -> str:
        """The text to continue after the user said `line`, leaving `room` tokens; the oldest is forgotten first."""
        self._messages.append({"role": "user", "content": line})
        while len(self._messages) > 1 and self._length() + room > self._llm.context:
            del self._messages[:2]
        return self._render()

    def answered(self, text: str) -> None:
        """Remember the reply."""
        self._messages.append({"role": "assistant", "content": text})

    def _length(self) -> int:
        tokenizer = self._llm.tokenizer
        return len(tokenizer.encode(self._render()).ids) if tokenizer else 0

    def _render(self) -> str:
        if self._template:
            return self._template(self._messages)
        return "".join(message["content"] for message in self._messages)


def _lines() -> Iterator[str]:
    """Lines of stdin with their newline; asked for with a sign on stderr where a person types them."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line


def chat_template(out: Path) -> Render | None:
    """The artifact's chat template as a function of the messages, or None. Templates run in a sandbox."""
    source, special = _template_source(out)
    if source is None:
        return None
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    def render(messages: list[Message]) -> str:
        try:
            template = environment.from_string(source, {"raise_exception": refuse})
            return template.render(messages=messages, add_generation_prompt=True, **special)
        except TemplateError as error:
            raise UsageError(f"{out}: the chat template does not take this conversation: {error}") from error

    return render


def _template_source(out: Path) -> tuple[str | None, dict[str, str]]:
    """The template's text and the special tokens it may name."""
    config: dict[str, Any] = {}
    path = out / "tokenizer_config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
    special = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        if token:
            special[name] = token["content"] if isinstance(token, dict) else token
    alone = out / "chat_template.jinja"
    if alone.is_file():
        return alone.read_text(encoding="utf-8"), special
    source = config.get("chat_template")
    return (source if isinstance(source, str) else None), special
