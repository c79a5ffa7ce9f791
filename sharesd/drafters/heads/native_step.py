"""A head's steps in the CPU kernel."""

from __future__ import annotations

from compile.head_step import NativeHead
from sharesd.drafters.heads.head import Head


def native_head(head: Head) -> NativeHead:
    """Return steps in the CPU kernel, of packed linears; raise KernelUnsupported."""
    return NativeHead(
        head.block,
        tables=(head.get_buffer("cos"), head.get_buffer("sin")),
        hidden_act=head.config.block.hidden_act,
        embed_VD=head.embedding.weight,
        lm_head=head.unembedding,
        **head.native_parts(),
    )
