"""POST /v1/embeddings in OpenAI's format."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from qcompile.errors import UsageError
from qcompile.runtime.arguments import Prompt
from qcompile.runtime.embeddings import EmbeddingOptions, GivesHidden, Pooling
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.server.answers import EmbeddingsAnswer
from qcompile.runtime.server.api import BodyPart, OnePrompt
from qcompile.runtime.server.asking import Asker, unless_gone
from qcompile.runtime.server.schema import answered
from qcompile.runtime.server.served import GivesEmbeddings

MOST_INPUTS = 2048
"""Most texts of a request, as at OpenAI."""


class EmbeddingsRequest(BodyPart):
    """POST /v1/embeddings: one text or several, each a text or token numbers.

    pooling, normalize: as in `LLM.embed`. user: identifies the caller, without effect.
    """

    idle: ClassVar[dict[str, tuple[object, ...]]] = {"priority": (0,)}
    model: str | None = None
    input: OnePrompt  # checked where it is encoded: errors are clearer than those of a union type
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Pooling = "last"
    normalize: bool = True
    truncate_prompt_tokens: int | None = None
    user: str | None = None

    def texts(self) -> list[Prompt]:
        """The texts. Raises UsageError for none, or too many."""
        given = self.input
        several = isinstance(given, list) and not (given and all(type(token) is int for token in given))
        listed = list(given) if several else [given]
        if not 1 <= len(listed) <= MOST_INPUTS:
            raise UsageError(f"input has {len(listed)} texts: give 1 to {MOST_INPUTS}")
        return listed

    def shown(self, embedding: FloatArray) -> list[float] | str:
        """An embedding [dimensions] in the format that is asked for."""
        if self.encoding_format == "float":
            return [float(number) for number in embedding]
        return base64.b64encode(embedding.astype("<f4").tobytes()).decode()


class EmbeddingsRoute:
    """The handler. executor: that of the model."""

    def __init__(self, asker: Asker, service: GivesEmbeddings, executor: GivesHidden) -> None:
        self._asker, self._service, self._executor = asker, service, executor

    def add_to(self, router: APIRouter) -> None:
        """Add the route to a router."""
        router.post("/v1/embeddings", **answered(EmbeddingsAnswer))(self.embed)

    async def embed(self, asked: EmbeddingsRequest, request: Request) -> Response:
        """Embeddings of one text or several."""
        self._asker.check_model(asked.model)
        adapter = asked.model if asked.model in self._asker.adapters else None
        how = EmbeddingOptions(asked.pooling, asked.normalize, asked.dimensions, adapter)
        how.check(self._executor)
        # A prompt alone: no token has to fit behind it.
        alone = SamplingParams(max_tokens=0, prompt_logprobs=0, truncate_prompt_tokens=asked.truncate_prompt_tokens)
        tokens = await self._asker.encoded(asked.texts(), True, alone)
        embeddings = await unless_gone(request, self._embeddings(how, tokens))
        if embeddings is None:
            return Response(status_code=499)  # nobody reads it; proxies log this status for it
        data = [
            {"object": "embedding", "index": index, "embedding": asked.shown(embedding)}
            for index, embedding in enumerate(embeddings)
        ]
        count = sum(map(len, tokens))
        self._asker.metrics.embedded(len(tokens), count)
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "data": data, "model": self._asker.named(asked.model), "usage": usage})

    async def _embeddings(self, how: EmbeddingOptions, texts: Sequence[list[int]]) -> list[FloatArray]:
        """The embeddings of texts, as many at a time as a step has rows for: other requests run in between."""
        embeddings: list[FloatArray] = []
        for group in _groups(texts, self._executor.limits.max_tokens):
            embeddings.extend(await self._service.embed(how, group))
        return embeddings


def _groups(texts: Sequence[list[int]], most: int) -> Iterator[list[list[int]]]:
    """Consecutive texts of at most `most` tokens together, or one longer text."""
    group: list[list[int]] = []
    for text in texts:
        if group and sum(map(len, group)) + len(text) > most:
            yield group
            group = []
        group.append(text)
    yield group
