"""Ways to decode that tests cover: modes by how tokens are chosen, where weights are, and who else is decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from sharesd.config import EngineConfig, Mode, PipelineConfig
from sharesd.data import grammar_spec as grammar
from sharesd.sampling_params import SamplingParams
from tests.helpers.covering import covering
from tests.helpers.shared_runtimes import Shared
from tests.helpers.tiny_tokenizer import WORDS, make_backend
from tests.stand_in.decoding import decode

MODES: dict[str, tuple[Mode, str, dict[str, Any]]] = {
    **{mode: (mode, "", {}) for mode in ("naive", "share", "classic", "ngram", "suffix", "recycle")},
    "hybrid": ("hybrid", "", {}),
    "share, 4 tokens": ("share", "", {"num_draft": 4}),
    "share, trees": ("share", "", {"tree": (2, 3, 6)}),
    "classic, a small model": ("classic", "draft", {"mode": "classic", "num_draft": 4}),
    "eagle": ("eagle", "eagle", {"num_draft": 4}),
    "eagle 3": ("eagle", "eagle3", {}),
    "eagle 3, trees": ("eagle", "eagle3", {"tree": (2, 3, 6)}),
    "hybrid, eagle": ("hybrid", "eagle3", {"hybrid_with": ("eagle", "suffix")}),
    "parallel": ("parallel", "parallel", {"num_draft": 4}),
    "glide": ("glide", "glide", {"num_draft": 4}),
}
"""Name -> mode, what drafts next to the target's own weights, and options."""
ALONE = ("naive", "share", "classic", "ngram", "suffix", "recycle", "hybrid")
"""Modes that one runtime has together."""
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-k": {"temperature": 0.7, "top_k": 20, "min_p": 0.01},
    "rejection": {"temperature": 1.0, "acceptance": "rejection"},
    "block": {"temperature": 1.0, "acceptance": "block"},
}
PENALTIES = {"penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}}
LOGPROBS: dict[str, dict[str, Any]] = {"logprobs": {"logprobs": True}, "top": {"logprobs": True, "top_logprobs": 3}}
STAGES = [{"split": PipelineConfig(devices=tuple(f"cuda:{i}" for i in range(num)))} for num in (2, 4)]
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"device": "cuda"}),
    "rows differ": (1, {"device": "cuda"}),
    "offload": (1, {"device": "cuda"}),
    "second": (4, {"device": "cuda:1"}),
    "2 stages": (4, STAGES[0]),
    "4 stages": (4, STAGES[1]),
    "draft elsewhere": (4, {"device": "cuda", "draft_device": "cuda:1"}),
    "draft behind stages": (4, STAGES[0] | {"draft_device": "cuda:2"}),
    "2 ranks": (4, {"device": "cuda", "tensor_parallel": 2}),
}
"""Name -> GPUs of the machine, and options."""
HIDDEN, LAYERS = 128, 8


class Point(NamedTuple):
    """One of them; keys of the tables above, or nothing."""

    mode: str
    place: str
    choice: str = "greedy"
    penalties: str = ""
    logprobs: str = ""
    grammar: str = ""
    joins: str = ""
    """Requests that join and leave, if it is not empty."""

    def __str__(self) -> str:
        return "; ".join(filter(None, self))

    @property
    def devices(self) -> int:
        return PLACES[self.place][0]

    def params(self) -> SamplingParams:
        given = CHOICES[self.choice] | PENALTIES.get(self.penalties, {}) | LOGPROBS.get(self.logprobs, {})
        end = {"grammar": grammar.from_regex("[a-z ]*")} if self.grammar else {"ignore_eos": True}
        return SamplingParams(max_new_tokens=24, **end, **given)

    def call(self, shared: Shared) -> Callable[[], dict[str, float]]:
        """The call of `decode` for it, with models that are made where they are not there yet."""
        mode, beside, options = MODES[self.mode]
        target = shared.checkpoint(hidden=HIDDEN, layers=LAYERS)
        options = {"target": str(target), "max_context": 512, "max_batch": 3 if self.joins else 1, **options}
        if beside == "draft":
            options["draft"] = str(shared.checkpoint(layers=1, seed=1))
        elif beside:
            options["heads"] = (str(shared.head(target, beside, dtype=torch.bfloat16)),)
        config = EngineConfig(**{**options, **PLACES[self.place][1]})
        alone = self.place == "offload" or config.draft_device is not None
        modes: tuple[Mode, ...] = ALONE if self.mode in ALONE and not alone else (mode,)  # type: ignore[assignment]
        words = sorted(i for token, i in make_backend().get_vocab().items() if token.lstrip("Ġ") in WORDS)
        results = {"ids": words, "rows_agree": self.place != "rows differ"}
        resident = LAYERS // 2 if self.place == "offload" else None
        call = partial(decode, config, modes, mode, self.params(), joins=bool(self.joins))
        return partial(call, resident=resident, **results)


def _possible(point: Point) -> bool:
    """Is it more than an error that says so?"""
    mode, beside, options = MODES[point.mode]
    by_chance = point.choice in ("rejection", "block")
    return not (
        (by_chance and ("tree" in options or point.grammar))
        or ("ranks" in point.place and mode in ("eagle", "parallel", "glide", "hybrid") and beside)
        or ("stages" in point.place and mode == "glide")
        or (point.place == "offload" and beside and mode not in ("classic", "parallel"))
        or (point.place.startswith("draft") and mode != "classic")
    )


def points() -> tuple[list[Point], set[Point]]:
    """All pairs of values that can be, in few points, and those of them in which every value is."""
    axes = (MODES, PLACES, CHOICES, ("", *PENALTIES), ("", *LOGPROBS), ("", "grammar"), ("", "joins"))
    every = [point for point in map(Point._make, product(*axes)) if _possible(point)]
    pairs = [every[i] for i in sorted(covering(every, 2))]
    return pairs, {pairs[i] for i in covering(pairs, 1)}


def in_order(points: Sequence[Point]) -> list[Point]:
    """Those that share a runtime next to each other."""
    return sorted(points, key=lambda point: (point.place, point.mode not in ALONE, point.joins, point.mode))
