"""What a server needs of a model and of its engine, which may run in the same process or in another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from qcompile.runtime.embeddings import EmbeddingOptions, GivesHidden
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.masks import Grammar
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.structured import StructuredOutputsParams
from qcompile.runtime.server.mailbox import Cancelled, Checked
from qcompile.runtime.server.metrics import Occupancy
from qcompile.runtime.server.replies import OutputStream
from qcompile.runtime.server.sleeping import Sleeping

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Encoder(Protocol):
    """What is needed of an LLM."""

    sampling_defaults: dict[str, Any]
    tokenizer: Tokenizer | None

    def token_bytes(self, token: int) -> bytes | None: ...
    def encode(self, prompt: object, *, special: bool, params: SamplingParams) -> list[int]: ...


class Submitting(Protocol):
    """What is needed of a Service."""

    def admit(self, count: int, params: SamplingParams) -> None: ...
    async def compile(self, structure: StructuredOutputsParams) -> Grammar | None: ...
    def submit(
        self, prompts: Sequence[list[int]], params: SamplingParams, partial: bool, grammar: Grammar | None, owner: str
    ) -> OutputStream: ...


class GivesEmbeddings(Protocol):
    """What is needed of a Service."""

    async def embed(self, how: EmbeddingOptions, texts: Sequence[list[int]]) -> FloatArray: ...


class MaySleep(Protocol):
    """Whether a model can sleep."""

    def check_possible(self, level: object) -> object:
        """Raise UsageError for an unknown level, UnsupportedError if the model cannot sleep."""


class ServedEngine(Protocol):
    """What is needed of a model's engine."""

    @property
    def adapters(self) -> tuple[str, ...]: ...
    @property
    def sleep(self) -> MaySleep: ...
    @property
    def executor(self) -> GivesHidden: ...


class AnsweringModel(Encoder, Protocol):
    """What is needed of a model."""

    tokenizer: Tokenizer | None
    vocab_size: int

    @property
    def context(self) -> int: ...
    @property
    def engine(self) -> ServedEngine: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def end_at(self, tokens: Any) -> None: ...


class EngineService(Submitting, GivesEmbeddings, Sleeping, Occupancy, Checked, Protocol):
    """What is needed of the service that shares an engine among requests.

    cancelled: called for each cancelled prompt. failure: what ended the engine, if it was an error.
    """

    cancelled: Cancelled
    failure: BaseException | None
    failed: Callable[[BaseException], None]

    async def refresh(self) -> None:
        """Bring what the properties tell up to date."""

    def end(self) -> None:
        """End the engine as soon as it can; unfinished requests fail."""
