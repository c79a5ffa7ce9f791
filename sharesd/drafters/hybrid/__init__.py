"""The best of several drafters, chosen for each round."""

from sharesd.config import EngineConfig
from sharesd.drafters.registry import DrafterSpec, Support

PREFERRED = ("eagle", "share", "suffix")
"""Default drafters: first, or a head in the checkpoint, if one exists; else second; and third."""
WITH_STORED_WEIGHTS = ("suffix", "recycle")
"""Default drafters if the target runs on stored weights and there is no head.

A quantized copy of the target would be no smaller than the stored weights, so it could not draft faster.
"""


def members(config: EngineConfig) -> tuple[str, ...]:
    """Return the drafters that are mixed."""
    from sharesd.drafters import registry, selection

    if config.hybrid_with:
        return config.hybrid_with
    head, other, table = PREFERRED
    for found in (head, *config.inner_heads):
        lacking = config.tensor_parallel > 1 and registry.lacking((found,), Support.TENSOR_PARALLEL)
        if not lacking and selection.has_head(config, found):
            return found, table
    return WITH_STORED_WEIGHTS if config.dequantize is False else (other, table)


SPEC = DrafterSpec(
    name="hybrid",
    kind="mix",
    order=0,
    help="the best of `--hybrid-drafters` in each round",
    members="sharesd.drafters.hybrid:members",
    colour="#56B4E9",
)
