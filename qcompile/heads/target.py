"""The model that a draft head is trained for, as transformers runs it: its hidden states and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qcompile.checkpoints.configuration import auto_class, context_length, read_config, text_config
from qcompile.checkpoints.stored import formats
from qcompile.errors import ResourceError, UnsupportedError, UsageError
from qcompile.heads.layout import HeadShape, default_layers

_ROPE_THETA = 10_000.0
_HEAD_DIM = 64
"""What a head takes where the configuration of its target does not say."""


@dataclass(frozen=True)
class HeadTarget:
    """A decoder that is not trained. Tokens are int64 [batch, length]."""

    module: Any
    config: Any

    @staticmethod
    def load(directory: Path, device: str) -> HeadTarget:
        """The model in `directory`, on a device of torch: float32 on CPUs, bfloat16 on others.

        Raises UsageError, UnsupportedError (it is no decoder, or stored quantized), ResourceError (no such device).
        """
        config = read_config(directory)
        if formats.stated(directory) is not None:
            raise UnsupportedError(f"{directory} is quantized: train on the model that it was made from")
        import transformers

        transformers.utils.logging.disable_progress_bar()  # the command has its own
        kind = getattr(transformers, auto_class(config.model_type, config.architectures or ()) or "")
        dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
        try:
            module = kind.from_pretrained(directory, dtype=dtype, local_files_only=True)
        except (OSError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(f"{directory} cannot be loaded: {reason}") from error
        try:
            module = module.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ResourceError(f"device {device}: {(str(error).splitlines() or ['unknown'])[0]}") from error
        return HeadTarget(module.eval().requires_grad_(False), text_config(config))

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return int(self.config.num_hidden_layers)

    @property
    def context(self) -> int:
        """The longest text, in tokens."""
        return context_length(self.config)

    @property
    def begin(self) -> int | None:
        """The token that begins a text; None if there is none."""
        stated = getattr(self.config, "bos_token_id", None)
        return stated if isinstance(stated, int) else None

    def head_shape(self, layers: Sequence[int], drafted: int) -> HeadShape:
        """The sizes of a head that reads the hidden states after `layers` and proposes `drafted` tokens.

        No `layers` selects the usual three. Raises UsageError for layers that the model does not have.
        """
        chosen = tuple(layers) if layers and self.depth > 2 else default_layers(self.depth)
        if list(chosen) != sorted(set(chosen)) or not 0 < chosen[0] <= chosen[-1] < self.depth or len(chosen) < 2:
            raise UsageError(
                f"layers {','.join(map(str, chosen))}: give two or more from 1 to {self.depth - 1}, in rising order"
            )
        hidden, vocabulary = self.output_weight.shape[1], self.output_weight.shape[0]
        head_dim = int(getattr(self.config, "head_dim", None) or _HEAD_DIM)
        heads = int(getattr(self.config, "num_attention_heads", 0) or max(1, hidden // head_dim))
        kv_heads = int(getattr(self.config, "num_key_value_heads", 0) or heads)
        return HeadShape(
            hidden=hidden,
            inner=int(getattr(self.config, "intermediate_size", 0) or 4 * hidden),
            heads=heads,
            kv_heads=kv_heads if heads % kv_heads == 0 else heads,
            head_dim=head_dim,
            vocabulary=vocabulary,
            drafted=min(drafted, vocabulary),
            layers=chosen,
            norm_eps=float(getattr(self.config, "rms_norm_eps", 0) or 1e-6),
            rope_theta=_rope_theta(self.config),
            context=self.context,
        )

    @property
    def output_weight(self) -> Tensor:
        """The output head [vocabulary, hidden]."""
        weight: Tensor = self.module.get_output_embeddings().weight
        return weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings float [batch, length, hidden] as the first layer reads them."""
        embedded: Tensor = self.module.get_input_embeddings()(tokens)
        return embedded

    @torch.no_grad()
    def states(self, tokens: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hidden states after `layers`, joined: [batch, length, layers * hidden]; logits [batch, length, vocabulary].

        Raises UnsupportedError if the model does not yield a hidden state of its width after each layer.
        """
        out = self.module(tokens, output_hidden_states=True, use_cache=False)
        states, width = out.hidden_states, self.output_weight.shape[1]
        if states is None or len(states) != self.depth + 1 or states[layers[0]].shape != (*tokens.shape, width):
            raise UnsupportedError(f"model type {self.config.model_type} does not yield one hidden state a layer")
        return torch.cat([states[layer] for layer in layers], -1), out.logits


def _rope_theta(config: Any) -> float:
    """The base of the rotary embedding that the configuration states."""
    stated = getattr(config, "rope_parameters", None) or {}
    theta = getattr(config, "rope_theta", None) or (stated.get("rope_theta") if isinstance(stated, dict) else None)
    return float(theta or _ROPE_THETA)
