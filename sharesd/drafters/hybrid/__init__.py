"""The best of several drafters, chosen for each round."""

from sharesd.config import EngineConfig
from sharesd.drafters.registry import DrafterSpec, Need, Support


def members(config: EngineConfig) -> tuple[str, ...]:
    """Return the drafters that are mixed: those given, or a head if one exists, else the target itself, and tables.

    Where quantized copies of the target pay next to the head, they are mixed as in mode `auto`, once that has chosen.
    Copies of a target that runs on stored weights would be no smaller than these, so they could not draft faster. There
    more tables are mixed instead.
    """
    from sharesd.drafters import registry, selection

    def tables(kind: str) -> tuple[str, ...]:
        return tuple(spec.name for spec in registry.specs("table") if kind in spec.auto_with)

    if config.hybrid_with:
        return config.hybrid_with
    for head in dict.fromkeys((registry.names("head")[0], *config.inner_heads)):
        lacking = config.tensor_parallel > 1 and registry.lacking((head,), Support.TENSOR_PARALLEL)
        if not lacking and selection.has_head(config, head):
            return config.auto_drafters if head in config.auto_drafters else (head, *tables("head"))
    return (
        tables("self") if config.dequantize is False else (selection.needing(Need.QUANTIZED_TARGET)[0], *tables("head"))
    )


SPEC = DrafterSpec(
    name="hybrid",
    kind="mix",
    order=0,
    help="the best of `--hybrid-drafters` in each round",
    members="sharesd.drafters.hybrid:members",
    colour="#56B4E9",
)
