"""The Python interface of a loaded model, which `qcompile.load` returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from qcompile.errors import UsageError
from qcompile.runtime.arguments import (
    EmbeddedPrompts,
    Params,
    Prompts,
    as_list,
    embeddings,
    params_for,
    token_rows,
)
from qcompile.runtime.can_sleep import CanSleep
from qcompile.runtime.chat import Render, closing_tokens
from qcompile.runtime.chats import ChatOptions, Conversation, conversations_of, turns_of, with_messages
from qcompile.runtime.dialogue import dialogue_format
from qcompile.runtime.embeddings import EmbeddingOptions, Pooling
from qcompile.runtime.engine.blocks import BlockPool
from qcompile.runtime.engine.engine import Engine
from qcompile.runtime.evaluate import Evaluation, perplexity
from qcompile.runtime.options import MAX_BATCH
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.prompts import CheckedPrompt, PromptReader
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.params import SamplingParams, plain_number
from qcompile.runtime.sampling.structured import FORCED, named_as
from qcompile.runtime.sampling.supported import check_supported
from qcompile.runtime.sharing import SharedEngine
from qcompile.runtime.speculation.stages import Drafter
from qcompile.runtime.step import StepExecutor
from qcompile.runtime.token_bytes import token_bytes
from qcompile.runtime.turn import Turn

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from qcompile.runtime.interop.causal_lm import CompiledCausalLM


class LLM(CanSleep):
    """A loaded model. Close it, or use it as a context manager, to end its threads and free its memory.

    Threads may share it: their concurrent requests are computed in the same steps.
    """

    def __init__(
        self,
        executor: StepExecutor,
        manifest: dict[str, Any],
        tokenizer: Tokenizer | None,
        max_batch: int = MAX_BATCH,
        drafter: Drafter | None = None,
        keep: object = None,
        remember: int | None = None,
    ) -> None:
        """Use `load` instead.

        keep: kept alive as long as the model, such as the memory of its weights. remember: most free KV pages that keep
        their text for reuse; None for all.
        """
        model = manifest["model"]
        self.executor, self.manifest, self.tokenizer = executor, manifest, tokenizer
        self.vocab_size: int = executor.limits.vocab
        self.bos_token_id: int | None = model.get("bos_token_id")
        self.engine = Engine(executor, _pool(executor, remember), tokenizer, model["eos_token_ids"], max_batch, drafter)
        self.template: Render | None = None
        """The chat template, if the artifact has one."""
        self._prompts = PromptReader(self.engine)
        self._token_bytes = cache(partial(token_bytes, tokenizer)) if tokenizer else None
        self.sampling_defaults: dict[str, Any] = {}
        """Fields of SamplingParams as the checkpoint recommends them, for calls that do not give SamplingParams."""
        self.generation_config: dict[str, Any] = {}
        """The checkpoint's generation_config.json, as far as it is not ignored."""
        self._keep = keep
        self._close = weakref.finalize(self, _close_all, executor, drafter)
        self._shared = SharedEngine(self.engine, self._close)

    @property
    def context(self) -> int:
        """Most tokens of prompt and output together."""
        return self.engine.context

    @property
    def threads(self) -> int:
        """CPU threads that compute; 0 on a GPU."""
        return self.executor.threads

    @overload
    def generate(
        self,
        prompts: Prompts | None = None,
        params: Params = None,
        stream: Literal[False] = False,
        *,
        prompt_embeds: EmbeddedPrompts = None,
        **options: Any,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompts | None = None,
        params: Params = None,
        *,
        stream: Literal[True],
        prompt_embeds: EmbeddedPrompts = None,
        **options: Any,
    ) -> Iterator[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompts | None = None,
        params: Params = None,
        stream: bool = False,
        *,
        prompt_embeds: EmbeddedPrompts = None,
        **options: Any,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Continue prompts: a text, a list of token numbers (or an array or a tensor), or a list of either.

        prompt_embeds: instead of prompts, embeddings [tokens, width] as tensor or array, or a list of such: what
        transformers calls `inputs_embeds`, for example of an image and a text. A row that equals the embedding of a
        token gives the same bits as the token. Such prompts share no prefixes, and outputs report no tokens of them.
        params: one for all or one for each; or give its fields as keywords (max_tokens=64). Returns a list of
        RequestOutput in the order of the prompts; with `stream` what `LLM.stream` returns. Raises UsageError for a
        prompt that is empty, too long, neither text nor tokens, or outside the vocabulary, for embeddings of another
        width, with NaN, or for a model that takes none, and OverflowedError if the
        logits of any prompt are not finite, which ends the whole call.
        """
        if stream:
            return self.stream(prompts, params, prompt_embeds=prompt_embeds, **options)
        finished = self._run(*self._checked(prompts, prompt_embeds, params, options), partial=False)
        return sorted(finished, key=lambda output: output.request_id)

    def stream(
        self,
        prompts: Prompts | None = None,
        params: Params = None,
        *,
        prompt_embeds: EmbeddedPrompts = None,
        **options: Any,
    ) -> Iterator[RequestOutput]:
        """As `generate`, but yields a prompt's RequestOutput whenever it has grown.

        `outputs[i].text` is the whole text so far, `outputs[i].new_text` what was added since the last yield. Closing
        the iterator cancels unfinished requests. Prompts are checked before the first step.
        """
        checked, params_of_each = self._checked(prompts, prompt_embeds, params, options)
        for one in params_of_each:
            one.check_streamed()
        return self._run(checked, params_of_each, partial=True)

    def chat(  # parameters: names of OpenAI's API, of which most calls give few
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        stream: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: Any = "auto",
        parallel_tool_calls: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        reasoning_effort: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Reply to a conversation, or to each of several: lists of messages in OpenAI's form.

        Returns what `generate` does, with `outputs[i].message`: the reply's `content`, `reasoning_content` and
        `tool_calls`. Options are those of /v1/chat/completions, and names of parsers (docs/serving.md), by default
        those of the chat template; without params or keywords, a reply may be as long as the context. Raises
        UsageError as `generate` does, and if the model has no chat template or it takes no such conversation.
        """
        given = (tools, tool_choice, parallel_tool_calls, documents, reasoning_effort, chat_template_kwargs)
        asked = ChatOptions(*given, tool_parser, reasoning_parser, add_generation_prompt, continue_final_message)
        turns = self.turns(conversations_of(messages), params, options, asked)
        prompts = [self.encode(turn.prompt, special=False) for turn, _ in turns]
        readers, params_of_each = [turn for turn, _ in turns], [one for _, one in turns]
        if stream:
            return with_messages(readers, self.stream(prompts, params_of_each))
        return list(with_messages(readers, self.generate(prompts, params_of_each)))

    def turns(
        self, conversations: Sequence[Conversation], params: Params, options: dict[str, Any], asked: ChatOptions
    ) -> list[tuple[Turn, SamplingParams]]:
        """The prompt of each conversation and how to read its replies, with its parameters; see `chat`."""
        form = dialogue_format(self.template, self.tokenizer, asked.tool_parser, asked.reasoning_parser)
        self.end_at(closing_tokens(form.template, self.tokenizer))
        options = options if params is not None else {"max_tokens": None} | options
        given = params_for(len(conversations), params, options, self.sampling_defaults)
        turns = turns_of(form, conversations, given, asked)
        with named_as(FORCED if turns[0][0].language else None):
            for _, one in turns:
                self.engine.grammars.compile(one.structure)
        return turns

    def _checked(
        self, prompts: Any, embeds: EmbeddedPrompts, params: Params, options: dict[str, Any]
    ) -> tuple[list[CheckedPrompt], list[SamplingParams]]:
        """The prompts with their tokens, and the parameters of each. Raises UsageError if anything is malformed."""
        if (prompts is None) == (embeds is None):
            raise UsageError("give prompts, or prompt_embeds instead of them")
        listed = as_list(prompts) if embeds is None else embeddings(embeds)
        params_of_each = params_for(len(listed), params, options, self.sampling_defaults)
        for one in params_of_each:
            self.check(one)
            self.engine.grammars.compile(one.structure)
        pairs = zip(listed, params_of_each, strict=True)
        return [self._prompts.read(prompt, one) for prompt, one in pairs], params_of_each

    def _run(
        self, prompts: list[CheckedPrompt], params_of_each: list[SamplingParams], partial: bool
    ) -> Iterator[RequestOutput]:
        """Yield outputs whenever they grow; with `partial` false only when they are finished."""
        yield from self._shared.run(prompts, params_of_each, partial)

    def lend(self, lent: bool = True) -> None:
        """Let one thread of a server step the engine from now on, or no longer; until then all other use is refused.

        Raises UsageError while requests are unfinished: the server's steps would take their outputs.
        """
        self._shared.lend(lent)

    def end_at(self, tokens: Iterable[int]) -> None:
        """Let these tokens end a text, too. `load` does so for the tokenizer's own, and chats for their template's."""
        self.engine.end_at(tokens)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a text."""
        return self.engine.postprocessor.eos

    def as_transformers(self) -> CompiledCausalLM:
        """The model in the form of transformers' causal language models, with `generate`, logits and loss.

        It uses this model, which must stay open. It needs torch and transformers, which building needs, too.
        """
        from qcompile.runtime.interop.causal_lm import CompiledCausalLM

        return CompiledCausalLM(self, self.manifest["model"].get("name", ""))

    def check(self, params: SamplingParams) -> None:
        """Raise UsageError for parameters that this model does not support."""
        check_supported(params, self.vocab_size, self.tokenizer is not None)
        self.engine.check_bans(params)

    def encode(
        self, prompt: object, cut: bool = False, special: bool = True, params: SamplingParams | None = None
    ) -> list[int]:
        """A prompt's token numbers, checked. With `cut`, a prompt that is too long loses its start. Raises UsageError.

        special: False if the text contains all special tokens already, as the output of a chat template does. params:
        what the prompt is for: how much of it is kept, and whether a token will follow.
        """
        kept = None if params is None else self._prompts.kept(params)
        return self._prompts.encode(prompt, cut, special, params is not None and params.max_tokens == 0, kept)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included; empty if the artifact has no tokenizer."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False) if self.tokenizer else ""

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of a token, which may be a part of a character; None if they cannot be told."""
        return self._token_bytes(token) if self._token_bytes else None

    def logits(self, token_ids: Any, chunk: int | None = None, lora: str | None = None) -> torch.Tensor:
        """Float32 logits [batch, tokens, vocab] of one forward pass over token_ids [batch, tokens].

        token_ids: list of lists, tensor or array. `chunk` limits the positions computed at once (default as many as
        fit); it does not change the result. lora: the adapter of all. Running requests are not affected.
        """
        import torch

        rows = token_rows(token_ids)
        for row in rows:
            self._prompts.check_range(row)
        if len(rows[0]) > self.context:
            raise UsageError(f"the text has {len(rows[0])} tokens, {self._prompts.limit}: shorten it")
        chunk = plain_number(chunk)
        if chunk is not None and not (isinstance(chunk, int) and chunk >= 1):
            raise UsageError(f"chunk must be a whole number of at least 1, not {chunk!r}")
        result = torch.empty((len(rows), len(rows[0]), self.vocab_size), dtype=torch.float32)
        with self._shared.exclusive():
            for index, start, values in self.engine.forward(rows, chunk or self.executor.limits.max_tokens, lora):
                result[index, start : start + len(values)] = torch.from_numpy(values)
        return result

    def embed(
        self,
        texts: Prompts,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        lora: str | None = None,
    ) -> FloatArray:
        """Embeddings of one text or several (texts or token numbers): float32 [texts, dimensions].

        An embedding is the final hidden state of a text's last token, or with pooling "mean" the mean of those of all
        its tokens. dimensions: how many of its numbers to keep; None for all. normalize: makes its length 1, after
        that. lora: the adapter. Raises UsageError, and UnsupportedError if the artifact gives no hidden states.
        """
        how = EmbeddingOptions(pooling, normalize, dimensions, lora)
        alone = SamplingParams(max_tokens=0, prompt_logprobs=0)
        tokens = [self.encode(text, params=alone) for text in as_list(texts)]
        with self._shared.exclusive():
            return how.embeddings(self.engine, tokens)

    def perplexity(
        self,
        documents: str | Path | Sequence[str],
        window: int = 2048,
        progress: Callable[[int, int], None] | None = None,
        max_windows: int | None = None,
        lora: str | None = None,
    ) -> Evaluation:
        """Perplexity, with the adapter `lora`, on a JSONL file ({"text": …} a line) or texts: `runtime.evaluate`."""
        tokenizer, bos = self._prompts.tokenizer, self.bos_token_id
        with self._shared.exclusive():
            return perplexity(self.engine, tokenizer, bos, documents, window, progress, max_windows, lora)

    def close(self) -> None:
        """End the threads and free the memory. The model cannot be used afterwards."""
        if self._shared.forked:
            return  # the memory is the parent's, and a lock that one of its threads held is never released
        with self._shared.exclusive():
            self._close()
            self._keep, self.engine.sleep.memory = None, "it is closed; load it again"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _pool(executor: StepExecutor, remember: int | None) -> BlockPool:
    """The pages of an executor's cache; at most `remember` free ones keep their text for reuse, None for all."""
    limits, total = executor.limits, executor.kv_pages
    if executor.state_slots and (not executor.copies or limits.ring_tokens):
        remember = 0  # the states after a cached page are not kept
    return BlockPool(total, limits.page_tokens, limits.ring_tokens, total if remember is None else remember)


def _close_all(target: StepExecutor, drafter: Drafter | None) -> None:
    """Close the drafts first, as they use the target's threads."""
    if drafter:
        drafter.close()
    target.close()
