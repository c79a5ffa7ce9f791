"""N-gram lookup in the text so far."""

from dataclasses import dataclass

from sharesd.drafters.registry import DrafterSpec, option


@dataclass(frozen=True, slots=True)
class NgramOptions:
    ngram_min: int = option(1, "mode ngram: shortest match", metavar="N")
    ngram_max: int = option(4, "mode ngram: longest match", metavar="N")
    ngram_recent: bool = option(False, "mode ngram: the most recent match, not the first")

    def __post_init__(self) -> None:
        if self.ngram_min < 1:
            raise ValueError(f"ngram_min is {self.ngram_min}; it must be at least 1")
        if self.ngram_max < self.ngram_min:
            raise ValueError(f"ngram_max is {self.ngram_max}; it must be at least {self.ngram_min}")


SPEC = DrafterSpec(
    name="ngram",
    kind="table",
    order=0,
    help="what followed the last tokens earlier in the text",
    build="sharesd.drafters.ngram.table:build",
    options=NgramOptions,
    colour="#F0E442",
)
