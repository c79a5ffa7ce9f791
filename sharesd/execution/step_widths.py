"""How many rows the steps of a target may have, so that all modes give the same text."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from compile.block_ranges import Range
from sharesd.execution.batch_invariance import WIDTHS, RowBits
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.weights.offloaded_decoder import HeadInPieces, full_head

log = logging.getLogger(__name__)

EXACT_WIDTHS = {"cpu": (9, 16), "cuda": (16,)}
"""Rows of every step, the first number that will do, where kernels do not give a row the same bits at any width."""


def fixed_width(device: str, most_draft: int) -> int:
    """Rows of every step on this kind of device, where all must have the same number: it changes with the length of
    drafts only where that is beyond all bounds.
    """
    rows = 1 + most_draft
    return next((width for width in EXACT_WIDTHS[device] if width >= rows), rows)


@dataclass(frozen=True, slots=True)
class Rows:
    """What steps may look like."""

    step: CausalModel
    """The target, as it runs."""
    widths: tuple[int, ...] | None
    """Numbers of rows that steps may have; a single one where a row's bits depend on the width. None = any."""
    depends_on_width: bool
    """Do a row's bits depend on the width, so that it was fixed?"""
    trees: bool
    """May drafts be trees?"""
    buckets: bool
    """May rounds have any of the numbers of rows that were checked?"""


def choose_rows(
    target: CausalModel,
    *,
    fixed: int,
    most: int,
    exact: bool,
    wants_trees: bool,
    compiles: bool,
    step_of: Callable[[set[int]], CausalModel],
    bits_of: Callable[[CausalModel, Sequence[int]], RowBits],
) -> Rows:
    """`step_of` compiles the target for some widths (`compiles`: each at a price), `bits_of` finds out about the rows
    of a native one; `fixed` is the width for where there must be a single one, `most` that of the longest drafts.
    """
    widths: tuple[int, ...] | None = (1, most) if compiles else None
    bits, depends = RowBits(False, False), False
    if isinstance(target, Decoder):
        step = step_of({*(widths or ())})
        bits = bits_of(step, widths or sorted({*WIDTHS, most}))
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
    return Rows(step, widths, depends, trees, buckets)


def shallow(model: Decoder) -> Decoder:
    """The model with its first block alone, which runs as it does in the model (but for `run_stack`), on its device.
    Weights of that block which travel stay where they are from step to step, since no others need the place.
    """
    twin = copy.copy(model)
    twin._modules = {**model._modules, "blocks": model.blocks[:1]}  # type: ignore[dict-item]
    twin.config = replace(model.config, layers=model.config.layers[:1])
    head = full_head(model)
    if isinstance(head, HeadInPieces):
        twin._modules["head"] = head.tail
    twin.run_stack = None
    twin.ranges = lambda: [
        Range(each.first, each.num_blocks, each.before, moves=each.moves, hand_over=each.hand_over)
        for each in model.ranges()
    ]
    return twin
