"""Layers for multi-token prediction (MTP) that come inside checkpoints."""

from sharesd.drafters.registry import DrafterSpec, Need, Support

SPEC = DrafterSpec(
    name="mtp",
    kind="head",
    order=3,
    help="the checkpoint's own layer for multi-token prediction (MTP) drafts token by token",
    build="sharesd.drafters.mtp.drafter:build",
    needs=frozenset({Need.HIDDEN_STATES}),
    supports=frozenset({Support.TREES}),
    inside="sharesd.drafters.mtp.checkpoint",
    needs_inside="a layer for multi-token prediction",
    colour="#661100",
)
