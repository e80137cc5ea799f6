"""What the process that answers clients knows of the model: its tokenizer, and what the engine's process tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from qcompile.runtime.detokenizer import Detokenizer, TokenLengths
from qcompile.runtime.engine.bans import BanReader
from qcompile.runtime.engine.postprocess import text_ends
from qcompile.runtime.prompts import PromptReader
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.supported import check_adapter, check_supported
from qcompile.runtime.step import HiddenStates, Limits
from qcompile.runtime.token_bytes import token_bytes
from qcompile.runtime.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class _Executor:
    """The sizes of an executor in another process."""

    limits: Limits
    hidden: HiddenStates | str
    embed_width: int = 0


@dataclass
class _Sleep:
    """The engine's process has checked whether the model can sleep, and checks again when it is asked for that."""

    def check_possible(self, level: object) -> None:
        """Nothing to do here."""


@dataclass
class _Engine:
    """What is known of an engine in another process."""

    executor: _Executor
    tokenizer: Tokenizer | None
    context: int
    adapters: tuple[str, ...]
    sleep: _Sleep = field(default_factory=_Sleep)


class RemoteModel:
    """A model with its engine in another process: prompts are read and requests are checked here.

    root, files: the artifact and the files of its manifest. facts: those of `EngineHost`. tell_ends: told the tokens
    that end a text, too.
    """

    def __init__(
        self,
        root: Path,
        files: dict[str, Any],
        facts: Mapping[str, Any],
        tell_ends: Callable[[list[int]], None],
    ) -> None:
        self.tokenizer = load_tokenizer(root, files)
        limits = Limits(**facts["limits"])
        hidden = facts["hidden"] if isinstance(facts["hidden"], str) else HiddenStates(facts["hidden"], _elsewhere)
        self.engine = _Engine(_Executor(limits, hidden), self.tokenizer, facts["context"], tuple(facts["adapters"]))
        self.context: int = facts["context"]
        self.vocab_size = limits.vocab
        self.max_batch: int = facts["max_batch"]
        self.sampling_defaults: dict[str, Any] = facts["sampling_defaults"]
        self._ends, self._tell_ends = frozenset(facts["end_tokens"]), tell_ends
        self._prompts = PromptReader(self.engine)
        self._lengths: dict[bool, TokenLengths] = {}
        self._bans = BanReader(self.tokenizer, limits.vocab)
        self._token_bytes = cache(partial(token_bytes, self.tokenizer)) if self.tokenizer else None

    def encode(
        self, prompt: object, cut: bool = False, special: bool = True, params: SamplingParams | None = None
    ) -> list[int]:
        """As `LLM.encode`."""
        kept = None if params is None else self._prompts.kept(params)
        return self._prompts.encode(prompt, cut, special, params is not None and params.max_tokens == 0, kept)

    def decode(self, tokens: Sequence[int]) -> str:
        """As `LLM.decode`."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False) if self.tokenizer else ""

    def token_bytes(self, token: int) -> bytes | None:
        """As `LLM.token_bytes`."""
        return self._token_bytes(token) if self._token_bytes else None

    def detokenizer(self, prompt: Sequence[int], params: SamplingParams) -> Callable[[], Detokenizer] | None:
        """Makes what decodes the output of a prompt; None if the engine does, to find stop texts, or nobody can."""
        if self.tokenizer is None or params.stops:
            return None
        skips = params.skip_special_tokens
        if skips not in self._lengths:
            self._lengths[skips] = TokenLengths(self.tokenizer, skips)
        return partial(Detokenizer, self.tokenizer, prompt, skips, self._lengths[skips])

    def end_at(self, tokens: Iterable[int]) -> None:
        """As `LLM.end_at`."""
        more = sorted(set(tokens) - self._ends)
        if more:
            self._ends |= set(more)
            self._tell_ends(more)

    def check(self, params: SamplingParams) -> None:
        """Raise UsageError for parameters that this model does not support, as `LLM.check` does."""
        check_supported(params, self.vocab_size, self.tokenizer is not None)
        check_adapter(params.lora, self.engine.adapters)
        self._bans.read(params, text_ends(params, self._ends))


def _elsewhere(rows: object) -> NoReturn:
    raise NotImplementedError("the engine runs in another process")
