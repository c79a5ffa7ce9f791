"""Logits to choose from, in four launches: what `sharesd.sampling.process` composes of some 200.

Several programs per row of logits, each with a chunk of the vocabulary. Bias, penalties and temperature come first.
Top-k and top-p each keep the tokens above which less than so much weight lies (1 each, or their mass): all programs add
up what lies in each bin of a scale of depths below the likeliest, then copy what lies in the bins of the borders, and
each finds the borders by bisection among those few. Weights are integers, so that sums depend on no order, nor on
chunks. Nothing of a row depends on other rows.

Legend: B rows of the batch, T logit rows of each, V vocabulary, N draft tokens, F numbers of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compile.cuda.pdl import launch_options

BLOCK = 1024
"""Tokens of a program."""
WARPS = 8
BINS = tl.constexpr(1024)
"""32 to each power of 2, for depths of 2^-8 to 2^24."""
COUNTS, MASSES = tl.constexpr(0), tl.constexpr(1024)
"""Where a row's state has the sums of the bins."""
NUM, BIN, ABOVE, MASS_ABOVE, FIRST, LAST, MASS_BEFORE = (tl.constexpr(2048 + i) for i in range(7))
"""Where it has how many tokens were copied; the bin of top-k's border, tokens and mass above it; the first and the last
bin that top-p's border may lie in, and the mass above them."""
STATE = tl.constexpr(2056)
EVERYTHING = tl.constexpr(0xFFFFFFFF)
"""A border below which nothing lies."""
_INTS = ["T", "V", "N"]
# Views of some rows begin anywhere: where they do must not make another binary.
_PLACES = ["logits_ptr", "numbers_ptr", "bias_ptr", "prompt_ptr", "count_ptr", "draft_ptr", "seen_ptr"]


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
def _divisor(degrees):
    return tl.minimum(tl.maximum(degrees, 1.1754943508222875e-38), 3.4028234663852886e38).to(tl.float32)


@triton.jit
def _top(tops_ptr, degrees, cold, CHUNKS: tl.constexpr):
    """Amount that a cold row's logits lose before they are divided, and the row's largest logit after that."""
    i, chunks = tl.arange(0, CHUNKS), tl.num_programs(1)
    tops = tl.load(tops_ptr + tl.program_id(0) * chunks + i, mask=i < chunks, other=float("-inf"))
    zero = tl.minimum(tl.maximum(tl.max(tops, 0), -3.4028234663852886e38), 3.4028234663852886e38)
    tops = tl.where(degrees < cold, tl.div_rn(tops - zero, _divisor(degrees) + i * 0.0), tops)
    return zero, tl.max(tops, 0)


@triton.jit
def _rank(x):
    """Integers 0..2^32-1 in the order of floats, the largest first."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # no -0
    return 0x7FFFFFFF - (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _depth(x, top):
    """Integers in the order of the depths below the likeliest: what the bits of non-negative floats are."""
    return (top - x + 0.0).to(tl.int32, bitcast=True)  # no -0


@triton.jit
def _bin(x, top):
    return tl.minimum(tl.maximum((_depth(x, top) >> 18) - (0x3B800000 >> 18), 0), BINS - 1)


@triton.jit
def _mass(x, top):
    """2^40 times the probability relative to the likeliest."""
    return tl.where(x > float("-inf"), (tl.exp(x - top) * 1099511627776.0).to(tl.int64), 0)


@triton.jit
def _copied(copied_ptr, start, num, first, last, top, limit, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Weights and orders of copied tokens; no weight, and order -1, if not of these bins, or of ranks beyond `limit`.

    Orders are depths for masses, else ranks.
    """
    at = start + tl.arange(0, BLOCK)
    x = tl.load(copied_ptr + at, mask=at < num, other=float("-inf"))
    bin = _bin(x, top)
    among = (at < num) & (bin >= first) & (bin <= last) & (_rank(x) <= limit)
    weight = _mass(x, top) if MASS else at.to(tl.int64) * 0 + 1
    order = _depth(x, top).to(tl.int64) if MASS else _rank(x)
    return tl.where(among, weight, 0), tl.where(among, order, -1)


@triton.jit
def _border(copied_ptr, num, first, last, top, limit, above, need, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The first order up to which copied tokens, and `above`, weigh as much as `need`."""
    low, high = limit * 0 + EVERYTHING, limit * 0
    for start in range(0, num, BLOCK):
        _weight, order = _copied(copied_ptr, start, num, first, last, top, limit, MASS, BLOCK)
        low = tl.minimum(low, tl.min(tl.where(order < 0, EVERYTHING, order), 0))
        high = tl.maximum(high, tl.max(order, 0))
    while low < high:
        middle = (low + high) >> 1
        reached = above
        for start in range(0, num, BLOCK):
            weight, order = _copied(copied_ptr, start, num, first, last, top, limit, MASS, BLOCK)
            reached += tl.sum(tl.where(order <= middle, weight, 0), 0)
        enough = reached.to(tl.float64) >= need
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_PLACES)
def adjust(
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
    """Bias, penalties, and temperature of rows that are not cold; the largest logit. Grid (B * T, chunks)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    numbers_ptr += row // T * F  # in the order of `compile.logits.NUMBERS`
    repetition = tl.load(numbers_ptr + 4).to(tl.float32)
    frequency = tl.load(numbers_ptr + 5).to(tl.float32)
    presence = tl.load(numbers_ptr + 6).to(tl.float32)
    x = _raw(
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
        degrees = tl.load(numbers_ptr)
        x = tl.div_rn(x, tl.where(degrees < cold, 1.0, _divisor(degrees)) + at * 0.0)
        tl.store(tops_ptr + row * tl.num_programs(1) + chunk, tl.max(x, 0))
    tl.store(out_ptr + row * V + at, x, mask=at < V)
    if TRUNCATED:
        i = tl.arange(0, 4096)
        tl.store(state_ptr + row * STATE + i, tl.zeros((4096,), tl.int64), mask=(i <= NUM) & (chunk == 0))


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_PLACES)
def weigh(
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
    """Temperature of cold rows; tokens and mass in each bin. Grid (B * T, chunks)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    numbers_ptr += row // T * F
    degrees = tl.load(numbers_ptr)
    asks = degrees < cold
    if TRUNCATED:
        top_k, top_p = tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2)
        asks |= (top_k < V) | (top_p < 1)
    if asks:
        zero, top = _top(tops_ptr, degrees, cold, CHUNKS)
        x = tl.load(out_ptr + row * V + at, mask=at < V, other=float("-inf"))
        if degrees < cold:
            x = tl.div_rn(x - zero, _divisor(degrees) + at * 0.0)
            tl.store(out_ptr + row * V + at, x, mask=at < V)
        if TRUNCATED:
            bins_ptr = state_ptr + row * STATE + _bin(x, top)
            if top_k < V:
                tl.atomic_add(bins_ptr + COUNTS, tl.full((BLOCK,), 1, tl.int64), mask=x > float("-inf"), sem="relaxed")
            if top_p < 1:
                mass = _mass(x, top)
                tl.atomic_add(bins_ptr + MASSES, mass, mask=mass > 0, sem="relaxed")


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_PLACES)
def gather(
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
    """The bins of the borders, and a copy of what lies in them, in any order. Grid (B * T, chunks).

    What top-k leaves of its border's bin is not known yet, so that top-p's border may lie in one of several bins.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
        mass_most = tl.sum(tl.where(bins <= border, masses, 0), 0)
        upto = tl.cumsum(masses, 0).to(tl.float64)
        first = tl.sum((upto < mass_above.to(tl.float64) * top_p).to(tl.int32), 0)
        last = tl.sum((upto < mass_most.to(tl.float64) * top_p).to(tl.int32), 0)
        first = tl.where(top_p < 1, first, BINS)
        _zero, top = _top(tops_ptr, tl.load(numbers_ptr), cold, CHUNKS)
        x = tl.load(out_ptr + row * V + at, mask=at < V, other=float("-inf"))
        bin = _bin(x, top)
        wanted = (x > float("-inf")) & ((bin == border) | ((bin >= first) & (bin <= last)))
        place = tl.cumsum(wanted.to(tl.int32), 0) - 1
        num = tl.sum(wanted.to(tl.int64), 0)
        place += tl.atomic_add(state_ptr + NUM, num, sem="relaxed").to(tl.int32)
        tl.store(copied_ptr + row * V + place, x, mask=wanted)
        if chunk == 0:
            tl.store(state_ptr + BIN, border.to(tl.int64))
            tl.store(state_ptr + ABOVE, tl.sum(tl.where(bins < border, counts, 0), 0))
            tl.store(state_ptr + MASS_ABOVE, mass_above)
            tl.store(state_ptr + FIRST, first.to(tl.int64))
            tl.store(state_ptr + LAST, last.to(tl.int64))
            tl.store(state_ptr + MASS_BEFORE, tl.sum(tl.where(bins < first, masses, 0), 0))


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_PLACES)
def cut(
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
    """Top-k, top-p and min-p. Grid (B * T, chunks): each program finds the borders, and keeps what lies above them."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    numbers_ptr += row // T * F
    state_ptr += row * STATE
    copied_ptr += row * V
    top_k, top_p = tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2)
    log_min_p = tl.load(numbers_ptr + 3).to(tl.float32)
    if (top_k < V) | (top_p < 1) | (log_min_p > float("-inf")):
        _zero, top = _top(tops_ptr, tl.load(numbers_ptr), cold, CHUNKS)
        limit, deepest = row * 0 + EVERYTHING, row * 0 + EVERYTHING
        if (top_k < V) | (top_p < 1):
            num, bin = tl.load(state_ptr + NUM).to(tl.int32), tl.load(state_ptr + BIN)
            if bin < BINS:
                above = tl.load(state_ptr + ABOVE)
                limit = _border(copied_ptr, num, bin, bin, top, limit, above, top_k, False, BLOCK)
            if top_p < 1:
                mass = tl.load(state_ptr + MASS_ABOVE)
                for start in range(0, num, BLOCK):
                    weight, _order = _copied(copied_ptr, start, num, bin, bin, top, limit, True, BLOCK)
                    mass += tl.sum(weight, 0)
                first, last = tl.load(state_ptr + FIRST), tl.load(state_ptr + LAST)
                above, need = tl.load(state_ptr + MASS_BEFORE), mass.to(tl.float64) * top_p
                deepest = _border(copied_ptr, num, first, last, top, limit, above, need, True, BLOCK)
        x = tl.load(out_ptr + row * V + at, mask=at < V, other=float("-inf"))
        keep = (_rank(x) <= limit) & (_depth(x, top).to(tl.int64) <= deepest) & (x >= top + log_min_p)
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
    """See `compile.logits.process_logits`."""
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
    adjust[grid](
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
        weigh[grid](numbers_BF, out_BTV, tops, state, T, V, cold, TRUNCATED=truncated, **common)
    if truncated:
        copied_BTV = torch.empty_like(out_BTV)
        gather[grid](numbers_BF, out_BTV, tops, state, copied_BTV, T, V, cold, **common)
        cut[grid](numbers_BF, out_BTV, tops, state, copied_BTV, T, V, cold, **common)
    return out_BTV
