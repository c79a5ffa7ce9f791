"""Suffix lookup in the text so far and in a corpus."""

from dataclasses import dataclass
from pathlib import Path

from sharesd.drafters.registry import DrafterSpec, option
from sharesd.field_types import PathText

EMBEDDED_CORPUS = Path(__file__).parents[1] / "tables" / "smollm2-135m-instruct.npy"
"""Embedded model's answers to training prompts, by `sharesd train corpus`."""


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    corpus: PathText | None = option(
        None,
        "mode suffix: datastore of texts to search as well, or `empty` (`sharesd train corpus` makes one; "
        "default: the one of the embedded model, for that model)",
        metavar="FILE",
    )


SPEC = DrafterSpec(
    name="suffix",
    kind="table",
    order=1,
    help="trees of what followed the longest repeated suffix of the text, and of a corpus",
    build="sharesd.drafters.suffix.table:build",
    options=SuffixOptions,
    file="corpus",
    embedded=EMBEDDED_CORPUS,
    auto_with=frozenset({"", "model", "self", "head"}),
    colour="#009E73",
)
