"""The command `chat`: read a line, answer it, keep the conversation while it fits the context."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qcompile.cli import console
from qcompile.cli.models import opened
from qcompile.cli.options import Adapting, Building, ChatSampling, DraftedLoading, Source, command
from qcompile.cli.replies import result_of, show
from qcompile.errors import UsageError

if TYPE_CHECKING:
    from qcompile.runtime.chat import Message, Render
    from qcompile.runtime.llm import LLM
    from qcompile.runtime.sampling.params import SamplingParams
    from qcompile.runtime.turn import Turn


@command
def chat(
    out: Source,
    sampling: ChatSampling,
    building: Building,
    loading: DraftedLoading,
    adapting: Adapting,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per reply instead of text.")] = False,
) -> None:
    """Chat with a model line by line; Ctrl-D ends. Without a chat template it continues your text.

    \b
    Example:
      qcompile chat samples/pycode-26m
      qcompile chat out/pycode
    """
    params = sampling.params(adapting.chosen())
    with opened(out, building, loading, lora=adapting.named()) as (llm, artifact):
        _chat_loop(llm, artifact.path, params, json)


def _chat_loop(llm: LLM, out: Path, params: SamplingParams, as_json: bool) -> None:
    """Read a line, answer it, until the input ends. History is kept while it fits the context."""
    from qcompile.runtime.chat import chat_template

    if llm.tokenizer is None:
        raise UsageError(f"{out} has no tokenizer, so it cannot chat: build it from a checkpoint that has one")
    template = chat_template(out, llm.manifest["files"])
    if not template:
        console.note("No chat template: your text is continued as it stands. Ctrl-D ends.")
    conversation = Conversation(llm, template)
    for line in _lines():
        try:
            prompt = conversation.prompt(line, params.max_tokens or 1)
            stream = llm.stream(prompt, conversation.params(params))
        except UsageError as error:
            if not sys.stdin.isatty():
                raise
            console.log(f"qcompile: {error}")
            conversation.forget()
            continue
        last = show(stream, quiet=as_json)
        conversation.answered(last.outputs[0].text)
        if as_json:
            console.print_json_line(result_of(last, llm.engine.speculation.active, llm.engine.speculation.chooser))
        else:
            print(flush=True)


class Conversation:
    """The messages so far. Without a template they are one text, to which each message is appended."""

    def __init__(self, llm: LLM, template: Render | None) -> None:
        from qcompile.runtime.chat import closing_tokens
        from qcompile.runtime.dialogue import DialogueFormat

        self._llm = llm
        self._format = DialogueFormat(template, llm.tokenizer) if template else None
        self._turn: Turn | None = None
        self._messages: list[Message] = []
        if template:
            llm.end_at(closing_tokens(template, llm.tokenizer))

    def prompt(self, line: str, room: int) -> list[int]:
        """The tokens to continue after the user's `line`. The oldest messages are dropped to leave `room` tokens.

        At most half of the context is left free, so that long replies can still depend on earlier messages.
        """
        room = min(room, self._llm.context // 2)
        self._messages.append({"role": "user", "content": line})
        while len(self._messages) > 1 and self._length() + room > self._llm.context:
            del self._messages[:2]
        return self._llm.encode(self._render(), special=self._format is None)

    def params(self, params: SamplingParams) -> SamplingParams:
        """The sampling parameters of the reply to the last prompt."""
        return self._turn.params(params) if self._turn else params

    def answered(self, text: str) -> None:
        """Add the reply. Its reasoning is no part of its content."""
        message = {"role": "assistant", "content": text}
        if self._turn:
            reply = self._turn.parser().whole(text)
            message["content"] = reply.content or ""
            if reply.reasoning:
                message["reasoning_content"] = reply.reasoning
        self._messages.append(message)

    def forget(self) -> None:
        """Drop the user's last message, which cannot be answered."""
        del self._messages[-1:]

    def _length(self) -> int:
        from qcompile.runtime.tokenizer import encode

        tokenizer = self._llm.tokenizer
        return len(encode(tokenizer, self._render(), self._format is None)) if tokenizer else 0

    def _render(self) -> str:
        if self._format:
            from qcompile.runtime.dialogue import Dialogue

            self._turn = self._format.turn(Dialogue(self._messages))
            return self._turn.prompt
        return "".join(message["content"] for message in self._messages)


def _lines() -> Iterator[str]:
    """Lines of stdin with their newline; on a terminal, each is asked for with a prompt on stderr."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line
