"""Rounds replayed as CUDA graphs, recorded on a CPU: the same tokens, and the same drafts accepted, as without."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from compile.cuda_graphs import Graphs
from sharesd import Engine, SamplingParams
from sharesd.drafters.base import Drafter
from sharesd.drafters.classic.drafter import ClassicDrafter
from sharesd.drafters.eagle.drafter import EagleDrafter
from sharesd.drafters.glide.drafter import GlideDrafter
from sharesd.drafters.hybrid.drafter import HybridDrafter
from sharesd.drafters.parallel.drafter import ParallelDrafter
from sharesd.drafters.recycle.table import RecycleTable
from sharesd.drafters.share.drafter import ShareDrafter
from sharesd.drafters.suffix.table import SuffixTable
from sharesd.speculation.draft_tree import NO_DRAFT, chains, shapes_of
from sharesd.startup import cost_profiler
from sharesd.startup.warmup import warm_up
from tests.helpers.after_warmup import no_captures
from tests.helpers.made_costs import made_costs
from tests.helpers.oracle import classic_engine, new_engine, share_engine, switched, tiny_decoder
from tests.helpers.recorded_graphs import RecordedGraphs, host_reads, take_the_way_of_cuda
from tests.helpers.staged_devices import in_stages, watched
from tests.helpers.tiny_heads import random_head

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(max_new_tokens=8)
SAMPLED = SamplingParams(max_new_tokens=8, temperature=1.0, top_p=0.9, seed=5)
PENALISED = replace(SAMPLED, temperature=0.7, top_p=1.0, top_k=9, repetition_penalty=1.3, presence_penalty=0.1)
REJECTION, BLOCK = (replace(SAMPLED, acceptance=rule) for rule in ("rejection", "block"))
PROMPTS = [[3, 17, 9], [21, 4, 4, 30, 8, 12, 1]]
CONFIGURATIONS: list[tuple[str, SamplingParams, int]] = [
    *(("naive", PENALISED, 2), ("share", GREEDY, 1), ("share", SAMPLED, 2), ("share", BLOCK, 2)),
    *(("share tree", PENALISED, 2), ("classic", replace(PENALISED, logprobs=True), 1), ("classic tree", SAMPLED, 1)),
    *(("eagle", SAMPLED, 2), ("eagle3", REJECTION, 1), ("eagle3 tree", GREEDY, 2), ("glide", SAMPLED, 2)),
    *(("glide tree", GREEDY, 1), ("parallel", SAMPLED, 2), ("parallel tree", PENALISED, 2), ("suffix", SAMPLED, 2)),
    *(("suffix", BLOCK, 1), ("recycle", GREEDY, 1), ("hybrid classic tree", GREEDY, 1), ("hybrid", REJECTION, 1)),
    ("hybrid classic share tree", SAMPLED, 2),
]
SELDOM = [("naive", GREEDY, 1), ("share", REJECTION, 1)]  # what they capture others capture, too


@pytest.fixture(autouse=True)
def way_of_cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("cuda") is None:
        take_the_way_of_cuda(monkeypatch)


def noisy() -> Any:
    model = tiny_decoder(3)
    dice = torch.Generator().manual_seed(7)
    for tensor in model.parameters():
        tensor.add_(0.05 * tensor.std() * torch.randn(tensor.shape, generator=dice, dtype=tensor.dtype))
    return model


Place = tuple[str, torch.dtype]
CPU, GPU = ("cpu", torch.float64), ("cuda", torch.float32)  # our kernels for GPUs take no float64


def new(kind: str, batch: int, *, place: Place = CPU, num_blocks: tuple[int, ...] = (), **options: Any) -> Engine:
    """An engine with drafts of up to 6 nodes. Its target has so many blocks in each stage; a second model is apart."""
    name, tree = kind.split()[0], (2, 3, 6) if "tree" in kind else None
    model, switch = switched(tiny_decoder(3), 0.2)
    model.to(*place)
    second = noisy().to(*place)
    if num_blocks:
        in_stages(model, num_blocks), in_stages(second, (2,), caller_device=len(num_blocks) - 1)
    options = {"batch": batch, "auto_length": True} | options
    if name == "naive":
        return new_engine(model, **options)
    if name == "share":
        return share_engine(model, switch, num_draft=6, tree=tree, **options)
    if name == "classic":
        return classic_engine(model, second, num_draft=6, tree=tree, **options)
    shapes, top = shapes_of(2, 3, 6) if tree else chains(6), 2 if tree else 1
    if "eagle" in name or name in ("parallel", "glide"):
        head = random_head(model, name, ids=range(3, 40, 2), draft_length=6)
        if num_blocks:  # heads are at the last stage, the target's embedding at the first
            head.embed = torch.nn.Embedding.from_pretrained(model.embed.weight.clone())
        cache = model.new_cache(batch, 160, head.config.taps)
        drafts: Any = {"parallel": ParallelDrafter, "glide": GlideDrafter}.get(name, EagleDrafter)
        drafter = drafts(head, cache, shapes=shapes, weight_bytes=0, branching=top)
        return new_engine(model, drafter, cache=cache, **options)
    cache = model.new_cache(batch, 160)
    models: list[Drafter] = []
    if name == "hybrid" and "classic" in kind:
        models.append(ClassicDrafter(second, batch=batch, slots=160, shapes=shapes, weight_bytes=0, branching=top))
    if name == "hybrid" and ("classic" not in kind or "share" in kind):
        models.append(ShareDrafter(model, cache, switch, shapes=shapes, quantized_bytes=0, branching=top))
    tables = [RecycleTable(40, 2)] if name == "recycle" else [SuffixTable()]
    return new_engine(model, HybridDrafter(name, tables, *models, num_nodes=6, trees=True), cache=cache, **options)


def outcome(engine: Engine, params: SamplingParams) -> Any:
    """Texts, and what the drafts were worth: a stale draft changes no token, but is accepted less."""
    done = engine.generate(PROMPTS[: engine.cache.batch], params)
    texts, logprobs = [each.token_ids for each in done], [each.logprobs for each in done]
    return texts, logprobs, engine.stats.accept_lengths, engine.stats.drafted_tokens


def pins(engine: Engine) -> list[Any]:
    """Shapes that calls are held to, so that both engines draft alike."""
    shapes = engine.drafter.shapes if engine.drafter else ()
    return [*shapes[-1:], NO_DRAFT, *shapes[2:3], *shapes[-1:]] if shapes else [NO_DRAFT, NO_DRAFT]


IN_EACH = pytest.mark.parametrize(
    "kind, params, batch", [*CONFIGURATIONS, *(pytest.param(*each, marks=pytest.mark.long) for each in SELDOM)]
)


@IN_EACH
def test_captured_rounds_equal_uncaptured_ones(kind: str, params: SamplingParams, batch: int, caplog: Any) -> None:
    graphs = RecordedGraphs()
    compare(kind, params, batch, graphs, CPU)
    assert graphs.num_replays > 6 and not caplog.records, "no capture failed"


@pytest.mark.parametrize(
    "kind, params, batch",
    [
        *(("naive", PENALISED, 2), ("share", SAMPLED, 2), ("share tree", GREEDY, 1), ("eagle3 tree", GREEDY, 2)),
        *(("suffix", SAMPLED, 2), ("hybrid classic tree", GREEDY, 1)),
        pytest.param("classic", SAMPLED, 1, marks=pytest.mark.long),
    ],
)
def test_stages_are_captured_in_graphs_of_one_device_each(kind: str, params: Any, batch: int, caplog: Any) -> None:
    """Hops lie between them; texts, and what is accepted, are those of rounds that are launched anew on one device."""
    graphs = RecordedGraphs()
    plain = new(kind, batch, widths=[7])
    captured = new(kind, batch, widths=[7], graphs=graphs, num_blocks=(1, 1))
    with watched(captured.target, captured.cache) as places:  # type: ignore[arg-type]
        for pin in pins(plain):
            for engine in (plain, captured):
                engine.variant(params).policy.pinned = pin
            with _disable_current_modes():
                wanted = outcome(plain, params)
            assert outcome(captured, params) == wanted
    assert "classic" in kind or places.found == []  # nobody has said where second models are
    assert graphs.num_replays > 6 and not caplog.records, "no capture failed"


@pytest.mark.cuda
@IN_EACH
def test_rounds_in_graphs_of_cuda_equal_uncaptured_ones(kind: str, params: Any, batch: int, caplog: Any) -> None:
    before = Graphs.num_captures
    compare(kind, params, batch, Graphs(), GPU)
    assert Graphs.num_captures > before and not caplog.records


def compare(kind: str, params: SamplingParams, batch: int, graphs: Graphs, place: Place) -> None:
    """Outcomes with and without graphs are the same, whatever is drafted."""
    plain, captured = (new(kind, batch, widths=[7], graphs=each, place=place) for each in (None, graphs))
    for pin in pins(plain):
        for engine in (plain, captured):
            engine.variant(params).policy.pinned = pin
        assert outcome(captured, params) == outcome(plain, params), pin


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(
    "kind, params",
    [("naive", PENALISED), ("share", SAMPLED), pytest.param("share", GREEDY, marks=pytest.mark.long)],
)
def test_rounds_launched_ahead_change_nothing(kind: str, params: Any, graphs: bool) -> None:
    """Rows end in the middle and are refilled; what the next round made of them is dropped."""
    prompts = [[*prompt, i] for i in range(2) for prompt in PROMPTS]
    params = replace(params, stop_token_ids=(5, 9, 21), max_new_tokens=17, logprobs=True)
    options: dict[str, Any] = {"widths": [7], "auto_length": False}
    found = []
    for async_scheduling in (False, True):
        engine = new(kind, 2, graphs=RecordedGraphs() if graphs else None, async_scheduling=async_scheduling, **options)
        assert engine.async_scheduling == async_scheduling
        for _ in range(2):
            done = engine.generate(prompts, params)
        found.append(([(c.token_ids, c.logprobs, c.sources) for c in done], engine.stats.accept_lengths))
        assert engine.num_running == 0 and engine.stats.rounds == sum(map(len, engine.stats.accept_lengths))
    assert found[0] == found[1]
    assert len({len(tokens) for tokens, _, _ in found[0][0]}) > 1, "rows shall end at different times"


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("kind", ["naive", "share"])
def test_a_round_is_launched_before_the_one_in_front_of_it_is_read(kind: str, async_scheduling: bool) -> None:
    graphs = RecordedGraphs()
    engine = new(kind, 1, widths=[7], graphs=graphs, auto_length=False, async_scheduling=async_scheduling)
    engine.generate(PROMPTS[:1], replace(GREEDY, max_new_tokens=30))  # captures
    chunks = engine.stream(PROMPTS[:1], replace(GREEDY, max_new_tokens=60))
    next(chunks)
    launches: list[int] = []  # replays so far, at each read
    before, each = graphs.num_replays, 1 + engine.num_draft
    with host_reads(lambda name: launches.append(graphs.num_replays - before)):
        for _ in range(3):
            next(chunks)
    chunks.close()
    assert launches == [each * (number + async_scheduling) for number in (1, 2, 3)]


def new_pool(kind: str, widths: list[int], patch: pytest.MonkeyPatch) -> tuple[Engine, RecordedGraphs]:
    """An engine that is warmed up; its costs are made up, since measuring takes a while."""
    costs = made_costs({1: 1.0, 7: 1.1}, 0.2, 0.2, drafters=("share", "classic"), step_slot={1: 0.0, 7: 0.0})
    patch.setattr(cost_profiler, "measure_costs", lambda *_: (costs, True))
    graphs = RecordedGraphs()
    engine = new(kind, 1, widths=widths, graphs=graphs)
    warm_up(engine, engine.mode, GREEDY)
    return engine, graphs


@pytest.mark.parametrize(
    "kind, widths, most",
    [
        ("naive", [7], 1),
        ("naive", [1, 7], 1),
        ("suffix", [7], 1),  # verify
        ("suffix", [1, 7], 2),  # plain, verify
        ("share", [7], 3),  # verify, a chain's first step, its others
        ("hybrid", [1, 7], 4),
        ("share tree", [7], 6),  # besides: a tree's first level, its others, the choice
        ("hybrid classic tree", [7], 6),
    ],
)
def test_few_graphs_are_captured_and_all_in_warm_up(kind: str, widths: list[int], most: int, monkeypatch: Any) -> None:
    engine, graphs = new_pool(kind, widths, monkeypatch)
    assert len(graphs.recorded) == most
    policy, [plain] = engine.variant(GREEDY).policy, new("naive", 1, widths=widths).generate(PROMPTS[:1], GREEDY)
    with no_captures():
        for pin in pins(engine):
            policy.pinned = pin
            [done] = engine.generate(PROMPTS[:1], GREEDY)
            assert done.token_ids == plain.token_ids


@pytest.mark.parametrize("kind", ["naive", "share", "share tree", "classic", "suffix", "recycle"])
def test_the_host_reads_once_a_round(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, graphs = new_pool(kind, [7], monkeypatch)
    if engine.drafter is not None:
        engine.variant(GREEDY).policy.pinned = engine.drafter.shapes[-1]
    reads: list[str] = []
    chunks = engine.stream(PROMPTS[:1], replace(GREEDY, max_new_tokens=60))
    next(chunks)
    depth = 0 if engine.drafter is None or engine.drafter.runs_on_host else engine.drafter.shapes[-1].depth
    for _ in range(3):
        before, reads[:] = graphs.num_replays, []
        with host_reads(reads.append):
            next(chunks)
        assert [name for name in reads if name != "numpy"] == ["tolist"], "numpy takes the host's memory alone"
        assert graphs.num_replays - before == 1 + depth + ("tree" in kind), "verify, steps or levels, the choice"
    chunks.close()


def test_ways_of_sampling_do_not_keep_graphs_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new("share", 1, widths=[7], graphs=RecordedGraphs())
    first = weakref.ref(engine.variant(GREEDY))
    wishes: list[dict[str, Any]] = [{}, {"logprobs": True}, {"repetition_penalty": 1.2}, {"logit_bias": {1: 1.0}}]
    for step in range(24):
        params = replace(SAMPLED, temperature=step % 3 / 2, top_p=1 - step % 2 / 2, **wishes[step % 4])
        engine.generate(PROMPTS[:1], replace(params, max_new_tokens=3))
    assert 1 < len(engine.loaded) <= 8, "kinds that are captured are few"
    monkeypatch.setattr("sharesd.engine.loaded_mode.MAX_VARIANTS", 2)
    engine.generate(PROMPTS[:1], replace(GREEDY, logprobs=True)), engine.generate(PROMPTS[:1], SAMPLED)
    gc.collect()
    assert first() is None and len(engine.loaded) < 9


def test_draft_steps_are_timed_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By replays: launched one by one, a draft step's operations take several times as long."""
    measure = cost_profiler.measure_costs
    engine, graphs = new_pool("share", [7], monkeypatch)
    ran: list[int] = []
    timed = cost_profiler._timed

    def counted(function: Callable[[], object]) -> float:
        before = graphs.num_replays
        took = timed(function)
        ran.append(graphs.num_replays - before)
        return took

    monkeypatch.setattr(cost_profiler, "_timed", counted)
    monkeypatch.setattr(cost_profiler, "SWEEPS", (1, 12))
    with no_captures():
        measure(engine, engine.mode, GREEDY)
    assert set(ran) == {1, 3}, "a round, plain or with a draft that is there; a chain of half the longest"
