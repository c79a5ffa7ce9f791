"""`benchmark serve`: figures of recorded answers, arrivals, what is asked, failures, comparisons, files, mistakes."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from operator import truediv
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from benchmark.__main__ import main
from benchmark.serve import spawn
from benchmark.serve.client import Answer
from benchmark.serve.command import draw, noise_remarks
from benchmark.serve.load import Load, LoadSettings, compare, counters, figures, measure, median, speculation
from benchmark.serve.workload import LoadRequest, departures, from_file, questions, random_words, repeated
from sharesd.models.hub import resolve
from sharesd.models.tokenizer import load_tokenizer
from tests.helpers.openai_server import GAP_S, RUNS, TOKENS, serving
from tests.helpers.paths import HELPERS

PNG = b"\x89PNG\r\n\x1a\n"


def answer(sent_s: float, *chunks_s: float, tokens: int = 3, text: str = "") -> Answer:
    return Answer(sent_s=sent_s, chunks_s=list(chunks_s), prompt_tokens=10, output_tokens=tokens, text=text)


def load_with(*answers: Answer, mode: str | None = None, rate: float = 1.0, seconds: float = 1.0) -> Load:
    result = figures(answers, seconds, goodput={}, percentiles=(99,))
    return Load(mode=mode, rate=rate, answers=list(answers), result=result)


def file_of(folder: Path, *prompts: str) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(file)


TIMELINE = [
    answer(0.0, 0.1, 0.2, 0.5, tokens=9),  # runs of several tokens in a chunk
    answer(0.5, 0.3, tokens=1),
    answer(1.0, 0.2, 0.7, tokens=2),
    Answer(sent_s=0.0, chunks_s=[0.1], failure="error in stream", detail="gone"),
]


def test_figures_of_a_recorded_timeline() -> None:
    found = figures(TIMELINE, 2.0, goodput={}, percentiles=(50, 99))
    expected: dict[str, float] = {"duration": 2.0, "completed": 3, "failed": 1}
    expected |= {"total_input_tokens": 30, "total_output_tokens": 12}
    expected |= {"request_throughput": 1.5, "output_throughput": 6.0, "total_token_throughput": 21.0}
    expected |= {"mean_ttft_ms": 200.0, "median_ttft_ms": 200.0, "std_ttft_ms": 1e3 * pstdev([0.1, 0.2, 0.3])}
    expected |= {"p99_ttft_ms": 298.0, "p99_e2el_ms": 696.0}  # between the two largest, linear as in numpy
    expected |= {"mean_tpot_ms": (400 / 8 + 500 / 1) / 2, "mean_e2el_ms": 500.0}  # one token alone has no tpot
    expected |= {"mean_itl_ms": (100 + 300 + 500) / 3, "median_itl_ms": 300.0, "p50_itl_ms": 300.0}
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert found["failures"] == {"error in stream": 1} and found["request_goodput"] is None


def test_goodput_counts_answers_within_all_limits() -> None:
    for limits, good in (
        ({"ttft": 200.0}, 2),
        ({"ttft": 199.0}, 1),
        ({"ttft": 300.0, "tpot": 49.0}, 1),  # a single token has no tpot to exceed
        ({"ttft": 300.0, "tpot": 50.0, "e2el": 500.0}, 2),
        ({"e2el": 10.0}, 0),
    ):
        assert figures(TIMELINE, 2.0, goodput=limits, percentiles=(99,))["request_goodput"] == good / 2.0


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0, math.inf])
def test_departures_end_at_their_rate(burstiness: float) -> None:
    times = departures(500, 20.0, burstiness, seed=3)
    assert times == sorted(times) and times[-1] == pytest.approx(25.0) and times[0] > 0
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    expected = 0.0 if burstiness == math.inf else 1 / math.sqrt(burstiness)  # of a Gamma distribution
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(expected, rel=0.15, abs=1e-9)
    assert times == departures(500, 20.0, burstiness, seed=3)
    assert burstiness == math.inf or times != departures(500, 20.0, burstiness, seed=4)
    assert departures(3, math.inf, burstiness, seed=0) == [0.0, 0.0, 0.0]


def test_random_lengths_and_prompts() -> None:
    drawn = random_words(200, 10, 4, 0.5, seed=1)
    assert {len(r.prompt.split()) for r in drawn} == set(range(5, 16))
    assert {r.output_len for r in drawn} == {2, 3, 4, 5, 6}
    assert drawn == random_words(200, 10, 4, 0.5, seed=1) != random_words(200, 10, 4, 0.5, seed=2)
    words = random_words(3, 300, 4, 0.0, seed=1)
    assert {len(r.prompt.split()) for r in words} == {300} and len({r.prompt for r in words}) == 3
    assert random_words(2, 300, 4, 0.0, seed=1) == words[:2]
    [request] = random_words(1, 1000, 1, 0.0, seed=0)  # about as many tokens
    assert len(load_tokenizer(resolve(None)).encode(str(request.prompt))) == pytest.approx(1000, rel=0.15)


def test_questions_and_files_begin_again_at_their_end(tmp_path: Path) -> None:
    asked = repeated(questions(None, 32))(200, 0)
    assert len(asked) == 200 and {r.output_len for r in asked} == {32} and len({r.prompt for r in asked}) < 200
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hello"}\n\n{"prompt": "x", "output_tokens": 5}\n')
    found = repeated(from_file(str(file), 9))(3, 0)
    assert [(r.prompt, r.output_len) for r in found] == [("Hello", 9), ("x", 5), ("Hello", 9)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"}', "f.jsonl:1: field 'prompt' is missing"),
        ('{"prompt": [1, 2]}', "f.jsonl:1: field 'prompt' holds a list"),
        ('{"prompt": "x", "output_tokens": true}', "f.jsonl:1: field 'output_tokens' is True"),
        ("{", "f.jsonl:1: not JSON"),
        ("", "contains no prompts"),
    ],
)
def test_wrong_files(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "f.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        from_file(str(tmp_path / "f.jsonl"), 9)


def test_speculation_is_the_difference_of_two_counters() -> None:
    def text(drafts: int, tokens: int, accepted: int, places: tuple[int, ...]) -> str:
        counts: dict[str, float] = {"drafts_total": drafts, "draft_tokens_total": tokens, "drafts_created": 1e9}
        counts |= {f'accepted_tokens_total{{engine="{i}"}}': accepted / 2 for i in (0, 1)}  # labels are summed
        counts |= {f'accepted_tokens_per_pos_total{{position="{i}"}}': n for i, n in enumerate(places)}
        return "".join(f"vllm:spec_decode_num_{name} {count}\n" for name, count in counts.items())

    before, after = counters(text(10, 40, 20, (10, 10))), counters(text(20, 80, 32, (18, 14)))
    found = {name.removeprefix("spec_decode_"): value for name, value in speculation(before, after).items()}
    counts = {"num_drafts": 10, "draft_tokens": 40, "accepted_tokens": 12, "acceptance_rate": 30.0}
    assert found == {**counts, "acceptance_length": 2.2, "per_position_acceptance_rates": [0.8, 0.4]}
    assert speculation(after, after) == {} and speculation(before, None) == {}
    for other in (None, "", "some_metric 1\n", "<html>no metrics</html>"):
        assert counters(other) is None


def test_ratios_and_texts_over_naive() -> None:
    def load(mode: str, scale: float, texts: str) -> Load:
        answers = [answer(0.0, 0.1 * scale, 0.3 * scale, text=text) for text in texts]
        answers[-1].failure = "refused" if mode == "share" else None
        return load_with(*answers, mode=mode, seconds=scale)

    naive, share = load("naive", 1.0, "abcd"), load("share", 0.5, "abXd")
    compare(share, naive)
    latencies = {f"{which}_{name}_ms": 0.5 for which in ("median", "p99") for name in ("ttft", "tpot", "itl", "e2el")}
    # three answers of four in half the time
    assert share.result["ratio_to_naive"] == pytest.approx({"output_throughput": 1.5, **latencies})
    assert (share.result["same_texts_as_naive"], share.result["texts_compared"]) == (2, 3)


def serve(*argv: str) -> int:
    return main(["serve", *argv])


def load_of(server: Any, out: Path, *argv: str, status: int = 0) -> dict[str, Any]:
    """The JSON of a load at rate inf on a running server."""
    flags = ["--base-url", server.url, "--random-input-len", "5", "--random-output-len", str(TOKENS)]
    assert serve(*flags, "--out-dir", str(out), *argv) == status
    return json.loads((out / "rate-inf.json").read_text())


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_load_from_flags_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    flags = ["--endpoint", endpoint, "--num-prompts", "6", "--max-concurrency", "2", "--save-detailed"]
    flags += ["--goodput", "ttft:600000", "e2el:900000", "--header", "X-Mine=yes", "--extra-body", '{"x": 1}']
    flags += ["--top-k", "5", "--temperature", "0.5", "--metric-percentiles", "99.9"]
    with serving() as server:
        found = load_of(server, tmp_path, *flags)
    assert len(server.bodies) == 7  # with one to warm up
    assert found["completed"] == found["num_prompts"] == 6 and found["failed"] == 0
    assert found["total_output_tokens"] == 6 * TOKENS and found["total_input_tokens"] == 6 * 7
    assert found["request_goodput"] == found["request_throughput"]
    assert found["model_id"] == "fake-model" and found["request_rate"] == "inf" and found["max_concurrency"] == 2
    assert found["backend"] == ("openai-chat" if endpoint == "chat" else "openai")
    assert found["generated_texts"] == ["".join(RUNS)] * 6 and found["errors"] == [""] * 6
    assert [len(gaps) for gaps in found["itls"]] == [len(RUNS) - 1] * 6  # the opening chunk of a chat holds no token
    assert min(found["ttfts"]) >= 0.9 * GAP_S and found["mean_e2el_ms"] >= 0.9e3 * GAP_S * len(RUNS)
    assert found["mean_tpot_ms"] == pytest.approx(1e3 * fmean(sum(gaps) / (TOKENS - 1) for gaps in found["itls"]))
    assert "p99.9_e2el_ms" in found
    body, headers = server.bodies[0], server.headers[0]
    assert body["stream"] and body["stream_options"] == {"include_usage": True} and body["ignore_eos"] is True
    assert (body["x"], body["top_k"], body["temperature"]) == (1, 5, 0.5) and "min_p" not in body
    assert headers["x-mine"] == "yes" and headers["x-request-id"].startswith("sharesd-bench-")
    assert {body["seed"] for body in server.bodies} == set(range(6))
    assert body["max_completion_tokens" if endpoint == "chat" else "max_tokens"] == TOKENS
    if endpoint == "completions":
        assert all(len(body["prompt"].split()) == 5 for body in server.bodies)
    out = capsys.readouterr().out
    assert "ttft" in out and "6/6" in out and "good/s" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rate-inf.json", "serve.csv", "serve.html", "serve.md"]
    assert "| 6/6 |" in (tmp_path / "serve.md").read_text()


def test_greedy_requests_say_no_more_than_needed_and_ids_count_where_there_is_no_usage(tmp_path: Path) -> None:
    with serving(usage=False, ids=True) as server:
        load_of(server, tmp_path, "--num-prompts", "1", "--num-warmups", "0", "--no-ignore-eos", "--model", "mine")
        body = server.bodies[0]
        found = load_of(server, tmp_path, "--endpoint", "completions", "--num-prompts", "2")
    assert body.keys() == {"model", "messages", "max_completion_tokens", "stream", "stream_options", "temperature"}
    assert body["model"] == "mine" and found["total_output_tokens"] == 2 * TOKENS


def test_without_any_counts_or_after_a_failed_warm_up_a_line_says_why(tmp_path: Path, capsys: Any) -> None:
    with serving(usage=False) as server:
        assert serve("--base-url", server.url, "--num-prompts", "2") == 2
        assert len(server.bodies) == 1
        assert "neither usage nor token ids" in capsys.readouterr().err
        assert serve("--base-url", server.url, "--dataset", file_of(tmp_path, "!rejected")) == 2
    err = capsys.readouterr().err
    assert "a warm-up request failed (rejected: 400: it is rejected really)" in err and err.count("\n") == 1


FAILURES = ("refused", "full", "rejected", "broken", "cut", "dropped", "error", "odd", "silent")
KINDS = ["refused"] * 2 + ["rejected", "server error"] + ["disconnected"] * 2 + ["error in stream"] * 2 + ["no answer"]


def test_failures_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [*(f"!{name}" for name in FAILURES), "fine"]
    flags = ["--dataset", file_of(tmp_path, *prompts), "--num-warmups", "0", "--num-prompts", str(len(prompts))]
    with serving() as server:
        found = load_of(server, tmp_path / "out", *flags, "--save-detailed")
    assert [error.partition(":")[0] for error in found["errors"]] == [*KINDS, ""]
    assert found["failures"] == Counter(KINDS) and found["completed"] == 1 and found["failed"] == len(KINDS)
    assert "2 refused, the first: 429: it is refused really" in capsys.readouterr().out


def test_what_takes_too_long_is_a_timeout(tmp_path: Path) -> None:
    flags = ["--dataset", file_of(tmp_path, "!slow"), "--num-warmups", "0", "--num-prompts", "2", "--timeout", "0.3"]
    with serving() as server:
        found = load_of(server, tmp_path / "out", *flags, "--goodput", "ttft:1", status=1)
    assert found["failures"] == {"timeout": 2} and found["completed"] == 0
    assert found["request_goodput"] == found["output_throughput"] == 0, "nothing was answered"
    assert found["mean_ttft_ms"] is None and found["p99_itl_ms"] is None


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        url = server.url
    assert serve("--base-url", url) == 2 and f"cannot ask {url} for its models" in capsys.readouterr().err
    flags = ["--model", "x", "--num-warmups", "0", "--num-prompts", "2", "--out-dir", str(tmp_path)]
    assert serve("--base-url", f"{url}/v1", *flags) == 1  # nothing was answered
    assert json.loads((tmp_path / "rate-inf.json").read_text())["failures"] == {"unreachable": 2}


def test_a_sweep_writes_a_file_per_rate_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "4", "--random-input-len", "3", "--out-dir", str(tmp_path)]
    with serving() as server:
        assert serve("--base-url", server.url, "--sweep", "40,8,inf", *flags) == 0
    files = {"rate-40.json", "rate-8.json", "rate-inf.json", "latency.png", "serve.csv", "serve.html", "serve.md"}
    assert {path.name for path in tmp_path.iterdir()} == files
    assert (tmp_path / "latency.png").read_bytes().startswith(PNG)
    slow, fast = (json.loads((tmp_path / f"rate-{rate}.json").read_text()) for rate in ("8", "40"))
    assert (slow["request_rate"], fast["request_rate"]) == (8, 40) and slow["duration"] >= 4 / 8
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(prompts)) == len(prompts) == 15  # no rate asks what another has asked
    assert "8/s" in capsys.readouterr().out


def test_pictures_stand_what_was_not_answered(tmp_path: Path) -> None:
    one = answer(0.0, 0.1, 0.3)
    loads = [load_with(one, mode=mode, rate=rate) for mode, rate in product(("naive", "share"), (1.0, math.inf))]
    draw(tmp_path / "a.png", "model", [*loads[:3], load_with(mode="share", rate=math.inf)], "p99")
    draw(tmp_path / "b.png", "model", [load_with(mode="naive")], "p99")
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in ("a.png", "b.png"))


@pytest.fixture
def fake_spawn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setattr(spawn, "COMMAND", (sys.executable, str(HELPERS / "openai_server.py")))
    return partial(serve, "--num-prompts", "2", "--random-input-len", "3")


def test_modes_are_compared_with_naive(fake_spawn: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    assert fake_spawn("--spawn", "hybrid,share", "--out-dir", str(tmp_path)) == 0
    names = [f"{mode}-rate-inf.json" for mode in ("hybrid", "naive", "share")]
    tables = ["serve-over-naive.csv", "serve.csv", "serve.html", "serve.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, *tables])
    hybrid, naive, _ = (json.loads((tmp_path / name).read_text()) for name in names)
    assert "ratio_to_naive" not in naive and "spec_decode_num_drafts" not in naive and naive["label"] == "naive"
    throughput = hybrid["output_throughput"] / naive["output_throughput"]
    assert hybrid["ratio_to_naive"]["output_throughput"] == pytest.approx(throughput)
    assert (hybrid["same_texts_as_naive"], hybrid["texts_compared"]) == (2, 2)
    assert hybrid["spec_decode_acceptance_length"] == 2.5 and hybrid["spec_decode_num_drafts"] == 4  # no warm-up in it
    assert hybrid["spec_decode_per_position_acceptance_rates"] == [0.5, 0.5, 0.5]
    out = capsys.readouterr().out
    assert "over naive" in out and out.count("2/2") >= 5


def test_modes_take_turns(fake_spawn: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--turns", "3", "--dataset", "questions", "--num-warmups", "1", "--sweep", "50,inf", "--save-detailed")
    assert fake_spawn("--spawn", "hybrid", *flags, "--out-dir", str(tmp_path)) == 0
    files = [tmp_path / f"{mode}-rate-{rate}.json" for rate in ("50", "inf") for mode in ("naive", "hybrid")]
    naive, hybrid, *_ = (json.loads(path.read_text()) for path in files)
    assert naive["output_throughput"] == sorted(naive["output_throughputs"])[1]
    ratios = sorted(map(truediv, hybrid["output_throughputs"], naive["output_throughputs"]))
    assert hybrid["ratio_to_naive"]["output_throughput"] == pytest.approx(ratios[1])
    assert hybrid["ratio_to_naive"]["output_throughput_range"] == pytest.approx([ratios[0], ratios[2]])
    assert hybrid["output_throughput_range"] == [min(hybrid["output_throughputs"]), max(hybrid["output_throughputs"])]
    assert (hybrid["same_texts_as_naive"], hybrid["texts_compared"]) == (6, 6)
    out = capsys.readouterr().out
    assert "6/6" in out and "Medians and ranges of 3 turns" in out and "Measured once" not in out
    row = next(csv.DictReader((tmp_path / "serve-medians-and-ranges-of-3-turns.csv").read_text().splitlines()))
    low, high = (f"{end:.1f}" for end in naive["output_throughput_range"])
    assert (row["figure"], row["median and range min"], row["median and range max"]) == ("tok/s", low, high)


def test_another_mode_begins_each_turn(fake_spawn: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def measured(settings: LoadSettings, url: str, *, mode: str, rate: float, turn: int, **_: Any) -> Load:
        asked.append((turn, mode))
        load = load_with(answer(0.0, 0.1, 0.3 / (1 + turn)), mode=mode, rate=rate)
        load.result |= {"model_id": "m", "num_prompts": 1}
        return load

    monkeypatch.setattr("benchmark.serve.load.measure", measured)
    assert fake_spawn("--spawn", "share,hybrid", "--turns", "3") == 0
    modes = ["naive", "share", "hybrid"]
    assert asked == [(turn, modes[(i + turn) % 3]) for turn in range(3) for i in range(3)]


def test_a_server_that_changes_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = (load_with(answer(0.0, 0.1, end)) for end in (0.3, 0.5))
    assert noise_remarks([fast], 1) == ["Measured once, so the noise is unknown; use --turns 3 for ranges."]
    assert noise_remarks([median([fast, fast])], 2) == []
    [line] = noise_remarks([median([fast, slow])], 2)
    assert line.startswith("1/s: 0.50 times as fast in the last turn as in the first")


def test_files_name_the_hash_of_their_data(tmp_path: Path) -> None:
    found = []
    with serving() as server:
        for texts in ("ab", "ab", "ac"):
            file = file_of(tmp_path, *texts)
            load = load_of(server, tmp_path / "out", "--dataset", file, "--num-prompts", "2")
            found.append([load[name] for name in ("requests.sha256", "files.questions")])
    one, same, other = found
    assert one == same and one[0] != other[0] and one[1] != other[1]
    assert other[1] == hashlib.sha256(Path(file).read_bytes()).hexdigest()
    assert f"requests.sha256: {other[0]}" in (tmp_path / "out/serve.md").read_text().replace("`", "")


def test_each_turn_has_prompts_of_its_own() -> None:
    def draw(num: int, seed: int) -> list[LoadRequest]:
        return [LoadRequest(prompt=f"number {i}", output_len=2) for i in range(num)]

    settings = LoadSettings(draw=draw, num_prompts=2, num_turns=2, num_warmups=1, max_concurrency=1)
    with serving() as server:
        for turn in range(2):
            asyncio.run(measure(settings, server.url, rate=math.inf, mode=None, turn=turn))
    asked = [body["messages"][-1]["content"] for body in server.bodies]
    assert asked == [f"number {i}" for i in (4, 0, 1, 2, 3)]  # one to warm up, two, and two


def test_other_texts_and_servers_that_do_not_start_are_found(
    fake_spawn: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fake_spawn("--spawn", "suffix", "--", "--text", "changed") == 1
    assert "0/2" in capsys.readouterr().out
    assert fake_spawn("--spawn", "naive", "--", "--dies") == 2
    assert "the server in mode naive ended with status 1: no such model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--request-rate", "0"], "'0' is not a number above 0, or inf"),
        (["--burstiness", "nan"], "'nan' is not a number"),
        (["--sweep", "1,x"], "'x' is not a number"),
        (["--sweep", "1", "--request-rate", "2"], "--sweep sets the rates"),
        (["--goodput", "itl:5"], "'itl:5' is not a limit on ttft, tpot, e2el"),
        (["--goodput", "ttft:x"], "is not a time in milliseconds"),
        (["--header", "nothing"], "'nothing' is not K=V"),
        (["--extra-body", "[1]"], "is not a JSON object"),
        (["--extra-body", '{"a": NaN}'], "is not a JSON object"),
        (["--top-p", "nan"], "'nan' is not a number"),
        (["--random-range-ratio", "1"], "from 0 to below 1"),
        (["--metric-percentiles", "101"], "'101' is not a list of percentiles"),
        (["--exact", "2"], "list them with --spawn"),
        (["--num-prompts", "0"], "'0' is not a whole number from 1 on"),
        (["--questions", "x.jsonl"], "add --dataset questions"),
        (["--dataset", "no-such-file.jsonl"], "no-such-file.jsonl cannot be read (No such file"),
        (["--spawn", "fast"], "mode is 'fast'"),
        (["--spawn", "naive", "--base-url", "http://x"], "use one or the other"),
        (["--", "--max-batch", "8"], "'--max-batch' is for a server that --spawn starts"),
        (["--base-url", "localhost"], "cannot ask localhost for its models"),
    ],
)
def test_wrong_flags_are_one_line(argv: list[str], message: str, bench: Callable[..., tuple[int, str, str]]) -> None:
    status, _, err = bench("serve", *argv)
    assert status == 2 and message in err and err.count("\n") == 1
