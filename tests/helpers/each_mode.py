"""A generation in each mode, chains and trees, greedy and sampled, with a model of test size; all have one text."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quant.config import QuantConfig
from sharesd.config import EngineConfig, Mode
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from tests.helpers.in_mode import in_mode
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint

MODES: tuple[Mode, ...] = ("naive", "share", "classic", "ngram", "suffix", "recycle", "hybrid")
HEADS = {"eagle": QuantConfig.parse("hqq:4:32,head=8"), "eagle3": None}
SIZES: dict[str, Any] = {"ids": range(0, 384, 3), "dtype": torch.bfloat16, "mlp": 64}
TREES: dict[str, dict[str, Any]] = {"chains": {"num_draft": 4}, "trees": {"num_draft": 6, "tree": (2, 3, 6)}}
GREEDY = SamplingParams(max_new_tokens=48)
SAMPLED = SamplingParams(max_new_tokens=48, temperature=1.0, top_p=0.9, seed=3)
PROMPTS: list[str | list[int]] = ["the cat sat on the mat and the cat sat on the", [7], [5, 6, 7] * 20]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(make_checkpoint(Path(folder)))
        for name, options in TREES.items():
            config = EngineConfig(target=checkpoint, device="cpu", max_context=256, max_batch=2, **options)
            compare(name, config, MODES)
            for kind, quant in HEADS.items():
                head = make_head(Path(folder) / kind, decoder_config(Path(checkpoint)), kind, **SIZES)
                with_head = replace(config, heads=(str(head),), head_quant=quant, hybrid_with=("eagle", "suffix"))
                compare(f"{kind}, {name}", with_head, ("naive", "eagle", "hybrid"))


def compare(name: str, config: EngineConfig, modes: Sequence[Mode]) -> None:
    """AssertionError where texts differ."""
    runtime = Runtime(config, modes)
    for params in (GREEDY, SAMPLED):
        texts = {}
        for mode in modes:
            engine = in_mode(runtime, mode, warm=params)
            texts[mode] = [done.token_ids for done in engine.generate(PROMPTS, params)]
            assert texts[mode] == texts["naive"], f"{mode}: {texts}"
            print(f"{name}, temperature {params.temperature}: {mode} ok", flush=True)


if __name__ == "__main__":
    main()
