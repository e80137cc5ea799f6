"""The commands that generate text: `run`, `chat` and `serve`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import qcompile
from qcompile.cli import console
from qcompile.cli.options import Artifact, CacheBytes, Gamma, GpuShare, Json, PrefixCaching, Threads
from qcompile.errors import ResourceError, UsageError

if TYPE_CHECKING:
    from qcompile.runtime.chat import Message, Render
    from qcompile.runtime.llm import LLM
    from qcompile.runtime.outputs import RequestOutput
    from qcompile.runtime.sampling.sampling import SamplingParams


def run(
    out: Artifact,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", metavar="TEXT", help="Text to continue; `-` reads standard input.")
    ],
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, metavar="N", help="Maximum number of tokens to generate.")
    ] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Sample from the k most likely tokens; 0 is no limit.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Sample from the most likely tokens of this total probability.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Minimum probability relative to the most likely token.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1 discourages repetition.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed for reproducible sampling.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop before this text; repeatable.")
    ] = None,
    kv_cache_bytes: CacheBytes = None,
    threads: Threads = None,
    gamma: Gamma = "auto",
    gpu_memory_utilization: GpuShare = 0.9,
    json: Json = False,
) -> None:
    """Generate text. Prints the prompt and its continuation to stdout as they come, the speed to stderr.

    \b
    Example:
      qcompile run out/pycode --prompt "def main(" --max-tokens 64
    """
    from qcompile import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or None,
        max_tokens=max_tokens,
    )
    text = console.everything() if prompt == "-" else prompt
    share, drafted = gpu_memory_utilization, _gamma_of(gamma)
    with qcompile.load(out, threads, kv_cache_bytes=kv_cache_bytes, gamma=drafted, gpu_memory_utilization=share) as llm:
        _run_prompt(llm, text, params, json)


def chat(
    out: Artifact,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, metavar="N", help="Maximum number of tokens per reply.")
    ] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="Sampling temperature; 0 is greedy.")] = 0.7,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Sample from the most likely tokens of this total probability.")
    ] = 0.95,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed for reproducible sampling.")] = None,
    kv_cache_bytes: CacheBytes = None,
    threads: Threads = None,
    gamma: Gamma = "auto",
    gpu_memory_utilization: GpuShare = 0.9,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per reply instead of text.")] = False,
) -> None:
    """Chat with a model line by line; Ctrl-D ends. Without a chat template it continues your text.

    \b
    Example:
      qcompile chat out/pycode
    """
    from qcompile import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    share, drafted = gpu_memory_utilization, _gamma_of(gamma)
    with qcompile.load(out, threads, kv_cache_bytes=kv_cache_bytes, gamma=drafted, gpu_memory_utilization=share) as llm:
        _chat_loop(llm, out, params, json)


def serve(
    out: Artifact,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 means all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", help="Model name for clients. Default: OUT's last part.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="QCOMPILE_API_KEY", help="API key that clients must send.")
    ] = None,
    max_batch: Annotated[
        int, typer.Option("--max-batch", min=1, metavar="N", help="Maximum number of samples that run at once.")
    ] = 16,
    max_waiting: Annotated[
        int,
        typer.Option(
            "--max-waiting", min=0, metavar="N", help="Maximum number of samples that wait; more get HTTP 429."
        ),
    ] = 256,
    kv_cache_bytes: CacheBytes = None,
    threads: Threads = None,
    gamma: Gamma = "auto",
    gpu_memory_utilization: GpuShare = 0.9,
    prefix_caching: PrefixCaching = True,
    json: Json = False,
) -> None:
    """Serve an OpenAI-compatible HTTP API: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics.

    \b
    Example:
      qcompile serve out/pycode --port 8000
      curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "def main("}'
    """
    try:
        from qcompile.runtime.server import app
    except ModuleNotFoundError as error:
        raise ResourceError(f"serving needs {error.name}: pip install 'qcompile[serve]'") from error
    from qcompile.runtime.chat import chat_template

    if (os.environ.get("QCOMPILE_API_KEY") if api_key is None else api_key) == "":  # typer drops an empty variable
        raise UsageError("the API key is empty: give one, or unset --api-key and QCOMPILE_API_KEY to let everybody in")
    cache: Any = {"kv_cache_bytes": kv_cache_bytes, "prefix_caching": prefix_caching}
    share, drafted = gpu_memory_utilization, _gamma_of(gamma)
    with (
        app.bind(host, port) as listening,
        qcompile.load(out, threads, max_batch, gamma=drafted, gpu_memory_utilization=share, **cache) as llm,
    ):
        called = name or out.resolve().name
        at = listening.getsockname()
        url = f"http://{f'[{at[0]}]' if ':' in at[0] else at[0]}:{at[1]}"

        def ready() -> None:
            console.heed_interrupts()
            if json:
                console.print_json_line({"url": url, "model": called, "context": llm.context, "max_batch": max_batch})
            console.log(f"qcompile: {called} answers at {url} (Ctrl-C ends)")

        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a client that hangs up ends its answer, not the server
        template = chat_template(out, llm.manifest["files"])
        app.serve(app.Served(llm, called, template, api_key, max_waiting), listening, ready)


def _gamma_of(text: str) -> int:
    """`--gamma` as `load` takes it."""
    from qcompile.runtime.options import AUTO

    if text == "auto":
        return AUTO
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"--gamma {text}: write a whole number, or auto")
    return int(text)


def _run_prompt(llm: LLM, prompt: str, params: SamplingParams, as_json: bool) -> None:
    """Generate from one prompt and print it: text as it comes, or one JSON document at the end."""
    stream = llm.stream(prompt, params)  # refuses the prompt before any of it is printed
    if not as_json:
        print(prompt, end="", flush=True)
    last = _show(stream, quiet=as_json)
    result = result_of(last)
    if as_json:
        console.print_json(result)
        return
    print(flush=True)
    speed = result["decode_tokens_per_second"]
    told = f", {speed:.1f} tokens/s" if speed else ""
    if last.speculation:
        told += f", {last.speculation.tokens_per_round:.2f} tokens a round"
    if llm.threads:
        told += f", {console.counted(llm.threads, 'thread')}"
    prompted = console.counted(len(last.prompt_token_ids), "prompt token")
    console.log(f"[{prompted} in {result['prefill_seconds'] * 1e3:.1f} ms, {len(result['token_ids'])} generated{told}]")


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


def _chat_loop(llm: LLM, out: Path, params: SamplingParams, as_json: bool) -> None:
    """Read a line, answer it, until the input ends. History is kept while it fits the context."""
    from qcompile.runtime.chat import chat_template

    if llm.tokenizer is None:
        raise UsageError(f"{out} has no tokenizer, so nobody can talk to it: build it of a checkpoint that has one")
    template = chat_template(out, llm.manifest["files"])
    if not template:
        console.log("No chat template: your text is continued as it stands. Ctrl-D ends.")
    talk = _Talk(llm, template)
    for line in _lines():
        try:
            stream = llm.stream(talk.prompt(line, params.max_tokens or 1), params)
        except UsageError as error:
            if not sys.stdin.isatty():
                raise
            console.log(f"qcompile: {error}")
            talk.forget()
            continue
        last = _show(stream, quiet=as_json)
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

    def prompt(self, line: str, room: int) -> list[int]:
        """The tokens to continue after the user said `line`; the oldest is forgotten first, to leave room for more.

        At most half of the context is left: who allows long replies wants them to heed what was said, too.
        """
        room = min(room, self._llm.context // 2)
        self._messages.append({"role": "user", "content": line})
        while len(self._messages) > 1 and self._length() + room > self._llm.context:
            del self._messages[:2]
        return self._llm.encode(self._render(), special=self._template is None)

    def answered(self, text: str) -> None:
        """Remember the reply."""
        self._messages.append({"role": "assistant", "content": text})

    def forget(self) -> None:
        """What the user said last cannot be answered: who types may say something else."""
        del self._messages[-1:]

    def _length(self) -> int:
        from qcompile.runtime.tokenizer import encode

        tokenizer = self._llm.tokenizer
        return len(encode(tokenizer, self._render(), self._template is None)) if tokenizer else 0

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
