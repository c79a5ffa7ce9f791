"""Checks of options that exclude replicas on a Ray cluster."""

from __future__ import annotations

from multigpu.ray_cluster import require_ray
from sharesd.config import EngineConfig


def check_ray(config: EngineConfig, library: str) -> None:
    """Raise ValueError for options that replicas exclude, and if Ray is missing."""
    excluded = {
        "--prompt-cache": config.prompt_cache is not None,
        "--tensor-parallel": config.tensor_parallel > 1,
        "--devices": config.split.enabled,
    }
    given = [flag for flag, is_given in excluded.items() if is_given]
    if given:
        raise ValueError(f"{given[0]} belongs to a single process; drop it, or --ray")
    if config.device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"--device is {config.device}, and Ray gives each replica its GPU; give cuda, or drop --ray")
    require_ray(library)
