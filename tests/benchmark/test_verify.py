"""`sharesd verify`: all modes on a tiny model, and mistakes made on purpose, which it must find."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmark.studies import verify
from benchmark.studies.verify import compare_answers
from sharesd import sampling
from sharesd.config import EngineConfig
from sharesd.models.loader import load_decoder
from sharesd.runtime import Runtime
from sharesd.sampling import sampler
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_tree import VerifyResult
from sharesd_command import main
from tests.helpers.tiny_models import make_checkpoint

PROMPTS: dict[str | int, list[int]] = {"a": [5, 6, 7, 8], "b": list(range(20, 40))}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def compare(tiny: Path, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit status and verify.json of a run over two questions."""
    sizes = ["--num-questions", "2", "--max-new-tokens", "24", "--max-context", "512"]
    status = main(["verify", "--target", str(tiny), "--out-dir", str(out), *sizes, *options])
    return status, json.loads((out / "verify.json").read_text())


@pytest.mark.smoke
def test_all_modes_are_exact(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modes = ("classic", "share", "ngram", "suffix")
    status, report = compare(tiny, tmp_path / "out", "--num-speculative-tokens", "1,3", "--mode", ",".join(modes))
    assert status == 0 and report["identical"] is True
    seen = [(c["mode"], c["num_draft"], c["temperature"], c["seed"]) for c in report["cases"]]
    ways = ((0, 0), (1, 0), (1, 1))  # greedy decoding knows no seeds
    assert sorted(seen) == sorted((mode, K, *way) for mode in modes for K in (1, 3) for way in ways)
    assert all(case["num_turns"] == 2 and not case["mismatches"] for case in report["cases"])
    assert all(case["verify_width"] == 1 + case["num_draft"] for case in report["cases"])
    assert report["settings"]["model"] == "model" and report["environment"]["torch"] == metadata.version("torch")
    out = capsys.readouterr().out
    assert "T=1 seed 1" in out and out.count("2/2") == 24 and "first differing" not in out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["verify.json"]


def test_a_wrong_acceptance_rule_is_found(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first draft token of each round is accepted, whatever the target says."""

    def credulous(draft_BN: torch.Tensor, chosen_BT: torch.Tensor) -> VerifyResult:
        if draft_BN.shape[1]:
            chosen_BT = torch.cat([draft_BN[:, :1], chosen_BT[:, 1:]], 1)
        return right(draft_BN, chosen_BT)

    right = sampler.accept_match
    monkeypatch.setattr(sampler, "accept_match", credulous)
    options = ("--mode", "share", "--draft-quant", "hqq:2:64", "--num-speculative-tokens", "2", "--temperatures", "0")
    status, report = compare(tiny, tmp_path, *options)
    assert status == 1 and report["identical"] is False
    [case] = report["cases"]
    assert len(case["mismatches"]) == len({mismatch["question_id"] for mismatch in case["mismatches"]}) == 2
    for mismatch in case["mismatches"]:
        assert mismatch["naive_token"] != mismatch["token"] and mismatch["logit_gap"] > 0
    out = capsys.readouterr().out
    assert "0/2" in out and "first differing tokens" in out


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_position_tokens_and_gaps_of_a_mismatch(tiny: Path, temperature: float) -> None:
    config = EngineConfig(target=str(tiny), dtype="float32", compile="off", max_context=128, num_draft=2)
    runtime = Runtime(config, ("naive", "share"))
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=12, ignore_eos=True)
    engines: dict[Any, Any] = {mode: runtime.engine(mode) for mode in ("naive", "share")}
    wanted = engines["naive"].generate([PROMPTS["b"]], params)[0].token_ids

    class Doctored:
        """Says something else at position 5 of the second prompt, and stops after position 8 of the first."""

        num_draft, options = 2, SimpleNamespace(widths=(8,))

        def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
            ids = engines["share"].generate(prompts, params)[0].token_ids
            ids = ids[:8] if prompts[0] == PROMPTS["a"] else [*ids[:5], ids[5] ^ 1, *ids[6:]]
            return [SimpleNamespace(token_ids=ids)]

    ticks: list[None] = []
    doctored = {"naive": engines["naive"], "share": Doctored()}
    [case] = compare_answers(doctored, PROMPTS, params, num_draft=2, tick=lambda: ticks.append(None))  # type: ignore[arg-type]
    assert (case.num_turns, case.num_identical, case.num_tokens, case.verify_width) == (2, 0, 24, 8)
    assert len(ticks) == 4
    short, wrong = case.mismatches
    assert (short.question_id, short.position, short.token, short.text) == ("a", 8, None, "")
    assert (wrong.question_id, wrong.position) == ("b", 5)
    assert (wrong.naive_token, wrong.token) == (wanted[5], wanted[5] ^ 1)
    assert wrong.naive_text == runtime.tokenizer.decode([wanted[5]], False)

    decoder, text = load_decoder(tiny, dtype=torch.float32), PROMPTS["b"] + wanted[:5]
    with torch.inference_mode():
        logits_V = decoder.forward(torch.tensor([text]), decoder.new_cache(1, 64))[0, -1]
    scores_V = logits_V
    if temperature:
        noise_11V = sampling.gumbel(torch.tensor([3]), torch.tensor([[len(text)]]), len(logits_V))
        scores_V = logits_V / temperature + noise_11V[0, 0]
    assert int(scores_V.argmax()) == wanted[5]
    for gap, values in ((wrong.logit_gap, logits_V), (wrong.score_gap, scores_V)):
        first, second = values.topk(2).values
        assert gap == pytest.approx(float(first - second), abs=1e-4)
    [case] = compare_answers(engines, PROMPTS, params, num_draft=2)
    assert not case.mismatches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mode", "naive"], "--mode is only naive"),
        (["--num-speculative-tokens", "0,1"], "num_draft is 0"),
        (["--temperatures=-1"], "temperature is -1"),
        (["--seeds=-1"], "seed is -1"),
        (["--questions", "none.jsonl"], "none.jsonl cannot be read (No such file"),
        (["--out-dir", "taken/x"], "--out-dir taken/x cannot be made"),
    ],
)
def test_mistakes_cost_a_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    assert main(["verify", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert not (tmp_path / "results").exists()


def test_lists_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--num-speculative-tokens", "1,x"])
    assert "'1,x' is not a list of numbers such as 1,2" in capsys.readouterr().err
    assert verify._list_of(int)("2,1,2") == (2, 1)
