"""Prompts as the engine takes them: text encoded, tokens and embeddings checked against the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from qcompile.errors import LongPromptError, UsageError, shown
from qcompile.runtime.arguments import are_tokens, plain
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.step import Limits
from qcompile.runtime.tokenizer import encode

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class CheckedPrompt:
    """A prompt of a call: its text if it was given as one, its tokens, and its embeddings if it was given as those.

    The tokens of a prompt given as embeddings are zeros, which have no meaning.
    """

    text: str | None
    tokens: list[int]
    embeds: FloatArray | None = None

    @property
    def shown(self) -> list[int]:
        """The tokens, as outputs report them."""
        return self.tokens if self.embeds is None else []


class BoundsPrompts(Protocol):
    """What bounds prompts: an executor."""

    @property
    def limits(self) -> Limits: ...
    @property
    def embed_width(self) -> int:
        """The width of embeddings that prompts may consist of; 0 if they may not."""


class TakesPrompts(Protocol):
    """What prompts are read for: an engine. context: most tokens of prompt and output together."""

    tokenizer: Tokenizer | None
    context: int

    @property
    def executor(self) -> BoundsPrompts: ...


class PromptReader:
    """Reads prompts for one engine: with its tokenizer, and within its vocabulary and context."""

    def __init__(self, engine: TakesPrompts) -> None:
        self._engine = engine
        self._vocab = engine.executor.limits.vocab

    def read(self, prompt: Any, params: SamplingParams) -> CheckedPrompt:
        """A prompt of text, tokens, or embeddings from `embeddings`. Raises UsageError."""
        alone = params.max_tokens == 0
        if not isinstance(prompt, np.ndarray) or prompt.dtype != np.float32:
            text = prompt if isinstance(prompt, str) else None
            return CheckedPrompt(text, self.encode(prompt, alone=alone, kept=self.kept(params)))
        width = self._engine.executor.embed_width
        if not width:
            raise UsageError(
                "this artifact takes no prompt_embeds: those for CPUs and for one GPU do, if the model reads tokens for"
                " one table of embeddings only, and no pass has changed it"
            )
        if prompt.shape[1] != width:
            raise UsageError(f"prompt_embeds must be [tokens, {width}], and have shape {list(prompt.shape)}")
        if params.truncate_prompt_tokens is not None:
            raise UsageError("truncate_prompt_tokens is for prompts of text or tokens")
        if params.prompt_logprobs is not None:
            raise UsageError("prompt_logprobs are for prompts of tokens: embeddings have none")
        self._check_length(len(prompt), alone)
        return CheckedPrompt(None, [0] * len(prompt), prompt)

    def kept(self, params: SamplingParams) -> int | None:
        """How many of a prompt's last tokens to keep by truncate_prompt_tokens; None for all."""
        if params.truncate_prompt_tokens != -1:
            return params.truncate_prompt_tokens
        return max(1, self._engine.context - (1 if params.max_tokens is None else params.max_tokens))

    def encode(
        self, prompt: object, cut: bool = False, special: bool = True, alone: bool = False, kept: int | None = None
    ) -> list[int]:
        """A prompt's token numbers, checked. With `cut`, a prompt that is too long loses its start. Raises UsageError.

        special: False if the text contains all special tokens already, as the output of a chat template does. alone:
        whether no token will follow. kept: as `kept` gives it.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise UsageError("the prompt is empty: give at least one character")
            tokens = encode(self.tokenizer, prompt, special)
            if not tokens:
                raise UsageError("the prompt has no tokens: give other text")
        elif isinstance(listed := plain(prompt), Sequence) and not isinstance(listed, bytes) and are_tokens(listed):
            tokens = [int(token) for token in listed]
            if not tokens:
                raise UsageError("the prompt is empty: give at least one token")
        else:
            raise UsageError(f"a prompt must be text or a list of token numbers, not {type(prompt).__name__}")
        self.check_range(tokens)
        if kept is not None:
            tokens = tokens[-kept:]
        if cut:
            return tokens[1 - self._engine.context :] if len(tokens) >= self._engine.context > 1 else tokens
        self._check_length(len(tokens), alone)
        return tokens

    def _check_length(self, count: int, alone: bool) -> None:
        """Raise LongPromptError unless the context has room for `count` tokens, and one more unless `alone`."""
        if count >= self._engine.context + alone:
            message = f"the prompt is too long: it has {count} tokens, {self.limit}, answer included"
            raise LongPromptError(f"{message}: shorten it")

    @property
    def limit(self) -> str:
        """For messages: how long a text may be, and whether the model or the cache is the limit."""
        longest = self._engine.executor.limits.max_position
        if self._engine.context < longest:
            return f"the cache room for {self._engine.context} of the model's {longest} (see kv_cache_bytes)"
        return f"the context {self._engine.context}"

    def check_range(self, tokens: Sequence[int]) -> None:
        """Raise UsageError unless all tokens are in the vocabulary."""
        if min(tokens) < 0 or max(tokens) >= self._vocab:
            bad = next(token for token in tokens if not 0 <= token < self._vocab)
            raise UsageError(f"token {shown(bad)} is outside the vocabulary of {self._vocab}")

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the artifact. Raises UsageError if it has none."""
        if self._engine.tokenizer is None:
            raise UsageError("this artifact has no tokenizer: give token numbers instead of text")
        return self._engine.tokenizer
