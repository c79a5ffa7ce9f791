"""Blocks in stages: the texts of one device, each stage's tensors on its own, and one synchronisation a round."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compile import inductor
from compile.inductor import CompiledBlocks
from multigpu.pipeline_parallel import PipelineSizes, StagesDoNotFit, balance_blocks, parse_device_map
from serve.command import load_model
from sharesd.cli.main import main
from sharesd.config import EngineConfig, PipelineConfig
from sharesd.devices import transfer
from sharesd.engine.engine import Engine
from sharesd.execution.batch_invariance import check_rows, first_block_view
from sharesd.models.loader import decoder_config
from sharesd.models.prefill import Piece, prefill, read_piece
from sharesd.runtime import Runtime
from tests.helpers.oracle import classic_engine, new_engine, share_engine, switched, tiny_decoder
from tests.helpers.recorded_graphs import host_reads, take_the_way_of_cuda
from tests.helpers.served_model import served
from tests.helpers.staged_devices import Hop, TimedPlaces, in_stages, watched
from tests.helpers.tensor_ranks import GREEDY, MODES, SAMPLED, SMALL, texts_of, texts_of_moved_rows
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")

CPU = torch.device("cpu")
NAMES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounds cost decides how far is drafted, and nothing here."""
    monkeypatch.setattr("sharesd.engine.cost_profiler.SECONDS", 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", layers=5)


def config_of(folder: Path, num_stages: int = 1, **options: Any) -> EngineConfig:
    split = PipelineConfig(devices=("cpu",) * num_stages)
    return EngineConfig(**{**SMALL, "target": str(folder), "device": "auto", "split": split, **options})


def staged(folder: Path, num_stages: int, modes: tuple[Any, ...], **options: Any) -> Runtime:
    runtime = Runtime(config_of(folder, num_stages, **options), modes)
    assert len(runtime.target.split.stages) == num_stages  # type: ignore[union-attr]
    return runtime


# ---- texts


@pytest.mark.parametrize("options", [{"max_draft": 4, "num_draft": None}, {"num_draft": 6, "tree": (2, 3, 6)}])
@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_texts_of_all_modes_are_those_of_one_device(folder: Path, num_stages: int, options: dict[str, Any]) -> None:
    """With lengths that clocks decide, and with trees; the second model is a stage of its own."""
    alone = Runtime(config_of(folder, max_batch=3, **options), ("naive",))
    modes = (*MODES, "ngram", "recycle", "classic")
    runtime = staged(folder, num_stages, modes, max_batch=3, draft_device="cpu", **options)
    for params in (GREEDY, SAMPLED):
        wanted = texts_of(alone, "naive", params)
        for mode in modes:
            assert texts_of(runtime, mode, params) == wanted, mode


@pytest.mark.parametrize("compile", ["off", pytest.param("regional", marks=pytest.mark.long)])
def test_texts_without_the_kernel(folder: Path, compile: Any) -> None:
    options: dict[str, Any] = {"compile": compile, "max_batch": 2, "num_draft": 3}
    runtime = staged(folder, 3, ("naive", "share"), **options)
    wanted = texts_of(Runtime(config_of(folder, **options)), "naive", SAMPLED)
    assert texts_of(runtime, "share", SAMPLED) == wanted


@pytest.mark.parametrize("kind", ["eagle", "parallel", "glide"])
def test_heads_read_features_of_all_stages(folder: Path, tmp_path: Path, kind: Any) -> None:
    """As many guesses of theirs are accepted as on one device."""
    layers = {"target_layers": (1, 4)} if kind == "glide" else {"taps": (1, 4)}
    head = make_head(tmp_path, decoder_config(folder), kind, dtype=torch.bfloat16, **layers)
    options: dict[str, Any] = {"max_batch": 2, "num_draft": 3, "heads": (str(head),), "mode": kind}
    found = []
    for num_stages in (1, 3):
        engine = staged(folder, num_stages, (kind,), **options).engine(kind, warm=SAMPLED)
        done = engine.generate([[5, 6, 7] * 5, [9]], SAMPLED)
        found.append(([each.token_ids for each in done], engine.stats.accept_lengths))
    assert found[0] == found[1]


def test_rows_join_and_leave_and_chats_go_on(folder: Path) -> None:
    runtime = staged(folder, 3, ("hybrid",), max_batch=2)
    assert texts_of_moved_rows(runtime) == texts_of_moved_rows(Runtime(config_of(folder, max_batch=2)))


def test_a_server_in_stages(folder: Path) -> None:
    def load() -> Any:
        return load_model(config_of(folder, 3, mode="share", max_batch=2), "share", None)

    with served(load, settings={"max_batch": 2}) as running:
        running.wait(lambda: running.http.get("/health").status_code == 200, 60)
        text = running.complete([5, 6, 7], max_tokens=20, temperature=0)["choices"][0]["text"]
    [alone] = Runtime(config_of(folder)).engine().generate([[5, 6, 7]], replace(GREEDY, max_new_tokens=20))
    assert text == alone.text != ""


def test_as_much_is_accepted_as_on_one_device(folder: Path) -> None:
    """A stage that saw an old length, or another path, would spoil drafts, and texts stay right."""
    found = []
    for num_stages in (1, 3):
        lengths, place = [], {} if num_stages == 1 else {"draft_device": "cpu"}
        for options in ({"num_draft": 4}, {"num_draft": 6, "tree": (2, 3, 6)}):
            runtime = staged(folder, num_stages, ("share", "classic"), **options, **place)
            for mode in runtime.modes:
                engine = runtime.engine(mode, warm=GREEDY)
                engine.generate([[5, 6, 7]], replace(GREEDY, max_new_tokens=60))
                lengths.append(engine.stats.accept_lengths)
        found.append(lengths)
    assert found[0] == found[1]


# ---- hops, places, synchronisations


def test_a_pass_takes_a_hop_for_each_stage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(transfer, "delay", waits.append)
    split = PipelineConfig(devices=("cpu",) * 3, simulated_latency_s=0.02)
    runtime = Runtime(config_of(folder, num_draft=4, split=split), ("naive", "share"))
    for mode, passes in (("naive", 1), ("share", 1 + 4)):
        engine = runtime.engine(mode, warm=GREEDY)  # type: ignore[arg-type]
        chunks = engine.stream([[5, 6, 7]], GREEDY)
        next(chunks)
        for _ in range(2):
            waits.clear()
            next(chunks)
            assert waits == [0.02] * 3 * passes, mode
        chunks.close()


def kinds() -> dict[str, Callable[[Any], Engine]]:
    def staged_switch(batch: int, **options: Any) -> Engine:
        model, switch = switched(tiny_decoder(num_hidden_layers=5), 0.3)
        return share_engine(in_stages(model, (2, 2, 1)), switch, batch=batch, **options)

    def plain() -> Any:
        return in_stages(tiny_decoder(num_hidden_layers=5), (2, 2, 1))

    return {
        "naive": lambda batch: new_engine(plain(), batch=batch),
        "share": lambda batch: staged_switch(batch),
        "share tree": lambda batch: staged_switch(batch, num_draft=6, tree=(2, 3, 6)),
        "classic": lambda batch: classic_engine(plain(), tiny_decoder(1), batch=batch),
    }


@pytest.fixture
def way_of_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    take_the_way_of_cuda(monkeypatch)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("kind", kinds())
def test_no_operation_reads_two_stages(kind: str, way_of_cuda: None) -> None:
    prompts, params = [[1, 2, 3], [4, 5]], replace(SAMPLED, max_new_tokens=12)
    engine = kinds()[kind](2)
    caches = [engine.cache]
    with watched(engine.target, *caches) as places:  # type: ignore[arg-type]
        texts = [done.token_ids for done in engine.generate(prompts, params)]
    assert places.found == [] and len(places.hops) > 2 * engine.stats.steps
    alone = new_engine(tiny_decoder(num_hidden_layers=5), batch=2)
    assert texts == [done.token_ids for done in alone.generate(prompts, params)]


@pytest.mark.parametrize(("kind", "widths"), [("naive", [1]), ("share", [1, 1, 1, 1, 5])])
def test_what_is_copied_in_a_round(kind: str, widths: list[int], way_of_cuda: None) -> None:
    """Of each pass tokens, lengths and the residual stream, to where they are needed; to the host nothing."""
    engine = kinds()[kind](2)
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
        for first in range(0, len(tokens), 4):
            logits_1V = read_piece(decoder, cache, 0, tokens, Piece(first, first + 4, 4))
    assert isinstance(places, TimedPlaces) and places.found == []
    products = len(places.busy[0]) // num_pieces  # of a piece in a stage; the last stage has the head besides
    begins = [[places.busy[stage][i * products] for i in range(num_pieces)] for stage in (0, 1)]
    assert all(
        second < end for second, end in zip(begins[0][1:], (begin + products for begin in begins[1]), strict=False)
    )
    assert max(places.clocks.values()) <= (num_pieces + 2) * (products + 1)
    alone = tiny_decoder(num_hidden_layers=6)
    whole_1V = prefill(alone, alone.new_cache(1, 128), [tokens], [0])
    torch.testing.assert_close(logits_1V, whole_1V)


def test_copies_to_other_devices_wait_for_nothing() -> None:
    waits: list[bool] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                waits.append(not args[2])
            return func(*args, **(kwargs or {}))

    with Copies():
        transfer.copy_to_device(torch.device("meta"), torch.ones(2))
    assert waits == [False]


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


def test_a_stage_whose_device_was_not_made_current_is_noticed(way_of_cuda: None, monkeypatch: Any) -> None:
    engine = kinds()["naive"](1)
    with watched(engine.target, engine.cache) as places:  # type: ignore[arg-type]
        monkeypatch.setattr(transfer, "use", lambda device: None)
        engine.generate([[1, 2, 3]], replace(GREEDY, max_new_tokens=2))
    assert any("on 0 while 2 is the current device" in found for found in places.found)


def test_a_tensor_at_a_wrong_place_is_noticed(way_of_cuda: None) -> None:
    engine = kinds()["naive"](1)
    with watched(engine.target, engine.cache) as places:  # type: ignore[arg-type]
        places.put(engine.target.blocks[1].mlp.down.parameters(), 2)  # type: ignore[attr-defined]
        engine.generate([[1, 2, 3]], replace(GREEDY, max_new_tokens=2))
    assert any("of places [0, 2]" in found for found in places.found)


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.smoke
def test_the_host_reads_once_a_round(kind: str, way_of_cuda: None) -> None:
    engine = kinds()[kind](1)
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


# ---- plans


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
    """Compared with all splits there are."""
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
    sizes = PipelineSizes(blocks=(10**9,) * 4, last=10**9)
    with pytest.raises(StagesDoNotFit) as error:
        balance_blocks(sizes, [2e9, 2.5e9], NAMES[:2])
    assert "a would hold blocks 0 to 1 with 2.00 GB, and may hold 2.00 GB" in str(error.value)
    assert "b would hold blocks 2 to 3 with 3.00 GB, and may hold 2.50 GB" in str(error.value)


def test_device_maps_of_accelerate() -> None:
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


def test_a_map_and_limits_decide(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"": "cpu"}))
    assert len(Runtime(config_of(folder, split=PipelineConfig(device_map=str(file)))).target.split.stages) == 1  # type: ignore[union-attr]
    limits = ((0, 10**9), (1, 2 * 10**9))
    runtime = Runtime(config_of(folder, split=PipelineConfig(devices=("cpu", "cpu"), max_memory=limits)), ("share",))
    stages = runtime.target.split.stages  # type: ignore[union-attr]
    assert stages[0].num_blocks < stages[1].num_blocks


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"split": PipelineConfig(devices=("cpu",) * 6)}, "the model has 5 blocks; give at most 5 devices"),
        ({"split": PipelineConfig(devices=("cpu", "tpu"))}, "device is 'tpu'; give cpu, cuda or cuda:N"),
        ({"split": PipelineConfig(device_map="no.json")}, "device_map 'no.json' is neither `auto` nor a file of JSON"),
        (
            {"split": PipelineConfig(devices=("cpu", "cpu"), max_memory=((0, 10**5), (1, 10**5)))},
            "the model does not fit: cpu would hold blocks 0 to .* GB; give more devices or memory",
        ),
        (
            {"split": PipelineConfig(devices=("cpu", "cpu"), max_memory=((0, 10**9),))},
            "max_memory names 0 and the devices are cpu, cpu; name each stage, from 0",
        ),
        ({"split": PipelineConfig(devices=("cpu",) * 2), "compile": "full"}, "a step runs on several devices"),
        ({"split": PipelineConfig(devices=("cpu",) * 2), "device": "cpu"}, "stages have devices of their own; leave"),
        ({"split": PipelineConfig(devices=("cpu",) * 2), "tensor_parallel": 2}, "drop one of the two"),
        ({"draft_device": "cpu"}, "draft_device is 'cpu' and no mode is classic"),
    ],
)
def test_mistakes(folder: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Runtime(config_of(folder, **options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_gpus_that_are_not_there(folder: Path) -> None:
    for split in (PipelineConfig(device_map="auto"), PipelineConfig(max_memory=((0, 10**9),))):
        with pytest.raises(ValueError, match="found no GPU; list the devices"):
            Runtime(config_of(folder, split=split))
    with pytest.raises(ValueError, match="device is 'cuda:1' but torch .* finds no GPU"):
        Runtime(config_of(folder, split=PipelineConfig(devices=("cuda:0", "cuda:1"))))


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hello")

    def text(*args: str) -> str:
        common = [
            "--target",
            str(folder),
            "--max-context",
            "128",
            "--max-new-tokens",
            "20",
            "--num-speculative-tokens",
            "3",
        ]
        assert main(["generate", "why is the sky blue", *common, *args]) == 0
        return capsys.readouterr().out

    assert text("--devices", "cpu,cpu", "--max-memory", "0=1GB,1=3GB") == text() != ""
    for args, complaint in (
        (["hello", "--max-memory", "10GB"], "is not a list of GPUs and sizes"),
        (
            ["--prompts", str(file), "--devices", "cpu,cpu", "--replicas", "2", "--out", "x"],
            "which have one device each",
        ),
        (["hello", "--devices", "cpu,cpu", "--device-map", "auto"], "give one of the two"),
        (["hello", "--devices", "cpu,cpu", "--cpu-memory-limit", "1GB"], "the model is split among devices"),
    ):
        try:
            status = main(["generate", "--target", str(folder), *args])
        except SystemExit as ended:
            status = ended.code  # type: ignore[assignment]
        assert status == 2 and complaint in capsys.readouterr().err


def test_a_pass_that_fails_leaves_lengths_to_the_device() -> None:
    """What the host knew of the row would be wrong for the next one, if views of the cache are remembered."""
    decoder = tiny_decoder()
    cache = decoder.new_cache(1, 64)

    def fails(*given: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    model = SimpleNamespace(forward=fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        read_piece(model, cache, 0, [1, 2, 3], Piece(0, 3, 3))  # type: ignore[arg-type]
    assert cache.rows(0, 1).known_length is None
