"""A second model drafts."""

from sharesd.drafters.registry import DrafterSpec, Need

SPEC = DrafterSpec(
    name="classic",
    kind="model",
    order=0,
    help="a second model drafts: a smaller one, or a quantized copy of the target",
    build="sharesd.drafters.classic.drafter:build",
    needs=frozenset({Need.SECOND_MODEL}),
    aliases=("sd-classic",),
    colour="#E69F00",
    hatch="//",
)
