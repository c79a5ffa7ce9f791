"""`python -m benchmark peers`: the clock, the processes, the loop, the figures, and each runtime's file."""

from __future__ import annotations

import io
import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from benchmark.peers import add_parser, gguf_export
from benchmark.peers.catalogue import RUNTIMES, Runtime
from benchmark.peers.command import joined
from benchmark.peers.figures import figures, num_leading
from benchmark.peers.measure import Row, measure
from benchmark.peers.process import PeerError, Worker
from benchmark.peers.protocol import Sample, Settings, TokenClock
from benchmark.peers.report import COLUMNS, markdown, remarks, rich_table
from benchmark.peers.worker import serve
from quant.config import QuantConfig
from sharesd.cli.options import Parser
from sharesd.config import EngineConfig
from tests.helpers.tiny_models import make_checkpoint

PROMPT = [5, 6, 7]
LOOPING = [300, 301, 302, 300, 301]


def settings(**config) -> Settings:
    return Settings(config=EngineConfig(**config), num_tokens=4, num_threads=1)


def sample(*answers, **fields) -> Sample:
    fields = {"num_read": 3, "num_first": 1, "first_s": 0.5, "decode_s": 1.0} | fields
    return Sample(answers=[list(ids) for ids in answers or [(1, 2, 3, 4)]], **fields)


def test_settings_survive_the_way_to_another_process():
    original = settings(quant=QuantConfig.parse("hqq:4:64,down=8", ["layers=0,2"]), target="folder", dtype="float32")
    assert Settings.from_json(json.loads(json.dumps(original.to_json()))) == original
    assert original.dtype == "float32" and settings().dtype == "bfloat16"


def test_clock_keeps_the_first_delivery_apart():
    clock = TokenClock([PROMPT])
    for ids in ([1, 2], [], [3], [4, 5]):
        clock.add(ids)
    found = clock.sample(5)
    assert found.answers == [[1, 2, 3, 4, 5]]
    assert (found.num_read, found.num_first) == (3, 2)
    assert found.first_s > 0 and found.work == (3, found.decode_s)


def test_clock_counts_all_that_comes_out_of_a_batch():
    clock = TokenClock([PROMPT, [8]])
    for row, ids in ((1, [1]), (1, [2]), (0, [3]), (1, [4]), (0, [5, 6])):
        clock.add(ids, row)
    found = clock.sample(3)
    assert found.answers == [[3, 5, 6], [1, 2, 4]]
    assert (found.num_read, found.num_first) == (4, 3), "three tokens were there when both had their first"
    assert found.work == (6, found.first_s + found.decode_s) and found.decode_s > 0
    clock.add([7], 1)
    with pytest.raises(ValueError, match="gave 4 tokens where 3"):
        clock.sample(3)


@pytest.mark.parametrize(
    ("deliveries", "message"), [([[1], [2]], "gave 2 tokens where 4"), ([[1, 2, 3, 4]], "at once")]
)
def test_clock_refuses_what_cannot_be_compared(deliveries, message):
    clock = TokenClock([PROMPT])
    for ids in deliveries:
        clock.add(ids)
    with pytest.raises(ValueError, match=message):
        clock.sample(4)


class FakePeer:
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def prepare(self, variant):
        self.calls.append(("prepare", variant))
        if variant == "broken":
            raise ValueError("no such\n  thing")
        if variant == "odd":
            raise KeyError("x")

    def generate(self, variant, batch):
        self.calls.append((variant, batch))
        return sample(*batch)


def ask(open_peer, *requests: dict) -> list[dict]:
    replies = io.StringIO()
    serve(open_peer, [json.dumps(r) for r in (settings().to_json(), *requests)], replies)
    return [json.loads(line) for line in replies.getvalue().splitlines()]


def request(do: str, variant: str) -> dict:
    return {"do": do, "variant": variant, "batch": [PROMPT]}


def test_worker_warms_each_variant_up_once():
    peer = FakePeer()
    replies = ask(lambda _: peer, request("prepare", "a"), request("measure", "a"), request("measure", "b"))
    assert [reply.get("ok") for reply in replies] == [True, True, None, None]
    assert replies[2]["sample"]["answers"] == [PROMPT]
    once, asked = ("a", [PROMPT]), ("b", [PROMPT])
    assert peer.calls == [("prepare", "a"), once, once, ("prepare", "b"), asked, asked]


def test_worker_reports_errors_and_goes_on():
    replies = ask(lambda _: FakePeer(), *(request("measure", variant) for variant in ("broken", "odd", "a")))
    assert replies[1] == {"error": "no such thing"}
    assert replies[2] == {"error": "KeyError: 'x'"}
    assert "sample" in replies[3]


FAKE_MODULE = """
import os, signal, sys, time
from benchmark.peers.protocol import TokenClock

class Fake:
    def __init__(self, settings):
        self.num_tokens = settings.num_tokens
        if settings.config.target == "damaged":
            raise OSError("weights are damaged")
        print("noise of a library")

    def prepare(self, variant):
        if variant == "dies":
            print("out of ideas", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if variant == "hangs":
            time.sleep(900)
        if variant == "fails":
            raise ValueError("cannot do that")

    def generate(self, variant, batch):
        print("more noise")
        clock = TokenClock(batch)
        for i in range(self.num_tokens):
            for row, prompt in enumerate(batch):
                clock.add([prompt[0] + i], row)
            time.sleep(0.001)
        return clock.sample(self.num_tokens)

open_peer = Fake
"""


@pytest.fixture
def fake_module(tmp_path, monkeypatch) -> str:
    """Name of a module that other processes can import."""
    (tmp_path / "fake_runtime.py").write_text(textwrap.dedent(FAKE_MODULE))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "fake_runtime"


def test_process_is_measured_though_it_prints(fake_module):
    with Worker(fake_module, settings()) as worker:
        worker.prepare("good", [PROMPT])
        found = worker.measure("good", [PROMPT])
        with pytest.raises(PeerError, match="cannot do that") as caught:
            worker.measure("fails", [PROMPT])
        assert not caught.value.dead
        again = worker.measure("good", [PROMPT])
    assert found.answers == again.answers == [[5, 6, 7, 8]]
    assert found.num_first == 1 and found.decode_s > 0.002
    assert 0 <= found.others_busy <= 1


def test_death_of_a_process_is_told_with_its_last_words(fake_module):
    with Worker(fake_module, settings()) as worker:
        with pytest.raises(PeerError, match=r"ended by SIGKILL: out of ideas") as caught:
            worker.measure("dies", [PROMPT])
        assert caught.value.dead


def test_process_that_hangs_is_ended(fake_module):
    with Worker(fake_module, settings()) as worker:
        worker._limit_s = 0.5
        with pytest.raises(PeerError, match="no answer within 0.5 s") as caught:
            worker.measure("hangs", [PROMPT])
        assert caught.value.dead


@pytest.mark.parametrize(
    ("module", "target", "reason"),
    [("fake_runtime", "damaged", "weights are damaged"), ("no_such_module", None, "No module named 'no_such_module'")],
)
def test_process_that_does_not_open_is_dead(fake_module, module, target, reason):
    with pytest.raises(PeerError, match=reason) as caught:
        Worker(module, settings(target=target))
    assert caught.value.dead


class FakeWorker:
    """In place of a process; variants named after what they do."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        log.append(f"open {name}")

    def prepare(self, variant, batch):
        self.log.append(f"prepare {self.name} {variant}")
        if variant == "impossible":
            raise PeerError("impossible")

    def measure(self, variant, batch):
        self.log.append(f"{self.name} {variant} {batch[0][0]}")
        if variant == "dies":
            raise PeerError("it died", dead=True)
        return sample(*batch)

    def close(self):
        self.log.append(f"close {self.name}")


def test_loop_takes_turns_and_isolates_failures():
    rows = [
        Row("a", "plain"),
        Row("a", "impossible"),
        Row("a", "dies"),
        Row("b", "plain"),
        Row("c", "plain", failure="not installed"),
    ]
    log: list[str] = []
    said: list[tuple] = []
    measure(
        rows,
        [[[10]], [[20]]],
        repeats=2,
        open_worker=lambda name: FakeWorker(name, log),
        say=lambda *what: said.append(what),
    )
    assert [row.failure for row in rows] == [None, "impossible", "it died", None, "not installed"]
    assert rows[0].samples.keys() == rows[3].samples.keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert log[:5] == ["open a", "prepare a plain", "prepare a impossible", "prepare a dies", "open b"]
    first, second = log.index("a plain 10"), log.index("b plain 10")
    assert first < second
    assert log.index("b plain 20") < log.index("a plain 20"), "the order changes from prompt to prompt"
    assert log.count("open a") == log.count("close a") == 2, "opened again after its death"
    assert not any("c" in line.split() for line in log)
    assert all(done < total == 25 for _, done, total in said)


def test_loop_survives_runtimes_that_do_not_open():
    def refuse(name):
        raise PeerError("broken installation", dead=True)

    rows = [Row("a", "plain"), Row("a", "lookup")]
    measure(rows, [[[1]]], repeats=1, open_worker=refuse, say=lambda *_: None)
    assert [row.failure for row in rows] == ["broken installation"] * 2


def test_loop_closes_processes_when_interrupted():
    log: list[str] = []

    def interrupt(what, done, total):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure([Row("a", "plain")], [[[1]]], repeats=1, open_worker=lambda n: FakeWorker(n, log), say=interrupt)
    assert log[-1] == "close a"


def handmade() -> list[Row]:
    """Two prompts, two repeats, 3 decoded tokens each; speeds 3, 6, 1.5 tok/s."""
    return [
        Row("sharesd", "naive", samples={(r, p): sample(decode_s=1.0 + r) for r in (0, 1) for p in (0, 1)}),
        Row("sharesd", "share", samples={(r, p): sample(decode_s=0.5) for r in (0, 1) for p in (0, 1)}),
        Row("openvino", "plain", samples={(r, p): sample((1, 2, 3, 9), decode_s=2.0) for r in (0, 1) for p in (0, 1)}),
        Row(
            "openvino",
            "lookup",
            samples={
                (0, 0): sample((1, 2, 3, 9), decode_s=1.0, first_s=0.2, others_busy=0.4),
                (0, 1): sample((1, 7, 8, 9), decode_s=1.0, num_first=2),
                (1, 0): sample((1, 2, 3, 9), decode_s=0.5),
                (1, 1): sample((1, 2, 3, 9), decode_s=1.0, num_first=2),
            },
        ),
        Row("llamacpp", "plain", failure="not installed: pip install llama-cpp-python"),
    ]


def test_figures_of_handmade_samples():
    naive, share, plain, lookup, absent = figures(handmade())
    assert absent is None
    assert naive.tokens_per_second == 3.0, "the fastest repeat of each prompt"
    assert naive.tokens_per_second_range == (1.5, 3.0)
    assert (naive.ratio_to_naive, naive.best_mode, naive.best_mode_ratio) == (1.0, "share", 2.0)
    assert naive.same_as_plain is None and naive.leading_as_naive is None
    assert (share.ratio_to_naive, share.best_mode_ratio, share.same_as_plain) == (2.0, 1.0, 1.0)
    assert (plain.ratio_to_naive, plain.best_mode_ratio) == (0.5, 4.0)
    assert plain.leading_as_naive == 3.0
    assert lookup.tokens_per_second == pytest.approx((3 + 2) / 1.5)
    assert lookup.same_as_plain == 0.75
    assert not lookup.same_in_all_repeats and plain.same_in_all_repeats
    assert lookup.leading_as_naive == (3 + 1 + 3 + 3) / 4
    assert lookup.first_token_s == pytest.approx((0.2 + 0.5) / 2)
    assert lookup.read_per_second == pytest.approx(6 / 0.7) and plain.read_per_second == 6.0
    assert lookup.others_busy == pytest.approx(0.1)


def test_figures_without_ours_have_no_ratios():
    [found] = figures([handmade()[2]])
    assert found.ratio_to_naive is found.best_mode is found.best_mode_ratio is found.leading_as_naive is None


def test_figures_of_several_at_once_count_all_tokens_and_all_time():
    whole = {"num_read": 8, "num_first": 3, "first_s": 1.0}
    naive = Row("sharesd", "naive", samples={(0, 0): sample((1, 2, 3, 4), (5, 6, 7, 8), decode_s=3.0, **whole)})
    other = Row("openvino", "plain", samples={(0, 0): sample((1, 2, 3, 9), (5, 6, 7, 8), decode_s=7.0, **whole)})
    ours, theirs = figures([naive, other])
    assert (ours.tokens_per_second, theirs.tokens_per_second, theirs.ratio_to_naive) == (2.0, 1.0, 0.5)
    assert theirs.leading_as_naive == 3.5 and theirs.read_per_second == 8.0


def test_leading_tokens():
    assert num_leading((1, 2, 3, 4), (1, 2, 9, 4)) == 2
    assert num_leading((1, 2), (1, 2)) == 2


def handmade_report() -> dict:
    from benchmark.peers.command import _row

    rows = handmade()
    return {
        "settings": {
            "model": "tiny",
            "command": "python -m benchmark peers",
            "questions": "ours",
            "num_prompts": 2,
            "prompt_format": "plain",
            "prompt_tokens": [7, 9],
            "concurrency": 1,
            "num_tokens": 4,
            "dtype": "bfloat16",
            "device": "cpu",
            "num_threads": 2,
            "repeats": 2,
        },
        "environment": {"cpu": "a chip", "gpu": None},
        "rows": json.loads(json.dumps([_row(row, found) for row, found in zip(rows, figures(rows), strict=True)])),
    }


def test_report_shows_numbers_and_absent_runtimes():
    report = handmade_report()
    page = markdown(report)
    assert (
        "| openvino | lookup: prompt_lookup: 5 tokens after 3-grams | 3.3 (2.5 to 3.3) | 1.11x | 1.80x | 75.0 % |"
        in page
    )
    assert "| llamacpp | plain: Llama.generate | - | - | - | - | - | - | - |" in page
    assert "- llamacpp plain: not installed: pip install llama-cpp-python" in page
    assert "another text in another repeat: openvino lookup" in page
    assert "cpu: a chip" in page and "gpu" not in page
    screen = Console(width=80, file=io.StringIO())
    screen.print(rich_table(report))
    text = screen.file.getvalue()
    assert "2.00x" in text and "…" not in text and "llamacpp" not in text
    assert all(name in text for name in COLUMNS)


def test_report_warns_of_a_busy_machine():
    report = handmade_report()
    assert not any("other processes" in line for line in remarks(report))
    report["rows"][0]["figures"]["others_busy"] = 0.5
    assert any("50.0 %" in line for line in remarks(report))


def run_command(*argv: str) -> int:
    parser = Parser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["peers", *argv])
    return args.run(args)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("peers") / "tiny")


def test_command_from_flags_to_files(fake_module, checkpoint, tmp_path, monkeypatch, capsys):
    fake = Runtime(
        module=fake_module, package="json", distribution="fake", variants={"good": "well", "fails": "not at all"}
    )
    absent = Runtime(module="none", package="no_such_package", distribution="no-such", variants={"plain": "never"})
    monkeypatch.setitem(RUNTIMES, "fake", fake)
    monkeypatch.setitem(RUNTIMES, "absent", absent)
    flags = ["--target", str(checkpoint), "--num-questions", "2", "--max-new-tokens", "5", "--repeats", "2"]
    out = tmp_path / "out"
    assert run_command("--peers", "fake, absent,fake", *flags, "--threads", "1", "--out-dir", str(out)) == 0
    report = json.loads((out / "peers.json").read_text())
    good, fails, gone = report["rows"]
    assert good["figures"]["same_in_all_repeats"] and len(good["samples"]) == 4
    assert fails["failure"] == "cannot do that" and fails["figures"] is None
    assert gone["failure"] == "not installed: pip install no-such"
    assert report["settings"]["num_tokens"] == 5 and len(report["settings"]["prompt_tokens"]) == 2
    assert "| fake | good: well |" in (out / "peers.md").read_text()
    assert "peers.md" in capsys.readouterr().out
    assert run_command("--peers", "absent", *flags, "--out-dir", str(out)) == 1
    flags = ["--target", str(checkpoint), "--max-new-tokens", "5", "--repeats", "1", "--out-dir", str(out)]
    assert run_command("--peers", "fake:good", *flags, "--concurrency", "2", "--prompt-tokens", "50") == 0
    report = json.loads((out / "peers.json").read_text())
    [good] = report["rows"]
    assert report["settings"]["prompt_tokens"] == [50, 50] and len(good["samples"]) == 1
    assert "50 to 50 tokens long, asked 2 at once" in (out / "peers.md").read_text()


def test_long_prompts_begin_with_different_questions():
    assert joined([[1, 2], [3], [4, 5]], 4, 3) == [[1, 2, 3, 4], [3, 4, 5, 1], [4, 5, 1, 2]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peers", "ours"], "--peers names 'ours'"),
        (["--max-new-tokens", "1"], "from 2 on"),
        (["--questions", "no-such-file"], "no-such-file"),
        (["--max-context", "32"], "context holds 32"),
        (["--peers", "sharesd:plain"], "sharesd has naive, share"),
        (["--prompt-tokens", "2000"], "a prompt has 2000 tokens, 64 are to follow"),
        (["--concurrency", "3", "--num-questions", "4"], "ask a multiple"),
    ],
)
def test_command_refuses_before_anything_is_measured(flags, message, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_command("--target", str(checkpoint), "--out-dir", str(tmp_path), *flags)
    assert not list(tmp_path.iterdir())


def small(checkpoint: Path, **config) -> Settings:
    config = EngineConfig(target=str(checkpoint), device="cpu", compile="off", max_context=64, **config)
    return Settings(config=config, num_tokens=12, num_threads=1)


def test_transformers_gives_our_text_in_all_variants(checkpoint, monkeypatch, tmp_path):
    from benchmark.peers import ours, transformers_peer

    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path))
    told = small(checkpoint, dtype="float32")
    peers = {"transformers": transformers_peer.open_peer(told), "sharesd": ours.open_peer(told)}
    texts = {}
    for name, peer in peers.items():
        for variant in RUNTIMES[name].variants:
            peer.prepare(variant)
            found = peer.generate(variant, [LOOPING])
            assert 1 <= found.num_first < told.num_tokens
            texts[name, variant] = tuple(found.answers[0])
    assert len(set(texts.values())) == 1, texts


def test_several_at_once_get_the_texts_that_they_get_alone(checkpoint, monkeypatch, tmp_path):
    from benchmark.peers import ours, transformers_peer

    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path))
    told = small(checkpoint, dtype="float32", max_batch=3)
    batch = [LOOPING, PROMPT, [300, 5]]
    peer = ours.open_peer(small(checkpoint, dtype="float32"))
    peer.prepare("naive")
    alone = [peer.generate("naive", [prompt]).answers[0] for prompt in batch]
    ways = {ours: ("naive", "hybrid"), transformers_peer: ("plain", "continuous")}
    for module, variants in ways.items():
        peer = module.open_peer(told)
        for variant in variants:
            peer.prepare(variant)
            for _ in range(2):
                assert peer.generate(variant, batch).answers == alone, variant
    with pytest.raises(ValueError, match="drafts answers one prompt at a time"):
        peer.prepare("lookup")


def test_transformers_goes_on_after_end_tokens(tmp_path, monkeypatch):
    from benchmark.peers import transformers_peer

    folder = make_checkpoint(tmp_path / "model")
    first = transformers_peer.open_peer(small(folder, dtype="float32"))
    first.prepare("plain")
    text = first.generate("plain", [PROMPT]).answers[0]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": text[2]}))
    second = transformers_peer.open_peer(small(folder, dtype="float32"))
    second.prepare("plain")
    assert second.generate("plain", [PROMPT]).answers[0] == text


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_exported_gguf_holds_the_checkpoint(checkpoint, cache):
    file = gguf_export.gguf_file(checkpoint, "BF16")
    reader = gguf.GGUFReader(file)
    stored = {t.name: torch.from_numpy(np.array(gguf.dequantize(t.data, t.tensor_type))) for t in reader.tensors}
    ours = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    config = json.loads((checkpoint / "config.json").read_text())
    assert len(stored) == len(ours)
    assert torch.equal(stored["token_embd.weight"], ours["model.embed_tokens.weight"])
    assert torch.equal(stored["blk.1.ffn_down.weight"], ours["model.layers.1.mlp.down_proj.weight"])
    q_ND = ours["model.layers.0.self_attn.q_proj.weight"].view(config["num_attention_heads"], 2, 8, -1)
    assert torch.equal(stored["blk.0.attn_q.weight"].view(-1, 8, 2, q_ND.shape[-1]), q_ND.transpose(1, 2))
    assert reader.fields["llama.attention.head_count_kv"].contents() == config["num_key_value_heads"]
    assert reader.fields["llama.rope.freq_base"].contents() == config["rope_theta"]
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == config["vocab_size"] and tokens[config["eos_token_id"]] == "<|im_end|>"
    written = file.stat().st_mtime_ns
    assert gguf_export.gguf_file(checkpoint, "BF16") == file and file.stat().st_mtime_ns == written
    assert [f.name for f in file.parent.iterdir()] == [file.name], "nothing half is left"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "Llama checkpoints only"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotary scaling"),
        ({"attention_bias": True}, "no biases"),
    ],
)
def test_export_refuses_what_it_would_get_wrong(change, message, cache, tmp_path):
    folder = make_checkpoint(tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        gguf_export.gguf_file(folder, "F16")
    assert not list((cache / "gguf").iterdir())


@pytest.fixture
def stand_in_openvino(monkeypatch) -> ModuleType:
    """Records how it is used and answers with the numbers from 0 on, two at a time after the first."""
    library = ModuleType("openvino_genai")
    library.used = []

    def convert(path, device, **options):
        assert options == {"enable_save_ov_model": True}
        (Path(path).parent / "openvino_model.xml").write_text("<net/>")

    class Handle:
        def __init__(self, num_tokens):
            self.num_tokens, self.given = num_tokens, 0

        def can_read(self):
            return self.given < self.num_tokens

        def read(self):
            first, self.given = self.given, min(self.num_tokens, self.given + 2 if self.given else 1)
            return {0: SimpleNamespace(generated_ids=list(range(first, self.given)))}

    class Pipeline:
        def __init__(self, path, scheduler, device, options):
            library.used.append((Path(path), scheduler, options))
            self.handles = []

        def add_request(self, number, ids, config):
            library.used.append((number, ids.tolist(), vars(config)))
            self.handles.append(Handle(config.max_new_tokens))
            return self.handles[-1]

        def has_non_finished_requests(self):
            return any(handle.can_read() for handle in self.handles)

        def step(self):
            pass

    library.LLMPipeline, library.ContinuousBatchingPipeline = convert, Pipeline
    library.SchedulerConfig = library.GenerationConfig = SimpleNamespace
    library.draft_model = lambda path, device, **options: ("draft", Path(path))
    library.get_version = lambda: "1"
    runtime = ModuleType("openvino")
    runtime.Tensor = lambda array: array
    monkeypatch.setitem(sys.modules, "openvino_genai", library)
    monkeypatch.setitem(sys.modules, "openvino", runtime)
    return library


def test_openvino_is_asked_for_comparable_work(stand_in_openvino, checkpoint, cache):
    from benchmark.peers import openvino_peer

    peer = openvino_peer.open_peer(small(checkpoint, num_draft=3))
    found = {}
    for variant in RUNTIMES["openvino"].variants:
        peer.prepare(variant)
        folder, scheduler, options = stand_in_openvino.used[-1]
        assert (folder / "openvino_model.xml").exists() and not list(folder.glob("*.gguf"))
        assert options["INFERENCE_PRECISION_HINT"] == "bf16" and options["INFERENCE_NUM_THREADS"] == 1
        assert scheduler.enable_prefix_caching is False
        result = peer.generate(variant, [PROMPT, [9]])
        assert result.answers == [list(range(12))] * 2 and result.num_first == 2
        assert [used[:2] for used in stand_in_openvino.used[-2:]] == [(0, [PROMPT]), (1, [[9]])]
        config = stand_in_openvino.used[-1][2]
        assert config["ignore_eos"] and not config["do_sample"]
        found[variant] = (options, config)
    assert "Q4_0" in found["draft"][0]["draft_model"][1].name and found["draft"][1]["num_assistant_tokens"] == 3
    assert found["lookup"][0]["prompt_lookup"] and found["lookup"][1]["max_ngram_size"] == 3
    assert "prompt_lookup" not in found["plain"][0] and "num_assistant_tokens" not in found["plain"][1]


@pytest.fixture
def stand_in_llama(monkeypatch) -> ModuleType:
    library = ModuleType("llama_cpp")
    library.used = []

    class Llama:
        def __init__(self, path, **options):
            library.used.append((Path(path), options))
            self.held = 1

        def reset(self):
            self.held = 0

        def generate(self, tokens, temp):
            assert self.held == 0 and temp == 0.0 and tokens == PROMPT
            self.held = 1
            yield from range(10**6)

    library.Llama = Llama
    library.llama_backend_init = lambda: None
    library.llama_model_default_params = SimpleNamespace
    library.llama_context_default_params = lambda: SimpleNamespace(n_batch=2)
    library.llama_model_load_from_file = lambda path, params: Path(path.decode())
    library.llama_sampler_init_greedy = lambda: "greedy"
    library.llama_get_memory = lambda context: context.held
    library.llama_memory_clear = lambda held, data: held.clear()

    def open_context(model, params):
        library.used.append((model, vars(params)))
        return SimpleNamespace(held={}, asked=[])

    def new_batch(num_tokens, embd, num_ids):
        assert (embd, num_ids) == (0, 1)
        numbers = {name: [0] * num_tokens for name in ("token", "pos", "logits", "n_seq_id")}
        return SimpleNamespace(**numbers, seq_id=[[0] for _ in range(num_tokens)], n_tokens=0)

    def decode(context, batch):
        """Each token must lie behind those of its sequence."""
        context.asked = []
        for i in range(batch.n_tokens):
            row, at = batch.seq_id[i][0], batch.pos[i]
            assert batch.n_seq_id[i] == 1 and at == len(context.held.setdefault(row, []))
            context.held[row].append(batch.token[i])
            context.asked.append((row, batch.logits[i]))
        return 0

    def choose(greedy, context, i):
        row, wanted = context.asked[i]
        assert greedy == "greedy" and wanted
        return sum(context.held[row]) % 100

    library.llama_init_from_model, library.llama_batch_init = open_context, new_batch
    library.llama_decode, library.llama_sampler_sample = decode, choose
    speculative = ModuleType("llama_cpp.llama_speculative")
    speculative.LlamaPromptLookupDecoding = lambda num_pred_tokens: ("lookup", num_pred_tokens)
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    return library


def test_llamacpp_is_asked_for_comparable_work(stand_in_llama, checkpoint, cache):
    from benchmark.peers import llamacpp_peer

    peer = llamacpp_peer.open_peer(small(checkpoint))
    for variant in ("plain", "lookup"):
        peer.prepare(variant)
        file, options = stand_in_llama.used[-1]
        assert file.exists() and file.stem.endswith("BF16")
        assert options["n_ctx"] == 64 and options["n_threads"] == options["n_threads_batch"] == 1
        assert options["logits_all"] == (variant == "lookup") and (options["draft_model"] is None) == (
            variant == "plain"
        )
        for _ in range(2):
            assert peer.generate(variant, [PROMPT]).answers == [list(range(12))]


def sums(prompt, num_tokens) -> list[int]:
    """What the stand-in answers: each token the sum of all before."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(sum(ids) % 100)
    return ids[len(prompt) :]


@pytest.mark.parametrize(("variant", "weights"), [("continuous", "BF16"), ("f16", "F16"), ("q4_0", "Q4_0")])
def test_llamacpp_decodes_sequences_together(stand_in_llama, checkpoint, cache, variant, weights):
    from benchmark.peers import llamacpp_peer

    peer = llamacpp_peer.open_peer(small(checkpoint, max_batch=2))
    peer.prepare(variant)
    file, options = stand_in_llama.used[-1]
    assert file.exists() and file.stem.endswith(weights)
    assert (options["n_ctx"], options["n_seq_max"]) == (128, 2)
    for _ in range(2):
        found = peer.generate(variant, [PROMPT, [9, 8]])
        assert found.answers == [sums(PROMPT, 12), sums([9, 8], 12)]
    with pytest.raises(ValueError, match="Llama.generate answers one prompt at a time"):
        peer.prepare("plain")


def test_foreign_runtimes_say_what_they_cannot_do(stand_in_openvino, stand_in_llama, checkpoint):
    from benchmark.peers import llamacpp_peer, openvino_peer

    for module in (openvino_peer, llamacpp_peer):
        with pytest.raises(ValueError, match="float64"):
            module.open_peer(small(checkpoint, dtype="float64"))
        told = small(checkpoint)
        with pytest.raises(ValueError, match="--device cpu"):
            module.open_peer(replace(told, config=replace(told.config, device="cuda")))
