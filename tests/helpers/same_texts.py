"""Texts of all modes of an engine, which must be those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharesd import LLM, SamplingParams

MODES: tuple[Any, ...] = ("naive", "share", "suffix", "ngram", "recycle", "classic", "hybrid", "auto")
PROMPTS = [[5, 9, 14, 3, 77, 8], [40, 41, 42]]


def require_same_texts(target: Any, modes: Sequence[Any] = MODES, **options: Any) -> LLM:
    """Decode greedily and at T = 1 in all modes, two rows at once; return what decoded."""
    shared: dict[str, Any] = {"quant": "hqq:4:32", "max_context": 64, "hybrid_with": ("share", "suffix")}
    llm = LLM(target, modes=modes, **shared | options)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=4, ignore_eos=True)
        texts = {mode: [each.token_ids for each in llm.generate(PROMPTS, params, mode=mode)] for mode in modes}
        assert all(text == texts["naive"] for text in texts.values()), texts
    return llm
