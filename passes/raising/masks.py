"""Masks of attention. Running a mask proves that it is causal, possibly with a window or with a bias by key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from qcompile.ops.model import visible
from qcompile.passes.raising.evaluation import PositionEvaluator
from qcompile.passes.raising.facts import Facts
from qcompile.passes.raising.nodes import unsupported

LENGTHS_TRIED = (1, 2, 3, 8, 17, 64, 257)
"""Sequence lengths at which a mask is run, in addition to the model's maximum."""

LONGEST_MASK = 4096
"""Maximum number of tokens of a mask; a larger one would take too much memory to run."""

HIDDEN = -1e4
"""Scores below this count as hidden: models add values from -10,000 down to minus infinity."""


@dataclass(frozen=True)
class Mask:
    """The mask `node`, and its meaning: `seen` or `hidden` (booleans), or `added` to the scores, times `factor`.

    `kept` masks multiply the scores; they must be 1 wherever the others show a key. `source` are features of tokens,
    if the mask has some (token_bias.py); what it shows is then proved with zeros in their place.
    """

    node: fx.Node
    meaning: str
    factor: float = 1.0
    source: fx.Node | None = None


@dataclass(frozen=True)
class Seen:
    """The combined effect of masks: a causal `window` or `chunk` (0: none), and a bias by key position, f32 [H, P]."""

    window: int
    key_bias: Tensor | None = None
    chunk: int = 0


def prove_mask(facts: Facts, node: fx.Node, masks: Sequence[Mask], is_causal: bool) -> Seen:
    """Run `masks` at several lengths to prove that together they are a causal mask, optionally with a bias per key.

    Raises UnsupportedError naming `node` if they are anything else.
    """
    return facts.once(("mask", *masks, is_causal), lambda: _prove(facts, node, masks, is_causal))


def _prove(facts: Facts, node: fx.Node, masks: Sequence[Mask], is_causal: bool) -> Seen:
    longest = facts.longest
    _require_positions_only(facts, node, masks, is_causal)
    shown: dict[int, tuple[int, int]] = {}
    table: Tensor | None = None
    for length in lengths_tried(facts) if masks else ():
        seen, total = _combined(facts, masks, is_causal, length)
        shown[length] = _window_and_chunk(node, seen, length)
        if length == longest and total is not None:
            table = _last_row(total)
        if total is not None and (any(map(any, shown.values())) or not _is_by_key(seen, total, table)):
            raise unsupported(node, "adds a bias to its scores that is no mask and depends on more than the key")
    sizes = tuple(max(each) for each in zip(*shown.values(), strict=True)) if shown else (0, 0)
    if any(each != tuple(size if length > size else 0 for size in sizes) for length, each in shown.items()):
        raise unsupported(node, f"has a window that depends on the length: {sorted(set(shown.values()))}")
    return Seen(sizes[0], table, sizes[1])


def lengths_tried(facts: Facts) -> list[int]:
    """The numbers of tokens at which a mask is run, from the model's context down."""
    return sorted({min(length, facts.longest) for length in (*LENGTHS_TRIED, facts.longest)}, reverse=True)


def _values(facts: Facts, mask: Mask, length: int, batch: int = 1) -> Tensor:
    """The values of a mask for sequences of `length` tokens, with zeros in place of its source."""
    run = PositionEvaluator(facts, length, batch)
    if mask.source is not None:
        run = PositionEvaluator(facts, length, batch, {mask.source: run.zeros(mask.source)})
    values: Tensor = run.value(mask.node)
    return values


def _require_positions_only(facts: Facts, node: fx.Node, masks: Sequence[Mask], is_causal: bool) -> None:
    """Refuse masks that depend on token ids or on the sequence, that are missing, or that are too long to run."""
    for mask in masks:
        if mask.source is None and facts.reads_token_ids(mask.node):
            raise unsupported(mask.node, "makes a mask from token ids; only masks of positions are compiled")
    if not masks and not is_causal:
        raise unsupported(node, "attends to later tokens; only causal decoders are compiled")
    if masks and facts.longest > LONGEST_MASK:
        raise unsupported(
            node, f"has an explicit mask of {facts.longest} positions; beyond {LONGEST_MASK} use is_causal=True"
        )
    length = min(8, facts.longest)
    for mask in masks:
        one, three = (_values(facts, mask, length, batch) for batch in (1, 3))
        each = three.reshape(3 if three.numel() == 3 * one.numel() else 1, -1)
        if each.shape[1] != one.numel() or (each != one.reshape(1, -1)).any():
            raise unsupported(mask.node, "makes a mask that differs between the sequences of a batch")


def _combined(facts: Facts, masks: Sequence[Mask], is_causal: bool, length: int) -> tuple[Tensor, Tensor | None]:
    """Which keys all `masks` show at `length` tokens, [.., length, length]; and the sum of their biases, None if 0."""
    seen = torch.ones(length, length, dtype=torch.bool).tril() if is_causal else torch.ones(1, 1, dtype=torch.bool)
    biases = []
    for mask in (mask for mask in masks if mask.meaning != "kept"):
        shown, bias = _visibility(_values(facts, mask, length), mask)
        seen = seen & shown
        biases += [] if bias is None else [bias.expand(*bias.shape[:-1], length)]
    for mask in (mask for mask in masks if mask.meaning == "kept"):
        if (seen & (_values(facts, mask, length) != 1)).any():
            raise unsupported(mask.node, "multiplies scores that its mask does not hide")
    return seen, sum(biases[1:], biases[0]) if biases else None


def _visibility(values: Tensor, mask: Mask) -> tuple[Tensor, Tensor | None]:
    """A boolean tensor, true where the mask shows a key, and the bias it adds to visible scores, or None if zero."""
    if values.dtype == torch.bool:
        return (~values if mask.meaning == "hidden" else values), None
    if mask.meaning != "added":
        return (values == 0 if mask.meaning == "hidden" else values != 0), None
    values = values.float() * mask.factor
    shown = values > HIDDEN
    return shown, values if values[shown].any() else None


def _last_row(bias: Tensor) -> Tensor:
    """The last query's row, which sees every key, of a bias [.., H or 1, Q or 1, S]: [H or 1, S]."""
    return bias[..., -1, :].reshape(-1, bias.shape[-1])


def _is_by_key(seen: Tensor, total: Tensor, table: Tensor | None) -> bool:
    """Whether a bias equals `table` at all visible keys, up to a constant per query.

    Softmax ignores that constant. The tolerance covers float32 rounding.
    """
    if table is None:
        return False
    size = total.shape[-1]
    wanted = table[:, :size]
    if total.shape[-2] == 1:  # the same for every query: one row suffices
        rows, shown = total.reshape(-1, 1, size), torch.ones(1, 1, size, dtype=torch.bool)
        own = rows[..., :1], wanted[:, None, :1]
    else:
        rows = total.expand(*total.shape[:-2], size, size).reshape(-1, size, size)
        shown = seen.expand(*seen.shape[:-2], size, size).reshape(-1, size, size)
        own = rows.diagonal(dim1=-2, dim2=-1)[..., None], wanted[..., None]
    error = ((rows - own[0]) - (wanted[:, None] - own[1])).masked_fill(~shown, 0.0).abs().max()
    most = float(wanted.abs().max())
    return len(rows) == len(wanted) and float(error) <= 4 * 2.0**-23 * most


def _window_and_chunk(node: fx.Node, seen: Tensor, length: int) -> tuple[int, int]:
    """The window and the chunk of a mask broadcastable to [.., length, length]; 0 where it reaches the first token."""
    rows = seen.expand(*seen.shape[:-2], length, length).reshape(-1, length, length)
    place = torch.arange(length)
    width = int(rows[0, -1].sum())
    hidden = (~rows[0, :, 0]).nonzero()  # the first query that does not see the first token begins the second chunk
    for window, chunk in ((width % length, 0), (0, int(hidden[0]) if len(hidden) else 0)):
        if (rows == visible(place, place, window, chunk)).all():
            return window, chunk
    raise unsupported(node, "has a mask that is neither causal nor a causal window, sliding or of chunks")
