"""Checks of models whose layers keep a state, for each kind of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sharesd import LLM, OffloadConfig, SamplingParams
from sharesd.config import EngineConfig
from sharesd.engine.prompt_cache import PromptCache
from sharesd.kvcache.static import StaticKVCache
from sharesd.models import prefill
from sharesd.models.base import CausalModel
from sharesd.models.loader import native_config
from sharesd.startup.resolve import resolve_config
from sharesd.weights import memory_estimate, offload_planner
from tests.helpers.same_texts import require_same_texts
from tests.helpers.tiny_heads import make_head

TREES: dict[str, Any] = {"num_draft": 6, "tree": (2, 3, 6), "dtype": "fp32"}


def read_text(model: CausalModel, cache: StaticKVCache, row: int, tokens: list[int], source: int, num: int) -> Tensor:
    """Read a row's text after the first `num` tokens, which are those of row `source`; return its last logits."""
    cache.begin_row(row, tokens[:num], source)
    while num < len(tokens):
        piece = prefill.next_piece(model, cache, num, len(tokens))
        logits_RV, num = prefill.read_piece(model, cache, row, tokens, piece), piece.end
    cache.cached_ids[row] = tokens
    return logits_RV[-1]


def require_one_text_in_pieces(target: str, options: dict[str, Any]) -> None:
    """Also if a prompt is read in pieces between rounds of another row, and with the begin of an earlier one."""
    modes = ("naive", "share", "suffix", "classic", "hybrid", "auto")
    llm = require_same_texts(target, modes, device="cpu", **{"max_batch": 2, "draft": target, **options})
    prompts, params = [[7, 9], list(range(10, 360))], SamplingParams(max_new_tokens=8, temperature=1.0, seed=5)
    texts: list[Any] = [[] for _ in modes]
    for mode, found in zip(modes, texts, strict=True):
        for _ in range(2):
            found += [each.token_ids for each in llm.generate(prompts, params, mode=mode)]
            prompts[1] = [*prompts[1][:300], *prompts[0], *found[-1]]
        prompts[1] = list(range(10, 360))
    assert all(text == texts[0] for text in texts)


def restored_after_restarts(
    target: str,
    kept: Path,
    prompts: Callable[[list[int], list[int]], Sequence[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    max_context: int,
) -> list[int]:
    """Return how many tokens each of several starts reads back; their texts must be those of no such cache.

    `prompts`: from a text of 320 tokens and its answer to the prompts.
    """
    restored, restore = list[int](), PromptCache.restore

    def restore_and_note(*arguments: Any) -> int:
        restored.append(restore(*arguments))
        return restored[-1]

    monkeypatch.setattr(PromptCache, "restore", restore_and_note)
    options: dict[str, Any] = {"max_context": max_context, "device": "cpu"}
    first, params = list(range(10, 330)), SamplingParams(max_new_tokens=8, temperature=1.0, seed=5, ignore_eos=True)
    plain = LLM(target, modes=("naive",), **options)
    for prompt in prompts(first, plain.generate([first], params)[0].token_ids):
        with LLM(target, modes=("share",), prompt_cache=str(kept), **options) as llm:
            assert llm.generate([prompt], params)[0].token_ids == plain.generate([prompt], params)[0].token_ids
    return restored


def require_offloaded_blocks(target: str, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Require the same texts from resident and offloaded blocks; return the bytes of these."""
    monkeypatch.setattr(memory_estimate, "own_memory", lambda: 0)  # which is much more than such a model
    monkeypatch.setattr(memory_estimate, "RUNTIME_BYTES", 0)
    monkeypatch.setattr(offload_planner, "_disk_rate", lambda *_: 1e9)
    modes, texts = ("naive", "share"), []
    options: dict[str, Any] = {"device": "cpu", "max_context": 128, "mode": "share", "dtype": "bfloat16"}
    wanted = OffloadConfig(host_memory=10**9, choose_bits=False)
    plan = resolve_config(EngineConfig(target=target, offload=wanted, **options), modes).plan
    assert plan is not None
    for limit in (None, plan.device_bytes - plan.slot):
        wanted = OffloadConfig(host_memory=limit, choose_bits=False)
        llm = LLM(target, modes=modes, max_batch=1, offload=wanted, **options)
        params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
        texts += [llm.generate([prompt], params, mode=mode)[0].token_ids for mode in modes]
    runtime = llm._runtime
    assert runtime is not None and runtime.streamed is not None and len(runtime.streamed.stream.blocks) > 1
    assert len(texts) == 4 and texts == [texts[0]] * 4
    return tuple(plan.blocks)


def require_head_reads_hidden_states(target: Path, tmp_path: Path) -> None:
    config = native_config(target, torch.device("cpu"))
    head = make_head(tmp_path / "head", config, "eagle3", dtype=torch.bfloat16, mlp=64)
    require_same_texts(str(target), ("naive", "eagle"), device="cpu", heads=(str(head),), hybrid_with=("eagle",))
