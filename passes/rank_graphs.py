"""The graphs of all ranks of a divided model, from those of rank 0; and the builds that ranks do not support yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qcompile.errors import PassError, UnsupportedError, UsageError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, run_passes
from qcompile.passes.shard import Shard


def shard_of(passes: Sequence[Pass]) -> Shard | None:
    """The pass that divides the model; None if one process runs it."""
    return next((rewrite for rewrite in passes if isinstance(rewrite, Shard) and rewrite.wanted), None)


def check_ranks(passes: Sequence[Pass], drafts: str, check_passes: bool) -> None:
    """Raise UsageError or UnsupportedError if `passes` divide the model and the build wants what ranks cannot do.

    `drafts`: those of the build that one process cannot have for itself; empty if there are none. `check_passes`:
    whether each pass is to be measured by running its graph.
    """
    shard = shard_of(passes)
    if shard is None:
        return
    if shard.rank:
        raise UsageError(f"shard.rank={shard.rank}: a build makes all ranks; leave it out")
    if drafts:
        raise UnsupportedError(f"{drafts} do not run on {shard.ranks} ranks yet: take a build without, such as w4a8")
    if check_passes:
        raise UsageError("a rank alone has no logits to check: check the passes in a build for one process")


def other_ranks(graphs: Sequence[Graph], passes: Sequence[Pass]) -> list[Graph]:
    """The last graphs of ranks 1 and up, where `graphs` are those of rank 0 after each of `passes` that is wanted.

    Empty if one process runs the model. Raises PassError if nothing of it can be divided.
    """
    shard = shard_of(passes)
    if shard is None:
        return []
    after = passes[passes.index(shard) + 1 :]
    whole = graphs[-2 - sum(rewrite.wanted for rewrite in after)]
    if not graphs[-1].calls("all_reduce"):
        reason = f"nothing of this model can be divided over {shard.ranks} ranks"
        raise PassError(shard.name, graphs[-1].output.name, reason)
    return [run_passes(whole, (replace(shard, rank=rank), *after))[0][-1] for rank in range(1, shard.ranks)]
