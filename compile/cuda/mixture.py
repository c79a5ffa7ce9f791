"""Mixtures of experts on CUDA, for steps and prompts alike.

The router is a linear like others; what follows it are the five launches of `compile.cuda.experts`. Prompts go through
them, too: their rows fill tiles of 16 for each expert, and the host never asks which experts were chosen. A shared
expert is an MLP like others, whose residual is what the mixture returns.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compile.block_linear import NUMBERS
from compile.cuda.block_form import ExpertBlocks
from compile.cuda.gemm_config import tile_of
from compile.fused_linear import multiply_by_gates, project
from compile.op_registry import define_for_triton

_REMEDY = "use --dequantize, or --device cpu"
_OF_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+)")


class StackedExperts(nn.Module):
    """Weights of a mixture's experts, the first dimension of each: `gate_up` and `down`."""

    gate_up: nn.Parameter
    down: nn.Parameter


class RowMixture(nn.Module):
    """A mixture whose experts' weights lie one after the other; a row's bits depend on the row alone."""

    def __init__(self, mixture: Any) -> None:
        """`mixture`: as `sharesd.models.mixture.ExpertMLP`; its router is kept."""
        super().__init__()
        self.router, self.wide_router, self.switch = mixture.router, mixture.wide_router, mixture.switch
        self.router_bias, self.shared_expert = mixture.router_bias, mixture.shared_expert
        self.num_experts_per_tok, self.draft_experts = mixture.num_experts_per_tok, mixture.draft_experts
        self.norm_topk_prob, self.hidden_act = mixture.norm_topk_prob, mixture.hidden_act
        self.scaling_factor, self.sum_eps = mixture.scaling_factor, mixture.sum_eps
        self.experts = StackedExperts()
        self.stored: dict[str, tuple[list[str], list[int]]] = {}
        """Types and outputs of the parts of each linear of experts; of numbers none."""
        for name in ("gate_up", "down"):
            linears = [expert.get_submodule(name) for expert in mixture.experts]
            biases = [linear.bias for linear in linears if linear.bias is not None]
            self.stored[name] = _types_of(name, linears)
            weight = nn.Parameter(stack_weights([linear.weight for linear in linears]), requires_grad=False)
            self.experts.register_parameter(name, weight)
            self.register_buffer(f"{name}_bias", torch.stack(biases).detach() if biases else None, persistent=False)

    def forward(self, x: Tensor, norm: Any = None, residual: Tensor | None = None) -> Tensor:
        """Return residual + the chosen experts' MLPs of norm(x), times their factors; `norm` has `weight` and `eps`."""
        # A router in float32 and blocks read the norm's result, and in float16 x * weight may exceed the range.
        if norm is not None and (self.wide_router or self.stored["gate_up"][0] or x.dtype == torch.float16):
            x, norm = torch.ops.sharesd.row_norm(x, norm.weight, norm.eps), None
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = project(self.router, x.to(wide) if self.wide_router else x, norm=norm)
        around = None if norm is None else norm.weight, 0.0 if norm is None else norm.eps, residual, self.hidden_act
        chosen = self.draft_experts if self.switch.quantized else self.num_experts_per_tok
        how = chosen, self.norm_topk_prob, self.scaling_factor, self.sum_eps
        biases = self.gate_up_bias, self.down_bias, getattr(self.router_bias, "e_score_correction_bias", None)
        stored = *self.stored["gate_up"], *self.stored["down"]
        weights = self.experts.gate_up, self.experts.down
        y = torch.ops.sharesd.row_mixture(x, scores, *weights, *stored, *biases, *around, *how)
        if self.shared_expert is None:
            return y
        gates = scores[..., len(self.experts.gate_up) :]
        if not gates.shape[-1]:
            return self.shared_expert(x, norm, y)
        return multiply_by_gates(self.shared_expert(x, norm), gates, y)


def stack_weights(weights: Sequence[Tensor]) -> Tensor:
    """Return weights as one tensor, the first dimension experts: without a copy, if they lie one after the other."""
    first = weights[0].detach()
    places = {weight.data_ptr() - i * first.nbytes for i, weight in enumerate(weights)}
    of_one = {weight.untyped_storage().data_ptr() for weight in weights}
    if len(places) == len(of_one) == 1 and all(weight.is_contiguous() for weight in weights):
        return first.as_strided((len(weights), *first.shape), (first.numel(), *first.stride()))
    return torch.stack([weight.detach() for weight in weights])


def stack_outlines(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that a block's linears become, by name: those of `StackedExperts` for linears of experts.

    `weights`: of linears by path, on the meta device.
    """
    found: defaultdict[str, list[Tensor]] = defaultdict(list)
    for path, weight in weights.items():
        of_expert = _OF_EXPERT.fullmatch(path)
        found[f"{path}.weight" if of_expert is None else ".".join(of_expert.groups())].append(weight)
    return {name: each[0] if name.endswith(".weight") else torch.stack(each) for name, each in found.items()}


def _types_of(name: str, linears: Sequence[Any]) -> tuple[list[str], list[int]]:
    """Return types and outputs of the parts of a linear, which all experts have; of numbers none.

    Raises ValueError if they do not, for parts of numbers next to blocks, and for an order of inputs.
    """
    found = {(tuple(getattr(each, "types", ())), tuple(getattr(each, "outputs", ()))) for each in linears}
    if len(found) > 1:
        raise ValueError(f"experts' {name} is of several types: {sorted(types for types, _ in found)}; {_REMEDY}")
    [(types, outputs)] = found
    if NUMBERS.keys() & set(types):
        raise ValueError(f"experts' {name} is of types {', '.join(types)}, which do not run together; {_REMEDY}")
    if any(getattr(each, "order", None) is not None for each in linears):
        raise ValueError(f"experts' {name} is stored in an order of its inputs (act-order); {_REMEDY}")
    return list(types), list(outputs)


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
    x, scores, gate_up, down, gate_up_types, gate_up_outputs, down_types, down_outputs, gate_up_bias, down_bias,
    choice_bias, norm, eps, residual, gated, chosen, normalised, scale, sum_eps,
):  # fmt: skip
    from compile.cuda.experts import choose_experts, expert_mlp  # import Triton

    D = x.shape[-1]
    x_MD, scores_ME = x.reshape(-1, D).contiguous(), scores.reshape(-1, scores.shape[-1]).contiguous()
    experts_Mk, factors_Mk = choose_experts(
        scores_ME, choice_bias, chosen, len(gate_up), normalised=normalised, scale=scale, sum_eps=sum_eps
    )
    size = (sum(gate_up_outputs) if gate_up_types else gate_up.shape[1]) // 2
    around = {} if norm is None else {"norm": norm, "eps": eps}
    y_MD = expert_mlp(
        x_MD,
        experts_Mk,
        factors_Mk,
        len(gate_up),
        _product(x, gate_up, gate_up_types, gate_up_outputs, gate_up_bias, D, chosen, **around),
        _product(x, down, down_types, down_outputs, down_bias, size, chosen),
        gated=gated,
        residual_MD=None if residual is None else residual.reshape(-1, D).contiguous(),
    )
    return y_MD.view(x.shape)


def _product(x, weight, types, outputs, bias, inputs, chosen, **around):
    """Return a product of `expert_mlp` with its weights."""
    from compile.cuda.experts import block_tiles, expert_tile, multiply_expert_blocks, multiply_experts

    index = x.device.index if x.is_cuda else None
    if types:
        blocks = ExpertBlocks(weight, types, outputs)
        tiles = block_tiles(index, blocks, inputs, chosen)
        return partial(multiply_expert_blocks, blocks=blocks, tiles=tiles, bias_EW=bias, **around)
    find = partial(tile_of, index, bits=8 * weight.dtype.itemsize)
    tile = expert_tile(find, weight.shape[1], inputs, chosen)
    return partial(multiply_experts, weight_EWK=weight, tile=tile, bias_EW=bias, **around)


def _row_mixture_meta(x, *rest):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


define_for_triton(
    "row_mixture(Tensor x, Tensor scores, Tensor gate_up, Tensor down, str[] gate_up_types, int[] gate_up_outputs, "
    "str[] down_types, int[] down_outputs, Tensor? gate_up_bias, Tensor? down_bias, Tensor? choice_bias, Tensor? norm, "
    "float eps, Tensor? residual, str gated, int chosen, bool normalised, float scale, float sum_eps) -> Tensor",
    _row_mixture,
    _row_mixture_meta,
)
