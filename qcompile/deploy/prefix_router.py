"""Chooses a replica in a process that has a handle of the model's deployment: the replica that has most of the prompt's
beginning in its cache, unless it has much more to do than others.

Queue lengths are those that Ray keeps. It forgets one after 10 seconds, and asks the replica again when that is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from qcompile.deploy.exchange import Wanted
from qcompile.runtime.server.replicas.affinity import Affinity


class PrefixRouter(RequestRouter):
    """The router of requests: the second argument of a request says what it wants."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self._affinity = Affinity[str]()
        super().__init__(*given, **more)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The replicas have changed."""
        self._affinity.keep({replica.replica_id.unique_id for replica in replicas})
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica that fits best, then all others, which get the request if that one takes none."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None or not by_name:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        lengths = {name: self._queued(replica) for name, replica in by_name.items()}
        wanted = _wanted(pending_request.args)
        chosen = wanted.replica if wanted.replica in by_name else self._affinity.choose(wanted.blocks, lengths)
        self._affinity.note(chosen, wanted.blocks)
        return [[by_name[chosen]], [replica for name, replica in by_name.items() if name != chosen]]

    def _queued(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def _wanted(given: Sequence[Any]) -> Wanted:
    return given[1] if len(given) > 1 and isinstance(given[1], Wanted) else Wanted()
