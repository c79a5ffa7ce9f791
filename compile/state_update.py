"""Updates of tokens, lengths and roots between steps, and the accepted path of a draft.

Each is one launch on a GPU, instead of several tensor operations; these also take 3 % of a round on a CPU.

Legend: B rows, N draft tokens, T verify rows of a result, V vocabulary, W rows of a step, X numbers for the drafter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.attention import TreeAttentionMask
from compile.cpp_extension import call
from compile.op_registry import define, runs_cpp, runs_triton


def verify_tokens(root_B: Tensor, draft_BN: Tensor, width: int) -> Tensor:
    """Return a verify step's tokens [B, W]: root, draft, zeros.

    A missing node (-1) is 0, too.
    """
    if runs_triton(root_B.device):
        return torch.ops.sharesd.verify_tokens(root_B, draft_BN, width)
    tokens_BT = torch.cat([root_B[:, None], draft_BN.clamp(min=0)], 1)
    return F.pad(tokens_BT, (0, width - tokens_BT.shape[1]))


def write_draft_token(token_B: Tensor, lengths_B: Tensor, root_at_B: Tensor, last_B1: Tensor, draft_BN: Tensor) -> None:
    """Write a chain's next token into `last` and into the draft."""
    if runs_triton(token_B.device):
        torch.ops.sharesd.write_draft_token_(token_B, lengths_B, root_at_B, last_B1, draft_BN)
        return
    last_B1.copy_(token_B[:, None])
    draft_BN.scatter_(1, (lengths_B - root_at_B - 1)[:, None], last_B1)


LATE_SHIFT, LATE_MASK, LATE_OFFSET = 32, 2**32 - 1, 2
"""Of a word of late nodes: bits below the round's number; those bits; what is added to a token, so that -2 is 0."""


def join_late_nodes(
    words_BX: Tensor, number_B: Tensor, joined_B: Tensor, tokens_BN: Tensor, depth_BT: Tensor, path_BTT: Tensor
) -> None:
    """Add nodes that the host has written to a row's draft, if all of them have come by now.

    A row's words [X = N + T + T * T] are tokens, depths and paths, each with the number of its round in the upper half.
    So a row takes nothing of another round, and all or nothing, in whatever order words arrive. Token -2 keeps the
    draft's node. A late node with a path that the draft has is dropped (-1), and nodes below it follow the draft's.

    Adds 1 to `number`; `joined` is 1 in rows that have late nodes now, else 0.
    """
    if runs_triton(tokens_BN.device):
        torch.ops.sharesd.join_late_nodes_(words_BX, number_B, joined_B, tokens_BN, depth_BT, path_BTT)
        return
    (B, N), T = tokens_BN.shape, depth_BT.shape[1]
    number_B += 1
    joined_B.copy_((words_BX >> LATE_SHIFT == number_B[:, None]).all(1))
    late_BN, late_depth_BT, late_path_BX = (words_BX & LATE_MASK).split([N, T, T * T], 1)
    late_path_BTT = late_path_BX.reshape(B, T, T)
    late_BT, token_BT = F.pad(late_BN - LATE_OFFSET, (1, 0), value=-1), F.pad(tokens_BN, (1, 0), value=-1)
    is_drafted_BT = late_BT == -2
    is_late_BT = ~is_drafted_BT & (joined_B[:, None] > 0) & (torch.arange(T, device=token_BT.device) > 0)
    late_path_BTT = late_path_BTT.where(is_late_BT[..., None], 0)
    parent_BT = path_BTT.gather(2, (depth_BT - 1).clamp(min=0)[..., None])[..., 0]
    # The draft's row that a late path has reached, as long as the draft has that path; nodes that end there.
    row_BT, follows_BT, is_known_BT = torch.zeros_like(depth_BT), is_late_BT, torch.zeros_like(is_late_BT)
    path = [late_path_BTT[..., 0]]
    for d in range(1, T):
        at_BT = late_path_BTT[..., d]
        wanted_BT = late_BT.gather(1, at_BT)
        is_child_BTT = is_drafted_BT[:, None] & (parent_BT[:, None] == row_BT[..., None])
        is_child_BTT = is_child_BTT & (token_BT[:, None] == wanted_BT[..., None])
        follows_BT = follows_BT & (d <= late_depth_BT) & is_child_BTT.any(2)
        row_BT = is_child_BTT.to(torch.int64).argmax(2).where(follows_BT, row_BT)
        path.append(row_BT.where(follows_BT & (d < late_depth_BT), at_BT))  # a path ends in its node
        is_known_BT = is_known_BT | (follows_BT & (d == late_depth_BT))
    tokens_BN.copy_(late_BT.where(~is_known_BT, -1).where(is_late_BT, token_BT)[:, 1:])
    depth_BT.copy_(late_depth_BT.where(is_late_BT, depth_BT))
    path_BTT.copy_(torch.stack(path, 2).where(is_late_BT[..., None], path_BTT))


def commit_round(
    root_B: Tensor,
    lengths_B: Tensor,
    active_B: Tensor,
    num_new_B: Tensor,
    tokens_BT: Tensor,
    path_BT: Tensor | None,
    drafter_feedback_BX: Tensor | None,
    logits_BTV: Tensor,
) -> Tensor:
    """Add new tokens to lengths; active rows' last becomes their root.

    Returns [B, 2 + T (+ T) (+ X)] for the host: number of new tokens (0 of idle rows), `count_finite` of their logits,
    tokens, path, drafter feedback.
    """
    if runs_triton(root_B.device):
        return torch.ops.sharesd.commit_round_(
            root_B, lengths_B, active_B, num_new_B, tokens_BT, path_BT, drafter_feedback_BX, logits_BTV
        )
    num_finite_B = count_finite(logits_BTV, path_BT, num_new_B)
    lengths_B += num_new_B
    newest_B = tokens_BT[:, 0]
    if tokens_BT.shape[1] > 1:
        newest_B = tokens_BT.gather(1, (num_new_B - 1).clamp(min=0)[:, None])[:, 0]
    root_B.copy_(torch.where(active_B > 0, newest_B, root_B))
    parts = num_new_B[:, None], num_finite_B[:, None], tokens_BT, path_BT, drafter_feedback_BX
    return torch.cat([part for part in parts if part is not None], 1)


def count_finite(logits_BTV: Tensor, path_BT: Tensor | None, num_new_B: Tensor) -> Tensor:
    """Count new tokens [B] before logits that are not numbers.

    Such logits have NaN, +infinity or no finite one. The logits of a new token are those of its row in `path`; without
    paths its own.
    """
    if not runs_cpp(logits_BTV.device):
        return count_finite_reference(logits_BTV, path_BT, num_new_B)
    if logits_BTV.stride(2) != 1:
        logits_BTV = logits_BTV.contiguous()
    path_BT = path_BT if path_BT is None or path_BT.stride(1) == 1 else path_BT.contiguous()
    out_B = torch.empty(len(num_new_B), dtype=torch.int64)
    strides = 0 if path_BT is None else path_BT.stride(0), num_new_B.stride(0), *logits_BTV.stride()[:2]
    sizes = len(out_B), *strides, logits_BTV.shape[2], torch.get_num_threads()
    call("count_finite", logits_BTV.dtype, logits_BTV, path_BT, num_new_B, out_B, *sizes)
    return out_B


def count_finite_reference(logits_BTV: Tensor, path_BT: Tensor | None, num_new_B: Tensor) -> Tensor:
    """`count_finite` in tensor operations."""
    is_finite_BT = logits_BTV.amax(-1).isfinite()  # NaN is the largest
    if path_BT is not None:
        is_finite_BT = is_finite_BT.gather(1, path_BT)
    return torch.minimum(is_finite_BT.to(torch.int64).cumprod(1).sum(1), num_new_B)


def append_tokens(text_BS: Tensor, root_B: Tensor, at_B: Tensor, num_new_B: Tensor, tokens_BT: Tensor) -> None:
    """Append a round's new tokens to each text, after the root.

    Rows without new tokens are left alone.
    """
    if runs_triton(text_BS.device):
        torch.ops.sharesd.append_tokens_(text_BS, root_B, at_B, num_new_B, tokens_BT)
        return
    if not runs_cpp(text_BS.device):
        append_tokens_reference(text_BS, root_B, at_B, num_new_B, tokens_BT)
        return
    parts = [text_BS, *(part.contiguous() for part in (root_B, at_B, num_new_B, tokens_BT))]
    call("append_tokens", torch.int64, *parts, *text_BS.shape, text_BS.stride(0), parts[-1].stride(0))


def append_tokens_reference(
    text_BS: Tensor, root_B: Tensor, at_B: Tensor, num_new_B: Tensor, tokens_BT: Tensor
) -> None:
    """`append_tokens` in tensor operations."""
    both_BT = torch.cat([root_B[:, None], tokens_BT], 1)
    ahead_T, any_B1 = torch.arange(both_BT.shape[1], device=text_BS.device), num_new_B[:, None] > 0
    at_B1 = at_B.clamp(min=0)[:, None]  # idle rows may be before all slots
    kv_slots_BT = at_B1 + ahead_T
    is_new_BT = any_B1 & (ahead_T <= num_new_B[:, None]) & (kv_slots_BT < text_BS.shape[1])
    at_root_B1 = both_BT[:, :1].where(any_B1, text_BS.gather(1, at_B1))  # receives all writes without another place
    text_BS.scatter_(1, kv_slots_BT.where(is_new_BT, at_B1), both_BT.where(is_new_BT, at_root_B1))


define(
    "verify_tokens(Tensor root, Tensor draft, int width) -> Tensor",
    cuda="state_update:verify_tokens",
    meta=lambda root, draft, width: root.new_empty(len(root), width),
)
define(
    "write_draft_token_(Tensor token, Tensor lengths, Tensor root_at, Tensor(a!) last, Tensor(b!) draft) -> ()",
    cuda="state_update:write_draft_token",
    meta=lambda *_: None,
)
define(
    "append_tokens_(Tensor(a!) text, Tensor root, Tensor at, Tensor num_new, Tensor tokens) -> ()",
    cuda="state_update:append_tokens",
    meta=lambda *_: None,
)
define(
    "join_late_nodes_(Tensor words, Tensor(a!) number, Tensor(b!) joined, Tensor(c!) tokens, Tensor(d!) depth, "
    "Tensor(e!) path) -> ()",
    cuda="state_update:join_late_nodes",
    meta=lambda *_: None,
)
define(
    "commit_round_(Tensor(a!) root, Tensor(b!) lengths, Tensor active, Tensor num_new, Tensor tokens, Tensor? path, "
    "Tensor? feedback, Tensor logits) -> Tensor",
    cuda="state_update:commit_round",
    meta=lambda root, lengths, active, num_new, tokens, path, feedback, logits: tokens.new_empty(
        len(tokens), 2 + sum(part.shape[1] for part in (tokens, path, feedback) if part is not None)
    ),
)


def has_accept_kernel(device: torch.device, *, chains: bool = False) -> bool:
    """Return True if `accept_path` has a kernel for this device."""
    return runs_triton(device) or (runs_cpp(device) and not chains)


def accept_path(
    tokens_BN: Tensor, tree_mask: TreeAttentionMask | None, target_BT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the accepted path: children that equal the target's tokens.

    Without a tree mask, drafts are chains. Needs `has_accept_kernel`.

    Returns (num [B], tokens [B, T], rows [B, T]): the number of accepted rows, the target's token after each, the rows,
    of which the last is repeated.
    """
    T = target_BT.shape[1]
    if target_BT.device.type == "cpu":
        assert tree_mask is not None
        out = _accept_path_cpu(tokens_BN.contiguous(), tree_mask, target_BT.contiguous())
    else:
        out = torch.ops.sharesd.accept_path(tokens_BN, *(tree_mask or (None, None)), target_BT)
    return out[:, 0], out[:, 1 : 1 + T], out[:, 1 + T :]


def _accept_path_cpu(tokens_BN: Tensor, tree_mask: TreeAttentionMask, target_BT: Tensor) -> Tensor:
    B, T = target_BT.shape
    out = torch.empty(B, 1 + 2 * T, dtype=torch.int64)
    depth_at, path_at, P = tree_mask.words()
    call("accept_path", torch.int64, tokens_BN, depth_at, path_at, target_BT, out, B, T, P)
    return out


define(
    "accept_path(Tensor tokens, Tensor? depth, Tensor? path, Tensor target) -> Tensor",
    cuda="tree_verify:accept_path",
    meta=lambda tokens, depth, path, target: target.new_empty(len(target), 1 + 2 * target.shape[1]),
)
