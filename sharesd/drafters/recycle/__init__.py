"""Token recycling: successors that the target found likely."""

from dataclasses import dataclass
from pathlib import Path

from sharesd.drafters.registry import DrafterSpec, Need, option
from sharesd.field_types import PathText

EMBEDDED_TABLE = Path(__file__).parents[1] / "tables" / "smollm2-135m-instruct.npz"
"""Successors in the embedded model's answers, of `sharesd train table`."""


@dataclass(frozen=True, slots=True)
class RecycleOptions:
    recycle_table: PathText | None = option(
        None,
        "mode recycle: table to start from, or `empty` (default: the one of the embedded model, for that model)",
        metavar="FILE",
    )


SPEC = DrafterSpec(
    name="recycle",
    kind="table",
    order=2,
    help="trees of the successors that the target found likely the last time",
    build="sharesd.drafters.recycle.table:build",
    options=RecycleOptions,
    file="recycle_table",
    embedded=EMBEDDED_TABLE,
    needs=frozenset({Need.LOGITS}),
    # Next to a head it costs 1 to 9 % more than it gains (docs/results/README.md).
    auto_with=frozenset({"", "model", "self"}),
    colour="#D55E00",
)
