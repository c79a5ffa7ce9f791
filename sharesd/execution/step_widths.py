"""Widths of steps with which all modes give the same text."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from compile.block_ranges import BlockRange
from sharesd.execution.batch_invariance import WIDTHS, RowBits
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.weights.offloaded_decoder import HeadInPieces, full_head

log = logging.getLogger(__name__)

EXACT_WIDTHS = {"cpu": (9, 16), "cuda": (16,)}
"""Single widths by device, if bits depend on width: the first sufficient."""


def fixed_width(device: str, max_draft_tokens: int) -> int:
    """Return rows of every step; only unusually long drafts change it."""
    rows = 1 + max_draft_tokens
    return next((width for width in EXACT_WIDTHS[device] if width >= rows), rows)


@dataclass(frozen=True, slots=True)
class StepWidths:
    step: CausalModel
    widths: tuple[int, ...] | None
    """Allowed rows of steps: None = any; one if bits require it."""
    depends_on_width: bool
    trees: bool
    buckets: bool


def choose_step_widths(
    target: CausalModel,
    *,
    fixed: int,
    max_width: int,
    exact: bool,
    wants_trees: bool,
    compiles: bool,
    step_of: Callable[[set[int]], CausalModel],
    bits_of: Callable[[CausalModel, Sequence[int]], RowBits],
) -> StepWidths:
    """Choose the widths of a target's steps by bits of its rows.

    Args:
        fixed: width if there must be a single one.
        exact: bits of a row must be the same in all modes.
        compiles: each width is compiled, at a price.
    """
    widths: tuple[int, ...] | None = (1, max_width) if compiles else None
    bits, depends = RowBits(False, False), False
    if isinstance(target, Decoder):
        step = step_of({*(widths or ())})
        bits = bits_of(step, widths or sorted({*WIDTHS, max_width}))
    else:
        step = step_of({fixed} if exact else {*(widths or ())})
        if step is target:
            widths = None
    buckets = bits.batches
    if bits.chains:
        log.info("exact: rows have the same bits in steps of any width%s", " and batch" if buckets else "")
    elif exact:
        log.info("exact: rows depend on the width of their step, so every step of every mode has %d rows", fixed)
        widths, depends, buckets = (fixed,), True, False
        if isinstance(target, Decoder):
            step = step_of({fixed})
            bits = bits_of(step, (fixed,))
            if not bits.chains:
                log.warning("rows depend on their place in the step, too: texts of modes may differ")
    else:
        log.warning("exact is off, and rows differ between steps of 1 and of more rows: so may texts of modes")
    trees = target.takes_trees
    if wants_trees and trees and bits.chains and not bits.trees:
        if exact:
            trees = False
            log.info("exact: rows of trees depend on where their paths lie, so drafts are chains")
        else:
            log.warning("exact is off, and rows of trees differ from those of chains: so may texts of modes")
    return StepWidths(step, widths, depends, trees, buckets)


def first_block_view(model: Decoder) -> Decoder:
    """Return the first block alone, whose offloaded weights stay in place."""
    twin = copy.copy(model)
    twin._modules = {**model._modules, "blocks": model.blocks[:1]}  # type: ignore[dict-item]
    twin.config = replace(model.config, layer_types=model.config.layer_types[:1])
    head = full_head(model)
    if isinstance(head, HeadInPieces):
        twin._modules["head"] = head.tail
    twin.run_stack = None
    twin.ranges = lambda: [
        BlockRange(
            each.first, each.num_blocks, each.before, moves_weights=each.moves_weights, move_inputs=each.move_inputs
        )
        for each in model.ranges()
    ]
    return twin
