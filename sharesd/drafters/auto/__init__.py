"""Mix of drafters, chosen for the model and this machine."""

from sharesd.config import EngineConfig
from sharesd.drafters.registry import DrafterSpec


def members(config: EngineConfig) -> tuple[str, ...]:
    """Return the drafters that were chosen; none before the model is loaded."""
    return config.auto_drafters


SPEC = DrafterSpec(
    name="auto",
    kind="mix",
    order=1,
    help="hybrid of what fits the model and this machine",
    members="sharesd.drafters.auto:members",
)
