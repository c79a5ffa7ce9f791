"""A head's block in the CPU kernel."""

from __future__ import annotations

from compile.stack import NativeStack
from sharesd.models.heads.head import FeatureHead


def native_block(head: FeatureHead) -> NativeStack:
    """The head's block in one call of the CPU kernel, once its linears are packed. Raises Unsuited."""
    return NativeStack(
        [head.block],
        tables=[(head.get_buffer("cos"), head.get_buffer("sin"))],
        ropes=[0],
        activation=head.config.block.activation,
    )
