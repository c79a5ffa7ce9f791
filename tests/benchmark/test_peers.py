"""`bench peers`: the clock, the processes, the loop, the figures, and each runtime's adapter."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmark.__main__ import main
from benchmark.peers.measure import PeerResult, figures, measure
from benchmark.peers.peer import PEERS, Peer, PeerSettings
from benchmark.peers.process import PeerError, Sample, Worker, timed
from sharesd.config import EngineConfig

PROMPT = [5, 6, 7]
LOOPING = [300, 301, 302, 300, 301]


def settings(**config: Any) -> PeerSettings:
    return PeerSettings(config=EngineConfig(**config), num_tokens=4, num_threads=1)


def sample(*ids: int, **fields: Any) -> Sample:
    fields = {"num_prompt": 3, "num_first": 1, "first_s": 0.5, "decode_s": 1.0} | fields
    return Sample(token_ids=list(ids or (1, 2, 3, 4)), **fields)


class Fake(Peer):
    """Answers with the numbers after the prompt's first; variants named after what they do."""

    package, pip = "benchmark", "benchmark"
    variants = {"good": "well", "fails": "never", "dies": "", "hangs": "", "at once": "", "short": ""}

    def __init__(self, settings: PeerSettings) -> None:
        super().__init__(settings)
        if settings.config.target == "damaged":
            raise OSError("weights are damaged")
        print("noise of a library")

    def prepare(self, variant: str) -> None:
        if variant == "dies":
            print("out of ideas", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if variant == "hangs":
            time.sleep(900)
        if variant == "fails":
            raise ValueError("cannot do that")

    def answer(self, variant: str, prompt: list[int], deliver: Callable) -> None:
        ids = [prompt[0] + i for i in range(self.settings.num_tokens - (variant == "short"))]
        for each in [ids] if variant == "at once" else [[i] for i in ids]:
            time.sleep(0.001)
            deliver(each)


class Absent(Fake):
    package, pip, variants = "no_such_package", "no-such", {"plain": "never"}


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runtimes more, in processes too: what they import is this file."""
    monkeypatch.setitem(PEERS, "fake", Fake)
    monkeypatch.setitem(PEERS, "absent", Absent)
    monkeypatch.setattr("benchmark.peers.process.serve", serve_fake)


def serve_fake(*arguments: Any) -> None:
    from benchmark.peers import process

    PEERS["fake"] = Fake
    process.serve(*arguments)


def test_the_first_delivery_stands_apart() -> None:
    found = timed(Fake(settings()), "good", PROMPT)
    assert found.token_ids == [5, 6, 7, 8] and (found.num_prompt, found.num_first) == (3, 1)
    assert found.first_s > 0 and found.decode_s >= 0.003
    messages = {"short": "returned 3 tokens instead of 4", "at once": "at once, so decoding cannot be"}
    for variant, message in messages.items():
        with pytest.raises(ValueError, match=message):
            timed(Fake(settings()), variant, PROMPT)


@pytest.mark.subprocess
def test_processes_are_measured_and_their_death_is_an_error() -> None:
    def failed(what: Callable[[], object], message: str, *, dead: bool = True) -> None:
        with pytest.raises(PeerError, match=message) as caught:
            what()
        assert caught.value.dead is dead

    worker = Worker("fake", settings(), limit_s=60.0)
    worker.prepare("good", PROMPT)
    assert worker.measure("good", PROMPT).token_ids == [5, 6, 7, 8]
    failed(lambda: worker.measure("fails", PROMPT), "cannot do that", dead=False)
    assert worker.measure("good", [9]).token_ids == [9, 10, 11, 12]
    failed(lambda: worker.measure("dies", PROMPT), "ended by SIGKILL: out of ideas")
    worker.close()
    worker = Worker("fake", settings(), limit_s=60.0)
    worker._limit_s = 0.5
    failed(lambda: worker.measure("hangs", PROMPT), "no answer within 0.5 s")
    worker.close()
    failed(lambda: Worker("fake", settings(target="damaged"), limit_s=60.0), "weights are damaged")


class FakeWorker:
    """In place of a process."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        log.append(f"open {name}")

    def prepare(self, variant: str, prompt: list[int]) -> None:
        self.log.append(f"prepare {self.name} {variant}")
        if variant == "impossible":
            raise PeerError("impossible")

    def measure(self, variant: str, prompt: list[int]) -> Sample:
        self.log.append(f"{self.name} {variant} {prompt[0]}")
        if variant == "dies":
            raise PeerError("it died", dead=True)
        return sample(*prompt)

    def close(self) -> None:
        self.log.append(f"close {self.name}")


def test_the_loop_takes_turns_and_isolates_failures() -> None:
    rows = [PeerResult("a", name) for name in ("plain", "impossible", "dies")]
    rows += [PeerResult("b", "plain"), PeerResult("c", "plain", failure="not installed")]
    log: list[str] = []
    said: list[Any] = []

    def open_worker(name: str) -> FakeWorker:
        return FakeWorker(name, log)

    measure(rows, [[10], [20]], repeats=2, open_worker=open_worker, report=lambda *what: said.append(what))
    assert [row.failure for row in rows] == [None, "impossible", "it died", None, "not installed"]
    assert rows[0].samples.keys() == rows[3].samples.keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert log[:5] == ["open a", "prepare a plain", "prepare a impossible", "prepare a dies", "open b"]
    assert log.index("a plain 10") < log.index("b plain 10")
    assert log.index("b plain 20") < log.index("a plain 20"), "the order changes from prompt to prompt"
    assert log.count("open a") == log.count("close a") == 2, "opened again after its death"
    assert not any("c" in line.split() for line in log) and all(done < total == 25 for _, done, total in said)

    def interrupt(what: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure([PeerResult("a", "p")], [[1]], repeats=1, open_worker=open_worker, report=interrupt)
    assert log[-1] == "close a"


def test_figures_of_handmade_samples() -> None:
    """Two prompts, two repeats, 3 decoded tokens each."""
    keys = [(repeat, prompt) for repeat in (0, 1) for prompt in (0, 1)]
    looked_up = [sample(1, 2, 3, 9, first_s=0.2), sample(1, 7, 8, 9, num_first=2)]
    looked_up += [sample(1, 2, 3, 9, decode_s=0.5), sample(1, 2, 3, 9, num_first=2)]
    rows = [
        PeerResult("sharesd", "naive", samples={(r, p): sample(decode_s=1.0 + r) for r, p in keys}),
        PeerResult("openvino", "plain", samples={key: sample(1, 2, 3, 9, decode_s=2.0) for key in keys}),
        PeerResult("openvino", "lookup", samples=dict(zip(keys, looked_up, strict=True))),
        PeerResult("llamacpp", "plain", failure="not installed"),
    ]
    found = figures(rows, lambda name: next(iter(PEERS[name].variants)))
    naive, plain, lookup = (each for each in found if each)
    assert found[3] is None and naive["tokens_per_second"] == 3.0, "the fastest repeat of each prompt"
    assert naive["tokens_per_second_range"] == [1.5, 3.0] and naive["ratio_to_naive"] == 1.0
    assert naive["same_as_plain"] is None and plain["ratio_to_naive"] == 0.5 and plain["read_per_second"] == 6.0
    assert lookup["tokens_per_second"] == pytest.approx((3 + 2) / 1.5) and lookup["same_as_plain"] == 0.75
    assert not lookup["same_in_all_repeats"] and plain["same_in_all_repeats"]
    assert lookup["first_token_s"] == pytest.approx(0.35) and lookup["read_per_second"] == pytest.approx(6 / 0.7)
    [alone] = figures(rows[1:2], lambda name: "plain")
    assert alone and alone["ratio_to_naive"] is None


@pytest.mark.subprocess
def test_the_command_writes_a_report(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target", str(tiny), "--num-questions", "2", "--max-new-tokens", "5", "--repeats", "2"]
    flags += ["--threads", "1", "--out-dir", str(tmp_path)]
    assert main(["peers", "--peers", "fake:good, absent,fake:fails,fake:good", *flags]) == 0
    report = json.loads((tmp_path / "peers.json").read_text())
    good, gone, fails = report["rows"]
    assert good["figures"]["same_in_all_repeats"] and len(good["samples"]) == 4
    assert fails["failure"] == "cannot do that" and fails["figures"] is None
    assert gone["failure"] == "not installed: pip install no-such"
    assert report["settings"]["num_tokens"] == 5 and len(report["settings"]["prompt_tokens"]) == 2
    page = (tmp_path / "peers.md").read_text()
    assert "| fake | good |" in page and "- absent plain: not installed" in page and "| fake | fails |" not in page
    assert "peers.md" in capsys.readouterr().out
    assert main(["peers", "--peers", "absent", *flags]) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peers", "ours"], "--peers names 'ours'"),
        (["--max-new-tokens", "1"], "from 2 on"),
        (["--questions", "no-such-file"], "no-such-file"),
        (["--max-context", "32"], "the context holds 32"),
        (["--peers", "sharesd:plain"], "sharesd has naive, share"),
        (["--gguf", "none.gguf"], "--gguf none.gguf does not exist"),
    ],
)
def test_mistakes_cost_a_line(flags: list[str], message: str, tiny: Path, tmp_path: Path, bench: Any) -> None:
    status, _, err = bench("peers", "--target", str(tiny), "--out-dir", str(tmp_path), *flags)
    assert status == 2 and message in err and not list(tmp_path.iterdir())


def small(tiny: Path, gguf: str | None = None, **config: Any) -> PeerSettings:
    config = {"device": "cpu", "compile": "off", "max_context": 64, **config}
    return PeerSettings(config=EngineConfig(target=str(tiny), **config), num_tokens=12, num_threads=1, gguf=gguf)


def deliveries(peer: Peer, variant: str, prompt: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    peer.prepare(variant)
    peer.answer(variant, prompt, lambda ids: found.append(list(ids)))
    return list(filter(None, found))


@pytest.mark.usefixtures("own_cache")
def test_transformers_gives_our_text_in_all_variants(tiny: Path) -> None:
    texts = set()
    for name in ("transformers", "sharesd"):
        peer = PEERS[name](small(tiny, dtype="float32"))
        for variant in peer.variants:
            found = deliveries(peer, variant, LOOPING)
            assert len(found) > 1
            texts.add(tuple(chain.from_iterable(found)))
    assert len(texts) == 1 and len(texts.pop()) == 12


def test_transformers_goes_on_after_end_tokens(tmp_path: Path) -> None:
    from tests.helpers.tiny_models import make_checkpoint  # not above: processes import this file, and no torch with it

    folder, peer = make_checkpoint(tmp_path / "model"), PEERS["transformers"]
    text = deliveries(peer(small(folder, dtype="float32")), "plain", PROMPT)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": text[2][0]}))
    assert deliveries(peer(small(folder, dtype="float32")), "plain", PROMPT) == text


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    return str(tmp_path / "model.gguf")


@pytest.fixture
def stand_in_openvino(monkeypatch: pytest.MonkeyPatch, own_cache: None) -> ModuleType:
    """Records how it is used and answers with the numbers from 0 on, two at a time after the first."""
    library: Any = ModuleType("openvino_genai")
    library.used = []

    def convert(path: Path, device: str, **options: Any) -> None:
        assert options == {"enable_save_ov_model": True}
        (Path(path).parent / "openvino_model.xml").write_text("<net/>")

    class Handle(list[list[int]]):
        def can_read(self) -> bool:
            return bool(self)

        def read(self) -> dict[int, Any]:
            return {0: SimpleNamespace(generated_ids=self.pop(0))}

    class Pipeline:
        def __init__(self, path: Path, scheduler: Any, device: str, options: dict[str, Any]) -> None:
            library.used.append((Path(path), scheduler, options))

        def add_request(self, number: int, ids: Any, config: Any) -> Handle:
            library.used.append((ids.tolist(), vars(config)))
            handle = Handle([[0], *([i, i + 1] for i in range(1, 11, 2)), [11]])
            self.has_non_finished_requests, self.step = handle.can_read, lambda: None
            return handle

    library.LLMPipeline, library.ContinuousBatchingPipeline = convert, Pipeline
    library.SchedulerConfig = library.GenerationConfig = SimpleNamespace
    library.get_version = lambda: "1"
    runtime: Any = ModuleType("openvino")
    runtime.Tensor = lambda array: array
    monkeypatch.setitem(sys.modules, "openvino_genai", library)
    monkeypatch.setitem(sys.modules, "openvino", runtime)
    return library


def test_openvino_is_asked_for_comparable_work(stand_in_openvino: Any, tiny: Path, gguf: str) -> None:
    peer = PEERS["openvino"](small(tiny, gguf))
    for variant in peer.variants:
        assert [*chain.from_iterable(deliveries(peer, variant, PROMPT))] == list(range(12))
        (folder, scheduler, options), (ids, config) = stand_in_openvino.used[-2:]
        assert (folder / "openvino_model.xml").exists() and not list(folder.glob("*.gguf"))
        assert options["INFERENCE_PRECISION_HINT"] == "bf16" and options["INFERENCE_NUM_THREADS"] == 1
        assert scheduler.enable_prefix_caching is False and ids == [PROMPT]
        assert config["ignore_eos"] and not config["do_sample"] and config["max_new_tokens"] == 12
        assert ("prompt_lookup" in options) == ("max_ngram_size" in config) == (variant == "lookup")
    with pytest.raises(ValueError, match="float64"):
        PEERS["openvino"](small(tiny, gguf, dtype="float64"))


def test_llamacpp_is_asked_for_comparable_work(monkeypatch: pytest.MonkeyPatch, tiny: Path, gguf: str) -> None:
    library: Any = ModuleType("llama_cpp")
    used: list[Any] = []

    class Llama:
        def __init__(self, path: str, **options: Any) -> None:
            used.append((path, options))
            self.held = 1

        def reset(self) -> None:
            self.held = 0

        def generate(self, tokens: list[int], temp: float) -> Any:
            assert self.held == 0 and temp == 0.0 and tokens == PROMPT
            self.held = 1
            yield from range(10**6)

    library.Llama = Llama
    speculative: Any = ModuleType("llama_cpp.llama_speculative")
    speculative.LlamaPromptLookupDecoding = lambda num_pred_tokens: ("lookup", num_pred_tokens)
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    peer = PEERS["llamacpp"](small(tiny, gguf))
    for variant in peer.variants:
        for _ in range(2):
            assert [*chain.from_iterable(deliveries(peer, variant, PROMPT))] == list(range(12))
        path, options = used[-1]
        assert path == gguf and options["n_ctx"] == 64 and options["n_threads"] == options["n_threads_batch"] == 1
        assert options["logits_all"] == (variant == "lookup") == (options["draft_model"] is not None)


def test_runtimes_say_what_they_need(stand_in_openvino: Any, monkeypatch: Any, tiny: Path, gguf: str) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", ModuleType("llama_cpp"))
    for name in ("openvino", "llamacpp"):
        with pytest.raises(ValueError, match="--gguf FILE"):
            PEERS[name](small(tiny))
        with pytest.raises(ValueError, match="--device cpu"):
            PEERS[name](small(tiny, gguf, device="cuda"))
