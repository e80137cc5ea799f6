"""The arguments of `generate` as transformers has them, as sampling parameters. What has no counterpart is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from qcompile.errors import UnsupportedError, UsageError, shown
from qcompile.runtime.sampling.params import SamplingParams

_NEW_TOKENS, _TOP_K = 20, 50
"""Defaults of transformers for `max_new_tokens`, and for `top_k` where tokens are drawn."""

_TAKEN = frozenset(
    {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample"),
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "num_return_sequences"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "return_dict_in_generate"),
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
        *("compile_config", "disable_compile", "low_memory", "transformers_version", "early_stopping"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size", "renormalize_logits"),
        *("remove_invalid_values", "decoder_start_token_id"),
    }
)
"""Fields that change how transformers computes, what only beams, assistants and models with an encoder read, and checks
of logits, which an engine of qcompile makes anyway. Log probabilities of tokens that are drawn are normalized here."""
_NEUTRAL: dict[str, Any] = {
    **{"num_beams": 1, "num_beam_groups": 1, "typical_p": 1, "length_penalty": 1, "encoder_repetition_penalty": 1},
    **{"guidance_scale": 1},
}
"""Values that ask for nothing, besides None, False, what is empty, and 0 unless it numbers a token."""
_ARGUMENTS = ("logits_processor", "synced_gpus")
"""Arguments of `generate` besides the fields, which some callers give with values that ask for nothing."""


def _asks_for_nothing(name: str, value: Any) -> bool:
    if name.endswith("_token_id"):
        return value is None
    return not value or bool(value == _NEUTRAL.get(name))


@dataclass(frozen=True)
class GenerationSettings:
    """What `generate` is asked for. Raises UsageError, and UnsupportedError for what is not possible.

    values: the fields of GenerationConfig that the caller, or else the model's configuration, sets.
    """

    values: Mapping[str, Any]

    @staticmethod
    def of(given: GenerationConfig | None, own: GenerationConfig, options: Mapping[str, Any]) -> GenerationSettings:
        """The settings of a call. options: keywords, which count most; own: the model's configuration, the least."""
        fields = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
        values: dict[str, Any] = {}
        for name in fields:
            candidates = (options.get(name), getattr(given, name, None), getattr(own, name, None))
            values[name] = next((value for value in candidates if value is not None), None)
            if name not in _TAKEN | _WITHOUT_EFFECT and not _asks_for_nothing(name, values[name]):
                raise UnsupportedError(f"{name} {shown(values[name])}: a compiled model does not generate with it")
        more = [name for name, value in options.items() if name not in fields and value is not None]
        unknown = [name for name in more if name not in _ARGUMENTS or not _asks_for_nothing(name, options[name])]
        if unknown:
            raise UnsupportedError(f"{unknown[0]}: generate of a compiled model has no such argument")
        return GenerationSettings(values)

    @property
    def ends(self) -> list[int]:
        """The tokens that end a sequence."""
        given = _listed(self.values["eos_token_id"])
        return [int(token) for token in given]

    @property
    def padding(self) -> int:
        """The token that fills rows of a result."""
        pad = self.values["pad_token_id"]
        return int(pad) if pad is not None else (self.ends or [0])[0]

    @property
    def samples(self) -> int:
        """Sequences for each prompt."""
        count = self.values["num_return_sequences"] or 1
        if count > 1 and not self.values["do_sample"]:
            raise UsageError(f"num_return_sequences {count} without do_sample: all would be equal")
        return int(count)

    def new_tokens(self, width: int) -> int:
        """Most tokens to generate after `width` tokens of prompt, padding included."""
        most = self.values["max_new_tokens"]
        if most is None:
            longest = self.values["max_length"]
            most = _NEW_TOKENS if longest is None else longest - width
        if most < 1:
            if self.values["max_new_tokens"] is not None:
                raise UsageError(f"no token may be generated: max_new_tokens is {shown(most)}")
            length = f"max_length {self.values['max_length']} with a prompt of {width} tokens"
            raise UsageError(f"no token may be generated: {length}; give max_new_tokens")
        return int(most)

    def params(self, width: int, seed: int | None) -> SamplingParams:
        """The sampling parameters of a prompt. seed: for tokens that are drawn."""
        least = self.values["min_new_tokens"]
        if least is None:
            least = max(0, (self.values["min_length"] or 0) - width)
        drawn: dict[str, Any] = {"temperature": 0.0}
        if self.values["do_sample"]:
            top_k = self.values["top_k"]
            limits = {name: self.values[name] for name in ("temperature", "top_p", "min_p")}
            drawn = {name: value for name, value in limits.items() if value is not None}
            drawn |= {"top_k": _TOP_K if top_k is None else top_k, "seed": seed, "n": self.samples}
        return SamplingParams(
            **drawn,
            repetition_penalty=self.values["repetition_penalty"] or 1.0,
            max_tokens=self.new_tokens(width),
            min_tokens=least,
            ignore_eos=True,  # the ends are those of the configuration alone
            stop_token_ids=self.ends,
            stop=_listed(self.values["stop_strings"]) or None,
        )


def _listed(given: Any) -> list[Any]:
    """One value or several, of any kind, as a list."""
    given = given.tolist() if hasattr(given, "tolist") else given
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
