"""Attention over a static KV cache: write rows, attend to live slots.

Legend: B rows of the batch, T new tokens, H query heads, K key/value heads, S slots, d head size.

On a GPU, steps run kernels in Triton (`compile/cuda/attention.py`), and prompts torch's flash attention; tensor
operations run what neither supports.
"""

from __future__ import annotations

import logging
from ctypes import c_double, c_int64, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from compile.cpp_extension import kernel
from compile.kv_layout import CHUNK, SINKS, SLOT_MULTIPLE, unpack_q8, write_slots
from compile.op_registry import define, define_for_triton, runs_cpp, runs_triton

log = logging.getLogger(__name__)
MAX_HEAD = 512
"""Largest head size of the CPU kernel."""
MAX_HEAD_CUDA = 256
"""Largest head size of the CUDA kernels."""
MAX_STEP = 64
"""Maximum rows of a step; more rows are a prompt."""
FLASH_HEAD = (8, 256)
"""Head sizes of flash attention: divisor and maximum."""
FLASH_PLACES = (
    *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
    *("dropout_p", "is_causal", "return_debug_mask"),
)
FLASH_NAMES = {"scale", "window_size_left", "window_size_right", "seqused_k"}
"""Positional and keyword arguments of torch's private operator."""

_CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_SHAPE, _STRIDES = c_int64 * 9, c_int64 * 6
_ARGTYPES = (*[c_void_p] * 9, _SHAPE, _STRIDES, c_double, c_int64, c_int64, c_double, c_void_p)


class Norm(Protocol):
    """RMSNorm of heads; the weight multiplies before the cast if `gemma`."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def eps(self) -> float: ...
    @property
    def gemma(self) -> bool: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class TreeAttentionMask(NamedTuple):
    """Mask of draft trees: rows attend to older slots and their path."""

    depth_BT: Tensor  # int64: nodes above each row on its path
    path_BTP: Tensor  # int64: their slots, counted from the length, top first, the row's own last; no more is read

    def words(self) -> tuple[int, int, int]:
        """`struct TreeAttentionMask` of the CPU kernels."""
        assert self.depth_BT.is_contiguous() and self.path_BTP.is_contiguous()
        return self.depth_BT.data_ptr(), self.path_BTP.data_ptr(), self.path_BTP.shape[2]


def reads_live_slots(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return True if steps read only the slots that they attend to.

    A query's row then has the same bits whatever T, S, B and its place in a tree.
    """
    if runs_cpp(device):
        return True
    return runs_triton(device) and dtype in _CUDA_DTYPES and head_size <= MAX_HEAD_CUDA


def supports_flash(device: torch.device, dtype: torch.dtype, head_size: int, softcap: float) -> bool:
    """Return True if prompts read only the slots that they attend to."""
    step, largest = FLASH_HEAD
    fits = dtype in (torch.bfloat16, torch.float16) and head_size % step == 0 and head_size <= largest and not softcap
    return device.type == "cuda" and fits and has_flash(device)


def has_flash(device: torch.device) -> bool:
    """Return True if this GPU and this torch have flash attention."""
    has = KNOWS_FLASH and torch.backends.cuda.is_flash_attention_available()
    return has and torch.cuda.get_device_capability(device) >= (8, 0)


def _knows_flash() -> bool:
    """Return True if torch's private operator has the expected arguments."""
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    taken = [] if operator is None else [argument.name for argument in operator.default._schema.arguments]
    return tuple(taken[: len(FLASH_PLACES)]) == FLASH_PLACES and set(taken) >= FLASH_NAMES


KNOWS_FLASH = _knows_flash()


@lru_cache
def warn_unknown_flash() -> None:
    """Warn once per process if prompts run SDPA.

    This is the case if torch's flash attention has unknown arguments.
    """
    if not KNOWS_FLASH:
        log.warning("torch %s has another flash attention: prompts run SDPA, which takes more time", torch.__version__)


def attend(
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    recent: int = 0,
    softcap: float = 0.0,
    tree_mask: TreeAttentionMask | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Norm, Norm] | None = None,
    query_factors: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write k and v in place; return the attention output.

    They go to slots lengths..lengths+T-1; the output is [B, T, H, d]. Query t of a row attends to slots <= lengths + t,
    of those to the last `window` only (0 = all). With `recent` (0 = all; for drafts) it attends to the first SINKS of
    these and to the last `recent` ones, more of them to the next multiple of CHUNK (Xiao et al. 2023, arXiv
    2309.17453). `softcap` > 0 squashes the scores to softcap * tanh(score / softcap) before masking (Gemma 2). With
    `tree_mask` a row is written to the last slot of its path, and attends to slots < lengths and its path. Before,
    queries and keys are normalised by `norms` and rotated by `rotary`: cosines and sines [P, r] of all positions, fewer
    than padding may have; then queries are multiplied by `query_factors` [P]. `sinks` [H] are one more score of each
    head, unscaled, which takes weight and has no value (OpenAI 2025, arXiv 2508.10925). If
    `reads_live_slots`, a query's result has the same bits whatever T, S, B, the number of threads, and its place in a
    tree. Caches may be in 8 bits.
    """
    (B, T, _, d), device = q_BTHd.shape, q_BTHd.device
    is_step = T <= MAX_STEP or tree_mask is not None
    has_kernel = runs_cpp(device) or (is_step and reads_live_slots(device, q_BTHd.dtype, d))
    if not has_kernel or device.type == "cpu":  # the CUDA kernels normalise and rotate by themselves
        if norms is not None:
            q_BTHd, k_BTKd, norms = norms[0](q_BTHd), norms[1](k_BTKd), None
        if rotary is not None:
            angles = position_angles(rotary, T, lengths_B, tree_mask)
            q_BTHd, k_BTKd, rotary = rotate(q_BTHd, *angles), rotate(k_BTKd, *angles), None
        if query_factors is not None:
            q_BTHd = q_BTHd * query_factors[_positions(len(query_factors), T, lengths_B, tree_mask)][..., None, None]
            query_factors = None
    new, old, extent = (q_BTHd, k_BTKd, v_BTKd), (k_cache, v_cache, lengths_B), (scale, window, recent, softcap)
    if has_kernel:
        places = (*(rotary or (None, None)), *old, *(tree_mask or (None, None)))
        q_norm, k_norm = norms or (None, None)
        how = () if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps, q_norm.gemma)
        more = {} if sinks is None else {"sinks": sinks}
        return torch.ops.sharesd.attend_(*new, *places, *extent, *how, query_factors=query_factors, **more)
    if B == 1 and tree_mask is None and not recent and supports_flash(device, q_BTHd.dtype, d, softcap):
        kept = append_kv(*new[1:], *old, lengths_B[:, None] + torch.arange(T, device=device))
        ends_B = (lengths_B + T).to(torch.int32)
        return torch.ops.sharesd.flash(q_BTHd, *kept, ends_B, scale, window, sinks)
    return attend_reference(
        *new, *old, scale=scale, window=window, recent=recent, softcap=softcap, tree_mask=tree_mask, sinks=sinks
    )


def position_angles(
    rotary: tuple[Tensor, Tensor], num_rows: int, lengths_B: Tensor, tree_mask: TreeAttentionMask | None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, T, r] of new tokens' positions."""
    position_BT = _positions(len(rotary[0]), num_rows, lengths_B, tree_mask)
    return rotary[0][position_BT], rotary[1][position_BT]


def _positions(num: int, num_rows: int, lengths_B: Tensor, tree_mask: TreeAttentionMask | None) -> Tensor:
    """Return positions [B, T] of new tokens, below `num`: those of padding are never read."""
    ahead = torch.arange(num_rows, device=lengths_B.device) if tree_mask is None else tree_mask.depth_BT
    return (lengths_B[:, None] + ahead).clamp(0, num - 1)


def attend_reference(
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    recent: int = 0,
    softcap: float = 0.0,
    tree_mask: TreeAttentionMask | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run `attend` in tensor operations: the oracle of the kernels.

    Prompts on CUDA without flash attention run it, and read every slot of the cache: a chunk's bits depend on its size,
    its place and its prefix alone. Caches are not packed.
    """
    B, T, H, d = q_BTHd.shape
    place_BT = torch.arange(T, device=q_BTHd.device).expand(B, T)
    if tree_mask is not None:
        place_BT = tree_mask.path_BTP.gather(2, tree_mask.depth_BT[..., None])[..., 0]
    slots_BT = lengths_B[:, None] + place_BT
    k_BKSd, v_BKSd = append_kv(k_BTKd, v_BTKd, k_cache, v_cache, lengths_B, slots_BT, tree_mask)
    K, S = k_BKSd.shape[1:3]
    slot_S = torch.arange(S, device=q_BTHd.device)
    if tree_mask is None:
        position_BTS, own_BT1 = slot_S.expand(B, T, S), slots_BT[:, :, None]
    else:
        depth_BT, path_BTP = tree_mask
        depth_P = torch.arange(path_BTP.shape[2], device=q_BTHd.device)
        on_path_BTP = depth_P <= depth_BT[:, :, None]
        places_BTP = (lengths_B[:, None, None] + path_BTP).where(on_path_BTP, slots_BT[:, :, None])
        depth_BTP = depth_P.where(on_path_BTP, depth_BT[:, :, None])
        unseen = torch.iinfo(torch.int64).max
        position_BTS = slot_S.where(slot_S < lengths_B[:, None], unseen)[:, None].repeat(1, T, 1)
        position_BTS = position_BTS.scatter(2, places_BTP, lengths_B[:, None, None] + depth_BTP)
        own_BT1 = (lengths_B[:, None] + depth_BT)[:, :, None]
    seen_BTS = position_BTS <= own_BT1
    if recent:
        first_BT1 = (own_BT1 + 1 - recent).clamp(min=0) // CHUNK * CHUNK
        seen_BTS = seen_BTS & ((position_BTS >= first_BT1) | (position_BTS < SINKS))
    if window:
        seen_BTS = seen_BTS & (position_BTS > own_BT1 - window)
    if not softcap and sinks is None:
        if q_BTHd.is_cuda and H != K:
            return _attend_in_groups(q_BTHd, k_BKSd, v_BKSd, seen_BTS, scale)
        out_BHTd = F.scaled_dot_product_attention(
            q_BTHd.transpose(1, 2), k_BKSd, v_BKSd, seen_BTS[:, None], scale=scale, enable_gqa=H != K
        )
        return out_BHTd.transpose(1, 2)
    q_BKGTd = q_BTHd.reshape(B, T, K, H // K, d).permute(0, 2, 3, 1, 4)
    wide = torch.promote_types(q_BTHd.dtype, torch.float32)
    scores_BKGTS = torch.einsum("bkgtd,bksd->bkgts", q_BKGTd.to(wide), k_BKSd.to(wide)) * scale
    if softcap:
        scores_BKGTS = softcap * torch.tanh(scores_BKGTS / softcap)
    scores_BKGTS = scores_BKGTS.masked_fill(~seen_BTS[:, None, None], float("-inf"))
    if sinks is not None:
        sinks_KG11 = sinks.to(wide).view(K, H // K, 1, 1)
        scores_BKGTS = torch.cat([scores_BKGTS, sinks_KG11.expand(B, -1, -1, T, 1)], -1)
    weights_BKGTS = scores_BKGTS.softmax(-1)[..., :S]
    out_BTKGd = torch.einsum("bkgts,bksd->btkgd", weights_BKGTS, v_BKSd.to(wide))
    return out_BTKGd.reshape(B, T, H, d).to(q_BTHd.dtype)


def _attend_in_groups(q_BTHd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, seen_BTS: Tensor, scale: float) -> Tensor:
    """Return masked attention, [B, T, H, d], without groups of heads.

    Heads that share keys become further rows of one head.
    """
    (T, H), K = q_BTHd.shape[1:3], k_BKSd.shape[1]
    q_BKXd = q_BTHd.unflatten(2, (K, H // K)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    seen_B1XS = seen_BTS.repeat(1, H // K, 1)[:, None]
    out_BKXd = F.scaled_dot_product_attention(q_BKXd, k_BKSd, v_BKSd, seen_B1XS, scale=scale)
    return out_BKXd.unflatten(2, (H // K, T)).permute(0, 3, 1, 2, 4).flatten(2, 3)


@lru_cache
def _bounds(num: int, device: torch.device) -> Tensor:
    """Return [0, num], the bounds of the only text's rows."""
    return torch.tensor([0, num], dtype=torch.int32, device=device)


def _flash(
    q_1THd: Tensor,
    k_cache_1KSd: Tensor,
    v_cache_1KSd: Tensor,
    ends_1: Tensor,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention of a text's last rows within a window.

    `window` 0: all slots.
    """
    T, S = q_1THd.shape[1], k_cache_1KSd.shape[2]
    q_THd, k_SKd, v_SKd = q_1THd[0], k_cache_1KSd[0].transpose(0, 1), v_cache_1KSd[0].transpose(0, 1)
    found_THd, sums_HT, *_ = torch.ops.aten._flash_attention_forward(
        *(q_THd, k_SKd, v_SKd, _bounds(T, q_THd.device), _bounds(S, q_THd.device), T, S),
        *(0.0, True, False),  # no dropout, causal, no mask for debugging
        scale=scale,
        window_size_left=window - 1 if window else None,
        window_size_right=0,
        seqused_k=ends_1,
    )
    if sinks is not None:  # of all weight e^sum + e^sink, this share is that of keys
        found_THd = (found_THd * (sums_HT - sinks.float()[:, None]).sigmoid().t()[..., None]).to(q_THd.dtype)
    return found_THd[None]


def _attend_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    depth: Tensor | None,
    path: Tensor | None,
    scale: float,
    window: int,
    recent: int,
    softcap: float,
    *norms: Any,
    query_factors: None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    assert cos is None and sin is None and not any(norms) and query_factors is None, "normalise and rotate before"
    q, k, v = (x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous() for x in (q, k, v))
    B, T, H, d = q.shape
    q8 = k_cache.dtype == torch.int8
    K, S = k_cache.shape[1], k_cache.shape[2] * (SLOT_MULTIPLE if q8 else k_cache.shape[4])
    assert d <= MAX_HEAD, f"head size is {d}"
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and S % SLOT_MULTIPLE == 0, "make caches with new_kv"
    depth_at, path_at, P = (None, None, 0) if depth is None or path is None else TreeAttentionMask(depth, path).words()
    out = q.new_empty((B, T, H, d))
    (q0, q1, _, _), (k0, k1, _, _), (v0, v1, _, _) = q.stride(), k.stride(), v.stride()
    kernel("attend", q.dtype, *_ARGTYPES)(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        lengths.data_ptr(),
        out.data_ptr(),
        depth_at,
        path_at,
        _SHAPE(B, T, H, K, S, d, torch.get_num_threads(), P, q8),
        _STRIDES(q0, q1, k0, k1, v0, v1),
        scale,
        window,
        recent,
        softcap,
        None if sinks is None else sinks.data_ptr(),
    )
    return out


define(
    "attend_(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor lengths, Tensor? depth, Tensor? path, float scale, int window, int recent, float softcap, "
    "Tensor? q_norm=None, Tensor? k_norm=None, float eps=0.0, bool gemma=False, *, Tensor? query_factors=None, "
    "Tensor? sinks=None) -> Tensor",
    cpu=_attend_cpu,
    cuda="attention:attend_live",
    meta=lambda q, *rest, **more: q.new_empty(q.shape),
)
define(
    "flash(Tensor q, Tensor k_cache, Tensor v_cache, Tensor ends, float scale, int window, Tensor? sinks=None) "
    "-> Tensor",
    cuda=_flash,
    meta=lambda q, *rest: q.new_empty(q.shape),
)


def rotate(x_BTNd: Tensor, cos_BTr: Tensor, sin_BTr: Tensor) -> Tensor:
    """Rotate the first 2r entries of every head, in halves (GPT-NeoX order)."""
    r = cos_BTr.shape[-1]
    cos, sin = cos_BTr[:, :, None], sin_BTr[:, :, None]
    a, b, rest = x_BTNd[..., :r], x_BTNd[..., r : 2 * r], x_BTNd[..., 2 * r :]
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat(turned if rest.shape[-1] == 0 else (*turned, rest), dim=-1)


def append_kv(
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths_B: Tensor,
    slots_BT: Tensor,
    tree: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Write to slots; return the cache's numbers [B, K, S, d].

    `slots` are those after lengths, or with `tree` the last of paths. Caches are not packed. Numbers of 8 bits are a
    copy: 0, or masked after the new ones.
    """
    is_q8 = k_cache.dtype == torch.int8
    if is_q8 and runs_triton(k_cache.device):
        return torch.ops.sharesd.append_q8_(k_BTKd, v_BTKd, k_cache, v_cache, lengths_B, *(tree or (None, None)))
    write_slots(k_cache, k_BTKd, slots_BT)
    write_slots(v_cache, v_BTKd, slots_BT)
    return unpack_q8(k_cache, v_cache, k_BTKd.shape[3], k_BTKd.dtype, plain=True) if is_q8 else (k_cache, v_cache)


def _append_triton(
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths_B: Tensor,
    depth_BT: Tensor | None,
    path_BTP: Tensor | None,
) -> tuple[Tensor, Tensor]:
    from compile.cuda.kv_q8 import expand_kv  # imports Triton, which not every machine has
    from compile.cuda.kv_write import write_new_kv

    (_, T, _, d), dtype = k_BTKd.shape, k_BTKd.dtype
    k, v = (x if x.stride()[2:] == (d, 1) else x.contiguous() for x in (k_BTKd, v_BTKd))
    depth, path, P = lengths_B, lengths_B, 0
    if depth_BT is not None and path_BTP is not None:
        depth, path, P = depth_BT.contiguous(), path_BTP.contiguous(), path_BTP.shape[2]
    write_new_kv(k[:, :, :0], k, v, None, None, k_cache, v_cache, lengths_B, depth, path, P, (None, None, 0.0, False))
    return expand_kv(k_cache, v_cache, lengths_B, T, d, dtype)


def _append_meta(k_BTKd: Tensor, v_BTKd: Tensor, k_cache: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor]:
    B, K, blocks, _ = k_cache.shape
    k_BKSd, v_BKSd = (k_BTKd.new_empty(B, K, blocks * SLOT_MULTIPLE, k_BTKd.shape[3]) for _ in range(2))
    return k_BKSd, v_BKSd


define_for_triton(
    "append_q8_(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, Tensor? depth, "
    "Tensor? path) -> (Tensor, Tensor)",
    _append_triton,
    _append_meta,
)
