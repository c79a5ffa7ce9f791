"""`python -m train`: prompts are read as they are published, and a table knows what the model says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest import CaptureFixture, MonkeyPatch

from multigpu.journal import Journal
from sharesd.config import EngineConfig
from sharesd.data.prompt_files import read_prompts
from sharesd.drafters.recycle import EMBEDDED_TABLE
from sharesd.drafters.recycle.table import RecycleTable
from sharesd.drafters.selection import EMBEDDED, file_of, head_of, second_model
from sharesd.drafters.suffix import EMBEDDED_CORPUS
from sharesd.drafters.suffix.datastore import build_datastore, open_datastore
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.startup.conflicts import check_options
from tests.helpers.in_mode import in_mode
from train.__main__ import main

RECORDS = [
    {"instruction": "why is the sky blue", "input": ""},
    {"instruction": "the cat", "instances": [{"input": "sat on the mat", "output": "yes"}]},
    {"question": "how is it", "answer": "fine"},
    {"prompt": "this is the cat"},
    *({"prompt": f"the cat and the mat {i}"} for i in range(10)),
]


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def prompts(tmp_path: Path) -> tuple[Path, Path]:
    """The records as a list, and again as lines."""
    whole, lines = tmp_path / "prompts.json", tmp_path / "prompts.jsonl"
    whole.write_text(json.dumps(RECORDS), encoding="utf-8")
    lines.write_text("\n".join(map(json.dumps, RECORDS)) + "\n\n", encoding="utf-8")
    return whole, lines


def test_prompts_are_read_once_each(prompts: tuple[Path, Path]) -> None:
    found = read_prompts([*map(str, prompts)])
    assert len(found) == len(RECORDS) == len(set(found))
    assert {"why is the sky blue", "the cat\n\nsat on the mat", "how is it", "this is the cat"} < set(found)
    some = read_prompts([str(prompts[0])], 3)
    assert some == read_prompts([str(prompts[1])], 3) and len(set(some)) == 3 and set(some) < set(found)
    assert read_prompts([str(prompts[0])], 99) == read_prompts([str(prompts[0])]), "no more than there are"


@pytest.mark.smoke
def test_a_filled_table_knows_what_the_model_says(
    tiny: Path, tmp_path: Path, prompts: tuple[Path, Path], capsys: CaptureFixture[str]
) -> None:
    out = tmp_path / "table.npz"
    options = ["--target", str(tiny), "--max-context", "128", "--max-new-tokens", "24"]
    assert main(["table", "--prompts", str(prompts[0]), "--num-prompts", "14", "--out", str(out), *options]) == 0
    assert "from 13 answers" in capsys.readouterr().out
    table = RecycleTable.filled(out)
    known = table.successors[table.successors[:, 0] >= 0]
    assert len(known) > 10 and (np.sort(known, 1)[:, 1:] != np.sort(known, 1)[:, :-1]).all()
    config = EngineConfig(
        target=str(tiny), mode="recycle", max_context=128, drafter_options={"recycle_table": str(out)}
    )
    engine = in_mode(Runtime(config, ("recycle",)), "recycle")
    [done] = engine.generate(["the cat and the mat 3"])
    hits = sum(b in table.successors[a] for a, b in zip(done.token_ids, done.token_ids[1:], strict=False))
    assert hits > 0.2 * len(done.token_ids), "by chance it would be 8 of 384"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompts", "none.json", "--out", "x.npz"], "none.json cannot be read"),
        (["--prompts", "bad.jsonl", "--out", "x.npz"], "bad.jsonl:2: not JSON (Expecting value at column 12)"),
        (["--prompts", "empty.jsonl", "--out", "x.npz"], "empty.jsonl:1 has none of instruction, prompt, question"),
        (["--prompts", "few.jsonl", "--out", "x.npz"], "the files hold 1 prompts; give at least 10"),
        (["--prompts", "few.jsonl", "--out", "x.txt"], "--out is x.txt; give a .npz file"),
        (["--prompts", "few.jsonl", "--out", "x.npz", "--num-prompts", "0"], "--num-prompts is 0; it must be at least"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], message: str, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.jsonl").write_text('{"prompt": "hello"}\n')
    Path("bad.jsonl").write_text('{"prompt": "hello"}\n{"prompt": \n')
    Path("empty.jsonl").write_text('{"text": "hello"}\n')
    assert main(["table", *args]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and not Path("x.npz").exists()


def test_the_target_says_what_users_ask_and_nothing_of_it_again_after_an_end(
    tiny: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    options = ["--target", str(tiny), "--max-context", "256", "--num-prompts", "20", "--max-new-tokens", "120"]
    whole, out = tmp_path / "whole.jsonl", tmp_path / "prompts.jsonl"
    assert main(["prompts", "--out", str(whole), *options, "--max-batch", "2"]) == 0
    said = [json.loads(line)["prompt"] for line in whole.read_text().splitlines()]
    assert 0 < len(said) == len(set(said)) < 20 and set(read_prompts([str(whole)])) == set(said)
    assert f"{len(said)} distinct prompts of 20" in capsys.readouterr().out
    command, add, added = ["prompts", "--out", str(out), *options, "--max-batch", "5"], Journal.add, []

    def ends(journal: Journal, record: dict[str, Any]) -> None:
        if len(added) == 5:
            raise KeyboardInterrupt
        added.append(record["index"])
        add(journal, record)

    monkeypatch.setattr(Journal, "add", ends)
    assert main(command) == 130 and not out.exists()
    monkeypatch.setattr(Journal, "add", lambda journal, record: (added.append(record["index"]), add(journal, record)))
    assert main(command) == 0 and sorted(added) == [*range(20)]
    assert out.read_text() == whole.read_text(), "whatever is said next to them"
    assert main(command) == 0 and len(added) == 20, "all is there"
    capsys.readouterr()
    assert main([*command, "--seed", "7"]) == 2
    assert "use the same settings to resume, or give another --out" in capsys.readouterr().err


def test_a_corpus_is_looked_into(tiny: Path, tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    out, text, answers = (tmp_path / name for name in ("corpus.npy", "a.txt", "answers-naive.jsonl"))
    text.write_text("the cat sat on the mat", encoding="utf-8")
    config = EngineConfig(target=str(tiny), mode="suffix", max_context=128, compile="off", num_draft=4)
    engine = in_mode(Runtime(config, ("suffix",)), "suffix")
    [said] = engine.generate(["why is the sky"])
    answers.write_text(json.dumps({"text": said.text}) + "\n", encoding="utf-8")
    assert main(["corpus", "--texts", str(text), str(answers), "--target", str(tiny), "--out", str(out)]) == 0
    assert "of 2 texts" in capsys.readouterr().out
    before = engine.stats.steps
    engine = in_mode(Runtime(replace(config, drafter_options={"corpus": str(out)}), ("suffix",)), "suffix")
    [again] = engine.generate(["why is the sky"])
    assert again.token_ids == said.token_ids and engine.stats.steps < before
    assert main(["corpus", "--texts", str(answers), "--target", str(tiny), "--out", "x.txt"]) == 2
    answers.write_text('{"text": "a"}\n{}\n', encoding="utf-8")
    assert main(["corpus", "--texts", str(answers), "--target", str(tiny), "--out", str(out)]) == 2
    assert "answers-naive.jsonl:2 is not a JSON record" in capsys.readouterr().err
    build_datastore([1, 2, 10_000], out)
    with pytest.raises(ValueError, match="holds token id 10000 and the target has 384"):
        Runtime(replace(config, drafter_options={"corpus": str(out)}), ("suffix",))


def test_a_corpus_of_answers(
    tiny: Path, tmp_path: Path, prompts: tuple[Path, Path], capsys: CaptureFixture[str]
) -> None:
    out = tmp_path / "corpus.npy"
    options = ["--target", str(tiny), "--max-context", "128", "--max-new-tokens", "24", "--out", str(out)]
    assert main(["corpus", "--prompts", str(prompts[0]), "--num-prompts", "5", *options]) == 0
    assert "of 5 texts" in capsys.readouterr().out
    asked = read_prompts([str(prompts[0])], 5)
    config = EngineConfig(target=str(tiny), mode="suffix", max_context=128, num_draft=4)
    rounds = []
    for corpus in (None, str(out)):
        engine = in_mode(Runtime(replace(config, drafter_options={"corpus": corpus}), ("suffix",)), "suffix")
        engine.generate([engine.tokenizer.ask(asked[0])], SamplingParams(max_new_tokens=24))
        rounds.append(engine.stats.rounds)
    assert rounds[1] < 0.5 * rounds[0], "it has seen the very answer"
    assert main(["corpus", "--prompts", str(prompts[0]), *options, "--max-new-tokens", "127"]) == 2
    assert "no prompt leaves room for 127 new tokens in a context of 128" in capsys.readouterr().err
    assert main(["corpus", *options]) == 2
    assert "no input; pass --texts, --prompts or both" in capsys.readouterr().err


def test_the_embedded_models_table_and_corpus_ship() -> None:
    assert EMBEDDED_TABLE.stat().st_size < 2_000_000
    table = RecycleTable.filled(EMBEDDED_TABLE)
    assert table.successors.shape == (49152, 8) and (table.successors[:, 0] >= 0).sum() > 4000
    assert file_of(EngineConfig(), "recycle") == EMBEDDED_TABLE
    assert file_of(EngineConfig(drafter_options={"recycle_table": "empty"}), "recycle") is None
    assert EMBEDDED_CORPUS.stat().st_size < 2_000_000
    corpus = open_datastore(EMBEDDED_CORPUS)
    assert corpus.nbytes == 8 * corpus.num_tokens and corpus.num_tokens > 200_000 and corpus.largest < 49152
    assert file_of(EngineConfig(), "suffix") == EMBEDDED_CORPUS
    assert file_of(EngineConfig(drafter_options={"corpus": "empty"}), "suffix") is None
    assert not any(file_of(EngineConfig(target="elsewhere"), table) for table in ("recycle", "suffix"))


def test_the_embedded_models_heads_and_small_decoder_ship_for_it_alone() -> None:
    assert not (head_of(EngineConfig(target="other"), "eagle") or head_of(EngineConfig(), "parallel"))
    assert head_of(EngineConfig(heads=("mine",)), "eagle") == "mine"
    sizes = []
    folders = {mode: head_of(EngineConfig(mode=mode), mode) for mode in ("eagle", "glide")}
    small = second_model(EngineConfig(mode="classic", draft="small"))
    for folder in map(Path, filter(None, (*folders.values(), small))):
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert all(word in card for word in ("python -m train", "steps", "tau", "SmolLM2-135M-Instruct", "4-bit"))
        assert json.loads((folder / "config.json").read_text())["vocab_size"] == 49152
        sizes.append((folder / "model.safetensors").stat().st_size)
    assert len(sizes) == 3 and 1e6 < sum(sizes) < 40e6
    assert second_model(EngineConfig(mode="classic", draft="small")) == str(EMBEDDED / "classic")
    assert second_model(EngineConfig(mode="classic")) is None
    assert second_model(EngineConfig(mode="classic", target="other", draft="mine")) == "mine"
    with pytest.raises(ValueError, match="draft is 'small', which is for the embedded model alone"):
        check_options(EngineConfig(mode="classic", target="other", draft="small"))
