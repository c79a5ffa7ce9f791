"""How often quantized weights agree with the target: part of `sharesd tune`.

Drafts are measured as mode share makes the first of a round: over the target's KV, one token at a time.

Legend: B rows of a batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharesd.runtime import Runtime


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    num_tokens: int
    greedy: float
    """Share of tokens that quantized weights choose as the target does, at temperature 0."""
    overlap: float
    """Mean over tokens of the sum of the smaller probabilities at temperature 1.

    No rule of acceptance that keeps the distribution accepts a larger share.
    """


def measure_agreement(runtime: Runtime, prompts: Sequence[list[int]], max_new_tokens: int) -> Agreement:
    """Compare drafts with the target along its greedy answers, up to their end.

    `runtime`: with mode share, on the native decoder.
    """
    import torch

    from quant.switch_linear import SwitchLinear
    from sharesd.models.decoder import Decoder
    from sharesd.models.prefill import prefill, slots_for

    assert isinstance(runtime.target, Decoder)
    switch = next(module.switch for module in runtime.target.modules() if isinstance(module, SwitchLinear))
    equal, overlap, count = 0, 0.0, 0
    with torch.inference_mode():
        batch = runtime.cache.batch
        for first in range(0, len(prompts), batch):
            here = prompts[first : first + batch]
            cache = runtime.step.new_cache(batch, slots_for(max(map(len, here)) + max_new_tokens))
            rows = [list(here[row]) if row < len(here) else [] for row in range(batch)]
            logits_BV = prefill(runtime.step, cache, rows, [0] * batch)
            is_live_B = torch.tensor([bool(row) for row in rows])
            for _ in range(max_new_tokens):
                tokens_B = logits_BV.argmax(-1)
                is_live_B &= ~torch.isin(tokens_B.cpu(), torch.tensor(runtime.target.eos_ids))
                if not is_live_B.any():
                    break
                with switch.quantized_weights():
                    drafts_BV = runtime.step.forward(tokens_B[:, None], cache)[:, 0].float().cpu()[is_live_B]
                logits_BV = runtime.step.forward(tokens_B[:, None], cache)[:, 0]
                cache.lengths.add_(1)
                wanted_BV = logits_BV.float().cpu()[is_live_B]
                equal += int((drafts_BV.argmax(-1) == wanted_BV.argmax(-1)).sum())
                overlap += float(torch.minimum(drafts_BV.softmax(-1), wanted_BV.softmax(-1)).sum())
                count += len(wanted_BV)
    return Agreement(num_tokens=count, greedy=equal / max(count, 1), overlap=overlap / max(count, 1))
