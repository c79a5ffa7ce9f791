"""Bias, penalties, temperature, top-k, top-p and min-p in four launches.

`sharesd.sampling.process` composes the same of some 200. Several programs per row of logits have a chunk of the
vocabulary each. Top-k and top-p each keep tokens until a weight (1 each, or the mass) is reached: all programs sum the
weights in bins of depth below the largest, then copy the tokens in the bins of the borders, and each finds the borders
by bisection among those few. Weights are integers: sums depend on no order, nor on chunks. Nothing of a row depends on
other rows.

Legend: B rows of the batch, T logit rows of each, V vocabulary, N draft tokens, F numbers of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile.cuda.dependent_launch import wait_for_predecessor
from compile.cuda.logit_bins import (
    ABOVE,
    BIN,
    BINS,
    COUNTS,
    EVERYTHING,
    FIRST,
    LAST,
    MASS_ABOVE,
    MASS_BEFORE,
    MASSES,
    NUM,
    STATE,
    bin_of,
    depth_of,
    divisor_of,
    find_border,
    load_copied,
    mass_of,
    rank_of,
    row_top,
)
from compile.cuda.pdl import launch_options

BLOCK = 1024
"""Tokens of a program."""
WARPS = 8
_INTS = ["T", "V", "N"]
# Views of some rows begin at any address: alignment must not make another binary.
_UNALIGNED = ["logits_ptr", "numbers_ptr", "bias_ptr", "prompt_ptr", "count_ptr", "draft_ptr", "seen_ptr"]


@triton.jit
def _penalised_logits(
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
    """Return logits with bias and penalties; -inf beyond the vocabulary."""
    row = tl.program_id(0)
    b = (row // T).to(tl.int64)
    is_valid = at < V
    x = tl.load(logits_ptr + row.to(tl.int64) * V + at, mask=is_valid, other=float("-inf")).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + b * V + at, mask=is_valid, other=0.0)
    if PENALTIES:
        count = tl.load(count_ptr + b * V + at, mask=is_valid, other=0)
        for j in range(0, N):
            token = tl.load(draft_ptr + b * N + j)
            sees = tl.load(seen_ptr + row.to(tl.int64) * N + j) != 0 if PATHS else j < row % T + (N - T + 1)
            count += ((at == token) & sees).to(tl.int32)
        seen = (tl.load(prompt_ptr + b * V + at, mask=is_valid, other=0) != 0) | (count > 0)
        x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition + at * 0.0), x * repetition), x)
        x = x - frequency * count.to(tl.float32)
        x = x - presence * (count > 0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_UNALIGNED)
def adjust_logits(
    logits_ptr,
    numbers_ptr,
    bias_ptr,
    prompt_ptr,
    count_ptr,
    draft_ptr,
    seen_ptr,
    out_ptr,
    tops_ptr,
    state_ptr,
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
    PDL: tl.constexpr,
):
    """Apply bias, penalties, temperature; find maxima. Grid (B * T, chunks)."""
    wait_for_predecessor(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    numbers_ptr += row // T * F  # in the order of `compile.topk.NUMBERS`
    repetition = tl.load(numbers_ptr + 4).to(tl.float32)
    frequency = tl.load(numbers_ptr + 5).to(tl.float32)
    presence = tl.load(numbers_ptr + 6).to(tl.float32)
    x = _penalised_logits(
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
        BIAS,
        PENALTIES,
        PATHS,
    )
    if SAMPLED:
        temperature = tl.load(numbers_ptr)
        x = tl.div_rn(x, tl.where(temperature < cold, 1.0, divisor_of(temperature)) + at * 0.0)
        tl.store(tops_ptr + row * tl.num_programs(1) + chunk, tl.max(x, 0))
    tl.store(out_ptr + row * V + at, x, mask=at < V)
    if TRUNCATED:
        i = tl.arange(0, 4096)
        tl.store(state_ptr + row * STATE + i, tl.zeros((4096,), tl.int64), mask=(i <= NUM) & (chunk == 0))


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_UNALIGNED)
def sum_bins(
    numbers_ptr,
    out_ptr,
    tops_ptr,
    state_ptr,
    T,
    V,
    cold: tl.float64,
    F: tl.constexpr,
    TRUNCATED: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum tokens and mass by bin. Grid (B * T, chunks).

    Applies the temperature of cold rows first.
    """
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    numbers_ptr += row // T * F
    temperature = tl.load(numbers_ptr)
    is_changed = temperature < cold
    if TRUNCATED:
        top_k, top_p = tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2)
        is_changed |= (top_k < V) | (top_p < 1)
    if is_changed:
        zero, top = row_top(tops_ptr, temperature, cold, CHUNKS)
        x = tl.load(out_ptr + row * V + at, mask=at < V, other=float("-inf"))
        if temperature < cold:
            x = tl.div_rn(x - zero, divisor_of(temperature) + at * 0.0)
            tl.store(out_ptr + row * V + at, x, mask=at < V)
        if TRUNCATED:
            bins_ptr = state_ptr + row * STATE + bin_of(x, top)
            if top_k < V:
                tl.atomic_add(bins_ptr + COUNTS, tl.full((BLOCK,), 1, tl.int64), mask=x > float("-inf"), sem="relaxed")
            if top_p < 1:
                mass = mass_of(x, top)
                tl.atomic_add(bins_ptr + MASSES, mass, mask=mass > 0, sem="relaxed")


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_UNALIGNED)
def copy_border_bins(
    numbers_ptr,
    out_ptr,
    tops_ptr,
    state_ptr,
    copied_ptr,
    T,
    V,
    cold: tl.float64,
    F: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the borders' bins, unordered. Grid (B * T, chunks).

    What top-k leaves of its border's bin is not computed yet: top-p's border may be in one of several bins.
    """
    wait_for_predecessor(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    numbers_ptr += row // T * F
    state_ptr += row * STATE
    top_k, top_p = tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2)
    if (top_k < V) | (top_p < 1):
        bins = tl.arange(0, BINS)
        counts, masses = tl.load(state_ptr + COUNTS + bins), tl.load(state_ptr + MASSES + bins)
        border = tl.sum((tl.cumsum(counts, 0).to(tl.float64) < top_k).to(tl.int32), 0)
        mass_above = tl.sum(tl.where(bins < border, masses, 0), 0)
        mass_kept = tl.sum(tl.where(bins <= border, masses, 0), 0)
        upto = tl.cumsum(masses, 0).to(tl.float64)
        first = tl.sum((upto < mass_above.to(tl.float64) * top_p).to(tl.int32), 0)
        last = tl.sum((upto < mass_kept.to(tl.float64) * top_p).to(tl.int32), 0)
        first = tl.where(top_p < 1, first, BINS)
        _zero, top = row_top(tops_ptr, tl.load(numbers_ptr), cold, CHUNKS)
        x = tl.load(out_ptr + row * V + at, mask=at < V, other=float("-inf"))
        bin = bin_of(x, top)
        is_copied = (x > float("-inf")) & ((bin == border) | ((bin >= first) & (bin <= last)))
        place = tl.cumsum(is_copied.to(tl.int32), 0) - 1
        num = tl.sum(is_copied.to(tl.int64), 0)
        place += tl.atomic_add(state_ptr + NUM, num, sem="relaxed").to(tl.int32)
        tl.store(copied_ptr + row * V + place, x, mask=is_copied)
        if chunk == 0:
            tl.store(state_ptr + BIN, border.to(tl.int64))
            tl.store(state_ptr + ABOVE, tl.sum(tl.where(bins < border, counts, 0), 0))
            tl.store(state_ptr + MASS_ABOVE, mass_above)
            tl.store(state_ptr + FIRST, first.to(tl.int64))
            tl.store(state_ptr + LAST, last.to(tl.int64))
            tl.store(state_ptr + MASS_BEFORE, tl.sum(tl.where(bins < first, masses, 0), 0))


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_UNALIGNED)
def truncate(
    numbers_ptr,
    out_ptr,
    tops_ptr,
    state_ptr,
    copied_ptr,
    T,
    V,
    cold: tl.float64,
    F: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Apply top-k, top-p and min-p. Grid (B * T, chunks).

    Each program finds the borders, and keeps the tokens above them.
    """
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    numbers_ptr += row // T * F
    state_ptr += row * STATE
    copied_ptr += row * V
    top_k, top_p = tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2)
    log_min_p = tl.load(numbers_ptr + 3).to(tl.float32)
    if (top_k < V) | (top_p < 1) | (log_min_p > float("-inf")):
        _zero, top = row_top(tops_ptr, tl.load(numbers_ptr), cold, CHUNKS)
        limit, deepest = row * 0 + EVERYTHING, row * 0 + EVERYTHING
        if (top_k < V) | (top_p < 1):
            num, bin = tl.load(state_ptr + NUM).to(tl.int32), tl.load(state_ptr + BIN)
            if bin < BINS:
                above = tl.load(state_ptr + ABOVE)
                limit = find_border(copied_ptr, num, bin, bin, top, limit, above, top_k, False, BLOCK)
            if top_p < 1:
                mass = tl.load(state_ptr + MASS_ABOVE)
                for start in range(0, num, BLOCK):
                    weight, _order = load_copied(copied_ptr, start, num, bin, bin, top, limit, True, BLOCK)
                    mass += tl.sum(weight, 0)
                first, last = tl.load(state_ptr + FIRST), tl.load(state_ptr + LAST)
                above, need = tl.load(state_ptr + MASS_BEFORE), mass.to(tl.float64) * top_p
                deepest = find_border(copied_ptr, num, first, last, top, limit, above, need, True, BLOCK)
        x = tl.load(out_ptr + row * V + at, mask=at < V, other=float("-inf"))
        keep = (rank_of(x) <= limit) & (depth_of(x, top).to(tl.int64) <= deepest) & (x >= top + log_min_p)
        tl.store(out_ptr + row * V + at, tl.where(keep, x, float("-inf")), mask=at < V)


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
    """See `compile.topk.process_logits`."""
    logits_BTV = logits_BTV.contiguous()
    B, T, V = logits_BTV.shape
    grid = (B * T, triton.cdiv(V, BLOCK))
    out_BTV = torch.empty_like(logits_BTV, dtype=torch.float32)
    tops = out_BTV.new_empty(grid)
    state = out_BTV.new_empty(B * T, STATE.value, dtype=torch.int64) if truncated else tops
    draft, seen, N = logits_BTV, logits_BTV, 0  # neither is read unless there are some
    if draft_BN is not None:
        draft, N = draft_BN.contiguous(), draft_BN.shape[1]
    if seen_BTN is not None:
        seen = seen_BTN.contiguous().view(torch.uint8)
    penalties = prompt_mask_BV is not None and counts_BV is not None
    prompt = prompt_mask_BV.view(torch.uint8) if prompt_mask_BV is not None else logits_BTV
    common = {"F": numbers_BF.shape[1], "BLOCK": BLOCK, "num_warps": WARPS, "enable_fp_fusion": False}
    common |= launch_options(logits_BTV.device)
    adjust_logits[grid](
        *(logits_BTV, numbers_BF, logits_BTV if bias_BV is None else bias_BV, prompt),
        *(logits_BTV if counts_BV is None else counts_BV, draft, seen, out_BTV, tops, state),
        *(T, V, N, cold),
        BIAS=bias_BV is not None,
        PENALTIES=penalties,
        PATHS=seen_BTN is not None,
        SAMPLED=sampled,
        TRUNCATED=truncated,
        **common,
    )
    common["CHUNKS"] = triton.next_power_of_2(grid[1])
    if sampled:
        sum_bins[grid](numbers_BF, out_BTV, tops, state, T, V, cold, TRUNCATED=truncated, **common)
    if truncated:
        copied_BTV = torch.empty_like(out_BTV)
        copy_border_bins[grid](numbers_BF, out_BTV, tops, state, copied_BTV, T, V, cold, **common)
        truncate[grid](numbers_BF, out_BTV, tops, state, copied_BTV, T, V, cold, **common)
    return out_BTV
