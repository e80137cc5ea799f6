"""What a parser finds in a reply, in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class TextPiece:
    """Further content for the reader."""

    text: str


@dataclass(frozen=True)
class ReasoningPiece:
    """Further text of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins."""

    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """Further text of the arguments of the newest call, which are JSON."""

    text: str


Event = TextPiece | ReasoningPiece | CallStart | ArgumentsPiece


def merged(events: Iterable[Event]) -> list[Event]:
    """The events with adjacent pieces of a kind joined, and without empty ones."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, CallStart):
            joined.append(event)
        elif not event.text:
            continue
        elif last is not None and not isinstance(last, CallStart) and type(last) is type(event):
            joined[-1] = type(event)(last.text + event.text)
        else:
            joined.append(event)
    return joined
