"""A conversation as a prompt, and how to read its replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from qcompile.errors import UsageError
from qcompile.runtime.parsers.reply import ReplyParser
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.structured import Reasoning, StructuredOutputsParams


@dataclass(frozen=True)
class Turn:
    """A dialogue as a prompt, and how to read replies.

    parser: makes a parser of one reply. keeps_special: whether replies must be decoded with their special tokens.
    id_characters: length of the ids of calls; None for any. language: that of replies, if they must be calls. named:
    whether the request names the function to call. reasoning: what stands before structured output.
    """

    prompt: str
    parser: Callable[[], ReplyParser]
    keeps_special: bool = False
    id_characters: int | None = None
    language: StructuredOutputsParams | None = None
    named: bool = False
    reasoning: Reasoning | None = None

    def params(self, params: SamplingParams) -> SamplingParams:
        """The sampling parameters of a request, with what replies need. Raises UsageError."""
        if self.keeps_special:
            params = replace(params, skip_special_tokens=False)
        if self.reasoning is not None and params.structure is not None:
            params = replace(params, structured_outputs=replace(params.structure, reasoning=self.reasoning))
        if self.language is None:
            return params
        if params.bans or params.ignore_eos:
            options = "min_tokens, allowed_token_ids, bad_words and ignore_eos"
            raise UsageError(f"tool_choice: {options} are not possible with forced calls")
        return replace(params, structured_outputs=replace(self.language, reasoning=self.reasoning))


PLAIN_TURN = Turn("", ReplyParser)
"""Replies without anything to find in them."""
