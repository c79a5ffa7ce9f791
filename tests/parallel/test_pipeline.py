"""Blocks in stages: the texts of one device, each stage's tensors on its own, and one synchronisation a round."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from compile import inductor
from compile.inductor import CompiledBlocks
from multigpu.pipeline_parallel import PipelineSizes, StagesDoNotFit, balance_blocks, parse_device_map
from sharesd import Engine, EngineConfig, PipelineConfig
from sharesd.cli.main import main
from sharesd.devices import transfer
from sharesd.execution.batch_invariance import check_rows, first_block_view
from sharesd.models.loader import decoder_config
from sharesd.models.prefill import Piece, prefill, read_piece
from sharesd.runtime import Runtime
from tests.helpers.in_mode import in_mode
from tests.helpers.oracle import classic_engine, new_engine, share_engine, switched, tiny_decoder
from tests.helpers.recorded_graphs import host_reads, take_the_way_of_cuda
from tests.helpers.staged_devices import Hop, TimedPlaces, in_stages, watched
from tests.helpers.tensor_ranks import GREEDY, MODES, SAMPLED, SMALL, texts_of, texts_of_moved_rows
from tests.helpers.tiny_heads import make_head

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")

NAMES = ("a", "b", "c")
TWO = PipelineConfig(devices=("cpu", "cpu"))
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
TREE: dict[str, Any] = {"num_draft": 6, "tree": (2, 3, 6)}


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(layers=5)


def config_of(folder: Path, num_stages: int = 1, **options: Any) -> EngineConfig:
    split = PipelineConfig(devices=("cpu",) * num_stages)
    return EngineConfig(**{**SMALL, "target": str(folder), "device": "auto", "split": split, **options})


def staged(folder: Path, num_stages: int, modes: tuple[Any, ...], **options: Any) -> Runtime:
    runtime = Runtime(config_of(folder, num_stages, **options), modes)
    assert len(runtime.target.split.stages) == num_stages  # type: ignore[union-attr]
    return runtime


@pytest.mark.parametrize("options", [{"max_draft": 4, "num_draft": None}, TREE])
@pytest.mark.parametrize("num_stages", [2, 5, pytest.param(3, marks=pytest.mark.long)])
def test_texts_of_all_modes_are_those_of_one_device(folder: Path, num_stages: int, options: dict[str, Any]) -> None:
    """With lengths that clocks decide, and with trees; the second model is a stage of its own."""
    alone = Runtime(config_of(folder, max_batch=3, **options), ("naive",))
    modes = (*MODES, "ngram", "recycle", "classic")
    runtime = staged(folder, num_stages, modes, max_batch=3, draft_device="cpu", **options)
    for params in (GREEDY, SAMPLED):
        wanted = texts_of(alone, "naive", params)
        for mode in modes:
            assert texts_of(runtime, mode, params) == wanted, mode


@pytest.mark.long
def test_texts_of_compiled_blocks(folder: Path) -> None:
    options: dict[str, Any] = {"compile": "regional", "max_batch": 2, "num_draft": 3}
    runtime = staged(folder, 3, ("naive", "share"), **options)
    wanted = texts_of(Runtime(config_of(folder, **options)), "naive", SAMPLED)
    assert texts_of(runtime, "share", SAMPLED) == wanted


@pytest.mark.parametrize("kind", ["share", "share tree", "classic tree", "eagle", "parallel", "glide"])
def test_as_much_is_accepted_as_on_one_device(folder: Path, tmp_path: Path, kind: str) -> None:
    """A stage that saw an old length or path would spoil drafts, but no text. Heads read features of all stages."""
    mode: Any = kind.split()[0]
    options: dict[str, Any] = {"max_batch": 2, "mode": mode, **(TREE if "tree" in kind else {"num_draft": 3})}
    if mode not in ("share", "classic"):
        layers = {"target_layers": (1, 4)} if kind == "glide" else {"taps": (1, 4)}
        options["heads"] = (str(make_head(tmp_path, decoder_config(folder), mode, dtype=torch.bfloat16, **layers)),)
    found = []
    for num_stages in (1, 3):
        place = {"draft_device": "cpu"} if mode == "classic" and num_stages > 1 else {}
        engine = in_mode(staged(folder, num_stages, (mode,), **options, **place), mode, warm=SAMPLED)
        done = engine.generate([[5, 6, 7] * 5, [9]], replace(SAMPLED, max_new_tokens=40))
        found.append(([each.token_ids for each in done], engine.stats.accept_lengths))
    assert found[0] == found[1]


def test_rows_join_and_leave_and_chats_go_on(folder: Path) -> None:
    runtime = staged(folder, 3, ("hybrid",), max_batch=2)
    assert texts_of_moved_rows(runtime) == texts_of_moved_rows(Runtime(config_of(folder, max_batch=2)))


def test_a_pass_takes_a_hop_for_each_stage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(transfer, "delay", waits.append)
    split = PipelineConfig(devices=("cpu",) * 3, simulated_latency_s=0.02)
    runtime = Runtime(config_of(folder, num_draft=4, split=split), ("naive", "share"))
    for mode, passes in (("naive", 1), ("share", 1 + 4)):
        engine = in_mode(runtime, mode, warm=GREEDY)  # type: ignore[arg-type]
        chunks = engine.stream([[5, 6, 7]], GREEDY)
        next(chunks)
        for _ in range(2):
            waits.clear()
            next(chunks)
            assert waits == [0.02] * 3 * passes, mode
        chunks.close()


KINDS = ("naive", "share", "share tree", "classic")


def engine_of(kind: str, batch: int) -> Engine:
    model, switch = switched(tiny_decoder(num_hidden_layers=5), 0.3)
    in_stages(model, (2, 2, 1))
    if "share" in kind:
        return share_engine(model, switch, batch=batch, **(TREE if "tree" in kind else {}))
    return new_engine(model, batch=batch) if kind == "naive" else classic_engine(model, tiny_decoder(1), batch=batch)


@pytest.fixture
def way_of_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    take_the_way_of_cuda(monkeypatch)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_no_operation_reads_two_stages(kind: str, way_of_cuda: None) -> None:
    prompts, params = [[1, 2, 3], [4, 5]], replace(SAMPLED, max_new_tokens=12)
    engine = engine_of(kind, 2)
    with watched(engine.target, engine.cache) as places:  # type: ignore[arg-type]
        texts = [done.token_ids for done in engine.generate(prompts, params)]
    assert places.found == [] and len(places.hops) > 2 * engine.stats.steps
    alone = new_engine(tiny_decoder(num_hidden_layers=5), batch=2)
    assert texts == [done.token_ids for done in alone.generate(prompts, params)]


@pytest.mark.parametrize(("kind", "widths"), [("naive", [1]), ("share", [1, 1, 1, 1, 5])])
def test_what_is_copied_in_a_round(kind: str, widths: list[int], way_of_cuda: None) -> None:
    """Of each pass tokens, lengths and the residual stream, to where they are needed; to the host nothing."""
    engine = engine_of(kind, 2)
    with watched(engine.target, engine.cache) as places:  # type: ignore[arg-type]
        chunks = engine.stream([[1, 2, 3], [4, 5]], replace(GREEDY, max_new_tokens=60))
        next(chunks)
        steps = engine.stats.steps
        while engine.stats.steps == steps:  # until the first round is over
            places.hops.clear()
            next(chunks)
        assert places.hops == [
            Hop(shape, source, target)
            for width in widths
            for shape, source, target in (
                *(((2, width), 2, 0), ((2,), 2, 0)),
                *(((2,), 2, 1), ((2, width, 32), 0, 1), ((2, width, 32), 1, 2)),
            )
        ]
        chunks.close()


def test_pieces_of_a_prompt_go_through_stages_one_behind_the_other(way_of_cuda: None) -> None:
    """The first stage reads a piece while the second one is at the piece before, and nothing waits longer than that."""
    decoder, num_pieces = in_stages(tiny_decoder(num_hidden_layers=6), (2, 2, 2)), 6
    cache, tokens = decoder.new_cache(1, 128), [*range(1, 1 + 4 * num_pieces)]
    with watched(decoder, cache, kind=TimedPlaces) as places:
        for at in range(0, len(tokens), 4):
            logits_1V = read_piece(decoder, cache, 0, tokens, Piece(at, at + 4, 4))
    assert isinstance(places, TimedPlaces) and places.found == []
    products = len(places.busy[0]) // num_pieces  # of a piece in a stage; the last stage has the head next tos
    first, second = ([places.busy[stage][i * products] for i in range(num_pieces)] for stage in (0, 1))
    assert all(first[i + 1] < second[i] + products for i in range(num_pieces - 1))
    assert max(places.clocks.values()) <= (num_pieces + 2) * (products + 1)
    alone = tiny_decoder(num_hidden_layers=6)
    whole_1V = prefill(alone, alone.new_cache(1, 128), [tokens], [0])
    torch.testing.assert_close(logits_1V, whole_1V)


def test_the_first_block_alone_runs_where_it_is(way_of_cuda: None) -> None:
    """The check of rows runs it, and the norm and the head behind it, which are with the last stage."""
    decoder = in_stages(tiny_decoder(num_hidden_layers=4), (2, 2))
    first = first_block_view(decoder)
    cache = first.new_cache(1, 256)
    with watched(decoder, decoder.new_cache(1, 256)) as places:
        places.put([cache.k[0], cache.v[0]], 0)
        places.put([cache.lengths], 1)
        check_rows(first, cache, (1, 3), trees=True)
    assert {*places.found} == {"copy_ on 0 while 1 is the current device"}, "which fills the cache, before steps"
    assert places.current == 1


def test_a_model_apart_is_told_there_which_rows_are_kept(way_of_cuda: None) -> None:
    decoder = in_stages(tiny_decoder(num_hidden_layers=2), (2,), caller_device=1)
    cache = decoder.new_cache(1, 64)
    with watched(decoder, cache) as places:
        tokens_BT, keep_BR = torch.tensor([[1, 2, 3]]), torch.tensor([[2]])
        places.put([tokens_BT, keep_BR, cache.lengths], 1)
        logits_BRV = decoder.forward(tokens_BT, cache, keep_BR)
    assert places.found == [] and places.current == 1
    assert places.hops[0] == Hop((1, 3), 1, 0) and places.hops[-1] == Hop(tuple(logits_BRV.shape), 0, 1)


def test_tensors_at_wrong_places_and_devices_that_are_not_current_are_noticed(
    way_of_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = engine_of("naive", 1)
    with watched(engine.target, engine.cache) as places:
        places.put(engine.target.blocks[1].mlp.down.parameters(), 2)
        engine.generate([[1, 2, 3]], replace(GREEDY, max_new_tokens=2))
        assert any("of places [0, 2]" in found for found in places.found)
        places.found.clear()
        with monkeypatch.context() as patch:  # undone before `watched` undoes its own
            patch.setattr(transfer, "use", lambda device: None)
            engine.generate([[1, 2, 3]], replace(GREEDY, max_new_tokens=2))
        assert any("on 0 while 2 is the current device" in found for found in places.found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.smoke
def test_the_host_reads_once_a_round(kind: str, way_of_cuda: None) -> None:
    engine = engine_of(kind, 1)
    chunks = engine.stream([[1, 2, 3]], replace(GREEDY, max_new_tokens=60))
    next(chunks)
    for _ in range(3):
        reads: list[str] = []
        with host_reads(reads.append):
            next(chunks)
        assert [name for name in reads if name != "numpy"] == ["tolist"], "numpy takes the host's memory alone"
    chunks.close()


def test_blocks_on_other_devices_have_compiled_forms_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(inductor, "compile_step", lambda function: compiled.append(function) or (lambda block, x: x))
    run, block = CompiledBlocks({1}), torch.nn.Linear(2, 2)
    for device in ("cpu", "meta", "cpu"):
        run(block, torch.empty(1, 1, 2, device=device))
    assert len(compiled) == 2


def test_stages_get_what_they_have_room_for() -> None:
    even = PipelineSizes(blocks=(10,) * 12)
    assert balance_blocks(even, [math.inf] * 3, NAMES) == (4, 4, 4)
    assert balance_blocks(even, [100, 50, 50], NAMES) == (6, 3, 3)
    ends = PipelineSizes(blocks=(10,) * 12, first=30, last=60)
    assert balance_blocks(ends, [math.inf] * 3, NAMES) == (4, 7, 1)
    assert balance_blocks(PipelineSizes(blocks=(40, 10, 10, 10, 10)), [math.inf] * 2, NAMES[:2]) == (1, 4)
    beside = PipelineSizes(blocks=(10,) * 12, extra={1: 60})
    assert balance_blocks(beside, [math.inf] * 2, NAMES[:2]) == (9, 3)


def test_no_split_is_fuller_than_need_be() -> None:
    sizes, limits = PipelineSizes(blocks=(7, 3, 9, 4, 4, 8), first=5, last=11), [40.0, 60.0, 30.0]

    def fullest(parts: tuple[int, ...]) -> float:
        a, b = parts[0], parts[0] + parts[1]
        return max(
            sizes.of(i, 3, *ends) / limit
            for i, (ends, limit) in enumerate(zip(((0, a), (a, b), (b, 6)), limits, strict=True))
        )

    every = [(a, b, 6 - a - b) for a in range(1, 5) for b in range(1, 6 - a)]
    assert fullest(balance_blocks(sizes, limits, NAMES)) == min(map(fullest, every))


def test_what_does_not_fit_is_shown() -> None:
    told = "a would hold blocks 0 to 1 with 2.00 GB, and may hold 2.00 GB"
    with pytest.raises(StagesDoNotFit, match=told) as error:
        balance_blocks(PipelineSizes(blocks=(10**9,) * 4, last=10**9), [2e9, 2.5e9], NAMES[:2])
    assert "b would hold blocks 2 to 3 with 3.00 GB, and may hold 2.50 GB" in str(error.value)


def test_a_map_of_accelerate_and_limits_decide(folder: Path, tmp_path: Path) -> None:
    layers = {f"model.layers.{i}": int(i > 1) for i in range(12)}
    ends = {"model.embed_tokens": 0, "model.norm": 1, "lm_head": 1}
    assert parse_device_map({**layers, **ends}, 12) == (["cuda:0", "cuda:1"], (2, 10))
    assert parse_device_map({"": "cpu"}, 3) == (["cpu"], (3,))
    for change, complaint in (
        ({"model.layers.4": 0}, "comes back to cuda:0"),
        ({"lm_head": 0}, "has lm_head on cuda:0; it belongs to the layers on cuda:1"),
        ({"model.embed_tokens": "1"}, "has model.embed_tokens on cuda:1; it belongs to the layers on cuda:0"),
    ):
        with pytest.raises(ValueError, match=complaint):
            parse_device_map({**layers, **ends, **change}, 12)
    with pytest.raises(ValueError, match=r"does not name model.layers.12"):
        parse_device_map({**layers, **ends}, 13)
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"": "cpu"}))
    split = PipelineConfig(device_map=str(file))
    assert len(Runtime(config_of(folder, split=split)).target.split.stages) == 1  # type: ignore[union-attr]
    split = replace(TWO, max_memory=((0, 10**9), (1, 2 * 10**9)))
    first, second = Runtime(config_of(folder, split=split), ("share",)).target.split.stages  # type: ignore[union-attr]
    assert first.num_blocks < second.num_blocks


@pytest.mark.parametrize(
    ("split", "complaint"),
    [
        (PipelineConfig(devices=("cpu",) * 6), "the model has 5 blocks; give at most 5 devices"),
        (PipelineConfig(devices=("cpu", "tpu")), "device is 'tpu'; give cpu, cuda or cuda:N"),
        (PipelineConfig(device_map="no.json"), "device_map 'no.json' is neither `auto` nor a file of JSON"),
        (replace(TWO, max_memory=((0, 10**5), (1, 10**5))), "the model does not fit: cpu would hold .* GB; give more"),
        (replace(TWO, max_memory=((0, 10**9),)), "max_memory names 0 and the devices are cpu, cpu; name each stage"),
        pytest.param(PipelineConfig(device_map="auto"), "found no GPU; list the devices", marks=NO_GPU),
        pytest.param(PipelineConfig(max_memory=((0, 10**9),)), "found no GPU; list the devices", marks=NO_GPU),
        pytest.param(PipelineConfig(devices=("cuda:0", "cuda:1")), "'cuda:1' but torch .* finds no GPU", marks=NO_GPU),
    ],
)
def test_mistakes(folder: Path, split: PipelineConfig, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Runtime(config_of(folder, split=split))


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["generate", "--target", str(folder), "--max-context", "128"]
    given += ["--max-new-tokens", "20", "--num-speculative-tokens", "3"]
    staged, texts = [*given, "--devices", "cpu,cpu"], []
    for command in (given, [*staged, "--max-memory", "0=1GB,1=3GB"]):
        assert main([*command, "why is the sky blue"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
    with pytest.raises(SystemExit, match="2"):
        main([*staged, "hello", "--max-memory", "10GB"])
    assert "is not a list of GPUs and sizes" in capsys.readouterr().err
    for args, complaint in (
        (["hello", "--device-map", "auto"], "give one of the two"),
        (["hello", "--cpu-memory-limit", "1GB"], "the model is split among devices"),
        (["--prompts", __file__, "--out", "x", "--replicas", "2"], "which have one device each"),
    ):
        assert main([*staged, *args]) == 2 and complaint in capsys.readouterr().err


def test_a_pass_that_fails_leaves_lengths_to_the_device() -> None:
    """What the host knew of the row would be wrong for the next one, if views of the cache are remembered."""
    cache = tiny_decoder().new_cache(1, 64)
    model: Any = SimpleNamespace(forward=Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        read_piece(model, cache, 0, [1, 2, 3], Piece(0, 3, 3))
    assert cache.rows(0, 1).known_length is None
