"""The tensors that a transformers model reads, and which of an artifact's weights each of them is."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from qcompile.checkpoints import huggingface
from qcompile.errors import UnsupportedError
from qcompile.exports.origins import TensorRows, Use


class Parameters:
    """The tensors of the model of a transformers configuration, by name.

    `shapes` has all tensors that a checkpoint holds, tied ones under each of their names. `linears` are the names of
    the weights of linears, `head` that of the output head's.
    """

    def __init__(self, config: Any) -> None:
        module = huggingface.build(config)
        state = module.state_dict(keep_vars=True)
        self.shapes = {name: tuple(value.shape) for name, value in state.items()}
        self._same = {name: id(value) for name, value in state.items()}
        modules = list(module.named_modules())
        self.linears = frozenset(f"{path}.weight" for path, inner in modules if type(inner) is nn.Linear)
        self._tables = frozenset(f"{path}.weight" for path, inner in modules if isinstance(inner, nn.Embedding))
        head = module.get_output_embeddings()
        self.head = next((f"{path}.weight" for path, inner in modules if head is not None and inner is head), None)

    def alike(self, name: str) -> list[str]:
        """The names of the tensor `name`, which is tied if there are several."""
        return [other for other, same in self._same.items() if same == self._same[name]]

    def assigned(
        self, origins: Mapping[Use, list[TensorRows]], neutral: Mapping[str, float]
    ) -> dict[str, list[TensorRows]]:
        """The rows of each tensor of the checkpoint. A tied tensor that an artifact holds twice gets both names.

        Weights of other names are constants of the model's code. Raises UnsupportedError for a tensor that the artifact
        does not hold, or not all of, unless it is one of the `neutral` ones.
        """
        by_name: dict[str, list[TensorRows]] = {}
        for use, rows in origins.items():
            if use.tensor in self.shapes:
                by_name[self._name(use)] = rows
        for name, shape in self.shapes.items():
            if not any(other in by_name or other in neutral for other in self.alike(name)):
                raise UnsupportedError(f"export: the artifact does not hold {name}, which the checkpoint needs")
            _require_whole(name, shape, by_name.get(name))
        return by_name

    def _name(self, use: Use) -> str:
        """The name of a tensor for one of its uses: embeddings and linears have their own, even if they are tied."""
        names = self.alike(use.tensor)
        right = [name for name in names if (name in self._tables) == use.table]
        return use.tensor if use.tensor in right or not right else right[0]


def _require_whole(name: str, shape: tuple[int, ...], rows: list[TensorRows] | None) -> None:
    """Raise UnsupportedError unless `rows`, where there are some, are all rows of a tensor, each of them once."""
    if rows is None:
        return
    count = prod(shape[:-1]) if len(shape) > 1 else prod(shape)
    places = torch.cat([part.places for part in rows]).sort().values
    if not torch.equal(places, torch.arange(count)):
        raise UnsupportedError(f"export: the artifact does not hold each of the {count} rows of {name} once")
