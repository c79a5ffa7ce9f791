"""`python -m sharesd generate --prompts`: the same file from any number of processes, whoever is killed when."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sharesd import EngineConfig, SamplingParams
from sharesd.cli.generate_file import read
from sharesd.cli.main import main
from sharesd.data.json_lines import read_text, records, text_lines
from sharesd.runtime import Runtime
from tests.helpers.in_mode import in_mode
from tests.helpers.paths import ROOT
from tests.helpers.tiny_tokenizer import WORDS
from tests.multigpu.test_replicas import ENVIRONMENT, killed

NUM, TOO_LONG = 40, 7  # and the number of a prompt that does not fit
SAMPLED = ["--temperature", "1", "--seed", "5", "--max-new-tokens", "12", "--max-context", "96", "--max-batch", "3"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, some of them equal, one conversation, and one text that is too long."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records: list[Any] = [f"{WORDS[i % 5]} {WORDS[i // 5]} cat" if i % 4 else "the cat" for i in range(NUM)]
    records[2] = {"prompt": "why is the sky blue"}
    roles = ("system", "user", "assistant", "user")
    records[3] = {"messages": [{"role": role, "content": "the mat"} for role in roles]}
    records[TOO_LONG] = "how " * 200
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(tiny: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory, own_cache: None) -> Path:
    out = tmp_path_factory.mktemp("whole") / "answers.jsonl"
    assert generate(tiny, prompts, out) == 1
    return out


def command(tiny: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    given = ["--target", str(tiny), "--prompts", str(prompts), "--out", str(out), "--mode", "naive"]
    return ["generate", *given, *SAMPLED, *more]


def generate(tiny: Path, prompts: Path, out: Path, *more: str) -> int:
    return main(command(tiny, prompts, out, *more))


def answers(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def texts(out: Path) -> list[dict[str, Any]]:
    """All but the statistics, whose times are those of a run."""
    return [{name: value for name, value in record.items() if name != "stats"} for record in answers(out)]


def test_each_answer_is_that_of_plain_decoding(whole: Path, tiny: Path, prompts: Path) -> None:
    found = answers(whole)
    assert [record["index"] for record in found] == list(range(NUM))
    assert sorted(os.listdir(whole.parent)) == ["answers.jsonl", "answers.jsonl.settings.json"]
    engine = in_mode(Runtime(EngineConfig(target=str(tiny), mode="naive", max_context=96)))
    params = SamplingParams(temperature=1.0, seed=5, max_new_tokens=12)
    for record, (_, prompt) in zip(found, read(prompts, raw=False), strict=True):
        assert record["prompt"] == prompt
        if record["index"] == TOO_LONG:
            assert "tokens and the context holds 96" in record["error"] and "text" not in record
            continue
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        request = engine.add(engine.tokenizer.chat(messages), params, record["index"])
        while request.finish_reason is None:
            engine.step()
        assert record["token_ids"] == request.tokens[len(request.prompt_ids) :]
        assert record["stats"].keys() == request.stats.to_dict().keys()
        for name in ("prompt_tokens", "new_tokens", "rounds", "sources", "tau"):
            assert record["stats"][name] == request.stats.to_dict()[name]
    assert len({record["text"] for record in found if record["prompt"] == "the cat"}) > 5, "each has noise of its own"


@pytest.mark.subprocess
def test_any_number_of_replicas_writes_the_same_file(
    whole: Path, tiny: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    assert generate(tiny, prompts, out, "--replicas", "2", "--mode", "ngram") == 1
    assert texts(out) == texts(whole)
    said = " ".join(capsys.readouterr().err.split())
    assert f"{NUM} prompts = {NUM - 1} answered + 1 failed (0 of them before)" in said
    assert f"prompts.jsonl:{TOO_LONG + 1}: a prompt has " in said and "the start of 2 replicas included" in said


def test_a_whole_file_is_left_as_it_is_and_other_settings_are_refused(
    whole: Path, tiny: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = whole.stat().st_mtime_ns
    assert generate(tiny, prompts, whole, "--replicas", "2") == 1
    assert f"({NUM} of them before)" in capsys.readouterr().err
    assert generate(tiny, prompts, whole, "--seed", "6") == 2
    assert "settings.json says sampling" in (said := capsys.readouterr().err) and "give another --out" in said
    assert said.count("\n") == 1
    assert whole.stat().st_mtime_ns == before and not whole.with_name("answers.jsonl.part").exists()


@pytest.mark.subprocess
@pytest.mark.parametrize(("seed", "num_trials"), [(0, 2), pytest.param(1, 8, marks=pytest.mark.long)])
def test_kills_at_random_moments_lose_and_double_nothing(
    seed: int, num_trials: int, whole: Path, tiny: Path, prompts: Path, tmp_path: Path
) -> None:
    """Of a replica and of the parent in turns."""
    dice = random.Random(seed)
    for trial in range(num_trials):
        out = tmp_path / f"answers-{trial}.jsonl"
        part = Path(f"{out}.part")
        given = [sys.executable, "-m", "sharesd", *command(tiny, prompts, out), "--replicas", "2", "--threads", "1"]
        whom = ("replica", "parent")[trial % 2]
        for _ in range(10):  # a busy machine may kill too late
            if killed(given, part, dice.randint(0, NUM - 8), whom, dice):
                break
            out.unlink()
        else:
            pytest.fail("it was never killed in time")
        kept = [json.loads(line) for line in part.read_bytes().split(b"\n")[:-1]] if part.exists() else []
        assert whom == "parent" or texts(out) == texts(whole), "the other replica has answered all"
        assert generate(tiny, prompts, out) == 1
        assert texts(out) == texts(whole) and not part.exists()
        found = answers(out)
        assert all(record == found[record["index"]] for record in kept)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no prompt; give a text, - for stdin, or --prompts FILE --out FILE"),
        (["why", "--out", "x"], "--out needs --prompts FILE"),
        (["why", "--prompts", "a.txt", "--out", "b"], "--prompts is a.txt but a prompt 'why' is given"),
        (["--prompts", "a.txt"], "--prompts is a.txt but --out is missing"),
        (["--prompts", "none.txt", "--out", "b"], "none.txt cannot be read (No such file or directory)"),
        (["--prompts", "none.json", "--out", "b"], "none.json cannot be read (No such file or directory)"),
        (["--prompts", "/dev/null", "--out", "b"], "/dev/null has no prompts"),
        (["--prompts", __file__, "--out", "b"], ":1: not JSON (Extra data at column 3)"),
        (["--prompts", "p.jsonl", "--out", "no/b"], "--out is no/b, but the folder no does not exist"),
        (["--prompts", "p.jsonl", "--out", "p.jsonl"], "--out is p.jsonl, which exists but has no p.j"),
        (["--prompts", "p.jsonl", "--out", "b", "--replicas", "0"], "--replicas is 0; it must be at least 1"),
        (["--prompts", "p.jsonl", "--out", "b", "--ray", "--replicas", "0"], "--replicas is 0; it must be at least 1"),
        (["--prompts", "p.jsonl", "--out", "b", "--ray", "--device", "cuda:1"], "use cuda, or drop --ray"),
        (["--prompts", "p.jsonl", "--out", "b", "--max-batch", "0"], "--max-batch is 0; it must be at least 1"),
        (["--prompts", "bad.jsonl", "--out", "b"], "bad.jsonl:2 has no user message"),
        (["--prompts", "talk.json", "--raw", "--out", "b"], "record 1 is a conversation, but --raw continues"),
        pytest.param(
            ["--prompts", "p.jsonl", "--out", "b", "--target", "no/such/folder", "--replicas", "2"],
            "no/such/folder does not exist",
            marks=pytest.mark.subprocess,
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(args: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('"why"\n')
    Path("bad.jsonl").write_text('"why"\n{"messages": []}\n')
    Path("talk.json").write_text(json.dumps([{"conversation": [{"role": "user", "content": "a"}] * 2}]))
    assert main(["generate", *args]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.subprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", ["torch.distributed.run", pytest.param("accelerate.commands.launch", marks=pytest.mark.long)]
)
def test_ranks_of_a_launcher_take_from_one_queue(
    launcher: str, whole: Path, tiny: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    flags = ["--nproc-per-node", "2"] if launcher == "torch.distributed.run" else ["--num_processes", "2", "--cpu"]
    given = [sys.executable, "-m", launcher, *flags, "-m", "sharesd", *command(tiny, prompts, out)]
    done = subprocess.run(given, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert out.exists() and texts(out) == texts(whole), done.stderr[-3000:]
    if launcher == "torch.distributed.run":  # the other one starts a single process where there are no GPUs
        assert "the start of 2 replicas included" in done.stderr


LINES = '\ufeff{"a": 1}\r\n\n  \n "x\u2028y" \n'.encode()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_lines_and_lists_hold_the_same_records(tmp_path: Path, pack) -> None:
    lines, one = tmp_path / "lines", tmp_path / "list"
    lines.write_bytes(pack(LINES))
    one.write_bytes(pack('\ufeff \n[{"a": 1},\n"x\u2028y"]\n'.encode()))
    assert records(lines) == [(f"{lines}:1", {"a": 1}), (f"{lines}:4", "x\u2028y")]
    assert records(one) == [(f"{one}, record 1", {"a": 1}), (f"{one}, record 2", "x\u2028y")]
    assert text_lines(lines) == [(f"{lines}:1", '{"a": 1}'), (f"{lines}:4", ' "x\u2028y" ')]
    assert read_text(lines) == '{"a": 1}\n\n  \n "x\u2028y" \n'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{}\n{1}", ":2: not JSON (Expecting property name enclosed in double quotes at column 2); write one JSON"),
        (b"[{},\n\n {]", ":3: not JSON (Expecting property name enclosed in double quotes at column 3); write one"),
        (b"[1]\n[2]", ":2: not JSON (Extra data at column 1)"),
        (b"{}\n" + b"9" * 5000, ":2: not JSON that can be read (Exceeds the limit"),
        (b"[" * 100_000, ":1: not JSON that can be read (maximum recursion depth"),
        (b"\xef\xbb\xbf\xff", ":1: byte 1 (0xff) is not UTF-8; save the file as UTF-8"),
        (b"{}\n\n[\xe4", ":3: byte 2 (0xe4) is not UTF-8"),
        ("{}".encode("utf-16-le"), ":1: byte 2 is zero, as in UTF-16 or a binary file; save the file as UTF-8"),
        ("[]\n{}".encode("utf-16-be"), ":1: byte 1 is zero"),
        (gzip.compress(b"{}\n\0", mtime=0), ":2: byte 1 is zero"),
        (b"\x1f\x8b", ": not a whole gzip file ("),
    ],
)
def test_a_mistake_has_its_place(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        records(path)
    assert str(error.value).startswith(f"{path}{says}") and "\n" not in str(error.value)
