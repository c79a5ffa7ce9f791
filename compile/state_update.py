"""What rounds and drafts note down between steps: on a GPU one launch each, where tensor operations take several.

Legend: B rows, N draft tokens, T verify rows of which a verdict is, W rows of a step, X numbers for the drafter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.op_registry import LIBRARY, on_cuda, runs_triton


def step_tokens(root_B: Tensor, draft_BN: Tensor, width: int) -> Tensor:
    """Tokens [B, W] of a verify step: the root and its draft; 0 where there is no node (-1) and behind."""
    if runs_triton(root_B.device):
        return torch.ops.sharesd.step_tokens(root_B, draft_BN, width)
    tokens_BT = torch.cat([root_B[:, None], draft_BN.clamp(min=0)], 1)
    return F.pad(tokens_BT, (0, width - tokens_BT.shape[1]))


def note_token(token_B: Tensor, lengths_B: Tensor, root_at_B: Tensor, last_B1: Tensor, draft_BN: Tensor) -> None:
    """A chain's next token, behind so many read ones: into `last`, and into its place in the draft."""
    if runs_triton(token_B.device):
        torch.ops.sharesd.note_token_(token_B, lengths_B, root_at_B, last_B1, draft_BN)
        return
    last_B1.copy_(token_B[:, None])
    draft_BN.scatter_(1, (lengths_B - root_at_B - 1)[:, None], last_B1)


def note_round(
    root_B: Tensor,
    lengths_B: Tensor,
    active_B: Tensor,
    num_new_B: Tensor,
    tokens_BT: Tensor,
    path_BT: Tensor | None,
    told_BX: Tensor | None,
) -> Tensor:
    """Lengths grow by the new tokens, the last of which become the roots of active rows. Returns what the host reads,
    [B, 1 + T (+ T) (+ X)]: number of new tokens (0 of idle rows), tokens, path, what is told.
    """
    if runs_triton(root_B.device):
        return torch.ops.sharesd.note_round_(root_B, lengths_B, active_B, num_new_B, tokens_BT, path_BT, told_BX)
    lengths_B += num_new_B
    newest_B = tokens_BT[:, 0]
    if tokens_BT.shape[1] > 1:
        newest_B = tokens_BT.gather(1, (num_new_B - 1).clamp(min=0)[:, None])[:, 0]
    root_B.copy_(torch.where(active_B > 0, newest_B, root_B))
    return torch.cat([part for part in (num_new_B[:, None], tokens_BT, path_BT, told_BX) if part is not None], 1)


def note_text(text_BS: Tensor, root_B: Tensor, at_B: Tensor, num_new_B: Tensor, tokens_BT: Tensor) -> None:
    """A round's new tokens into each row's text, behind the root at these places; nothing of rows without any."""
    if runs_triton(text_BS.device):
        torch.ops.sharesd.note_text_(text_BS, root_B, at_B, num_new_B, tokens_BT)
        return
    both_BT = torch.cat([root_B[:, None], tokens_BT], 1)
    ahead_T, any_B1 = torch.arange(both_BT.shape[1], device=text_BS.device), num_new_B[:, None] > 0
    at_B1 = at_B.clamp(min=0)[:, None]  # rows that take no part may lie before all slots
    places_BT = at_B1 + ahead_T
    is_new_BT = any_B1 & (ahead_T <= num_new_B[:, None]) & (places_BT < text_BS.shape[1])
    at_root_B1 = both_BT[:, :1].where(any_B1, text_BS.gather(1, at_B1))  # there goes what goes nowhere else
    text_BS.scatter_(1, places_BT.where(is_new_BT, at_B1), both_BT.where(is_new_BT, at_root_B1))


def _step_tokens_cuda(*arguments) -> Tensor:
    from compile.cuda import state_update  # imports Triton, which not every machine has

    return state_update.step_tokens(*arguments)


def _note_token_cuda(*arguments) -> None:
    from compile.cuda import state_update

    state_update.note_token(*arguments)


def _note_text_cuda(*arguments) -> None:
    from compile.cuda import state_update

    state_update.note_text(*arguments)


def _note_round_cuda(*arguments) -> Tensor:
    from compile.cuda import state_update

    return state_update.note_round(*arguments)


def _note_round_meta(root, lengths, active, num_new, tokens, path, told):
    return tokens.new_empty(len(tokens), 1 + sum(part.shape[1] for part in (tokens, path, told) if part is not None))


LIBRARY.define("step_tokens(Tensor root, Tensor draft, int width) -> Tensor")
on_cuda("step_tokens", _step_tokens_cuda)
LIBRARY.impl("step_tokens", lambda root, draft, width: root.new_empty(len(root), width), "Meta")
LIBRARY.define("note_token_(Tensor token, Tensor lengths, Tensor root_at, Tensor(a!) last, Tensor(b!) draft) -> ()")
on_cuda("note_token_", _note_token_cuda)
LIBRARY.impl("note_token_", lambda *_: None, "Meta")
LIBRARY.define("note_text_(Tensor(a!) text, Tensor root, Tensor at, Tensor num_new, Tensor tokens) -> ()")
on_cuda("note_text_", _note_text_cuda)
LIBRARY.impl("note_text_", lambda *_: None, "Meta")
LIBRARY.define(
    "note_round_(Tensor(a!) root, Tensor(b!) lengths, Tensor active, Tensor num_new, Tensor tokens, Tensor? path, "
    "Tensor? told) -> Tensor"
)
on_cuda("note_round_", _note_round_cuda)
LIBRARY.impl("note_round_", _note_round_meta, "Meta")
