"""Initial weights of heads, copied from the target.

A head's block is initialised from the target's last block, which reads the deepest hidden states. GLIDE's
cross-attentions are initialised from their layers. EAGLE starts as a linear map from embedding and previous hidden
state to the next hidden state, with a block whose output is zero. The map is solved in seconds, and replaces the
training steps that would learn it.

Legend: N tokens, T positions of a text, D hidden size, E inputs (2 D), K draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sharesd.drafters.eagle.head import Eagle, Eagle3
from sharesd.drafters.glide.head import GLIDE, GLIDE_LAYERS, Glide
from sharesd.drafters.heads.checkpoint import new_head
from sharesd.drafters.heads.config import ARCHITECTURES, LAYER_IDS, HeadConfig, Kind
from sharesd.drafters.heads.head import FeatureHead, Head
from sharesd.drafters.parallel.head import Parallel
from sharesd.models.decoder import Block, Decoder
from sharesd.models.layers import MLP
from train.heads.teacher import Lesson


@torch.no_grad()
def initial_head(
    kind: Kind,
    target_raw: dict[str, Any],
    target: Decoder,
    *,
    ids_K: Tensor | None = None,
    taps: tuple[int, ...] = (),
    **changes: Any,
) -> Head:
    """Return a new head with the draft tokens `ids` (None: all).

    `changes` override config fields: depths of hidden states (not EAGLE-1), or layers (GLIDE). The next token's
    embedding starts with zero weight. Masks differ from the root by position alone. The target must have its plain
    linears. Raises ValueError for a mixture of experts, or recurrent layers.
    """
    if target.config.experts is not None:
        raise ValueError("a head begins as the target's last block, and a mixture's has experts; give another target")
    if any(target.config.conv_widths):
        layers = target.config.recurrent_layers
        raise ValueError(f"a head begins as a block with attention, and the target has {layers}; give another one")
    if taps:
        changes |= {GLIDE: {GLIDE_LAYERS: list(taps)}} if kind == "glide" else {LAYER_IDS: list(taps)}
    num_draft_tokens = None if ids_K is None else len(ids_K)
    config = HeadConfig.new(kind, target_raw, draft_vocab_size=num_draft_tokens, **changes)
    head = new_head(config, target, ids_K=ids_K)
    (last, *upper), D = target.blocks[-len(head.blocks) :], config.block.hidden_size
    assert isinstance(last, Block) and isinstance(last.mlp, MLP)
    attn_norm_D, mlp_norm_D = (norm.get_parameter("weight") for norm in (last.attn_norm, last.mlp_norm))
    block = head.block
    for parameter in head.parameters():
        parameter.zero_()
    for to, weight in (
        (block.mlp.gate_up, last.mlp.gate_up),
        (block.attn.o, last.attn.o),
        (block.mlp.down, last.mlp.down),
    ):
        to.weight.copy_(weight.weight)
    for to, block_of_target in zip(head.blocks[1:], upper, strict=True):
        to.load_state_dict(block_of_target.state_dict())
    if isinstance(head, FeatureHead):
        head.fc.weight[:, -D:] = torch.eye(D)  # the features follow the embedding, the deepest ones last
    if isinstance(head, Glide):
        _begin_as_layers(head, target)
    elif isinstance(head, Eagle3):
        block.attn.qkv.weight[:, D:] = last.attn.qkv.weight
        head.embed_norm.weight.fill_(1)
        head.state_norm.weight.copy_(attn_norm_D)
        block.mlp_norm.weight.copy_(mlp_norm_D)
        head.norm.weight.copy_(target.norm.weight)
    else:
        dice, values = torch.Generator().manual_seed(0), block.attn.num_key_value_heads * block.attn.head_dim
        block.attn.qkv.weight.copy_(last.attn.qkv.weight * attn_norm_D)  # the head has no norm for these
        for weight in (block.attn.qkv.weight[-values:], block.mlp.gate_up.weight):
            weight.copy_(torch.randn(weight.shape, generator=dice) * D**-0.5)
        block.mlp_norm.weight.fill_(1)
        block.attn.o.weight.zero_(), block.mlp.down.weight.zero_()
    if head.lm_head is not None:
        head.lm_head.weight.copy_(target.head.weight if ids_K is None else target.head.weight[ids_K])
    return head


@torch.no_grad()
def with_masks(head: Eagle3, target: Decoder, draft_length: int) -> Parallel:
    """Return an EAGLE-3 head extended to draft several tokens in one pass.

    Its first draft token is unchanged. Masks differ from the root by position alone.
    """
    raw = {**head.config.raw, "architectures": [ARCHITECTURES["parallel"]], "draft_length": draft_length}
    config = HeadConfig.of(raw, "parallel", target.config)
    ids_K, has_bias = None if head.ids is None else head.get_buffer("ids"), getattr(head.fc, "bias", None) is not None
    one = new_head(config, target, ids_K=ids_K, own_embed=head.embed is not None, fc_bias=has_bias)
    assert isinstance(one, Parallel)
    given = dict(head.named_parameters())
    for name, parameter in one.named_parameters():
        parameter.copy_(given[name]) if name in given else parameter.zero_()
    return one


def _begin_as_layers(head: Glide, target: Decoder) -> None:
    """Copy weights of target layers into a GLIDE head.

    Self-attention comes from the first block, which reads embeddings; each cross-attention from its layer; the rest
    from the last block.
    """
    first, last, block = target.blocks[0], target.blocks[-1], head.block
    assert isinstance(first, Block) and isinstance(last, Block)
    block.attn.qkv.weight.copy_(first.attn.qkv.weight)
    block.attn.o.weight.copy_(first.attn.o.weight)
    for to, norm in (
        (block.attn_norm, first.attn_norm),
        (block.cross_norm, last.attn_norm),
        (block.mlp_norm, last.mlp_norm),
        (head.norm, target.norm),
    ):
        to.weight.copy_(norm.get_parameter("weight"))
    for cross in block.cross:
        layer = target.blocks[cross.layer]
        assert isinstance(layer, Block)
        cross.q.weight.copy_(layer.attn.qkv.weight[: len(cross.q.weight)])
        cross.o.weight.copy_(layer.attn.o.weight)
        if cross.q_norm is not None and layer.attn.q_norm is not None:
            cross.q_norm.weight.copy_(layer.attn.q_norm.weight)


def most_frequent(rows: Iterable[dict[str, Tensor]], vocab_size: int, num: int) -> Tensor:
    """Return ids [num], ascending, of the assistant's most frequent tokens.

    Of equally frequent tokens, lower ids come first. Raises ValueError if there are fewer than `num`.
    """
    if not 0 < num <= vocab_size:
        raise ValueError(f"--draft-vocab is {num} but the target has {vocab_size} tokens; give 1 to {vocab_size}")
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for row in rows:
        counts_V += row["token_ids"][row["loss_mask"]].bincount(minlength=vocab_size)
    return counts_V.sort(descending=True, stable=True).indices[:num].sort().values


@torch.no_grad()
def begin_linear(head: Eagle, lessons: Iterable[Lesson], ridge: float = 1e-3) -> None:
    """Set fc to the best linear prediction of the target's hidden states.

    `ridge` is added to the variance of each input, as a share of it.
    """
    inputs, outputs = head.fc.in_features, head.fc.out_features
    moments = torch.zeros(inputs + 1, inputs + 1 + outputs, dtype=torch.float64)
    for lesson in lessons:
        counted_T = lesson.counted(0)
        embeds_TD, features_TD = head.embedding(lesson.tokens_1T)[0], head.fuse(lesson.features_1TF)[0]
        ones_T1 = torch.ones_like(embeds_TD[:, :1])
        known_TE = torch.cat([embeds_TD, features_TD, ones_T1], 1)[counted_T].double()
        moments += known_TE.T @ torch.cat([known_TE, lesson.teacher_TD[counted_T].double()], 1)
    weight_ED = solved(moments[:, : inputs + 1], moments[:, inputs + 1 :], ridge).to(head.fc.weight)
    head.fc.weight.copy_(weight_ED[:-1].T)
    head.fc.bias.copy_(weight_ED[-1])


def solved(squares_EE: Tensor, products_ED: Tensor, ridge: float) -> Tensor:
    """Return weights [E, D] from sums of x x' and x y'.

    The last input is the constant 1, without ridge. Inputs that are always 0 get weight 0.
    """
    sizes_E = squares_EE.diagonal().sqrt()
    scale_E = torch.where(sizes_E > 0, 1 / sizes_E, 0)
    scaled_EE = squares_EE * scale_E[:, None] * scale_E
    ridge_E = torch.full_like(scale_E, ridge).where(sizes_E > 0, 1)
    ridge_E[-1] = 0
    found_ED = torch.linalg.solve(scaled_EE + ridge_E.diag(), products_ED * scale_E[:, None])
    return found_ED * scale_E[:, None]
