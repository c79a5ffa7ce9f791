"""A head's blocks in the CPU kernel."""

from __future__ import annotations

from compile.stack import NativeStack
from sharesd.models.heads.head import Head


def native_block(head: Head) -> NativeStack:
    """The head's blocks in one call of the CPU kernel, once their linears are packed. Raises Unsuited."""
    return NativeStack(
        head.blocks,
        tables=[(head.get_buffer("cos"), head.get_buffer("sin"))],
        ropes=[0] * len(head.blocks),
        activation=head.config.block.activation,
    )
