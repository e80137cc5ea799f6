"""Adam, with a state that can be kept between runs (Kingma and Ba 2015)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MEAN, _SQUARE = 0.9, 0.95
"""Decay of the running means of gradients and of their squares."""


class Adam:
    """Moves `parameters` against their gradients, each by about its rate, which decays linearly over `steps` steps."""

    def __init__(self, parameters: Sequence[Tensor], rates: Sequence[float], steps: int, warm: int) -> None:
        self.parameters, self.rates, self.steps, self.warm = list(parameters), list(rates), steps, warm
        self.state = [torch.zeros_like(parameter) for parameter in parameters for _ in range(2)]
        self.done = 0

    @torch.no_grad()
    def step(self) -> None:
        """Move by the gradients, and clear them. A rate grows over the first `warm` steps."""
        self.done += 1
        share = min(1.0, self.done / self.warm) * (1 - (self.done - 1) / self.steps)
        for index, (parameter, rate) in enumerate(zip(self.parameters, self.rates, strict=True)):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            mean, square = self.state[2 * index : 2 * index + 2]
            mean.lerp_(gradient, 1 - _MEAN)
            square.mul_(_SQUARE).addcmul_(gradient, gradient, value=1 - _SQUARE)
            root = (square / (1 - _SQUARE**self.done)).sqrt_().add_(1e-20)
            parameter.addcdiv_(mean, root, value=-rate * share / (1 - _MEAN**self.done))
