"""What transformers' `inputs_embeds` are to a model: rows of the table of its token embedding, times a number.

Some models scale embeddings in the module that reads the table, so `inputs_embeds` are scaled; others scale after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qcompile.checkpoints.loaders import Loader


def scale(module: Any, loaders: Mapping[str, Loader]) -> float:
    """The factor between a row of the table and the output of `module.get_input_embeddings()` for its token.

    0 if the output is no multiple of a row. The module is run on one token, with a table of two random rows and with
    the buffers that `loaders` load.
    """
    try:
        embed = module.get_input_embeddings()
        path = next(path for path, each in module.named_modules() if each is embed)
        ((name, table),) = embed.named_parameters()
        buffers = {buffer: loaders[f"{path}.{buffer}"]() for buffer, _ in embed.named_buffers()}
        row = torch.randn(table.shape[1], generator=torch.Generator().manual_seed(0))
        values = {name: row.expand(table.shape), **buffers}
        with torch.no_grad():
            given = torch.func.functional_call(embed, values, (torch.zeros(1, 1, dtype=torch.int64),))[0, 0]
    except (
        AttributeError,
        NotImplementedError,
        StopIteration,
        KeyError,
        ValueError,
        IndexError,
        TypeError,
        RuntimeError,
    ):
        return 0.0  # an embedding of another kind: of several tables, or one that reads more than token numbers
    factor = float((given[0].double() / row[0].double()).float())
    return factor if given.shape == row.shape and torch.equal(given, row * factor) else 0.0
