"""Sweeps on a tiny model: points, prompts, runs that share nothing, mistakes; reported times are held to the clock."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import fmean, variance
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmark import timed
from benchmark.__main__ import main
from benchmark.documents import Documents, filler_texts
from benchmark.points import Point, interval_of, remarks_of, sections_of
from benchmark.questions.records import TurnRecord
from benchmark.questions.session import measure_turn
from benchmark.timed import TimesDiffer, check_times, compare_modes
from sharesd.config import EngineConfig, Mode
from sharesd.engine.outputs import Completion, TokenChunk
from sharesd.engine.stats import Stats
from sharesd.llm import LLM
from sharesd.models.prefill import Piece, read_piece
from sharesd.models.tokenizer import load_tokenizer
from sharesd.reports.questions import Question
from sharesd.sampling_params import SamplingParams
from tests.helpers.tiny_tokenizer import WORDS

PNG = b"\x89PNG\r\n\x1a\n"
PARAMS = SamplingParams(max_new_tokens=101)
ROUND_S = 0.005


@pytest.fixture(scope="module")
def tiny(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(context=4096)


def measured(name: str, tiny: Path, out: Path, *argv: str) -> dict[str, Any]:
    sizes = ["--num-questions", "3", "--max-new-tokens", "10", "--runs", "2"]
    assert main([name, "--target", str(tiny), "--out-dir", str(out), *sizes, *argv]) == 0
    assert sorted(path.suffix for path in out.iterdir()) == [".csv", ".csv", ".csv", ".html", ".json", ".md", ".png"]
    assert (out / f"{name}.png").read_bytes().startswith(PNG)
    return json.loads((out / f"{name}.json").read_text())


def test_every_point_of_a_grid_is_measured(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axes = ("--contexts", "300,100", "--batches", "1,2", "--temperatures", "0,1")
    drafts = ("--modes", "ngram,hybrid", "--hybrid-drafters", "suffix,ngram", "--max-speculative-tokens", "2")
    report = measured("grid", tiny, tmp_path / "out", *axes, *drafts)
    points = report["points"]
    places = [(*point["values"].values(), point["mode"]) for point in points]
    assert places == list(product("12", ("300", "100"), "01", ("ngram", "hybrid")))
    for point in points:
        assert point["identical"] and point["speedup"] > 0 and point["tau"] >= 1
        assert len(point["turns"]) == {"1": 3, "2": 2}[point["values"]["batch"]]
        assert point["slowest"] == min(turn["speedup"] for turn in point["turns"])
        for turn in point["turns"]:
            assert len(turn["question_ids"]) == len(turn["prompt_tokens"]) == int(point["values"]["batch"])
            assert len(turn["ratios"]) == 2 and turn["decoded_tokens"] > 0
            if point["values"]["context"] == "300":
                assert all(280 <= length <= 320 for length in turn["prompt_tokens"])
    assert report["complete"] and report["settings"]["axes"]["batch"] == ["1", "2"]
    out, err = capsys.readouterr()
    assert "points below 0.98x" in out and "best single drafter" in out and "all texts identical" in out
    assert err.count("naive") >= 8
    assert "| batch | context | temperature | ngram | hybrid |" in (tmp_path / "out/grid.md").read_text()


def test_width_and_options_are_axes(tiny: Path, tmp_path: Path) -> None:
    quants, one = "draft-quant=hqq:8:64;hqq:4:64,head=4", ("--num-questions", "1")
    report = measured("sweep", tiny, tmp_path / "out", "--mode", "share", "--over", "width=2,4", "--over", quants, *one)
    points = report["points"]
    values = [tuple(point["values"].values()) for point in points]
    assert values == list(product("24", ("hqq:8:64", "hqq:4:64,head=4")))
    for point in points:
        assert 1 <= point["tau"] <= int(point["values"]["width"]) and point["identical"]
        assert point["draft_ms"] > 0 and point["verify_ms"] > 0 and point["naive_ms"] > 0


def test_prompts_hold_other_texts_each_and_fillers_are_texts(tiny: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    texts = [" ".join(WORDS[i % len(WORDS)] for i in range(start, start + 40)) for start in range(12)]
    documents = Documents(tokenizer, texts)
    question = Question(id=1, category="a", turns=("Why is the sky blue?",))
    prompts = [tokenizer.decode(documents.prompt(question, 300)) for _ in range(8)]
    assert len(set(prompts)) == 8 and all(question.turns[0] in prompt for prompt in prompts)
    assert all(270 <= len(tokenizer.encode(prompt)) <= 330 for prompt in prompts)
    alone = documents.prompt(question, 1)
    assert len(alone) < 60 and "notes" not in tokenizer.decode(alone)
    text = tmp_path / "a.txt"
    text.write_text("one\ntwo\n\nthree\n")
    assert filler_texts(text) == ["one\ntwo", "three"] and sum(map(len, filler_texts(None))) > 10**5
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match="cannot be"):
            filler_texts(path)
    text.write_text(" \n\n")
    with pytest.raises(ValueError, match="contains no text"):
        filler_texts(text)


def test_tables_have_not_seen_the_answer_of_an_earlier_run(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And prompts are read once: what `reuse` finds grows with the first answer to them only."""
    modes: tuple[Mode, ...] = ("recycle", "classic")
    config = EngineConfig(target=str(tiny), mode="recycle", num_draft=4, max_batch=2, max_context=512)
    llm = LLM.from_config(config, modes)
    for mode in modes:
        engine = llm.runtime.warm_up(mode)
    table = engine.modes["recycle"].drafter.tables[0]  # type: ignore[union-attr]
    before, at_start = table.successors.copy(), []
    begin, read = table.begin, []

    def noted(row: int, tokens: list[int]) -> None:
        at_start.append((table.successors == before).all())
        begin(row, tokens)

    def counted(model: Any, cache: Any, row: int, tokens: list[int], piece: Piece) -> Any:
        read.append(piece.end - piece.first)
        return read_piece(model, cache, row, tokens, piece)

    monkeypatch.setattr("sharesd.drafters.classic.drafter.read_piece", counted)
    monkeypatch.setattr(table, "begin", noted)
    prompts = [list(range(20, 90)), list(range(30, 80))]
    params = SamplingParams(max_new_tokens=12)
    found = compare_modes(llm.runtime.new_plain_engine(), llm, modes, prompts, params, runs=3)
    assert at_start[::2] == [True] * 3  # the second row's prompt comes after the first one's
    assert [length for length in read if length >= 50] == [70, 50]  # classic has read them once
    assert all(each.identical and len(each.ratios) == 3 for each in found.values())
    assert found["recycle"].stats.tau > 1, "nothing was drafted, so that nothing was put back"


def point(mode: str, speedup: float | None, *, context: str = "200", **given: Any) -> Point:
    figures: dict[str, Any] = dict.fromkeys(("draft_ms", "verify_ms", "naive_ms", "slowest", "first"), speedup)
    figures |= {"tau": 1.0, "alpha": 0.0, "turns": [], "interval": None, "drift": None, "identical": True, **given}
    return Point(values={"context": context}, mode=mode, speedup=speedup, **figures)


def test_verdicts() -> None:
    fine = [point("share", 1.2), point("hybrid", 1.19), point("suffix", None)]
    assert remarks_of(fine) == [
        "0 of 2 points below 0.98x",
        "hybrid below 0.99 of the best single drafter at 0 of 1 points",
        "all texts identical",
    ]
    lost = [*fine, point("share", 0.97, context="9"), point("hybrid", 0.95, context="9", identical=False)]
    assert remarks_of(lost) == [
        "2 of 4 points below 0.98x: share context=9: 0.97x; hybrid context=9: 0.95x",
        "hybrid below 0.99 of the best single drafter at 1 of 2 points: context=9: 0.98",
        "text differs from naive: hybrid context=9: 0.95x",
    ]
    drifted = remarks_of([point("share", 1.2, drift=0.84), point("share", 1.2, context="9", drift=1.1)])
    assert drifted[1] == "the machine changed speed; naive in the last run over the first: context=200: 0.84"


@pytest.mark.parametrize(
    ("intervals", "starred"),
    [
        ({"a": [1.4, 1.6], "b": [1.1, 1.3]}, "a"),
        ({"a": [1.25, 1.6], "b": [1.1, 1.3]}, None),
        ({"a": [1.4, 1.6], "b": [1.2, 1.3], "c": [0.5, 1.45]}, None),
        ({"a": None, "b": None}, None),
    ],
)
def test_best_is_starred_where_its_interval_lies_apart(intervals: dict[str, Any], starred: str | None) -> None:
    speedups = {"a": 1.5, "b": 1.2, "c": 1.1}
    points = [point(mode, speedups[mode], interval=around) for mode, around in intervals.items()]
    pivot, exact, _ = sections_of(points)
    shown = {mode for mode, cell in zip(intervals, pivot.rows[0][1:], strict=True) if cell.endswith("*")}
    assert shown == ({starred} if starred else set())
    low = intervals["a"] and intervals["a"][0]
    assert exact.rows[0][exact.head.index("95 % interval")] == (f"{low:.2f}x to 1.60x" if low else "one run")


STUDENT = {2: 4.3027, 4: 2.7764, 6: 2.4469}  # quantiles of t at 97.5 %, from tables, by degrees of freedom


@pytest.mark.parametrize("num", [1, 2, 3])
def test_an_interval_is_of_the_differences_between_repeats(num: int) -> None:
    turns = [[1.1, 1.2, 1.15], [0.9, 0.95, 1.0], [2.0, 2.1, 2.2]][:num]  # questions differ by more
    logs = [[math.log(each) for each in turn] for turn in turns]
    error = STUDENT[2 * num] * math.sqrt(fmean(map(variance, logs)) / (3 * num))
    mean = fmean(map(fmean, logs))
    assert interval_of(turns) == pytest.approx([math.exp(mean - error), math.exp(mean + error)], rel=2e-3)
    assert interval_of([[1.1], [0.9]]) is interval_of([]) is None


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("grid", "--modes", "naive"), "the only mode is naive"),
        (("grid", "--temperatures", "0,x"), "axis temperature holds 'x'"),
        (("grid", "--temperatures", "-1"), "temperature is -1.0"),
        (("grid", "--batches", "0"), "axis batch holds '0'; use whole numbers from 1 on"),
        (("grid", "--num-questions", "40"), "40 questions and one for warm-up are needed, and "),
        (("grid", "--filler", "nowhere.txt"), "nowhere.txt cannot be read (No such file or directory)"),
        (("grid", "--contexts", "100", "--max-context", "90"), "--max-context is 90 and"),
        (("grid", "--contexts", "9000", "--batches", "1"), "the model's context is 4096; lower the contexts"),
        (("sweep", "--over", "K"), "'K' is not NAME=LIST"),
        (("sweep", "--over", "K=1,"), "'K=1,' is not NAME=LIST"),
        (("sweep", "--over", "speed=1"), "--over names speed, which is neither an axis nor an option"),
        (("sweep", "--over", "K=x"), "'x' is not a whole number"),
        (("sweep", "--over", "width=1"), "axis width holds '1'; use whole numbers from 2 on"),
        (("sweep", "--over", "batch=1", "--over", "batch=2"), "use each axis once"),
        (("sweep", "--over", "tree=2:4"), "tree"),
    ],
)
def test_mistakes_cost_a_line(tiny: Path, tmp_path: Path, bench: Any, argv: tuple[str, ...], says: str) -> None:
    status, _, err = bench(argv[0], "--target", str(tiny), "--out-dir", str(tmp_path / "out"), *argv[1:])
    assert status == 2 and says in err and err.count("\n") == 1


class Launching:
    """An engine on a GPU of its own clock, whose rounds take 5 ms each."""

    def __init__(self, device: str = "cuda", is_async: bool = True, twice: bool = False, lost_s: float = 0.0) -> None:
        """`twice`: a round that is launched ahead is timed from its launch, when the last one had not ended yet.
        `lost_s`: seconds a round that are not reported.
        """
        self.options, self._twice, self._lost_s = SimpleNamespace(async_scheduling=is_async), twice, lost_s
        self.cache = SimpleNamespace(lengths=SimpleNamespace(device=torch.device(device)))
        self.stats = Stats()
        self.now = 0.0
        self.runtime = SimpleNamespace(engine=self)  # it is the LLM, too

    def stream(self, prompts: list[list[int]], params: SamplingParams, **_: Any) -> Any:
        self.stats = Stats(num_draft=0, new_tokens=1)
        launched = collected = self.now
        for _ in range(params.max_new_tokens - 1):
            next_launched = self.now  # before the last round has been read
            self.now += ROUND_S
            began = launched if self._twice else max(launched, collected)
            self.stats.record_step(0, 0.0, ROUND_S - self._lost_s, self.now - began - ROUND_S)
            collected, launched = self.now, next_launched if self.options.async_scheduling else self.now
            self.stats.decoded_tokens += 1
            request: Any = SimpleNamespace(index=0, call=None)
            yield TokenChunk(request, [7], ["target"], [None], "", None, None, None)

    def generate(self, prompts: list[list[int]], params: SamplingParams, mode: str) -> list[Completion]:
        for _ in self.stream(prompts, params):
            pass
        self.stats.accept_lengths, self.stats.new_tokens = [[]], 0
        return [Completion(finish_reason="length", stats=self.stats)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(engine: Launching) -> Launching:
        monkeypatch.setattr(timed, "time", SimpleNamespace(perf_counter=lambda: engine.now))
        monkeypatch.setattr(timed, "decode", lambda engine, *asked, **options: engine.stream(*asked, **options))
        return engine

    return use


@pytest.fixture
def turn(run: Any) -> Callable[..., TurnRecord]:
    """A turn of mtbench, answered by an engine of this kind."""
    question = Question(id=1, category="writing", turns=("why",))
    return lambda **kind: measure_turn(run(Launching(**kind)), "naive", [1], PARAMS, run=1, question=question, turn=1)


@pytest.mark.parametrize("is_async", [False, True])
def test_true_times_pass(turn: Callable[..., TurnRecord], is_async: bool) -> None:
    assert turn(is_async=is_async).decode_s == pytest.approx(0.5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rounds_that_are_counted_twice_are_refused(turn: Callable[..., TurnRecord], device: str) -> None:
    """Timed from their launch, they hold the round before: naive is reported at half its speed."""
    with pytest.raises(TimesDiffer) as refused:
        turn(twice=True, device=device)
    assert str(refused.value) == (
        "naive: prompts and rounds add up to 0.995 s, but 0.500 s passed; "
        "the figures are wrong, so no report is written"
    )


def test_modes_in_turns_are_refused(run: Any) -> None:
    engine = run(Launching(twice=True))
    with pytest.raises(TimesDiffer, match="naive and naive: "):
        timed._answers(engine, engine, "naive", [[1]], PARAMS)


def test_time_that_nobody_counts_is_refused_on_a_gpu_alone(turn: Callable[..., TurnRecord]) -> None:
    """On a CPU, other programs may have had it."""
    turn(is_async=False, device="cpu", lost_s=0.003)
    with pytest.raises(TimesDiffer, match="add up to 0.200 s, but 0.500 s passed"):
        turn(is_async=False, lost_s=0.003)


def test_a_little_between_the_rounds_passes() -> None:
    stats = Stats(steps=100, verify_s=1.0)
    check_times("naive", [stats], 1.08, on_gpu=True)
    with pytest.raises(TimesDiffer):
        check_times("naive", [stats], 1.10, on_gpu=True)
