"""Texts on disk: what a second start reads back, and what it leaves alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sharesd.config import EngineConfig, OffloadConfig, PipelineConfig
from sharesd.kvcache.static import StaticKVCache
from sharesd.llm import LLM
from sharesd.records.prompt_cache import ENDING, PromptCache
from sharesd.sampling_params import SamplingParams
from sharesd.startup.conflicts import check_options, offload_obstacles
from tests.helpers.tiny_models import make_checkpoint

IDENTITY = {"model": "a", "dtype": "float32"}
FIRST = list(range(1, 41))
OTHER = [*range(1, 21), *range(60, 90)]


def make_cache(dtype: torch.dtype = torch.float32, **more: Any) -> StaticKVCache:
    return StaticKVCache(shapes=[(2, 8)] * 2, batch=2, slots=64, dtype=dtype, device="cpu", **more)


def filled(**more: Any) -> StaticKVCache:
    """A cache whose rows hold FIRST and OTHER, with random KV."""
    cache = make_cache(**more)
    generator = torch.Generator().manual_seed(1)
    features = [] if cache.features is None else [cache.features]
    for tensor in (*cache.k, *cache.v, *features):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    for row, text in enumerate((FIRST, OTHER)):
        cache.begin_row(row, text, row)
    return cache


def opened(folder: Path, cache: StaticKVCache, max_bytes: int = 2**20, **identity: str) -> PromptCache:
    return PromptCache(folder, cache, identity=IDENTITY | identity, max_bytes=max_bytes)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{ENDING}"))


@pytest.mark.parametrize("more", [{}, {"plain": True}, {"dtype": torch.bfloat16}, {"taps": (1,), "hidden_size": 16}])
def test_a_text_is_read_back_bit_by_bit(tmp_path: Path, more: dict[str, Any]) -> None:
    first = filled(**more)
    assert opened(tmp_path, first).save(0)
    again = make_cache(**more)
    kept = opened(tmp_path, again).restore(1, [*FIRST[:30], 99, 98], 0)
    assert kept == 30 and again.cached_ids == [[], FIRST[:30]] and again.lengths.tolist()[1] == 30
    for layer in range(2):
        for ours, theirs in zip(again.kv(layer, 30), first.kv(layer, 30), strict=True):
            assert torch.equal(ours[1], theirs[0])
    if first.features is not None and again.features is not None:
        assert torch.equal(again.features[1, :30], first.features[0, :30])
    assert [path.stat().st_mode & 0o077 for path in files(tmp_path)] == [0], "texts are their user's"


def test_a_row_that_has_as_much_reads_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = opened(tmp_path, filled())
    assert other.save(0)
    prompts = opened(tmp_path, make_cache())
    assert prompts.restore(0, FIRST, 30) == 30 and prompts.restore(0, [7, *FIRST], 0) == 0
    assert prompts.restore(0, FIRST, 0) == len(FIRST) - 1, "the last token's logits are needed"
    files(tmp_path)[0].unlink()
    assert other.restore(1, FIRST, 0) == 0 and not caplog.messages, "another process has removed it"
    assert other.save(0), "it is written anew"


def test_a_longer_text_replaces_its_beginning(tmp_path: Path) -> None:
    cache = filled()
    prompts = opened(tmp_path, cache)
    assert prompts.save(0) and not prompts.save(0) and prompts.save(1)
    before = files(tmp_path)
    cache.cached_ids[0] = [*FIRST, 50, 51]
    assert prompts.save(0)
    assert len(files(tmp_path)) == 2 and files(tmp_path) != before
    cache.cached_ids[0] = FIRST
    assert not opened(tmp_path, cache).save(0), "the longer text has it"
    cache.cached_ids[0] = FIRST[:5]
    assert not prompts.save(0), "too short"


def test_only_whole_chunks_are_kept_where_prefill_and_decoding_differ(tmp_path: Path) -> None:
    cache = StaticKVCache(shapes=[(1, 8)], batch=1, slots=1200, dtype=torch.float32, device="cpu")
    prompts = PromptCache(tmp_path, cache, identity=IDENTITY, max_bytes=2**30, recompute_decoded_kv=True)
    text = list(range(1100))
    cache.begin_row(0, text, 0, 500)
    assert not prompts.save(0)
    cache.begin_row(0, text, 0, 1024)
    assert prompts.save(0)
    assert prompts.restore(0, text, 0) == 1024 and prompts.restore(0, text[:1000], 0) == 512
    assert cache.num_prefilled == [512]


def test_another_identity_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = opened(tmp_path, filled())
    assert prompts.save(0) and prompts.save(1)
    assert opened(tmp_path, make_cache(), model="b", dtype="bfloat16").restore(0, FIRST, 0) == 0
    assert caplog.messages == [f"texts of the prompt cache {tmp_path} are ignored: 2 with another model, dtype"]
    assert opened(tmp_path, make_cache()).restore(0, FIRST, 0) and len(caplog.messages) == 1


def test_damaged_files_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts, cache = opened(tmp_path, filled()), make_cache()
    assert prompts.save(0)
    [path] = files(tmp_path)
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    again = opened(tmp_path, cache)
    assert again.restore(0, FIRST, 3) == 3 and again.restore(0, FIRST, 0) == 0 and cache.cached_ids == [[], []]
    [message] = caplog.messages
    assert f"{path} is damaged and ignored (its checksum" in message
    assert prompts.save(1)
    for path in files(tmp_path):
        path.write_bytes(path.read_bytes()[:-100])
    (tmp_path / f"empty{ENDING}").touch()
    assert opened(tmp_path, make_cache()).restore(0, FIRST, 0) == 0
    [_, message] = caplog.messages
    assert message.startswith(f"prompt cache {tmp_path}: 3 damaged and ignored")


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = filled()
    prompts = opened(tmp_path, cache)
    prompts.save(0)
    [first] = files(tmp_path)
    prompts.save(1)
    [other] = [path for path in files(tmp_path) if path != first]
    for age, path in enumerate((other, first)):
        os.utime(path, (age, age))
    limit = first.stat().st_size + other.stat().st_size + 100
    prompts = opened(tmp_path, cache, limit)
    assert prompts.restore(1, [*range(1, 21), *range(60, 80), 5], 0) == 40, "and the other one was used last"
    cache.begin_row(0, list(range(100, 130)), 0)
    assert prompts.save(0)
    assert first not in files(tmp_path) and other in files(tmp_path) and len(files(tmp_path)) == 2
    opened(tmp_path, cache, 10)
    assert files(tmp_path) == [], "a smaller limit holds from the start"
    assert not opened(tmp_path, cache, 10).save(0)


def test_a_full_disk_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("sharesd.records.prompt_cache.write_tensors", full)
    prompts = opened(tmp_path, filled())
    assert not prompts.save(0) and not prompts.save(1)
    [message] = caplog.messages
    assert "No space left on device" in message and list(tmp_path.iterdir()) == []


def test_what_it_cannot_serve_is_refused(tmp_path: Path) -> None:
    for config, said in (
        (EngineConfig(prompt_cache="kv", tensor_parallel=2, mode="naive"), "drop it, or --tensor-parallel"),
        (EngineConfig(prompt_cache="kv", split=PipelineConfig(devices=("cpu", "cpu"))), "drop it, or --devices"),
    ):
        with pytest.raises(ValueError, match=said):
            check_options(config)
    offloaded = EngineConfig(prompt_cache="kv", offload=OffloadConfig(host_memory=2**30))
    [message] = offload_obstacles(offloaded, has_device_memory=False, in_memory=False)
    assert "prompt_cache is kv, and it needs all weights in memory" in message
    with pytest.raises(ValueError, match="prompt_cache_size is 0"):
        EngineConfig(prompt_cache_size=0)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"prompt_cache .*file cannot be written"):
        LLM(make_checkpoint(tmp_path / "tiny"), mode="naive", prompt_cache=str(tmp_path / "file"))


@pytest.mark.parametrize("mode", ["suffix", "share"])
def test_a_second_start_has_the_same_texts(tmp_path: Path, mode: str) -> None:
    """Prompts are continued after a restart; the texts are those without a prompt cache."""
    target, params = make_checkpoint(tmp_path / "tiny"), SamplingParams(max_new_tokens=24, seed=3, temperature=0.8)
    options: dict[str, Any] = {"mode": mode, "max_context": 256, "max_batch": 2}
    prompt = [5 + i % 40 for i in range(60)]
    with LLM(target, **options) as plain:
        [answer] = plain.generate(prompt, params)
        more = [*prompt, *answer.token_ids, 7, 8, 9]
        [expected] = plain.generate(more, params)
    with LLM(target, **options, prompt_cache=str(tmp_path / "kv")) as first:
        assert first.generate(prompt, params)[0].token_ids == answer.token_ids
    assert len(files(tmp_path / "kv")) == 1
    with LLM(target, **options, prompt_cache=str(tmp_path / "kv")) as second:
        chunks = list(second.stream(more, params))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.token_ids
    assert chunks[0].request.cached_tokens == len(prompt) + len(answer.token_ids) - 1, "all but the last token"
