"""`python -m train generate` and `inspect`: whose words are in the loss, and that nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import CaptureFixture, MonkeyPatch
from safetensors.torch import load_file, save_file

from sharesd.cli import options
from sharesd.config import EngineConfig
from sharesd.data.json_lines import records
from sharesd.data.prompt_files import conversation, read_prompts
from sharesd.engine.engine import Engine
from sharesd.models.tokenizer import load_tokenizer
from sharesd.reports.questions import load
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from tests.helpers.in_mode import in_mode
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import make_checkpoint
from tests.helpers.tiny_tokenizer import SPECIAL, WORDS
from train.__main__ import main
from train.data.generate import _device, add_parser, read
from train.data.loss_mask import masked
from train.data.shards import AnswerShard, answers_in

SHARE = ("from", "value")
"""Names in ShareGPT's form."""


def turns(*said: tuple[str, Any], names: tuple[str, str] = ("role", "content")) -> list[dict[str, Any]]:
    return [dict(zip(names, each, strict=True)) for each in said]


ASKED = (("human", "how is it"), ("human", "why"))
RECORDS: list[dict[str, Any]] = [
    {"instruction": "why is the sky blue", "input": "red", "output": "the cat"},
    {"conversations": turns(("human", "the cat"), ("gpt", "no"), *ASKED, names=SHARE)},
    {"messages": turns(("system", "this is a mat"), ("user", [{"type": "text", "text": "sat on"}]))},
    {"instruction": "the mat", "instances": [{"input": "was red", "output": "yes"}]},
    {"question": "how is it", "answer": "fine"},
    {"prompt": "why\u2028how", "system": "the sky is blue"},
    *({"prompt": f"the cat and the mat {i}"} for i in range(6)),
]
BAD: list[tuple[Any, str]] = [
    ({"prompt": "how " * 200}, "too long for the context"),
    ({"question": "how is it"}, "asks what an earlier one does"),
    ({"messages": turns(("assistant", "the"))}, "a user's message is missing or empty"),
    ({"messages": turns(("user", " "))}, "a user's message is missing or empty"),
    ({"messages": turns(("user", "a"), ("system", "b"))}, "a system message in the midst"),
    ({"conversations": turns(("tool", "a"), names=SHARE)}, "has a turn of role 'tool'"),
    ({"conversations": ["a"]}, "has a turn that is not a JSON object"),
    ({"messages": turns(("user", None))}, "has a turn whose content is not a text"),
    ({"prompt": "a\ud800"}, "has half a character"),
    ({"messages": turns(("user", "\udc00"))}, "has half a character"),
    ({"text": "a"}, "has none of instruction, prompt, question"),
    ("a", "is not a JSON object"),
]
ENVIRONMENT = dict(os.environ)
"""With the cache folder of all tests, in which kernels lie: processes of their own would build them again."""
OPTIONS = ["--max-context", "128", "--max-new-tokens", "24"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that ends its answers now and then."""
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
    tensors, tokenizer = load_file(folder / "model.safetensors"), load_tokenizer(folder)
    head = tensors["lm_head.weight"]
    end, word = (tokenizer.backend.token_to_id(token) for token in (SPECIAL[2], "Ġ" + WORDS[5]))
    head[end] = 1.5 * head[word]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [json.dumps(record, ensure_ascii=False) for record in RECORDS] + [json.dumps(record) for record, _ in BAD]
    path.write_text("\ufeff" + "\n".join(lines) + "\n\n", encoding="utf-8")
    return str(path)


Generate = Callable[..., int]


@pytest.fixture(scope="module")
def generate(model: str, prompts: str, own_cache: None) -> Generate:
    """The command, given a folder and more options."""

    def run(folder: Path, *more: str, mode: str = "naive") -> int:
        sampling = ["--temperature", "0,1", "--samples", "2"]
        given = ["--target", model, "--prompts", prompts, "--out-dir", str(folder), "--mode", mode, *sampling, *OPTIONS]
        return main(["generate", *given, *more])

    return run


@pytest.fixture(scope="module")
def whole(generate: Generate, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of one process that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert generate(folder) == 0
    return folder


def answers(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """By record and sample; an answer that is there twice raises."""
    return {(record["index"], record["sample"]): record for _, _, record in answers_in(folder)}


def test_questions_of_benchmarks_are_conversations(tmp_path: Path) -> None:
    """Those of HumanEval are asked as the benchmark asks them."""
    record = {"question_id": 81, "category": "writing", "turns": ["why is the sky blue", "and the sea"]}
    assert conversation(record) == [{"role": "user", "content": text} for text in record["turns"]]
    with pytest.raises(ValueError, match="has none of instruction"):
        conversation({"turns": ["", "x"]})
    code = '\ndef half(x: float) -> float:\n    """Half of x."""\n'
    row = {"task_id": "HumanEval/0", "prompt": code, "entry_point": "half", "canonical_solution": "    return x / 2\n"}
    file = tmp_path / "HumanEval.jsonl"
    file.write_text(json.dumps(row) + "\n")
    [question] = load("humaneval", file).questions
    assert conversation(row) == [{"role": "user", "content": question.turns[0]}]
    assert conversation({"task_id": "x", "prompt": "why"}) == [{"role": "user", "content": "why"}], "no code is known"


def test_every_format_is_a_conversation(prompts: str, tmp_path: Path) -> None:
    found = [conversation(record) for _, record in records(Path(prompts))[: len(RECORDS)]]
    assert [[(m["role"], m["content"]) for m in messages] for messages in found[:6]] == [
        [("user", "why is the sky blue\n\nred"), ("assistant", "the cat")],
        [("user", "the cat"), ("assistant", "no"), ("user", "how is it"), ("user", "why")],
        [("system", "this is a mat"), ("user", "sat on")],
        [("user", "the mat\n\nwas red"), ("assistant", "yes")],
        [("user", "how is it"), ("assistant", "fine")],
        [("system", "the sky is blue"), ("user", "why\u2028how")],
    ]
    for record, reason in BAD[5:]:
        with pytest.raises(ValueError, match=reason):
            conversation(record)
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(RECORDS[:3]), encoding="utf-8")
    assert set(read_prompts([str(path)])) == {"why is the sky blue\n\nred", "the cat", "sat on"}, "what is said first"
    path.write_text(json.dumps([{"messages": turns(("tool", "a"))}]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"talks.json, record 1 has a turn of role 'tool'"):
        read_prompts([str(path)])


def test_answers_are_the_targets_and_only_they_are_in_the_loss(whole: Path, model: str) -> None:
    found = answers(whole)
    assert found.keys() == {(index, sample) for index in range(len(RECORDS)) for sample in range(2)}
    engine = in_mode(Runtime(EngineConfig(target=model, mode="naive", max_context=128)))
    reasons, lengths = set(), set()
    for (index, sample), record in found.items():
        sampling = record["sampling"]
        assert sampling["temperature"] == (index + sample) % 2
        assert record["source"].endswith(f"prompts.jsonl:{index + 1}")
        params = SamplingParams(max_new_tokens=24, temperature=sampling["temperature"], seed=sampling["seed"])
        said = [i for i, message in enumerate(record["messages"]) if message["role"] == "assistant"]
        spans = [e["token_ids"][a:b] for e in record["sequences"] for a, b in e["loss_spans"]]
        reasons |= {*record["finish_reasons"]}
        lengths.add(len(said))
        assert len(said) == len(spans) == len(record["finish_reasons"])
        assert record["unasked"] == (3 if index == 1 else 1) - len(said)
        for place, span, reason in zip(said, spans, record["finish_reasons"], strict=True):
            prompt = engine.tokenizer.chat(record["messages"][:place])
            [plain] = engine.generate([prompt], params)
            assert (plain.token_ids, plain.text) == (span, record["messages"][place]["content"])
            assert (plain.finish_reason, span[-1] == engine.tokenizer.eos_ids[0]) == (reason, reason == "stop")
        if reason == "stop":  # texts, since the tiny model says words in other tokens than the tokenizer
            by_template = masked(engine.tokenizer, record["messages"])
            again = [example.token_ids[a:b] for example in by_template for a, b in example.loss_spans]
            ours, theirs = ([engine.tokenizer.decode(ids, False) for ids in each] for each in (spans, again))
            assert ours == theirs
    assert reasons == {"stop", "length"} and lengths >= {1, 2}, "all of it has happened"
    seeds = [record["sampling"]["seed"] for record in found.values()]
    assert len(set(seeds)) == len(seeds)


def test_neither_drafts_nor_the_number_at_once_change_an_answer(
    whole: Path, generate: Generate, tmp_path: Path
) -> None:
    assert generate(tmp_path, "--max-batch", "3", mode="hybrid") == 0
    assert answers(tmp_path) == answers(whole)


@pytest.mark.subprocess
def test_replicas_share_the_work(whole: Path, generate: Generate, tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    assert generate(tmp_path, "--replicas", "2", "--max-batch", "2") == 0
    assert answers(tmp_path) == answers(whole)
    said = capsys.readouterr().out
    assert f"{2 * len(RECORDS)} written (0 of them before) + {2 * len(BAD)} skipped + 0 failed" in said
    assert "skipped 2: too long for the context" in said and "the start of 2 replicas included" in said


def test_written_skipped_and_failed_are_all(
    generate: Generate, tmp_path: Path, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch
) -> None:
    check = Engine.check

    def refusing(self: Engine, prompt: list[int], *rest: Any) -> list[int]:
        if "was red" in self.tokenizer.decode(prompt):
            raise ValueError("the engine does not like this one")
        return check(self, prompt, *rest)

    monkeypatch.setattr(Engine, "check", refusing)
    assert generate(tmp_path) == 0
    said = capsys.readouterr().out
    assert f"{2 * (len(RECORDS) + len(BAD))} wanted = {2 * len(RECORDS) - 2} written (0 of them before) " in said
    assert f"+ {2 * len(BAD)} skipped + 2 failed" in said and "failed 2: the engine does not like this one" in said
    for _, reason in BAD:
        assert reason in said
    monkeypatch.setattr(Engine, "check", check)
    assert generate(tmp_path) == 0
    assert f"{2 * len(RECORDS)} written ({2 * len(RECORDS) - 2} of them before)" in capsys.readouterr().out


def test_processes_share_the_work_however_many_go_on(
    whole: Path, generate: Generate, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def share(rank: int, world: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        assert generate(tmp_path) == 0

    share(0, 2)
    assert len(answers(tmp_path)) == len(RECORDS)
    share(1, 2)
    assert answers(tmp_path) == answers(whole)
    first = tmp_path / "answers-00000-of-00002.jsonl"
    content = first.read_bytes().splitlines(keepends=True)
    assert len(content) == len(RECORDS)
    first.write_bytes(b"".join(content[:3]) + content[3][:40])  # as a kill might leave it
    for rank in range(3):
        share(rank, 3)
    assert answers(tmp_path) == answers(whole)
    assert sum(1 for _ in answers_in(tmp_path)) == len(answers(whole))


def test_more_prompts_hold_those_of_fewer(generate: Generate, tmp_path: Path, whole: Path) -> None:
    assert generate(tmp_path, "--num-prompts", "5") == 0
    some = answers(tmp_path)
    assert 0 < len(some) <= 10
    assert generate(tmp_path, "--num-prompts", "9") == 0
    assert len(answers(tmp_path)) > len(some)
    assert answers(tmp_path).items() <= answers(whole).items() and some.items() <= answers(tmp_path).items()


def test_a_record_is_left_out_whatever_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "asked.json"
    path.write_text(json.dumps([{"prompt": f"the {i % 7}"} for i in range(20)]), encoding="utf-8")
    every = read([str(path)] * 2, None, 0)
    assert [record.number for record in every] == list(range(40))
    assert [record.number for record in every if record.talk] == list(range(7))
    for most in range(1, 20):
        assert {*map(str, read([str(path)] * 2, most, 0))} < {*map(str, every)}
        assert len(read([str(path)] * 2, most, 0)) == 2 * most


def killed(command: list[str], folder: Path, lines: int) -> int:
    """Run it until the folder has so many lines, and kill it there. Returns how many whole lines it left."""
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and count(folder) < lines:
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
    return count(folder)


def count(folder: Path) -> int:
    return sum(shard.read_bytes().count(b"\n") for shard in folder.glob("answers-*.jsonl"))


@pytest.mark.subprocess
def test_a_killed_process_loses_and_doubles_nothing(model: str, tmp_path: Path) -> None:
    asked, folder = tmp_path / "asked.jsonl", tmp_path / "out"
    texts = [f"{WORDS[i % 20]} {WORDS[i // 20]} cat" for i in range(200)]
    asked.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    given = ["--target", model, "--prompts", str(asked), "--temperature", "0,1", *OPTIONS[:2], "--mode", "naive"]
    given += ["--max-new-tokens", "8"]
    dice, left = random.Random(2), [0]
    for _ in range(2):
        command = [sys.executable, "-m", "train", "generate", *given, "--out-dir", str(folder)]
        left.append(killed(command, folder, left[-1] + dice.randint(1, 10)))
    assert left[1] > 0 and sorted(left) == left and left[-1] < len(texts), "each has gone on, and none to the end"
    before = answers(folder)
    for out in (folder, tmp_path / "undisturbed"):
        assert main(["generate", *given, "--out-dir", str(out)]) == 0
    assert before.items() <= answers(folder).items() and answers(folder) == answers(tmp_path / "undisturbed")


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_line_that_was_cut_off_is_dropped(cut: int, tmp_path: Path) -> None:
    record = {"index": 0, "sample": 0, "sequences": []}
    with AnswerShard(tmp_path, 0, 1) as shard:
        shard.add(record)
        shard.add({**record, "index": 1})
    content = shard.path.read_bytes()
    shard.path.write_bytes(content[:-cut])
    assert len(answers(tmp_path)) == 1
    with AnswerShard(tmp_path, 0, 1) as shard:
        shard.add({**record, "index": 1})
    assert shard.path.read_bytes() == content


def test_nobody_else_writes_the_same_answers_and_doubled_or_damaged_lines_are_told(tmp_path: Path) -> None:
    with AnswerShard(tmp_path, 0, 2), AnswerShard(tmp_path, 1, 2):
        for rank, world in ((0, 2), (0, 1), (2, 3)):
            with pytest.raises(ValueError, match="another process writes .*; wait for its end"):
                AnswerShard(tmp_path, rank, world)
    with AnswerShard(tmp_path, 0, 1):
        pass
    for rank in range(2):
        with AnswerShard(tmp_path, rank, 2) as shard:
            shard.add({"index": 0, "sample": 0, "sequences": []})
    with pytest.raises(ValueError, match="of-00002.jsonl has answer 0 to record 0, which another line has"):
        answers(tmp_path)
    shard.path.write_bytes(b'{"index": 1, "sample"\n')
    with pytest.raises(ValueError, match="00001-of-00002.jsonl:1 is not a record"):
        answers(tmp_path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--temperature 0,x", "--temperature is '0,x'; give numbers"),
        ("--temperature -1", "temperature is -1.0; it must be at least 0"),
        *((f"--{name} 0", f"--{name} is 0; it must be at least 1") for name in ("max-batch", "samples", "num-prompts")),
        ("--samples 3", "--samples 3 at --temperature 0,1 answers some records greedily twice"),
        ("--mode fast", "mode is 'fast'; choose one of"),
        ("--prompts none.jsonl", "none.jsonl cannot be read (No such file or directory)"),
        ("--prompts /dev/null", "/dev/null: no records"),
        ("--gpu-index 0 --device cpu", "--gpu-index is 0 but --device is cpu; drop one or the other"),
        ("--seed 1", "settings.json says seed 0 and now it is 1; use the same settings to resume, or give"),
        ("--max-new-tokens 25", "says max_new_tokens 24 and now it is 25"),
        ("RANK=2 WORLD_SIZE=2", "RANK is 2 and WORLD_SIZE 2"),
        ("RANK=x", "RANK is x and WORLD_SIZE None"),
        ("--replicas 0", "--replicas is 0; it must be at least 1"),
        ("RANK=0 WORLD_SIZE=2 --replicas 2", "launcher has started 2 processes; use one of the two"),
        ("RANK=0 WORLD_SIZE=2 --tensor-parallel 2", "--tensor-parallel is 2 and a launcher has started"),
        ("--replicas 2 --tensor-parallel 3", "--replicas is 2 and --tensor-parallel 3; drop one of the"),
        ("--replicas 2 --gpu-index 0", "--gpu-index is 0, but --replicas assigns GPUs"),
    ],
)
def test_mistakes_are_one_line(
    more: str, message: str, whole: Path, generate: Generate, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    """Of options, and of what a launcher has set."""
    for name, _, value in (word.partition("=") for word in more.split() if "=" in word):
        monkeypatch.setenv(name, value)
    before = sorted(os.listdir(whole))
    assert generate(whole, *(word for word in more.split() if "=" not in word)) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and sorted(os.listdir(whole)) == before


def test_a_launchers_processes_take_a_gpu_each(monkeypatch: MonkeyPatch) -> None:
    parser = options.Parser()
    add_parser(parser.add_subparsers())

    def device(*more: str) -> str:
        args = parser.parse_args(["generate", "--prompts", "a", "--out-dir", "b", *more])
        return _device(args, options.engine_config(args, modes=("naive",)))

    assert device() == "auto" and device("--gpu-index", "3") == "cuda:3"
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device() == "cuda:1" and device("--device", "cpu") == "cpu" and device("--gpu-index", "3") == "cuda:3"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device() == "auto"


def test_inspect_shows_what_is_in_the_loss(whole: Path, model: str, prompts: str, capsys: CaptureFixture[str]) -> None:
    def inspect(*args: str) -> tuple[int, str, str]:
        status = main(["inspect", *args])
        return status, *capsys.readouterr()

    [shard] = whole.glob("answers-*.jsonl")
    record = json.loads(shard.read_text(encoding="utf-8").splitlines()[2])
    status, out, _ = inspect(str(shard), "--index", "2")  # the target's name is in settings.json
    said = next(message["content"] for message in record["messages"] if message["role"] == "assistant")
    assert status == 0 and f"<|im_start|>assistant\n⟦{said}" in out
    num_all = len(record["sequences"][0]["token_ids"])
    num_in_loss = sum(end - start for start, end in record["sequences"][0]["loss_spans"])
    assert f":3: {num_all} tokens, {num_in_loss} in the loss ({num_in_loss / num_all:.1%})" in out
    status, out, _ = inspect(prompts, "--target", model)
    assert status == 0 and "⟦the cat<|im_end|>⟧" in out and "prompts.jsonl:1: " in out
    status, out, err = inspect(prompts, "--target", model, "--index", "2")
    assert (status, out) == (2, "") and "prompts.jsonl:3: there is no assistant message" in err and err.count("\n") == 1
    assert "--index is 99 but" in inspect(prompts, "--index", "99")[2]


@pytest.mark.real_model
def test_the_embedded_model_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = tmp_path / "asked.json"
    questions = ["What is the capital of France?", "Say hello.", "Name a colour.", "Count to five."]
    asked.write_text(json.dumps([{"instruction": question} for question in questions]), encoding="utf-8")
    given = ["--prompts", str(asked), "--out-dir", str(tmp_path), "--max-new-tokens", "16", "--mode", "naive"]
    given += ["--dtype", "float32"]  # in bfloat16 two beginnings of the first answer are a tie
    assert main(["generate", *given, "--temperature", "0,1", "--max-context", "128"]) == 0
    assert "4 wanted = 4 written (0 of them before) + 0 skipped + 0 failed" in capsys.readouterr().out
    assert "Paris" in answers(tmp_path)[0, 0]["messages"][-1]["content"]
