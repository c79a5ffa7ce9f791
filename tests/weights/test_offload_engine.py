"""Decoding with weights that come through a link: the same bits as with weights that stay, in every mode."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from offload.plan import DEPTHS
from offload.transfer import LinkError
from quant.config import QuantConfig
from sharesd.cli.display import stats_dict, stats_table
from sharesd.config import EngineConfig, Mode
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from sharesd.speculation.draft_tree import chains
from tests.helpers.in_mode import in_mode
from tests.helpers.offloaded import PROMPTS, WAYS, packed_weights, spill, texts
from tests.helpers.tiny_heads import make_head

pytestmark = pytest.mark.usefixtures("own_cache")

LAYERS = 5
MODES: tuple[Mode, ...] = ("naive", "share", "classic", "suffix", "hybrid")


@pytest.fixture(scope="module")
def tiny(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(layers=LAYERS, context=1024)


def config_of(tiny: Path, **options: Any) -> EngineConfig:
    return EngineConfig(**{"target": str(tiny), "device": "cpu", "max_context": 256, "num_draft": 4} | options)


@pytest.fixture
def travelling(tmp_path: Path, close_after: list[Runtime]) -> Callable[..., Any]:

    def load(config: EngineConfig, blocks: Sequence[int], modes: Any = None, **how: Any) -> Runtime:
        file = tmp_path / "records"
        runtime = Runtime(config, modes, offload=lambda decoder: spill(decoder, blocks, file, direct=False, **how))
        close_after.append(runtime)
        return runtime

    return load


def logits(runtime: Runtime) -> list[torch.Tensor]:
    """Of a prompt, a step of one row behind it, and one of three."""
    cache = runtime.target.new_cache(1, 64)
    found = []
    with torch.inference_mode():
        for tokens in ([5, 6, 7, 8, 9, 5, 7], [11], [12, 3, 4]):
            found.append(runtime.target.forward(torch.tensor([tokens]), cache))
            cache.lengths += len(tokens)
    return [*found, *cache.k, *cache.v]


@pytest.mark.parametrize(
    ("options", "blocks", "num_slots"),
    [
        ({"dtype": "bfloat16"}, (0, 1, 2, 3, 4), 2),
        ({"dtype": "float16", "max_batch": 3}, (1, 3), 1),
        ({"dtype": "float64", "num_draft": 6, "tree": (2, 3, 6), "max_batch": 3}, (1, 2, 4), 9),
        ({"dtype": "float32", "num_draft": 6, "tree": (2, 3, 6), "compile": "off"}, (0, 2, 3), 2),
    ],
)
def test_texts_and_logits_are_those_of_weights_that_stay(
    tiny: Path, travelling: Callable, options: dict[str, Any], blocks: tuple[int, ...], num_slots: int
) -> None:
    config, modes = config_of(tiny, **options), MODES[:2] if "compile" in options else MODES
    resident = Runtime(config, modes)
    wanted = texts(resident, modes)
    streamed = travelling(config, blocks, modes, num_slots=num_slots)
    assert texts(streamed, modes) == wanted
    assert all(wanted[mode, t] == wanted["naive", t] for mode in modes for t in (0.0, 1.0))
    assert all(map(torch.equal, logits(streamed), logits(resident)))


def test_heads_see_hidden_states_of_blocks_that_travel(tiny: Path, tmp_path: Path, travelling: Callable) -> None:
    head = make_head(tmp_path / "head", decoder_config(tiny), "eagle3", taps=(1, 3, 4), dtype=torch.float32)
    config = config_of(tiny, mode="eagle", heads=(str(head),), dtype="float32")
    engines = []
    for runtime in (Runtime(config), travelling(config, (0, 2, 3))):
        engine = in_mode(runtime)
        done = engine.generate(PROMPTS[:1], WAYS[0])
        engines.append((done[0].token_ids, engine.stats.drafted_tokens, runtime.cache.features[:, :30].clone()))
    (ours, drafted, features), (theirs, _, wanted) = engines
    assert ours == theirs and drafted and torch.equal(features, wanted) and wanted.any()


class Passes:
    """Counts passes of blocks that travel."""

    def __init__(self, runtime: Runtime) -> None:
        stream: Any = runtime.streamed.stream
        self._need, self.needed = stream.need, 0
        self._num_blocks = len(stream.blocks)
        stream.need = self.count

    def count(self, block: int) -> int:
        self.needed += 1
        return self._need(block)

    def take(self) -> float:
        passes, self.needed = self.needed / self._num_blocks, 0
        return passes


@pytest.mark.parametrize("mode", ["naive", "share", "suffix", "hybrid"])
def test_only_the_target_moves_weights_and_prompts_take_one_pass(tiny: Path, travelling: Callable, mode: Mode) -> None:
    runtime = travelling(config_of(tiny, mode=mode, max_context=1024, num_draft=None, max_draft=64), (1, 3, 4))
    passes = Passes(runtime)
    for params in WAYS:
        engine = in_mode(runtime, warm=params)
        assert passes.take() <= 14
        engine.generate([[5, 6, 7] * 250], params)  # longer than a chunk
        assert passes.take() == 1 + engine.stats.steps
        assert (engine.stats.draft_steps > 0) == (mode in ("share", "hybrid"))
        traffic, record = engine.stats.traffic, runtime.streamed.stream.slots[0].nbytes
        assert traffic.num_bytes == pytest.approx(3 * record * (1 + engine.stats.steps), abs=2 * record)
        assert 0 < traffic.utilisation <= 1


def test_a_start_moves_little(tiny: Path, travelling: Callable) -> None:
    """Whether rows keep their bits is looked up in many steps of the first block, which stays where it is for them."""
    stream = travelling(config_of(tiny, mode="naive"), range(LAYERS)).streamed.stream
    assert stream.traffic.num_bytes == len(stream.slots) * stream.slots[0].nbytes


def test_requests_that_join_are_read_in_one_pass(tiny: Path, travelling: Callable) -> None:
    config = config_of(tiny, mode="share", max_batch=2, max_context=1024)
    runtime = travelling(config, (0, 2, 3), ("naive", "share"))
    prompts = [[7, 9, 11], [5, 6, 7] * 200]
    plain = in_mode(runtime, "naive")
    wanted = [plain.generate([prompt], WAYS[0])[0].token_ids for prompt in prompts]
    engine = in_mode(runtime, "share")
    passes = Passes(runtime)
    found: list[list[int]] = [[], []]
    requests = [engine.add(prompts[0], WAYS[0])]
    while engine.num_running or engine.num_waiting:
        for chunk in engine.step():
            found[requests.index(chunk.request)] += chunk.token_ids
        if len(requests) == 1:
            requests.append(engine.add(prompts[1], WAYS[0]))
    assert found == wanted
    assert passes.take() == 2 + engine.stats.steps


def test_depths_come_from_a_coarse_ladder() -> None:
    assert [shape.nodes for shape in chains(64, DEPTHS)] == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    assert [shape.nodes for shape in chains(10, DEPTHS)] == [1, 2, 4, 8, 10]
    assert [shape.nodes for shape in chains(1, DEPTHS)] == [1]


def test_a_disk_that_fails_ends_the_call_and_not_the_engine(tiny: Path, tmp_path: Path, travelling: Callable) -> None:
    engine = in_mode(travelling(config_of(tiny, mode="share"), (1, 3, 4)))
    wanted = engine.generate(PROMPTS[:1], WAYS[0])[0].token_ids
    file = tmp_path / "records"
    content = file.read_bytes()
    os.truncate(file, len(content) // 2)
    with pytest.raises(LinkError, match="block [34] cannot be read from .*records: the file ends at byte"):
        engine.generate(PROMPTS[:1], WAYS[0])
    file.write_bytes(content)
    assert engine.generate(PROMPTS[:1], WAYS[0])[0].token_ids == wanted


def test_what_drafts_need_must_stay(tiny: Path, travelling: Callable) -> None:
    config = config_of(tiny, mode="share", quant=QuantConfig(head_bits=4, skip_projs=("down",)))
    runtime = travelling(config, (1, 3))
    assert runtime.streamed is not None
    assert all("down" not in name for name in packed_weights(runtime.target.blocks[1]))
    resident = Runtime(config)
    for params in WAYS:
        ours, theirs = (in_mode(each).generate(PROMPTS[:1], params)[0] for each in (runtime, resident))
        assert ours.token_ids == theirs.token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant": QuantConfig(head_bits=4, skip_layers=(3,))}, "qkv.weight of block 3 has no quantized weights"),
        ({"compile": "full"}, "compile is 'full', and offloaded blocks run one by one; use native"),
    ],
)
def test_what_cannot_travel_is_refused(tiny: Path, travelling: Callable, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        travelling(config_of(tiny, mode="share", **options), (1, 3))


@pytest.mark.slow
def test_the_embedded_model_through_a_slow_link(travelling: Callable) -> None:
    """All but a few blocks come at 3 GB/s."""
    modes: tuple[Mode, ...] = ("naive", "share", "suffix")
    config = EngineConfig(device="cpu", max_context=512, max_draft=16)
    prompt = ["Give three tips for staying healthy. Number them."]
    blocks = [block for block in range(30) if block % 5]
    resident = Runtime(config, modes)
    streamed = travelling(config, blocks, modes, num_slots=3, bytes_per_second=3e9)
    for params in WAYS:
        wanted = in_mode(resident, "naive", warm=params).generate(prompt, params)[0].token_ids
        for mode in modes:
            engine = in_mode(streamed, mode, warm=params)
            assert engine.generate(prompt, params)[0].token_ids == wanted
            assert 0 < engine.stats.traffic.utilisation <= 1
    assert all(map(torch.equal, logits(streamed), logits(resident)))


def test_reports_say_what_was_moved(tiny: Path, travelling: Callable) -> None:
    runtime = travelling(config_of(tiny, mode="share"), (1, 3, 4))
    engine = in_mode(runtime)
    engine.generate(PROMPTS[:1], WAYS[0])
    told = stats_dict(engine.stats, runtime.report())
    assert told["resident_share"] == pytest.approx(2 / LAYERS)
    assert told["bytes_per_token"] > 0 and 0 < told["link_utilisation"] <= 1
    shown = StringIO()
    Console(file=shown).print(stats_table({"share": engine.stats}, runtime.report()))
    assert "40% of blocks" in shown.getvalue() and "MB/token" in shown.getvalue() and "link in use" in shown.getvalue()
    resident = Runtime(config_of(tiny, mode="naive"))
    engine = in_mode(resident)
    engine.generate(PROMPTS[:1], WAYS[0])
    assert "bytes_per_token" not in stats_dict(engine.stats, resident.report())
