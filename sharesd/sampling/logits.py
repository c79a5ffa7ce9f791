"""Logits processing and choice: everything between the target's logits and one token per row.

All of it is pure tensor arithmetic without host synchronisation; noise is an input of the choice, never drawn in it.
Every result belongs to its own row: asking for T rows at once gives the same bits as asking for them one by one, so
that a verify step decides as plain decoding would.

Processing order: logit bias, repetition, frequency and presence penalty, temperature, top-k, top-p, min-p. This is the
order of transformers (whose processors have no frequency and presence penalty; those follow vLLM, as does their place).
vLLM applies min-p before top-k and top-p, which differs only in that top-p then measures a smaller total.

Legend: B rows of the batch, T logit rows (verify: the root and N drafts), N draft tokens, V vocabulary, M new tokens at
most, L prompt tokens at most.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.logits import process_logits
from compile.ops import runs_triton
from compile.topk import arg_max
from sharesd.config import SamplingParams

COLD = 0.01
"""Temperatures below this are those of near-greedy decoding."""
_MASS_ONE = 1 << 40  # the likeliest token's probability in fixed point


class TokenCounts:
    """Which tokens each row has seen: what penalties need. Make one only where `SamplingParams.uses_penalties`.

    Two persistent tensors, changed in place: `prompt_mask` [B, V] bool and `output_counts` [B, V] int32.
    """

    def __init__(self, *, batch: int, vocab_size: int, device: torch.device | str) -> None:
        self.prompt_mask = torch.zeros(batch, vocab_size, dtype=torch.bool, device=device)
        self.output_counts = torch.zeros(batch, vocab_size, dtype=torch.int32, device=device)

    def begin(self, prompts_BL: Tensor, lengths_B: Tensor) -> None:
        """Forget everything and take right-padded prompts of these lengths."""
        self.output_counts.zero_()
        self.update(prompts_BL, lengths_B)
        self.prompt_mask.copy_(self.output_counts > 0)
        self.output_counts.zero_()

    def update(self, tokens_BM: Tensor, num_new_B: Tensor) -> None:
        """Add the first `num_new` tokens of each row (0 for an idle row) to its output."""
        valid_BM = torch.arange(tokens_BM.shape[1], device=tokens_BM.device) < num_new_B[:, None]
        self.output_counts.scatter_add_(1, tokens_BM.where(valid_BM, 0), valid_BM.to(torch.int32))

    def ahead(self, draft_BN: Tensor, num_rows: int, seen_BTN: Tensor | None = None) -> Tensor:
        """Output counts [B, T, V] as T = `num_rows` logit rows see them, the last row after all draft tokens.

        A verify step (T = N + 1) has row t see the t drafts before it; a draft step (T = 1) sees all N made so far.
        `seen_BTN` says otherwise for trees: which drafts each row sees. Drafts of -1 are no tokens.
        """
        device, (B, N) = draft_BN.device, draft_BN.shape
        if seen_BTN is None:
            num_seen_T = torch.arange(num_rows, device=device) + (N - num_rows + 1)
            seen_BTN = (torch.arange(N, device=device) < num_seen_T[:, None]).expand(B, num_rows, N)
        seen_BTN = seen_BTN & (draft_BN >= 0)[:, None]
        counts_BTV = self.output_counts[:, None].repeat(1, num_rows, 1)
        index_BTN = draft_BN.clamp(min=0)[:, None].expand(B, num_rows, N)
        return counts_BTV.scatter_add_(2, index_BTN, seen_BTN.to(torch.int32))


def bias_vector(
    params: SamplingParams, vocab_size: int, *, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    """`logit_bias` as a vector [V], or None where there is none. Make it once per call.

    Raises ValueError for a token id outside the vocabulary and for a bias that is NaN or +inf (-inf bans a token).
    """
    if not params.logit_bias:
        return None
    for token, amount in params.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise ValueError(f"logit_bias names token {token}; this model's vocabulary has ids 0 to {vocab_size - 1}")
        if not amount < math.inf:
            raise ValueError(f"logit_bias of token {token} is {amount}; give a finite number, or -inf to ban the token")
    bias_V = torch.zeros(vocab_size, dtype=dtype)
    bias_V[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()), dtype=dtype)
    return bias_V.to(device)


def process(
    logits_BTV: Tensor,
    params: SamplingParams,
    *,
    bias_V: Tensor | None = None,
    counts: TokenCounts | None = None,
    draft_BN: Tensor | None = None,
    seen_BTN: Tensor | None = None,
) -> Tensor:
    """Logits [B, T, V] to choose from, in float32 (float64 stays), tokens that fell out at -inf.

    `counts` holds the prompt and the output up to and including the root; `draft_BN` the draft tokens after it and
    `seen_BTN` who sees them, as `TokenCounts.ahead` reads them. Greedy decoding stops after the penalties, and without
    bias and penalties gives the logits back untouched. Ties: top-k keeps every token that equals the k-th (as
    transformers), and top-p keeps or drops equal tokens together (transformers picks among them by sort order), so
    nothing depends on a sort.
    """
    if params.greedy and bias_V is None and not params.uses_penalties:
        return logits_BTV
    if not params.uses_penalties:
        counts = None
    else:
        assert counts is not None, "penalties need TokenCounts"
    if runs_triton(logits_BTV.device) and logits_BTV.dtype != torch.float64:
        return process_logits(
            logits_BTV,
            bias_V=bias_V,
            prompt_mask_BV=counts.prompt_mask if counts is not None else None,
            counts_BV=counts.output_counts if counts is not None else None,
            draft_BN=draft_BN,
            seen_BTN=seen_BTN,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            temperature=params.temperature,
            cold=0 < params.temperature < COLD,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )
    x_BTV = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    if bias_V is not None:
        x_BTV = x_BTV + bias_V
    if counts is not None:
        x_BTV = _penalize(x_BTV, params, counts, draft_BN, seen_BTN)
    if params.greedy:
        return x_BTV
    if params.temperature != 1:
        x_BTV = _heat(x_BTV, params.temperature)
    return _truncate(x_BTV, params)


def choose(logits_BTV: Tensor, noise_BTV: Tensor | None = None) -> Tensor:
    """Tokens [B, T]: argmax of logits plus noise, the lowest id on ties. With Gumbel noise this samples the softmax."""
    return arg_max(logits_BTV if noise_BTV is None else logits_BTV + noise_BTV)


def probs_of(logits_BTV: Tensor, params: SamplingParams) -> Tensor:
    """The distribution [B, T, V] that processed logits stand for; greedy: all mass on the argmax."""
    if params.greedy:
        return F.one_hot(logits_BTV.argmax(-1), logits_BTV.shape[-1]).to(torch.float32)
    return logits_BTV.softmax(-1)


def logprobs_of(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """Log-probability [B, T] float32 of tokens under the target's raw logits, before any processing."""
    x_BTV = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    return (x_BTV.gather(-1, tokens_BT[..., None])[..., 0] - x_BTV.logsumexp(-1)).float()


def _heat(x_BTV: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature, however small or large; below COLD those of each row less their largest.

    The largest is then 0 and others may end at -inf: nothing overflows upwards, and large quotients do not swallow the
    noise that is added to them.
    """
    limits = torch.finfo(x_BTV.dtype)
    if temperature < COLD:
        x_BTV = x_BTV - x_BTV.amax(-1, keepdim=True).clamp(limits.min, limits.max)
    return x_BTV / min(max(temperature, limits.tiny), limits.max)


def _penalize(
    x_BTV: Tensor,
    params: SamplingParams,
    counts: TokenCounts,
    draft_BN: Tensor | None,
    seen_BTN: Tensor | None,
) -> Tensor:
    """Repetition penalty on tokens of prompt and output, frequency and presence penalty on those of the output."""
    output_BTV = counts.output_counts[:, None] if draft_BN is None else counts.ahead(draft_BN, x_BTV.shape[1], seen_BTN)
    if params.repetition_penalty != 1:
        r = params.repetition_penalty
        seen_BTV = counts.prompt_mask[:, None] | (output_BTV > 0)
        x_BTV = torch.where(seen_BTV, torch.where(x_BTV > 0, x_BTV / r, x_BTV * r), x_BTV)
    if params.frequency_penalty != 0:
        x_BTV = x_BTV - params.frequency_penalty * output_BTV.to(x_BTV.dtype)
    if params.presence_penalty != 0:
        x_BTV = x_BTV - params.presence_penalty * (output_BTV > 0).to(x_BTV.dtype)
    return x_BTV


def _truncate(x_BTV: Tensor, params: SamplingParams) -> Tensor:
    """Top-k, then top-p of what is left, then min-p."""
    k = params.top_k if params.top_k < x_BTV.shape[-1] else 0
    ranked_BTK = x_BTV.topk(k).values if k else None
    if ranked_BTK is not None:
        x_BTV = x_BTV.masked_fill(x_BTV < ranked_BTK[..., -1:], -math.inf)
    if params.top_p < 1:
        x_BTV = _nucleus(x_BTV, params.top_p, ranked_BTK)
    if params.min_p > 0:
        x_BTV = x_BTV.masked_fill(x_BTV < x_BTV.amax(-1, keepdim=True) + math.log(params.min_p), -math.inf)
    return x_BTV


def _nucleus(x_BTV: Tensor, top_p: float, ranked_BTK: Tensor | None) -> Tensor:
    """Keep a token while the likelier ones hold less than `top_p` of the mass.

    Masses are integers, so that sums depend on no order of addition. `ranked_BTK`: top-k's survivors in descending
    order, less those tied with the last one.
    """
    top_BT1 = x_BTV.amax(-1, keepdim=True)
    depth_BTV = top_BT1 - x_BTV
    if ranked_BTK is None:
        mass_BTV = _mass(depth_BTV)
        border_BT1 = _search(depth_BTV, mass_BTV, mass_BTV.sum(-1, keepdim=True).double() * top_p)
    else:
        depth_BTK = top_BT1 - ranked_BTK
        mass_BTK = _mass(depth_BTK)
        num_tied_BT1 = (x_BTV >= ranked_BTK[..., -1:]).sum(-1, keepdim=True) - ranked_BTK.shape[-1]
        total_BT1 = mass_BTK.sum(-1, keepdim=True) + num_tied_BT1 * mass_BTK[..., -1:]
        num_kept_BT1 = (mass_BTK.cumsum(-1) - mass_BTK < total_BT1.double() * top_p).sum(-1, keepdim=True)
        border_BT1 = _order(depth_BTK.gather(-1, num_kept_BT1 - 1))
    return x_BTV.masked_fill(_order(depth_BTV) > border_BT1, -math.inf)


def _search(depth_BTV: Tensor, mass_BTV: Tensor, need_BT1: Tensor) -> Tensor:
    """The largest order of depth above which there is less mass than needed.

    Bisection over its bits instead of a sort: a tenth of the time once compiled, the same time in eager mode.
    """
    order_BTV = _order(depth_BTV)
    border_BT1 = torch.zeros_like(need_BT1, dtype=torch.int32)
    for bit in reversed(range(31)):
        trial_BT1 = border_BT1 + (1 << bit)
        above_BT1 = mass_BTV.where(order_BTV < trial_BT1, 0).sum(-1, keepdim=True)
        border_BT1 = trial_BT1.where(above_BT1 < need_BT1, border_BT1)
    return border_BT1


def _mass(depth: Tensor) -> Tensor:
    """Probability relative to the likeliest token, in fixed point; `depth` is how far a logit lies below its."""
    return (torch.exp(-depth) * _MASS_ONE).to(torch.int64)


def _order(depth: Tensor) -> Tensor:
    """Integers in the order of the depths: what the bits of non-negative floats are."""
    return depth.float().view(torch.int32)
