"""A reply as a list of blocks: APIs other than chat completions divide it into texts, reasoning and calls in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from qcompile.runtime.messages import new_call_id
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.parsers.events import CallStart, Event, ReasoningPiece, TextPiece
from qcompile.runtime.turn import Turn


@dataclass
class ReplyBlock:
    """A part of a reply. name, call_id: those of a call. The text of a call is its arguments, as JSON if the model
    wrote JSON."""

    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    name: str = ""
    call_id: str = ""


@dataclass(frozen=True)
class Change:
    """What happened to a block: it began, its text grew by `added`, or it ended. index: its number in the reply.

    read: how many characters of the reply had been read.
    """

    what: Literal["begin", "grow", "end"]
    index: int
    block: ReplyBlock
    added: str = ""
    read: int = 0


class BlockReader:
    """Divides one reply into blocks as its text comes. call_prefix: of the ids of calls."""

    def __init__(self, turn: Turn, call_prefix: str) -> None:
        self._parser, self._id_characters, self._call_prefix = turn.parser(), turn.id_characters, call_prefix
        self.blocks: list[ReplyBlock] = []
        self._read = 0  # characters
        self.cut = False
        """Whether the reply reached the most tokens."""

    def read(self, output: RequestOutput, ends: Iterable[int] = ()) -> Iterator[Change]:
        """What is new in an output with one sample. A reply without any block gets an empty text.

        ends: where the new text is divided, in characters of the reply.
        """
        (sample,) = output.outputs
        ended, self.cut = sample.finish_reason is not None, sample.finish_reason == "length"
        for end in (*ends, len(sample.text)):
            text, self._read = sample.text[self._read : end], max(end, self._read)
            for event in self._parser.push(text) if text else ():
                yield from self._add(event)
        if ended:
            for event in self._parser.end():
                yield from self._add(event)
            if not self.blocks:
                yield from self._begin(ReplyBlock("text"))
            yield self._change("end")

    def text_of(self, kind: Literal["text", "reasoning"]) -> str:
        """All text of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return sum(block.kind == "call" for block in self.blocks)

    def _add(self, event: Event) -> Iterator[Change]:
        if isinstance(event, CallStart):
            call_id = new_call_id(self._id_characters, self._call_prefix)
            yield from self._begin(ReplyBlock("call", name=event.name, call_id=call_id))
            return
        if isinstance(event, TextPiece | ReasoningPiece):
            kind: Literal["text", "reasoning"] = "text" if isinstance(event, TextPiece) else "reasoning"
            if not self.blocks or self.blocks[-1].kind != kind:
                yield from self._begin(ReplyBlock(kind))
        self.blocks[-1].text += event.text
        yield self._change("grow", event.text)

    def _begin(self, block: ReplyBlock) -> Iterator[Change]:
        if self.blocks:
            yield self._change("end")
        self.blocks.append(block)
        yield self._change("begin")

    def _change(self, what: Literal["begin", "grow", "end"], added: str = "") -> Change:
        return Change(what, len(self.blocks) - 1, self.blocks[-1], added, self._read)
