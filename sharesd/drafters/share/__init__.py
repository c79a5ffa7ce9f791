"""The target drafts for itself through quantized linears."""

from dataclasses import dataclass
from typing import Literal

from sharesd.drafters.registry import DrafterSpec, Need, option


def window(text: str) -> int | str:
    """Return a whole number, `auto` or `off`."""
    if text in ("auto", "off"):
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


@dataclass(frozen=True, slots=True)
class ShareOptions:
    draft_window: int | Literal["auto", "off"] = option(
        "auto",
        "mode share: draft steps attend to the last N tokens and the first few; auto: only in long contexts; "
        "off: never",
        metavar="N",
        parse=window,
    )

    def __post_init__(self) -> None:
        if isinstance(self.draft_window, int) and self.draft_window < 1:
            raise ValueError(f"draft_window is {self.draft_window}; it must be at least 1")


SPEC = DrafterSpec(
    name="share",
    kind="self",
    order=0,
    help="the target drafts for itself with quantized linears",
    build="sharesd.drafters.share.drafter:build",
    options=ShareOptions,
    needs=frozenset({Need.QUANTIZED_TARGET, Need.TARGET_KV}),
    colour="#0072B2",
)
