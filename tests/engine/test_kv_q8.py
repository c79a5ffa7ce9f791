"""Keys and values in 8 bits: the text of plain decoding in every mode, and what takes no such cache is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sharesd.config import EngineConfig, PipelineConfig
from sharesd.llm import LLM
from sharesd.models.decoder import Decoder
from sharesd.models.loader import decoder_config
from sharesd.models.prefill import prefill
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.startup.cache_keys import kv_identity
from sharesd.startup.conflicts import target_conflicts
from sharesd.startup.resolve import resolve_config
from sharesd.weights.sizes import expanded_bytes, kv_bytes
from tests.execution.test_graphs import new, outcome, pins
from tests.helpers.each_mode import HEADS, MODES, SIZES, TREES, compare
from tests.helpers.oracle import tiny_decoder
from tests.helpers.quantized_folders import write_quantized
from tests.helpers.recorded_graphs import RecordedGraphs, take_the_way_of_cuda
from tests.helpers.same_texts import require_same_texts
from tests.helpers.tensor_ranks import GREEDY, SAMPLED, texts_of, texts_of_moved_rows, threads
from tests.helpers.tiny_heads import make_head

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")

KINDS = ("share tree", "classic", "eagle3 tree", "glide", "parallel", "suffix", "hybrid classic tree")


def config_of(tiny: Path, **options: Any) -> EngineConfig:
    shared: dict[str, Any] = {"device": "cpu", "max_context": 256, "max_batch": 2, "num_draft": 4, "kv_dtype": "q8"}
    return EngineConfig(**{**shared, "target": str(tiny), **options})


@pytest.mark.parametrize("shape", TREES)
def test_every_mode_gives_the_text_of_plain_decoding(tiny: Path, shape: str) -> None:
    compare(shape, config_of(tiny, **TREES[shape]), MODES)


@pytest.mark.thin
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "parallel", "glide"])
def test_trained_heads_give_the_text_of_plain_decoding(tiny: Path, tmp_path: Path, kind: str, shape: str) -> None:
    mode = "eagle" if kind == "eagle3" else kind
    head = make_head(tmp_path / kind, decoder_config(tiny), kind, **SIZES)
    more: dict[str, Any] = {"heads": (str(head),), "head_quant": HEADS.get(kind), "hybrid_with": (mode, "suffix")}
    compare(kind, config_of(tiny, **TREES[shape], **more), ("naive", mode, "hybrid"))


def test_stored_weights_take_it(tmp_path: Path) -> None:
    require_same_texts(write_quantized(tmp_path / "model", "gptq symmetric"), dequantize=False, kv_dtype="q8")


@pytest.mark.parametrize("compile", ["off", pytest.param("regional", marks=pytest.mark.long)])
def test_steps_without_the_whole_kernel_take_it(tiny: Path, compile: Any) -> None:
    runtime = Runtime(config_of(tiny, compile=compile), ("naive", "share"))
    for params in (GREEDY, SAMPLED):
        assert texts_of(runtime, "share", params) == texts_of(runtime, "naive", params)


def test_stages_and_ranks_give_the_texts_of_one_device(tiny: Path) -> None:
    wanted = [texts_of(Runtime(config_of(tiny), ("naive",)), "naive", params) for params in (GREEDY, SAMPLED)]
    modes = ("naive", "share", "hybrid")
    split = PipelineConfig(devices=("cpu", "cpu"))
    staged = Runtime(config_of(tiny, device="auto", split=split, tree=(2, 3, 6), num_draft=None), modes)
    with threads(config_of(tiny, tensor_parallel=2, mode="naive"), modes) as ranks:
        for runtime in (staged, ranks):
            for mode in modes:
                assert [texts_of(runtime, mode, params) for params in (GREEDY, SAMPLED)] == wanted, mode


def test_rows_join_and_leave_and_chats_go_on(tiny: Path) -> None:
    native, off = (Runtime(config_of(tiny, compile=how), ("hybrid",)) for how in ("native", "off"))
    assert texts_of_moved_rows(native) == texts_of_moved_rows(off)


def test_a_text_on_disk_is_read_by_its_own_form_alone(tiny: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"mode": "naive", "max_context": 256, "prompt_cache": str(tmp_path / "kv")}
    prompt, params = list(range(5, 85)), SamplingParams(max_new_tokens=16, temperature=0, ignore_eos=True)
    texts, cached = [], []
    for kv_dtype in ("q8", "q8", "auto"):
        with LLM(str(tiny), device="cpu", kv_dtype=kv_dtype, **options) as llm:
            chunks = list(llm.stream(prompt, params))
            texts.append([token for chunk in chunks for token in chunk.token_ids])
            cached.append(chunks[0].request.cached_tokens)
    assert texts[0] == texts[1] and cached == [0, len(prompt) - 1, 0]


def test_identities_of_kv_differ_in_its_form_alone(tiny: Path) -> None:
    found = {}
    for kv_dtype in ("auto", "q8"):
        resolved = resolve_config(config_of(tiny, kv_dtype=kv_dtype))
        model = tiny_decoder(0, dtype=torch.bfloat16)
        model.q8_kv = kv_dtype == "q8"
        found[kv_dtype] = kv_identity(resolved, model.new_cache(1, 64), recompute_decoded_kv=False)
    assert [name for name, value in found["auto"].items() if found["q8"][name] != value] == ["KV format"]


@pytest.mark.parametrize("q8", [False, True])
def test_rows_are_copied_swapped_and_kept_whole(q8: bool) -> None:
    model = tiny_decoder(0, dtype=torch.bfloat16)
    model.q8_kv = q8
    cache, texts = model.new_cache(3, 96, taps=(1,)), [list(range(40)), list(range(7, 30)), [3]]
    with torch.inference_mode():
        prefill(model, cache, texts, [0, 0, 0])
    cache.cached_ids = [*texts]
    before = [[part.clone() for part in cache.kv(layer, 40)] for layer in range(len(cache.k))]
    cache.copy_row(0, 2, 40)
    cache.swap_rows(0, 1)
    assert [len(cached_ids) for cached_ids in cache.cached_ids] == [23, 40, 1]
    kept, other = cache.copy_kv_of(1, 40), model.new_cache(1, 96, taps=(1,))
    other.write_kv_of(0, 40, kept)
    for layer, parts in enumerate(before):
        for was, now, copied in zip(parts, cache.kv(layer, 40), other.kv(layer, 40), strict=True):
            assert torch.equal(now[1], was[0]) and torch.equal(now[2], was[0]) and torch.equal(copied[0], was[0])
            assert torch.equal(now[0, :, :23], was[1, :, :23])
    cache.discard_row(1)
    assert not any(part[1].any() for part in cache.kv(0, 40))


def test_memory_is_counted_in_its_form(tiny: Path) -> None:
    plain, ours = (Runtime(config_of(tiny, kv_dtype=kind, mode="naive")).cache for kind in ("auto", "q8"))
    assert (plain.q8, ours.q8) == (False, True) and ours.dtype == plain.dtype == torch.bfloat16
    assert ours.nbytes < plain.nbytes
    for dtype, share in ((torch.bfloat16, 36 / 64), (torch.float32, 36 / 128)):
        decoder = tiny_decoder(0, dtype=dtype, head_dim=32)
        sizes = [sum(kv_bytes(decoder, config_of(tiny, kv_dtype=kind), 512)) for kind in ("q8", "auto")]
        assert sizes[0] == share * sizes[1]
        decoder.q8_kv = True
        assert decoder.new_cache(2, 512).nbytes == sizes[0]
    for kv_dtype in ("q8", "auto"):  # and numbers of a prompt's row, on GPUs
        decoder, config = tiny_decoder(0, dtype=torch.bfloat16, head_dim=32), config_of(tiny, kv_dtype=kv_dtype)
        decoder.q8_kv = kv_dtype == "q8"
        with pytest.MonkeyPatch.context() as patch:
            take_the_way_of_cuda(patch)
            cache = decoder.new_cache(2, 512)
        K, d = decoder.config.num_key_value_heads, decoder.config.head_dim
        wanted = 2 * 512 * K * d * 2 if decoder.q8_kv else 0
        assert cache.expanded_bytes == expanded_bytes(decoder, config, 512, on_gpu=True) == wanted
        assert expanded_bytes(decoder, config, 512, on_gpu=False) == decoder.new_cache(2, 512).expanded_bytes == 0
        assert cache.nbytes == sum(kv_bytes(decoder, config, 512))


def test_what_takes_no_such_cache_is_refused_by_name(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels in ("cpp", "triton"):
        monkeypatch.setattr(f"compile.op_registry._use_{kernels}", True)  # and as before after the test
    with pytest.raises(ValueError, match="kv_dtype is 'q4'; choose one of auto, q8"):
        config_of(tiny, kv_dtype="q4")
    with pytest.raises(ValueError, match="'q8', and KV in 8 bits needs this project's kernels, and torch's"):
        resolve_config(config_of(tiny, kernels="torch"))
    conflicts = partial(target_conflicts, config_of(tiny), unsupported=None, on_gpu=True)
    assert not [*conflicts(has_triton=True)]
    [message] = conflicts(has_triton=False)
    assert "and torch's run here; leave it out" in message


@pytest.mark.thin
@pytest.mark.parametrize("way", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 5}], ids=["T=0", "T=1"])
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_rounds_give_the_text_of_plain_decoding(kind: str, way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU runs them, in tensor operations."""
    params = SamplingParams(max_new_tokens=24, **way)
    take_the_way_of_cuda(monkeypatch)
    monkeypatch.setattr(Decoder, "q8_kv", True)
    graphs = RecordedGraphs()
    plain, engine = new("naive", 2), new(kind, 2, widths=[7], graphs=graphs)
    engine.variant(params).policy.pinned = pins(engine)[0]
    assert engine.cache.q8 and not engine.cache.packed and engine.cache.k[0].dtype == torch.int8
    assert outcome(engine, params)[0] == outcome(plain, params)[0] and graphs.num_replays > 3
