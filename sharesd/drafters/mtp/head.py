"""The layer for multi-token prediction (MTP) of a checkpoint, as a head that drafts chains or trees.

It mixes the norms of a hidden state of the target and of the next token's embedding, runs one block of the target's
own kind, and shares embedding and LM head with the target (DeepSeek-AI 2024, arXiv 2412.19437). A chain repeats it: the
layer's own state stands in for the target's.

Engines and training codes disagree about which state goes in: that behind the last norm, or the one before. Here a
state is always kept behind its norm, x / rms(x) * w. The norm of the state before it, which the layer wants then, is
x / rms(x) * w_in, so one factor, w_in / w, gives it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from compile.attention import TreeAttentionMask
from compile.block_ranges import BlockRange
from compile.fused_linear import project
from multigpu.pipeline_parallel import PipelinePlan
from sharesd.drafters.heads.config import HeadConfig
from sharesd.drafters.heads.head import FeatureHead, Head
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.decoder import Block, Decoder, call_block
from sharesd.models.layers import RMSNorm, empty_linear
from sharesd.models.loader import MakeLinear
from sharesd.models.mtp import mtp_config
from sharesd_files import JsonCache


class MTP(FeatureHead):
    """Head of one block over fc([norm(embedding); norm(state)]), whose states are normed for the LM head."""

    OWN_ROPE = False
    HAS_TARGET_WIDTH = True
    block: Block  # type: ignore[assignment]

    def __init__(self, config: HeadConfig, target: Decoder, *, choice: JsonCache) -> None:
        """`choice`: where it is kept which states go in."""
        Head.__init__(self, config, target, ids_K=None, own_embed=False)
        c, self.choice = config.block, choice
        self.lm_head = None
        self.block = Block(c, c.layer_types[0], dtype=self.place["dtype"], device="meta")
        self.fc = empty_linear(2 * c.hidden_size, c.hidden_size, bias=False, **self.place)
        self.embed_norm, self.state_norm, self.norm = (
            RMSNorm(c.hidden_size, c.rms_norm_eps, c.gemma_norm, **self.place) for _ in range(3)
        )
        for name in ("own_factor_D", "target_factor_D"):
            factor_D = torch.ones(c.hidden_size, dtype=torch.float32, device=self.place["device"])
            self.register_buffer(name, factor_D, persistent=False)
        self.register_buffer("is_before", torch.zeros((), dtype=torch.bool, device=self.place["device"]), False)
        self._layer = (_decoder_of(self.block, self.norm, config, target),)  # in a tuple, as it is no submodule

    @classmethod
    def of(cls, target: Decoder, *, key: object) -> MTP:
        """Return the layer of a target without values; `key` names the checkpoint."""
        block = mtp_config(target.config)
        config = HeadConfig(
            kind="mtp",
            block=block,
            taps=(target.normed_depth,),
            target_layers=(),
            target_hidden_size=block.hidden_size,
            draft_vocab_size=block.vocab_size,
            switches=frozenset(),
            draft_length=1,
            raw={},
        )
        return cls(config, target, choice=JsonCache("settings", "mtp-states", key))

    @torch.no_grad()
    def fill(self, values: Mapping[str, Tensor], make_linear: MakeLinear | None) -> None:
        """Set what is around the block, named as in `sharesd.models.mtp`; raises NotFinite."""
        for name in ("embed_norm", "state_norm", "norm"):
            getattr(self, name).weight.copy_(values[f"{name}.weight"])
        if make_linear is None:
            self.fc.weight.copy_(values["fc.weight"])
        else:
            self.fc = make_linear([values["fc.weight"]], None, self.place["device"])
        in_D, own_D, target_D = (
            norm.weight.detach().double() for norm in (self.state_norm, self.norm, self._target[0].norm)
        )
        self.get_buffer("own_factor_D").copy_(_ratio(in_D, own_D))
        self.get_buffer("target_factor_D").copy_(_ratio(own_D, target_D))
        kept = self.choice.load(bool)
        self.use_states_before_norm(bool(kept))
        self.is_chosen = kept is not None

    is_chosen = False
    """True if it is known which states go in."""

    def use_states_before_norm(self, is_before: bool) -> None:
        """Choose which states of the target, and of its own, go in."""
        self.get_buffer("is_before").fill_(is_before)

    @property
    def layer(self) -> Decoder:
        return self._layer[0]

    def new_cache(self, batch: int, slots: int) -> StaticKVCache:
        return self.layer.new_cache(batch, slots)

    def fuse(self, features_BTF: Tensor) -> Tensor:
        """Return the target's states; those before the norm as the layer's own would be."""
        scaled_BTD = (features_BTF * self.get_buffer("target_factor_D")).to(features_BTF.dtype)
        return scaled_BTD.where(self.get_buffer("is_before"), features_BTF)

    def mix(self, states_BTD: Tensor, embeds_BTD: Tensor) -> tuple[Tensor, Tensor]:
        scaled_BTD = (states_BTD * self.get_buffer("own_factor_D")).to(states_BTD.dtype)
        normed_BTD = scaled_BTD.where(self.get_buffer("is_before"), self.state_norm(states_BTD))
        x_BTD = project(self.fc, torch.cat([self.embed_norm(embeds_BTD), normed_BTD], 2))
        return x_BTD, x_BTD

    def run(
        self, x_BTD: Tensor, inputs_BTE: Tensor, cache: StaticKVCache, tree_mask: TreeAttentionMask | None = None
    ) -> Tensor:
        layer = self.layer
        states_BTD: Tensor = (layer.run_stack or layer._run_stack)(x_BTD, cache, tree_mask)
        return states_BTD

    def before_logits(self, states_BTD: Tensor) -> Tensor:
        return states_BTD


def _decoder_of(block: Block, norm: RMSNorm, config: HeadConfig, target: Decoder) -> Decoder:
    """Return a decoder of one block that shares its rotation with a target; embedding and head are not its own."""
    layer = copy.copy(target)
    layer.config = config.block
    layer._modules = {"blocks": nn.ModuleList([block]), "norm": norm, "head": nn.Identity()}
    layer.split = PipelinePlan.of([target.split.output_device], [1])
    layer.run_block, layer.run_stack = call_block, None
    layer.ranges = lambda: (BlockRange(0, 1),)
    return layer


def _ratio(upper_D: Tensor, lower_D: Tensor) -> Tensor:
    """Return upper / lower, 0 where lower is 0."""
    return torch.where(lower_D == 0, 0.0, upper_D / lower_D)
