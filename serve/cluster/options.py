"""Options of a deployment; does not import Ray."""

from __future__ import annotations

import argparse
import re
from typing import Any, NamedTuple

from serve.server_config import ServerSettings
from sharesd.cli.options import check_ray
from sharesd.config import EngineConfig

HEALTH_PERIOD_S = 2.0
"""Seconds between health checks, and between questions for what routers know; a dead replica is replaced after one."""
ROWS = "rows"
"""Name of the number of rows that a replica's engine has, among what its router knows."""
MAX_ONGOING = 100_000
"""Concurrent requests per replica, for Ray; the application refuses requests long before."""


class NumReplicas(NamedTuple):
    """Minimum and maximum number of replicas."""

    min: int
    max: int


def replicas_type(text: str) -> NumReplicas:
    """Parse `N` or `MIN-MAX`."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of replicas; give N or MIN-MAX, e.g. 2 or 1-8")
    return NumReplicas(low, high)


def check_options(config: EngineConfig, *, ray: bool, num_replicas: NumReplicas | None) -> None:
    """Raise ValueError for options that need Ray, or that replicas exclude."""
    if not ray:
        if num_replicas is not None:
            low, high = num_replicas
            raise ValueError(f"--replicas is {low if low == high else f'{low}-{high}'} but --ray is missing; add --ray")
        return
    check_ray(config, "serve")


def deployment_options(settings: ServerSettings, num_replicas: NumReplicas) -> dict[str, Any]:
    """Return Ray Serve's options; the queue's length scales a range of replicas."""
    router = "serve.cluster.deployment.ConversationRouter"
    options: dict[str, Any] = {
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_timeout_s": settings.shutdown_timeout,
        "health_check_period_s": HEALTH_PERIOD_S,
        "max_constructor_retry_count": 1,
        "request_router_config": {
            "request_router_class": router,
            "request_routing_stats_period_s": HEALTH_PERIOD_S,
        },
    }
    low, high = num_replicas
    if low == high:
        return {**options, "num_replicas": low}
    scaling = {"min_replicas": low, "max_replicas": high, "target_ongoing_requests": settings.max_batch}
    return {**options, "autoscaling_config": scaling}
