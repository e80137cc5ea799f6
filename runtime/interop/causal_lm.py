"""A loaded model in the form of transformers' causal language models: `generate`, logits and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, PretrainedConfig
from transformers.generation import GenerateDecoderOnlyOutput, MaxTimeCriteria
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qcompile.errors import UnsupportedError, UsageError
from qcompile.runtime.interop.generation_settings import GenerationSettings
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.sampling.params import SamplingParams

IGNORED = -100
"""The label of tokens that no loss counts."""


class Generating(Protocol):
    """What is needed of a loaded model (llm.py)."""

    vocab_size: int
    bos_token_id: int | None
    generation_config: dict[str, Any]

    @property
    def context(self) -> int: ...
    @property
    def end_tokens(self) -> frozenset[int]: ...
    def generate(self, prompts: Any, params: Any, *, prompt_embeds: Any) -> list[RequestOutput]: ...
    def stream(self, prompts: Any, params: Any, *, prompt_embeds: Any) -> Iterator[RequestOutput]: ...
    def logits(self, token_ids: Any) -> torch.Tensor: ...


class CompiledConfig(PretrainedConfig):
    """What transformers asks of a model's configuration, as far as an artifact has it."""

    model_type = "qcompile"


class CompiledCausalLM(torch.nn.Module):
    """A compiled model for code that is written for transformers; `LLM.as_transformers` makes it.

    The model computes where it was built for. `to` chooses the device of the tensors that it returns. It has no
    parameters and no gradients.
    """

    main_input_name = "input_ids"
    base_model_prefix = ""
    input_modalities = output_modalities = ("text",)
    dtype = torch.float32

    def __init__(self, llm: Generating, name: str) -> None:
        """name: of the model, which its configuration tells."""
        super().__init__()
        ends = sorted(llm.end_tokens)
        numbers: dict[str, Any] = {
            "bos_token_id": llm.bos_token_id,
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        }
        recommended = {name: value for name, value in llm.generation_config.items() if name not in numbers}
        self.llm = llm
        facts: dict[str, Any] = {"vocab_size": llm.vocab_size, "max_position_embeddings": llm.context}
        self.config = CompiledConfig(**facts, **numbers)
        self.config.name_or_path = name
        self.name_or_path = name
        self.generation_config = GenerationConfig.from_dict(numbers | recommended)
        self.register_buffer("_place", torch.empty(0, dtype=torch.int8), persistent=False)
        self.training = False

    @property
    def device(self) -> torch.device:
        """Where tensors are returned that come from no other device."""
        place: Any = self._place
        return torch.device(place.device)

    @staticmethod
    def can_generate() -> bool:
        """True."""
        return True

    def train(self, mode: bool = True) -> CompiledCausalLM:
        """Raise UnsupportedError: a compiled model has no gradients. `eval()`, which calls it with False, is fine."""
        if mode:
            raise UnsupportedError("train: a compiled model has no gradients; train the checkpoint, and build it again")
        return self

    def requires_grad_(self, requires_grad: bool = True) -> CompiledCausalLM:
        """Raise UnsupportedError for True, as `train` does."""
        return self.train(requires_grad)

    def forward(  # parameters: those of transformers' models
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[torch.Tensor, ...]:
        """Float32 logits [batch, tokens, vocab] of input_ids [batch, tokens], and with labels their mean loss.

        labels: as input_ids; -100 does not count, nor does a label that follows padding. logits_to_keep: a number of
        last tokens, 0 for all, or a tensor of positions; only these get logits. use_cache: without effect. Logits of
        padding are zeros. Raises UnsupportedError for further arguments, UsageError.
        """
        _refuse_rest(others, "the forward pass")
        rows = _rows(input_ids, attention_mask)
        width = input_ids.shape[1]
        logits = torch.zeros((len(rows), width, self.config.vocab_size))
        by_length: dict[int, list[int]] = {}
        for number, (_, tokens) in enumerate(rows):
            by_length.setdefault(len(tokens), []).append(number)
        for length, numbers in by_length.items():
            for number, values in zip(numbers, self.llm.logits([rows[n][1] for n in numbers]), strict=True):
                start = rows[number][0]
                logits[number, start : start + length] = values
        logits = logits.to(input_ids.device)
        loss = None if labels is None else _loss(logits, labels, attention_mask)
        kept = logits[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
        if return_dict is False:
            return (kept,) if loss is None else (loss, kept)
        return CausalLMOutputWithPast(loss=loss, logits=kept)

    def generate(  # parameters: those of transformers' generate
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        stopping_criteria: Sequence[Callable[..., Any]] | None = None,
        streamer: Any = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Continue each row of input_ids [batch, tokens]; returns prompts with new tokens, padded on the right.

        options: fields of GenerationConfig. attention_mask [batch, tokens]: 0 for padding, on either side. With
        do_sample, tokens are drawn from seeds of torch's generator: `torch.manual_seed` repeats them.
        stopping_criteria: called with each sequence alone, [1, tokens], after each of its tokens, and None as scores.
        streamer: for one sequence. inputs_embeds [batch, tokens, width]: instead of tokens, on CPUs and one GPU; then
        the result has the new tokens alone. tokenizer: not needed. Raises UnsupportedError for what a compiled model
        cannot do (beams, logits processors, assistants, scores), UsageError.
        """
        given = input_ids if inputs is None else inputs
        if token_type_ids is not None and bool(token_type_ids.any()):
            raise UnsupportedError("token_type_ids: a compiled model reads none")
        settings = GenerationSettings.of(generation_config, self.generation_config, options)
        if given is None and inputs_embeds is None:
            given = self._beginning(settings)
        batch = _PromptBatch(given, attention_mask, inputs_embeds, settings)
        criteria = list(stopping_criteria or ())
        if settings.values["max_time"]:
            criteria.append(MaxTimeCriteria(settings.values["max_time"]))
        if streamer is not None and batch.sequences > 1:
            raise UsageError(f"streamer: it takes one sequence, not {batch.sequences}")
        if streamer is None and not criteria:
            outputs = self.llm.generate(batch.prompts, batch.params, prompt_embeds=batch.embeds)
            generated = [sample.token_ids for output in outputs for sample in output.outputs]
        else:
            generated = self._watched(batch, criteria, streamer)
        sequences: Any = batch.joined(generated)
        dictionary = settings.values["return_dict_in_generate"]
        return GenerateDecoderOnlyOutput(sequences=sequences) if dictionary else sequences

    def _beginning(self, settings: GenerationSettings) -> torch.Tensor:
        """The prompt where none is given."""
        bos = settings.values["bos_token_id"]
        if bos is None:
            raise UsageError("give input_ids: the model has no token that begins a text")
        return torch.tensor([[bos]], device=self.device)

    def _watched(self, batch: _PromptBatch, criteria: Sequence[Callable[..., Any]], streamer: Any) -> list[list[int]]:
        """The new tokens of each sequence, of which each is shown to the criteria and the streamer."""
        generated: list[list[int]] = [[] for _ in range(batch.sequences)]
        ended = [False] * batch.sequences
        if streamer is not None:
            streamer.put(batch.before(0))
        for output in self.llm.stream(batch.prompts, batch.params, prompt_embeds=batch.embeds):
            for sample in output.outputs:
                number = output.request_id * len(output.outputs) + sample.index
                for token in sample.token_ids[len(generated[number]) :]:
                    if ended[number]:
                        break
                    generated[number].append(token)
                    if streamer is not None:
                        streamer.put(torch.tensor([token]))
                    shown = torch.cat([batch.before(number), torch.tensor([generated[number]])], 1)
                    ended[number] = any(bool(torch.as_tensor(each(shown, None)).all()) for each in criteria)
            if all(ended):
                break
        if streamer is not None:
            streamer.end()
        return generated


class _PromptBatch:
    """The prompts of one call of `generate`, and the parameters of each."""

    def __init__(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        embeds: torch.Tensor | None,
        settings: GenerationSettings,
    ) -> None:
        if embeds is not None and input_ids is not None and input_ids.numel():
            raise UsageError("give input_ids or inputs_embeds, not both")
        self._settings = settings
        self.prompts: list[list[int]] | None = None
        self.embeds: list[torch.Tensor] | None = None
        if embeds is not None:
            places = torch.arange(embeds.shape[1]).expand(embeds.shape[:2])
            rows = _rows(places, attention_mask)
            self.embeds = [row[start : start + len(kept)] for row, (start, kept) in zip(embeds, rows, strict=True)]
            self.shown = torch.empty((len(embeds), 0), dtype=torch.long, device=embeds.device)
            width = embeds.shape[1]
        else:
            assert input_ids is not None
            self.prompts = [tokens for _, tokens in _rows(input_ids, attention_mask)]
            self.shown = input_ids
            width = input_ids.shape[1]
        drawn = bool(settings.values["do_sample"])
        seeds = torch.randint(2**31, (len(self.shown),)).tolist() if drawn else [None] * len(self.shown)
        self.params: list[SamplingParams] = [settings.params(width, seed) for seed in seeds]
        self.sequences = len(self.shown) * settings.samples

    def before(self, number: int) -> torch.Tensor:
        """The tokens [1, tokens] before the new ones of a sequence, on the CPU."""
        row = number // self._settings.samples
        return self.shown[row : row + 1].cpu()

    def joined(self, generated: Sequence[Sequence[int]]) -> torch.Tensor:
        """Prompts and new tokens, [sequences, tokens]."""
        width = max(map(len, generated))
        padded = [[*tokens, *[self._settings.padding] * (width - len(tokens))] for tokens in generated]
        prompts = self.shown.repeat_interleave(self._settings.samples, 0)
        return torch.cat([prompts, torch.tensor(padded, dtype=prompts.dtype, device=prompts.device)], 1)


def _loss(logits: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """The mean loss of labels [batch, tokens] under the logits of the tokens before them. Raises UsageError."""
    if labels.shape != logits.shape[:2]:
        raise UsageError(f"labels must be {list(logits.shape[:2])} as input_ids, not {list(labels.shape)}")
    wanted = labels[:, 1:].to(logits.device)
    if attention_mask is not None:
        wanted = wanted.masked_fill(attention_mask[:, :-1].to(logits.device) == 0, IGNORED)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)


def _rows(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[tuple[int, list[int]]]:
    """The first position and the tokens of each row, without padding. Raises UsageError."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.is_floating_point():
        what = getattr(input_ids, "dtype", type(input_ids).__name__)
        raise UsageError(f"input_ids must be a tensor of whole numbers, not {what}")
    if input_ids.ndim != 2 or not input_ids.numel():
        raise UsageError(f"input_ids must be [batch, tokens] with at least one token, not {list(input_ids.shape)}")
    if attention_mask is None:
        return [(0, row) for row in input_ids.tolist()]
    if attention_mask.shape != input_ids.shape:
        shapes = f"{list(attention_mask.shape)}, and input_ids {list(input_ids.shape)}"
        raise UnsupportedError(f"attention_mask must have the shape of input_ids: it has {shapes}")
    rows = []
    for number, (tokens, mask) in enumerate(zip(input_ids.tolist(), attention_mask.tolist(), strict=True)):
        places = [place for place, kept in enumerate(mask) if kept]
        if not places:
            raise UsageError(f"attention_mask: row {number} is all padding")
        first, end = places[0], places[-1] + 1
        if end - first != len(places):
            raise UnsupportedError(f"attention_mask: row {number} masks tokens between others")
        rows.append((first, tokens[first:end]))
    return rows


def _refuse_rest(others: dict[str, Any], what: str) -> None:
    """Raise UnsupportedError if an argument asks for something. None and False ask for nothing."""
    for name, value in others.items():
        if value is not None and value is not False:
            raise UnsupportedError(f"{name}: {what} of a compiled model takes none")


# The pipeline of transformers otherwise prints that it does not support the class.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(CompiledConfig.model_type, CompiledCausalLM.__name__)
