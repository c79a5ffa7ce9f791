"""Mixtures of experts: an MLP of several, of which a router chooses some for each token.

Legend: M tokens, E experts, k of a token, D hidden size, g gates of the shared expert, W outputs and K inputs of a
linear, N tokens of one expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.switch_linear import Switch
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.layers import MLP, empty_linear


class RouterBias(nn.Module):
    """Numbers [experts] that are added to a router's probabilities before it chooses, in float32 at least."""

    def __init__(self, num_experts: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.e_score_correction_bias = nn.Parameter(torch.empty(num_experts, dtype=wide, device=device))


class ExpertMLP(nn.Module):
    """Sum of the MLPs of the k experts whose router gives a token the highest probabilities (Shazeer et al. 2017).

    With a bias of the router, that choice is by probability plus bias (DeepSeek-AI 2024). A row's result depends on
    nothing but the row: ties go to the lowest expert, and the chosen experts are added in the order of their numbers,
    a shared one last.

    Drafts may choose fewer: `draft_experts`, where `switch` is set.
    """

    def __init__(self, config: DecoderConfig, **place: Any) -> None:
        super().__init__()
        assert config.experts is not None
        found = config.experts
        self.num_experts_per_tok, self.norm_topk_prob = found.num_experts_per_tok, found.norm_topk_prob
        self.draft_experts, self.switch = found.num_experts_per_tok, Switch()
        self.scaling_factor, self.sum_eps = found.scaling_factor, found.sum_eps
        self.hidden_act = config.hidden_act
        self.num_experts, scores = found.num_experts, found.num_experts + found.gates_shared_expert
        self.wide_router = found.wide_router
        of_router = (
            place | {"dtype": torch.promote_types(place["dtype"], torch.float32)} if found.wide_router else place
        )
        self.router = empty_linear(config.hidden_size, scores, bias=found.router_bias, **of_router)
        self.experts = nn.ModuleList(
            MLP(config, intermediate_size=found.intermediate_size, **place) for _ in range(found.num_experts)
        )
        self.router_bias = RouterBias(found.num_experts, **place) if found.has_bias else None
        shared = MLP(config, intermediate_size=found.intermediate_size, **place) if found.has_shared_expert else None
        self.shared_expert = shared

    def allocate_together(self, device: torch.device) -> None:
        """Put all experts' weights one after the other: kernels of GPUs read them as one tensor.

        Those of blocks are there already; plain ones are uninitialised.
        """
        for name in ("gate_up", "down"):
            linears: list[Any] = [expert.get_submodule(name) for expert in self.experts]
            first = linears[0].weight
            if any(linear.weight.shape != first.shape for linear in linears):
                continue
            together = torch.empty(len(linears), *first.shape, dtype=first.dtype, device=device)
            for linear, weight in zip(linears, together, strict=True):
                if isinstance(linear, nn.Linear):
                    linear.weight = nn.Parameter(weight, requires_grad=False)
                else:
                    linear.weight = weight.copy_(linear.weight)

    def choose(self, x_MD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the numbers [M, k] of each token's experts, and factors in the dtype of the router.

        Factors are theirs [M, k], then that of the shared expert [M, 1]; without gates [M, 0].
        """
        wide = torch.promote_types(x_MD.dtype, torch.float32)
        scores = self.router(x_MD.to(wide) if self.wide_router else x_MD)
        scores_ME, gates_Mg = scores.tensor_split([self.num_experts], 1)
        if self.router_bias is None:
            probs_ME = by_ME = F.softmax(scores_ME, dim=-1, dtype=wide)
        else:
            probs_ME = _sigmoid(scores_ME.to(wide))
            by_ME = probs_ME + self.router_bias.e_score_correction_bias
        k = self.draft_experts if self.switch.quantized else self.num_experts_per_tok
        experts_Mk = by_ME.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        factors_Mk = probs_ME.gather(1, experts_Mk)
        if self.norm_topk_prob:
            factors_Mk = factors_Mk / (factors_Mk.sum(-1, keepdim=True) + self.sum_eps)
        factors_Mk, gates_Mg = factors_Mk * self.scaling_factor, _sigmoid(gates_Mg.to(wide))
        return experts_Mk, factors_Mk.to(scores.dtype), gates_Mg.to(scores.dtype)

    def forward(self, x: Tensor, norm: nn.Module | None = None, residual: Tensor | None = None) -> Tensor:
        """Return residual + the chosen experts' MLPs of norm(x), times their factors."""
        x_MD = (x if norm is None else norm(x)).flatten(0, -2)
        experts_Mk, factors_Mk, gates_Mg = self.choose(x_MD)
        sums_MD = torch.zeros_like(x_MD, dtype=torch.promote_types(x_MD.dtype, torch.float32))
        for number in experts_Mk.unique().tolist():  # in ascending order
            rows, places = (experts_Mk == number).nonzero(as_tuple=True)
            out_ND = self._run(self.experts[number], x_MD, rows)
            sums_MD[rows] += out_ND.to(sums_MD.dtype) * factors_Mk[rows, places, None].to(sums_MD.dtype)
        if self.shared_expert is not None:
            out_MD = self.shared_expert(x_MD).to(sums_MD.dtype)
            sums_MD += out_MD * gates_Mg.to(sums_MD.dtype) if gates_Mg.shape[1] else out_MD
        out = sums_MD.to(x.dtype).view(x.shape)
        return out if residual is None else residual + out

    @staticmethod
    def _run(expert: nn.Module, x_MD: Tensor, rows: Tensor) -> Tensor:
        """Return the expert's MLP [N, D] of N token rows.

        With torch's linears, whose sums depend on the number of token rows, it runs for all of them.
        """
        if isinstance(getattr(expert.gate_up, "full", expert.gate_up), nn.Linear):
            return expert(x_MD)[rows]
        return expert(x_MD[rows])


def _sigmoid(x: Tensor) -> Tensor:
    """Return a sigmoid whose bits depend on the number alone.

    Those of torch.sigmoid also depend on its place on CPUs: numbers beyond the last whole vector take another path.
    """
    return F.softmax(F.pad(x[..., None], (0, 1)), dim=-1)[..., 0]


def num_active_experts(num_experts: int, per_token: int, rows: float) -> float:
    """Return how many experts some rows activate on average, and a little for each row."""
    return num_experts * (1 - (1 - per_token / num_experts) ** rows) + 0.1 * rows
