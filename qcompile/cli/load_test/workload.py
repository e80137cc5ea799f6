"""What is asked: prompts and numbers of output tokens, from a file or cut from the text that comes with the package."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcompile import texts
from qcompile.errors import UsageError

Prompt = str | list[int]


@dataclass(frozen=True)
class Query:
    """A prompt (text or tokens), or the messages of a chat, and the most tokens of the answer."""

    prompt: Prompt
    output_tokens: int
    given: tuple[dict[str, Any], ...] = ()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As a conversation."""
        return list(self.given) or [{"role": "user", "content": self.prompt}]


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens with a normal distribution, at least 1; all equal if the deviation is 0."""

    mean: int
    deviation: int = 0

    @classmethod
    def of(cls, option: str, text: str) -> Lengths:
        """`128`, or `128:32` for a mean and a standard deviation. Raises UsageError that names the option."""
        mean, colon, deviation = text.partition(":")
        parts = (mean, deviation) if colon else (mean,)
        if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts) or int(mean) < 1:
            raise UsageError(f"{option} {text}: write tokens, as 128, or their mean and deviation, as 128:32")
        return cls(*map(int, parts))

    def draw(self, source: random.Random) -> int:
        """One number."""
        return max(1, round(source.gauss(self.mean, self.deviation))) if self.deviation else self.mean

    def __str__(self) -> str:
        return f"{self.mean} ± {self.deviation}" if self.deviation else str(self.mean)


@dataclass(frozen=True)
class Material:
    """A text to cut prompts from: as tokens, or as characters with the mean number of characters of a token."""

    content: Sequence[int] | str
    per_token: float = 1.0

    def cut(self, start: float, tokens: int) -> Prompt:
        """About `tokens` tokens from the place `start` (a share of the text) on. At its end the text starts again."""
        size = len(self.content)
        first, count = int(start * size), max(1, round(tokens * self.per_token))
        if isinstance(self.content, str):
            return "".join(self.content[(first + at) % size] for at in range(count))
        return [self.content[(first + at) % size] for at in range(count)]


@dataclass(frozen=True)
class Synthetic:
    """Prompts of given lengths, each from another place of the text; `prefix` tokens at their start are the same."""

    material: Material
    inputs: Lengths
    outputs: Lengths
    prefix: int = 0
    seed: int = 0

    def queries(self) -> Iterator[Query]:
        """Without end. The same seed gives the same queries."""
        source = random.Random(self.seed)
        shared = self.material.cut(source.random(), self.prefix) if self.prefix else None
        while True:
            prompt = self.material.cut(source.random(), self.inputs.draw(source))
            if shared is not None:
                prompt = shared + prompt  # type: ignore[operator]  # both are text, or both are tokens
            yield Query(prompt, self.outputs.draw(source))


@dataclass(frozen=True)
class Recorded:
    """Prompts of a file, again and again in an order that the seed chooses."""

    asked: tuple[Query, ...]
    outputs: Lengths
    seed: int = 0

    def queries(self) -> Iterator[Query]:
        """Without end. The same seed gives the same queries."""
        source = random.Random(self.seed)
        while True:
            for query in source.sample(self.asked, len(self.asked)):
                yield Query(query.prompt, query.output_tokens or self.outputs.draw(source), query.given)


def read_prompts(path: Path) -> tuple[Query, ...]:
    """The prompts of a JSONL file: lines with a "prompt" (text or tokens), "text", or "messages", and perhaps the
    "max_tokens" of the answer; 0 stands for a line without. Raises UsageError with the line number."""
    try:
        whole = texts.read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    asked = []
    for number, line in texts.lines(whole):
        value = texts.parsed(line)
        query = _query(value) if isinstance(value, dict) else None
        if query is None:
            raise UsageError(
                f'{path} line {number}: not a JSON object with a "prompt", a "text" or "messages" '
                'and at most a positive "max_tokens"'
            )
        asked.append(query)
    if not asked:
        raise UsageError(f'{path} is empty: give lines of JSON with a "prompt", a "text" or "messages" each')
    return tuple(asked)


def _query(line: dict[str, Any]) -> Query | None:
    """The query of a line; None if it has none."""
    most = line.get("max_tokens", 0)
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        return None
    messages = line.get("messages")
    if messages is not None:
        if not (isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages)):
            return None
        return Query("", most, tuple(messages))
    prompt = line.get("prompt")
    if isinstance(prompt, list):
        whole = prompt and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)
        return Query(prompt, most) if whole else None
    text = texts.text_of(line, "prompt", "text")
    return Query(text, most) if text else None
