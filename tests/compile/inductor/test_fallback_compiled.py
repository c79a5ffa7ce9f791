"""Steps of transformers' own models, compiled whole: the same texts in all modes, nothing compiled after warm-up,
caches that stay where they are; and what cannot be compiled runs eagerly, and says so.
"""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._inductor.utils import run_and_get_code

from compile.inductor import CompiledModel
from quant.config import QuantConfig
from quant.quantize_model import quantize_linears
from quant.switch_linear import Switch
from sharesd.config import EngineConfig
from sharesd.execution.batch_invariance import check_compiled
from sharesd.models.hf import HFModel, _RowLayer, load_hf
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.weights.quantize import head_name, layer_of
from tests.compile.inductor.test_inductor import BUFFER
from tests.helpers.after_warmup import no_recompiles
from tests.helpers.in_mode import in_mode
from tests.helpers.oracle import new_engine, share_engine
from tests.helpers.recorded_graphs import RecordedGraphs, take_the_way_of_cuda
from tests.helpers.tiny_models import make_checkpoint
from tests.models.test_models import FALLBACK, save_random

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
MODES = ("naive", "share", "suffix")
PROMPTS: list[str | list[int]] = ["why is the sky blue", [7], [5, 6, 7, 5, 6, 7, 5], [9] * 33]
GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=1.0, top_p=0.95, seed=3)
SHORT = SamplingParams(max_new_tokens=9)
WIDTH = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 with one head of 64, so that caches are larger than what attention computes."""
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    config = transformers.GPT2Config(
        vocab_size=384, n_embd=64, n_layer=1, n_head=1, n_positions=2048, eos_token_id=None, bos_token_id=None
    )
    save_random(config, folder)
    return folder


def new_runtime(checkpoint: Path, compile: Any, **options: Any) -> Runtime:
    config = EngineConfig(target=str(checkpoint), device="cpu", compile=compile, num_draft=3, **options)
    return Runtime(config, MODES)


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Dynamo traced runs as it is: quick to make, and seen operation by operation."""
    inductor = torch.compile

    def traced(function: Any, options: dict[str, Any], **how: Any) -> Any:
        guards = {"guard_filter_fn": options["guard_filter_fn"]}  # the rest is Inductor's
        return inductor(function, backend="aot_eager", options=guards, **how)

    monkeypatch.setattr(torch, "compile", traced)


def test_all_modes_emit_the_same_tokens_from_compiled_steps_over_caches_in_place(checkpoint: Path) -> None:
    runtime, codes = run_and_get_code(new_runtime, checkpoint, "full", max_context=2048)
    assert isinstance(runtime.step, CompiledModel) and runtime.target.step_widths == {1, 9}
    buffers = [math.prod(map(int, re.findall(r"\d+", shape))) for shape in re.findall(BUFFER, "".join(codes))]
    assert len(codes) == 2 and buffers and max(buffers) < runtime.cache.k[0].numel() // 4
    engines = [in_mode(runtime, mode, warm=SAMPLED) for mode in MODES]
    assert isinstance(engines[1].drafter.model, CompiledModel), "drafts are compiled, too"
    with no_recompiles():
        for params in (GREEDY, SAMPLED):
            naive, *others = ([c.token_ids for c in engine.generate(PROMPTS, params)] for engine in engines)
            assert others == [naive] * 2 and len(set(map(tuple, naive))) == len(PROMPTS)
            assert engines[1].stats.alpha > 0.2
        for length in range(1, 11):
            engines[1].generate([list(range(length))], SHORT)


@pytest.mark.parametrize("family", ["bloom", "opt", "starcoder2_sliding"])
def test_steps_are_traced_whole_and_their_rounds_captured(
    family: str, tmp_path: Path, traced_only: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take_the_way_of_cuda(monkeypatch)
    save_random(FALLBACK[family], tmp_path)
    model, switch = load_hf(tmp_path, dtype=torch.float64), Switch()
    quantize_linears(model, QuantConfig(bits=4, group_size=32), switch, head_name=head_name(model), layer_of=layer_of)
    caplog.clear()
    compiled = CompiledModel(model, {1, WIDTH}, lambda: switch.quantized)
    graphs, found = RecordedGraphs(), []
    for steps, captured in ((model, None), (compiled, None), (compiled, graphs)):
        cache = model.new_cache(2, 40 + 3 * WIDTH)
        if steps is compiled:
            check_compiled(compiled, model, cache, WIDTH)
        options: dict[str, Any] = {"max_context": 40, "widths": (WIDTH,), "graphs": captured, "cache": cache}
        naive = new_engine(steps, batch=2, **options)
        share = share_engine(steps, switch, num_draft=4, batch=2, **options)
        prompts = [[3, 17, 9], [21, 4, 4, 30, 8, 12, 1]]
        naive_texts, texts = ([c.token_ids for c in e.generate(prompts, SAMPLED)] for e in (naive, share))
        assert texts == naive_texts
        found.append((texts, share.stats.accept_lengths))
    assert found[0] == found[1] == found[2] and len({*found[0][0][0]}) > 3
    assert graphs.num_replays > 20
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "no capture failed"


def test_what_cannot_be_traced_runs_eagerly_and_says_why(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    update = _RowLayer.update

    def asks_the_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.lengths.max().item() >= 0
        return update(self, *args, **kwargs)

    monkeypatch.setattr(_RowLayer, "update", asks_the_host)
    eager = new_runtime(checkpoint, "off", max_context=128)
    caplog.clear()
    runtime = new_runtime(checkpoint, "full", max_context=128)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    [said] = [warning.message for warning in warnings if warning.name == "sharesd.execution.step_compiler"]
    assert said.startswith("gpt2 (transformers) runs eagerly, which is slower: ")
    assert runtime.step is runtime.target and runtime.target.step_widths == frozenset()
    for mode in MODES:
        with no_recompiles():
            texts = [[c.token_ids for c in in_mode(each, mode).generate(PROMPTS, SAMPLED)] for each in (eager, runtime)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("fault, said", [("state", "something else"), ("place", "depend on their place")])
def test_compiled_steps_that_differ_are_noticed(
    fault: str, said: str, checkpoint: Path, traced_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that each call changes is a constant of what was traced; rows may differ by their place."""
    model: Any = load_hf(checkpoint, dtype=torch.float64)
    forward = HFModel.forward
    model.num_calls = 0

    def faulty(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits_BTV = forward(self, *args, **kwargs)
        if fault == "state":
            self.num_calls += 1
            return logits_BTV * self.num_calls
        return logits_BTV * (1 + 1e-3 * torch.arange(logits_BTV.shape[1])[:, None])

    check_compiled(CompiledModel(model, {WIDTH}), model, model.new_cache(1, 64), WIDTH)
    monkeypatch.setattr(HFModel, "forward", faulty)
    with pytest.raises(ValueError, match=said):
        check_compiled(CompiledModel(model, {WIDTH}), model, model.new_cache(1, 64), WIDTH)
