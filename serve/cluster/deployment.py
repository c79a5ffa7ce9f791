"""Deployment of replicas with Ray Serve, and the choice of a request's replica."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.types import Message

from multigpu.ray_cluster import connect, resources_of_replica
from serve.cluster.ingress import Cluster, ReplicaDied, make_ingress, preference
from serve.cluster.options import ROWS, NumReplicas, deployment_options
from serve.cluster.replica import Forwarded, ServeReplica
from serve.engine_thread import ServedModel
from serve.server import OpenBackend
from serve.server_config import ServerSettings

CALL_TIMEOUT_S = 5.0
"""Time limit in seconds for a call of all replicas."""


class RayServeReplicas:
    """Replicas of one deployment on the connected cluster."""

    def __init__(
        self,
        num_replicas: NumReplicas,
        device: str,
        settings: ServerSettings,
        load: Callable[[], ServedModel],
        disconnect: bool = False,
    ) -> None:
        """Store the options; with `disconnect`, `stop` leaves the cluster."""
        self._num_replicas, self._device = num_replicas, device
        self._load, self._disconnect = load, disconnect
        self._settings = replace(settings, api_keys=(), cors_origins=(), key_pair=None)  # the ingress has these
        self._name = f"sharesd-{uuid.uuid4().hex[:8]}"
        self._handle: DeploymentHandle

    def start(self) -> None:
        """Start the replicas; return when they are loaded.

        Raises ValueError with the reason of a replica that could not load.
        """
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        quiet = {"log_level": "WARNING", "enable_access_log": False}
        serve.start(proxy_location="Disabled", logging_config=quiet)
        options = deployment_options(self._settings, self._num_replicas)
        resources = resources_of_replica(*self._num_replicas, self._device)
        deployment = serve.deployment(**options, ray_actor_options=resources, logging_config=quiet)(ServeReplica)
        application = deployment.bind(self._settings, self._load, os.getcwd())
        try:
            self._handle = serve.run(application, name=self._name, route_prefix=None)
        except RuntimeError as error:
            raise ValueError(_reason(self._name, error)) from error

    async def answer(self, request: Forwarded) -> AsyncIterator[list[Message]]:
        """Yield a replica's messages; raise ReplicaDied if it ends first.

        Waits until there is a replica. If the iterator is closed early, the replica's request is cancelled.
        """
        answer: Any = self._handle.options(method_name="answer", stream=True).remote(request)
        try:
            async for messages in answer:
                yield messages
        except RayActorError as error:
            raise ReplicaDied from error
        except BaseException:
            answer.cancel()
            raise

    async def of_each(self, method: str) -> list[Any]:
        """Return the results of a method of all replicas that answer."""
        try:
            call = self._handle.broadcast(method)
            results = await call.results_async(timeout_s=CALL_TIMEOUT_S, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError):
            return []
        return [result for result in results if not isinstance(result, BaseException)]

    def stop(self) -> None:
        """Stop the replicas, including those that are starting."""
        serve.delete(self._name)
        if self._disconnect:
            ray.shutdown()


def open_cluster(num_replicas: NumReplicas, device: str) -> OpenBackend:
    """Connect to Ray; return a function that opens the backend of a server.

    The connection comes first, since Ray installs signal handlers.
    """
    disconnect = connect()

    def open_backend(settings: ServerSettings, load: Callable[[], ServedModel]) -> tuple[Cluster, FastAPI]:
        cluster = Cluster(settings, RayServeReplicas(num_replicas, device, settings, load, disconnect))
        return cluster, make_ingress(cluster)

    return open_backend


def _reason(name: str, error: RuntimeError) -> str:
    """Return the last line of a failed replica's traceback."""
    application = serve.status().applications.get(name)
    found = [deployment.message for deployment in application.deployments.values()] if application else []
    lines = [line.strip() for line in "\n".join(filter(None, found)).splitlines() if line.strip()]
    return lines[-1].removeprefix("ValueError: ") if lines else str(error)


class ConversationRouter(RequestRouter):
    """Router to the replica that has the prefix of a conversation.

    If its batch is full, the next by the same order; if all are full, the one with the fewest requests.
    """

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
        free = [[each] for each in ordered if (lengths.get(each.replica_id) or 0) < each.routing_stats.get(ROWS, 1)]
        return [*free, ordered]
