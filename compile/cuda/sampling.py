"""Logits to choose from, in one launch: what `sharesd.sampling.process` composes of some 200.

A program per row of logits. Bias, penalties and temperature take one pass over the vocabulary. Top-k and top-p each
keep the tokens above which less than so much weight lies (1 each, or their mass): a pass finds the step of a coarse
scale that the border lies in, another copies what lies in there, and the border is found by bisection among those few.
Weights are integers, so that sums depend on no order. Nothing of a row depends on other rows.

Legend: B rows of the batch, T logit rows of each, V vocabulary, N draft tokens, F numbers of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Tokens that a program holds at once."""
WARPS = 16


@triton.jit
def _raw(
    at,
    logits_ptr,
    bias_ptr,
    prompt_ptr,
    count_ptr,
    draft_ptr,
    seen_ptr,
    T,
    V,
    N,
    repetition,
    frequency,
    presence,
    BIAS: tl.constexpr,
    PENALTIES: tl.constexpr,
    PATHS: tl.constexpr,
):
    """Logits of this program's row with bias and penalties; -inf behind the vocabulary."""
    row = tl.program_id(0)
    b = (row // T).to(tl.int64)
    there = at < V
    x = tl.load(logits_ptr + row.to(tl.int64) * V + at, mask=there, other=float("-inf")).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + b * V + at, mask=there, other=0.0)
    if PENALTIES:
        count = tl.load(count_ptr + b * V + at, mask=there, other=0)
        for j in range(0, N):
            token = tl.load(draft_ptr + b * N + j)
            sees = tl.load(seen_ptr + row.to(tl.int64) * N + j) != 0 if PATHS else j < row % T + (N - T + 1)
            count += ((at == token) & sees).to(tl.int32)
        seen = (tl.load(prompt_ptr + b * V + at, mask=there, other=0) != 0) | (count > 0)
        x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition + at * 0.0), x * repetition), x)
        x = x - frequency * count.to(tl.float32)
        x = x - presence * (count > 0).to(tl.float32)
    return x


@triton.jit
def _rank(x):
    """Integers 0..2^32-1 in the order of floats, the largest first."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # no -0
    return 0x7FFFFFFF - (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _weight(x, top, limit, MASS: tl.constexpr):
    """What tokens of ranks up to `limit` weigh: their mass, 2^40 that of the likeliest, or 1."""
    counts = (_rank(x) <= limit) & (x > float("-inf"))
    if MASS:
        return tl.where(counts, (tl.exp(x - top) * 1099511627776.0).to(tl.int64), 0)
    return counts.to(tl.int64)


@triton.jit
def _order(x, top, MASS: tl.constexpr):
    """What the border is one of: for masses the bits of the depth below the likeliest, else the rank."""
    if MASS:
        return (top - x).to(tl.int32, bitcast=True).to(tl.int64)
    return _rank(x)


@triton.jit
def _border(x_ptr, spare_ptr, V, top, limit, share, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest order above which less weight lies than `share` (for masses: of all), among ranks up to `limit`."""
    i, step = tl.arange(0, BLOCK), tl.arange(0, 8)
    edge = tl.where(step < 7, 0.35 * (step + 1) * (step + 1), float("inf"))  # depths at which the steps end
    weights = tl.zeros((8, BLOCK), tl.int64)
    for start in range(0, V, BLOCK):
        x = tl.load(x_ptr + start + i, mask=start + i < V, other=float("-inf"))
        before = (top - x)[None, :] < edge[:, None]
        weights += tl.where(before, _weight(x, top, limit, MASS)[None, :], 0)
    before = tl.sum(weights, 1)
    need = share
    if MASS:
        need = tl.max(before, 0).to(tl.float64) * share
    passed = before.to(tl.float64) < need
    low = tl.max(tl.where(passed, edge, 0.0), 0)
    high = tl.min(tl.where(passed, float("inf"), edge), 0)
    base = tl.max(tl.where(passed, before, 0), 0)
    num = tl.program_id(0) * 0
    for start in range(0, V, BLOCK):
        x = tl.load(x_ptr + start + i, mask=start + i < V, other=float("-inf"))
        inside = (top - x >= low) & (top - x < high) & (_rank(x) <= limit)
        place = num + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(spare_ptr + place, x, mask=inside)
        num += tl.sum(inside.to(tl.int32), 0)
    tl.debug_barrier()
    border = base * 0
    for bit in range(0, 32):
        trial = border + (border * 0 + 1 << (31 - bit))
        above = base
        for start in range(0, num, BLOCK):
            x = tl.load(spare_ptr + start + i, mask=start + i < num, other=float("-inf"))
            above += tl.sum(tl.where(_order(x, top, MASS) < trial, _weight(x, top, limit, MASS), 0), 0)
        border = tl.where(above.to(tl.float64) < need, trial, border)
    tl.debug_barrier()
    return border


@triton.jit(do_not_specialize=["T", "V", "N"])
def process(
    logits_ptr,
    numbers_ptr,
    bias_ptr,
    prompt_ptr,
    count_ptr,
    draft_ptr,
    seen_ptr,
    spare_ptr,
    out_ptr,
    T,
    V,
    N,
    cold: tl.float64,
    F: tl.constexpr,
    BIAS: tl.constexpr,
    PENALTIES: tl.constexpr,
    PATHS: tl.constexpr,
    SAMPLED: tl.constexpr,
    TRUNCATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of logits. Grid (B * T). What the row does not ask for takes no pass."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    spare_ptr += row * V
    out_ptr += row * V
    numbers_ptr += row // T * F  # in the order of `compile.logits.NUMBERS`
    repetition = tl.load(numbers_ptr + 4).to(tl.float32)
    frequency = tl.load(numbers_ptr + 5).to(tl.float32)
    presence = tl.load(numbers_ptr + 6).to(tl.float32)
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        x = _raw(
            start + i,
            logits_ptr,
            bias_ptr,
            prompt_ptr,
            count_ptr,
            draft_ptr,
            seen_ptr,
            T,
            V,
            N,
            repetition,
            frequency,
            presence,
            BIAS,
            PENALTIES,
            PATHS,
        )
        tops = tl.maximum(tops, x)
        tl.store(out_ptr + start + i, x, mask=start + i < V)
    top = tl.max(tops, 0)
    if SAMPLED:
        degrees = tl.load(numbers_ptr)
        if degrees != 1:
            tl.debug_barrier()
            temperature = tl.minimum(tl.maximum(degrees, 1.1754943508222875e-38), 3.4028234663852886e38).to(tl.float32)
            largest = tl.minimum(tl.maximum(top, -3.4028234663852886e38), 3.4028234663852886e38)
            zero = tl.where(degrees < cold, largest, 0.0)
            for start in range(0, V, BLOCK):
                x = tl.load(out_ptr + start + i, mask=start + i < V, other=float("-inf"))
                x = tl.div_rn(x - zero, temperature + i * 0.0)
                tl.store(out_ptr + start + i, x, mask=start + i < V)
            top = tl.max(tl.div_rn(top - zero + i * 0.0, temperature + i * 0.0), 0)
    if TRUNCATED:
        top_k = tl.load(numbers_ptr + 1)
        top_p = tl.load(numbers_ptr + 2)
        log_min_p = tl.load(numbers_ptr + 3).to(tl.float32)
        if (top_k < V) | (top_p < 1) | (log_min_p > float("-inf")):
            tl.debug_barrier()
            limit = row * 0 + 0xFFFFFFFF
            border = row * 0 + 0xFFFFFFFF
            if top_k < V:
                limit = _border(out_ptr, spare_ptr, V, top, limit, top_k, False, BLOCK)
            if top_p < 1:
                border = _border(out_ptr, spare_ptr, V, top, limit, top_p, True, BLOCK)
            for start in range(0, V, BLOCK):
                x = tl.load(out_ptr + start + i, mask=start + i < V, other=float("-inf"))
                keep = (_rank(x) <= limit) & (_order(x, top, True) <= border) & (x >= top + log_min_p)
                tl.store(out_ptr + start + i, tl.where(keep, x, float("-inf")), mask=start + i < V)


def process_logits(
    logits_BTV: Tensor,
    numbers_BF: Tensor,
    bias_BV: Tensor | None,
    prompt_mask_BV: Tensor | None,
    counts_BV: Tensor | None,
    draft_BN: Tensor | None,
    seen_BTN: Tensor | None,
    sampled: bool,
    truncated: bool,
    cold: float,
) -> Tensor:
    """See `compile.logits.process_logits`."""
    logits_BTV = logits_BTV.contiguous()
    B, T, V = logits_BTV.shape
    out_BTV = torch.empty_like(logits_BTV, dtype=torch.float32)
    spare_BTV = torch.empty_like(out_BTV) if truncated else out_BTV
    draft, seen, N = logits_BTV, logits_BTV, 0  # neither is read unless there are some
    if draft_BN is not None:
        draft, N = draft_BN.contiguous(), draft_BN.shape[1]
    if seen_BTN is not None:
        seen = seen_BTN.contiguous().view(torch.uint8)
    penalties = prompt_mask_BV is not None and counts_BV is not None
    prompt = prompt_mask_BV.view(torch.uint8) if prompt_mask_BV is not None else logits_BTV
    process[(B * T,)](
        *(logits_BTV, numbers_BF, logits_BTV if bias_BV is None else bias_BV, prompt),
        *(logits_BTV if counts_BV is None else counts_BV, draft, seen, spare_BTV, out_BTV),
        *(T, V, N, cold),
        F=numbers_BF.shape[1],
        BIAS=bias_BV is not None,
        PENALTIES=penalties,
        PATHS=seen_BTN is not None,
        SAMPLED=sampled,
        TRUNCATED=truncated,
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return out_BTV
