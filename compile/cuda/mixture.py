"""Mixtures of experts on CUDA, for steps and prompts alike.

The router is a linear like others; what follows it are the five launches of `compile.cuda.experts`. Prompts go through
them, too: their rows fill tiles of 16 for each expert, and the host never asks which experts were chosen. A shared
expert is an MLP like others, whose residual is what the mixture returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compile.cuda.gemm_config import tile_of
from compile.fused_linear import project
from compile.op_registry import define_for_triton


class RowMixture(nn.Module):
    """A mixture whose experts' weights lie one after the other; a row's bits depend on the row alone."""

    def __init__(self, mixture: Any) -> None:
        """`mixture`: as `sharesd.models.mixture.ExpertMLP`, without a gate of a shared expert; its router is kept."""
        super().__init__()
        assert mixture.router.out_features == len(mixture.experts)
        self.router, self.wide_router, self.switch = mixture.router, mixture.wide_router, mixture.switch
        self.router_bias, self.shared_expert = mixture.router_bias, mixture.shared_expert
        self.num_experts_per_tok, self.draft_experts = mixture.num_experts_per_tok, mixture.draft_experts
        self.norm_topk_prob, self.hidden_act = mixture.norm_topk_prob, mixture.hidden_act
        self.scaling_factor, self.sum_eps = mixture.scaling_factor, mixture.sum_eps
        for name in ("gate_up", "down"):
            linears = [expert.get_submodule(name) for expert in mixture.experts]
            biases = [linear.bias for linear in linears if linear.bias is not None]
            weight = nn.Parameter(stack_weights([linear.weight for linear in linears]), requires_grad=False)
            self.register_parameter(name, weight)
            self.register_buffer(f"{name}_bias", torch.stack(biases).detach() if biases else None, persistent=False)

    def forward(self, x: Tensor, norm: Any = None, residual: Tensor | None = None) -> Tensor:
        """Return residual + the chosen experts' MLPs of norm(x), times their factors; `norm` has `weight` and `eps`."""
        # A router in float32 reads the norm's result, and in float16 x * weight may exceed the range.
        if norm is not None and (self.wide_router or x.dtype == torch.float16):
            x, norm = torch.ops.sharesd.row_norm(x, norm.weight, norm.eps), None
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = project(self.router, x.to(wide) if self.wide_router else x, norm=norm)
        around = None if norm is None else norm.weight, 0.0 if norm is None else norm.eps, residual, self.hidden_act
        chosen = self.draft_experts if self.switch.quantized else self.num_experts_per_tok
        how = chosen, self.norm_topk_prob, self.scaling_factor, self.sum_eps
        biases = self.gate_up_bias, self.down_bias, getattr(self.router_bias, "e_score_correction_bias", None)
        y = torch.ops.sharesd.row_mixture(x, scores, self.gate_up, self.down, *biases, *around, *how)
        return y if self.shared_expert is None else self.shared_expert(x, norm, y)


def stack_weights(weights: Sequence[Tensor]) -> Tensor:
    """Return [E, N, K] of weights [N, K]: without a copy, if they lie one after the other."""
    first = weights[0].detach()
    places = {weight.data_ptr() - i * first.nbytes for i, weight in enumerate(weights)}
    of_one = {weight.untyped_storage().data_ptr() for weight in weights}
    if len(places) == len(of_one) == 1 and all(weight.is_contiguous() for weight in weights):
        return first.as_strided((len(weights), *first.shape), (first.numel(), *first.stride()))
    return torch.stack([weight.detach() for weight in weights])


def replace_with_row_mixtures(model: nn.Module) -> int:
    """Replace every mixture in place; returns their number."""
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "draft_experts") and not isinstance(child, RowMixture)
    ]
    for parent, name in found:
        setattr(parent, name, RowMixture(getattr(parent, name)))
    return len(found)


def _row_mixture(
    x, scores, gate_up, down, gate_up_bias, down_bias, choice_bias, norm, eps, residual, gated, chosen, normalised,
    scale, sum_eps,
):  # fmt: skip
    from compile.cuda.experts import choose_experts, expert_mlp, expert_tile  # import Triton

    D = x.shape[-1]
    x_MD, scores_ME = x.reshape(-1, D).contiguous(), scores.reshape(-1, scores.shape[-1]).contiguous()
    find = partial(tile_of, x.device.index if x.is_cuda else None, bits=8 * gate_up.dtype.itemsize)
    gate_up_tile, down_tile = (expert_tile(find, each.shape[1], each.shape[2], chosen) for each in (gate_up, down))
    experts_Mk, factors_Mk = choose_experts(
        scores_ME, choice_bias, chosen, normalised=normalised, scale=scale, sum_eps=sum_eps
    )
    y_MD = expert_mlp(
        x_MD,
        experts_Mk,
        factors_Mk,
        gate_up,
        down,
        (gate_up_tile, down_tile),
        gate_up_bias_EW=gate_up_bias,
        down_bias_ED=down_bias,
        norm=norm,
        eps=eps,
        gated=gated,
        residual_MD=None if residual is None else residual.reshape(-1, D).contiguous(),
    )
    return y_MD.view(x.shape)


def _row_mixture_meta(x, *rest):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


define_for_triton(
    "row_mixture(Tensor x, Tensor scores, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias, "
    "Tensor? choice_bias, Tensor? norm, float eps, Tensor? residual, str gated, int chosen, bool normalised, "
    "float scale, float sum_eps) -> Tensor",
    _row_mixture,
    _row_mixture_meta,
)
