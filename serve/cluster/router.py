"""Choice of a request's replica, in the process of the ingress."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serve.cluster.ingress import preference


class ConversationRouter(RequestRouter):
    """Router to the replica that has the prefix of a conversation.

    If its batch is full, the next by the same order; if all are full, the one with the fewest requests.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._max_batch: int = kwargs["max_batch"]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return replicas in the order in which Ray tries them."""
        assert pending_request is not None
        request = pending_request.args[0]
        conversation = request.conversation or pending_request.metadata.internal_request_id
        lengths = self.replica_queue_len_cache
        ordered = sorted(
            candidate_replicas, key=lambda replica: preference(conversation, replica.replica_id.unique_id), reverse=True
        )
        free = [[replica] for replica in ordered if (lengths.get(replica.replica_id) or 0) < self._max_batch]
        return [*free, ordered]
