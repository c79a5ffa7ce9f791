"""`sharesd verify`, which must find mistakes made on purpose, and --against; `sharesd tune`, `--draft-quant auto`."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmark.studies import divergence, tune, verify
from benchmark.studies.agreement import answer, equal_with_same_noise, measure_agreement
from benchmark.studies.tune import Drafts, best_length, expected_speedup, predict, settings_of
from benchmark.studies.verify import compare_answers
from quant.config import QuantConfig
from sharesd import sampling
from sharesd.cli import options
from sharesd.config import EngineConfig
from sharesd.llm import LLM
from sharesd.models import decoder
from sharesd.models.checkpoint import content_hash
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.loader import load_decoder
from sharesd.models.prefill import prefill
from sharesd.models.tokenizer import load_tokenizer
from sharesd.sampling import sampler
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_tree import DraftKind, VerifyResult
from sharesd.startup.cost_fit import STEP, fit_costs
from sharesd.startup.option_values import engine_config
from sharesd.startup.resolve import resolve_config, with_dequantize
from sharesd.weights import quant_tuning_cache
from sharesd.weights.calibrate import calibrate
from sharesd.weights.kept_calibration import CalibrationText, KeptCalibration
from sharesd.weights.quant_tuning_cache import TuningKey, load_tuned, save_tuned, tuning_key
from sharesd_command import main
from tests.helpers.block_parts import ggml_type
from tests.helpers.gguf_files import write_gguf
from tests.helpers.made_costs import made_costs

TEXT = "What is heard is not what was said, and what was said was not heard. " * 9
FOUR, DEFAULT = QuantConfig.parse("hqq:4:64"), EngineConfig().quant
PROMPTS: dict[str | int, list[int]] = {"a": [5, 6, 7, 8], "b": list(range(20, 40))}


@pytest.fixture(autouse=True)
def own_cache_and_short_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(divergence, "_WINDOW", 100)
    monkeypatch.setattr(divergence, "_PIECE", 40)


def compare(tiny: Path, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit status and verify.json of a run over two questions."""
    sizes = ["--num-questions", "2", "--max-new-tokens", "24", "--max-context", "512"]
    status = main(["verify", "--target", str(tiny), "--out-dir", str(out), *sizes, *options])
    return status, json.loads((out / "verify.json").read_text())


@pytest.mark.smoke
def test_all_modes_are_exact(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modes = ("classic", "share", "ngram", "suffix")
    status, report = compare(
        tiny, tmp_path / "out", "--num-speculative-tokens", "1,3", "--mode", ",".join(modes), "--max-new-tokens", "12"
    )
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
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
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
    llm = LLM.from_config(config, ("naive", "share"))
    runtime = llm.runtime
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=12, ignore_eos=True)
    for mode in runtime.modes:
        runtime.warm_up(mode)
    engine = runtime.engine
    wanted = llm.generate(PROMPTS["b"], params, mode="naive")[0].token_ids

    class OfOneWidth:
        modes, options = {"share": SimpleNamespace(num_draft=2)}, SimpleNamespace(widths=(8,))

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

    class Doctored:
        """Says something else at position 5 of the second prompt, and stops after position 8 of the first."""

        runtime = SimpleNamespace(engine=OfOneWidth())

        def generate(self, prompts: list[list[int]], params: SamplingParams, mode: str) -> list[Any]:
            ids = llm.generate(prompts, params, mode=mode)[0].token_ids
            if mode == "share":
                ids = ids[:8] if prompts[0] == PROMPTS["a"] else [*ids[:5], ids[5] ^ 1, *ids[6:]]
            return [SimpleNamespace(token_ids=ids)]

    ticks: list[None] = []
    doctored: Any = Doctored()
    [case] = compare_answers(doctored, runtime.modes, PROMPTS, params, num_draft=2, tick=lambda: ticks.append(None))
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
    [case] = compare_answers(llm, runtime.modes, PROMPTS, params, num_draft=2)
    assert not case.mismatches


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("verify --mode naive", "--mode is only naive"),
        ("verify --num-speculative-tokens 0,1", "num_draft is 0"),
        ("verify --temperatures=-1", "temperature is -1"),
        ("verify --seeds=-1", "seed is -1"),
        ("verify --questions none.jsonl", "none.jsonl cannot be read (No such file"),
        ("verify --out-dir taken/x", "--out-dir taken/x cannot be made"),
        ("verify --texts t", "--texts is t, which only --against reads; add --against"),
        ("verify --against nowhere/at-all/x", "nowhere/at-all/x does not exist"),
        ("verify --against {tiny} --texts {tiny}/none", "none cannot be read ... use a text in UTF-8"),
        ("verify --against {tmp}/other.gguf", "vocabular"),
        ("tune --quants hqq:4:64,,hqq:8:64", "--quants is 'hqq:4:64,,hqq:8:64', which has an empty part"),
        ("tune --quants hqq:5:64", "bits (hqq) is 5; choose one of 8, 4, 3, 2"),
        ("tune --keep nose --quants hqq:8:64", "projection 'nose' does not exist in this model; choose from qkv"),
        ("tune --num-questions 9999", "num_questions is 9999, but"),
        ("tune --max-new-tokens 500 --max-context 512", "raise --max-context or lower --max-new-tokens"),
    ],
)
def test_mistakes_cost_a_line_and_keep_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, argv: str, says: str
) -> None:
    figures: dict[str, Any] = dict.fromkeys(Drafts.__dataclass_fields__, 1)
    known = {"hqq:8:64": Drafts(**{**figures, "quant": "hqq:8:64"})} if "nose" in argv else {}
    measure = tune.measure

    def measured(config: EngineConfig, *rest: Any, **how: Any) -> Drafts:
        return known.get(str(config.quant)) or measure(config, *rest, **how)

    monkeypatch.setattr(tune, "measure", measured)
    monkeypatch.chdir(tmp_path)
    Path("taken").touch()
    if "other" in argv:
        write_gguf(tmp_path / "other.gguf")
    command, *options = argv.format(tiny=tiny, tmp=tmp_path).split()
    assert main([command, "--target", str(tiny), "--out-dir", "out", *options]) == 2
    err = capsys.readouterr().err
    assert all(part in " ".join(err.split()) for part in says.split(" ... "))
    assert err.count("\n") == 1 or "--against" in argv
    assert not [*tmp_path.glob("cache/settings/quant-*"), *tmp_path.glob("out/*")]


def test_lists_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--num-speculative-tokens", "1,x"])
    assert "'1,x' is not a list of numbers such as 1,2" in capsys.readouterr().err
    assert verify._list_of(int)("2,1,2") == (2, 1)


def against(target: Path, reference: Path, out: Path, *options: str) -> dict[str, Any]:
    out.with_suffix(".txt").write_text(TEXT)
    given = ["--target", str(target), "--against", str(reference), "--texts", f"{out}.txt", "--out-dir", str(out)]
    assert main(["verify", *given, *options]) == 0
    return json.loads((out / "verify.json").read_text())["divergence"]


@torch.inference_mode()
def log_probs(model: Any, text: list[int]) -> Tensor:
    windows = [torch.tensor([text[first : first + 100]]) for first in range(0, len(text), 100)]
    return torch.cat([model(window).logits[0].double().log_softmax(-1) for window in windows])


def test_it_is_the_divergence_that_transformers_gives(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    found = against(tiny, tiny, tmp_path / "out", "--target-quant", "q4_0")
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    ids = load_tokenizer(tiny).encode(TEXT)
    wanted = log_probs(model, ids)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            kind = ggml_type("Q8_0" if name == "lm_head.weight" else "Q4_0")
            values = gguf.dequantize(gguf.quantize(parameter.detach().numpy(), kind), kind)
            parameter.data.copy_(torch.from_numpy(values.copy()))
    ours = log_probs(model, ids)
    kl = (wanted.exp() * (wanted - ours)).sum(-1)
    assert found["num_positions"] == len(ids) > 200
    assert found["mean"] == pytest.approx(float(kl.mean()), rel=1e-3) and found["mean"] > 1e-4
    assert found["percentile_99"] == pytest.approx(float(kl.quantile(0.99)), rel=1e-2)
    assert found["max"] == pytest.approx(float(kl.max()), rel=1e-2)
    same = (ours.argmax(-1) == wanted.argmax(-1)).double().mean()
    assert found["same_argmax"] == pytest.approx(float(same), abs=0.01)
    assert f"{found['mean']:.3g}" in capsys.readouterr().out


def test_stored_weights_are_close_to_their_values(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf")
    exact = against(file, file, tmp_path / "exact")
    fast = against(file, file, tmp_path / "fast", "--activations", "fast")
    assert exact["num_positions"] == fast["num_positions"] > 20
    assert exact["mean"] < 1e-6 < 10 * fast["mean"] and exact["mean"] < fast["mean"]
    assert exact["same_argmax"] == 1


def config_of(*argv: str) -> EngineConfig:
    parser = options.Parser()
    options.add_model_options(parser)
    return options.engine_config(options.parse(parser, argv), modes=("share",))


@pytest.mark.smoke
def test_settings_are_measured_and_the_best_is_kept(
    tiny: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, closed = LLM.close, list[LLM]()
    monkeypatch.setattr(LLM, "close", lambda llm: (closed.append(llm), close(llm)))
    sizes = ["--num-questions", "2", "--max-new-tokens", "12", "--max-context", "512", "--max-speculative-tokens", "4"]
    argv = ["tune", "--target", str(tiny), "--quants", "hqq:4:64+head=4"]
    calibrated = KeptCalibration(content_hash(tiny), DEFAULT)
    calibrated.begin(tiny, [0, 1, None], [CalibrationText(list(range(3, 13)), list(range(20, 220)))] * 5)
    calibrate(load_decoder(tiny, dtype=torch.bfloat16), calibrated.answers(), calibrated)
    assert main([*argv, "--draft-quant", "hqq:8:64", "--keep", "layers=0", *sizes, "--out-dir", f"{tmp_path}/out"]) == 0
    assert len(closed) == 4  # before the next one: a process has ranks of one model
    report = json.loads((tmp_path / "out" / "tune.json").read_text())
    measured = report["measured"]
    names = ["hqq:4:64,head=4", "hqq:4:64,head=4,calibrated", "hqq:8:64 skip layers=0"]
    assert [each["quant"] for each in measured] == names
    for each in measured:
        assert each["quantized_bytes"] > 0
        agreement = each["agreement"]
        assert agreement["num_tokens"] > 0 and 0 < agreement["same_noise"] <= agreement["overlap"] <= 1
        for predicted, temperature in zip(each["predicted"], (0, 1), strict=True):
            assert (
                predicted["c"] > 0
                and predicted["v"] > 0
                and predicted["speedup"] > 0
                and 1 <= predicted["num_draft"] <= 4
            )
            assert predicted["temperature"] == temperature
            assert predicted["alpha"] == agreement["same_noise" if temperature else "greedy"] <= 1
    best = max(measured, key=lambda each: sum(part["speedup"] for part in each["predicted"]))
    assert report["best"] == best["quant"]
    for each in report["decoded"]:
        assert each["speedup"] == pytest.approx(each["share_tokens_per_second"] / each["naive_tokens_per_second"])
        assert 1 <= each["tau"] <= 5 and each["identical"] == 1
    [file] = tmp_path.glob("cache/settings/quant-*")
    entry = json.loads(file.read_text())["value"]
    assert str(QuantConfig.parse(entry["quant"], entry["skips"])) == best["quant"]
    assert entry["facts"]["predicted"] == best["predicted"]
    used = best["quant"].removesuffix(",calibrated") + ",calibrated" * ("hqq:4" in best["quant"])
    assert str(config_of("--target", str(tiny), "--draft-quant", "auto").quant) == used
    out = capsys.readouterr().out
    assert f"{best['quant']} at T = 1: " in out and f"--draft-quant auto now uses {best['quant']}" in out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tune.json"]


def test_where_answers_cannot_be_followed_alpha_is_that_of_decoded_chains(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(target=str(tiny), quant=QuantConfig.parse("hqq:8:64"), max_context=256)
    params = SamplingParams(max_new_tokens=12, seed=0, ignore_eos=True)
    with LLM.from_config(config, ("naive", "share")) as llm:
        monkeypatch.setattr(decoder, "Decoder", int)  # as if transformers ran the model
        alphas, agreement = tune._acceptance(llm, list(PROMPTS.values()), params, {})
    assert agreement is None and len(alphas) == 2 and all(0.5 < alpha <= 1 for alpha in alphas)


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_agreement_is_that_of_one_quantized_step_after_each_text(kind: str, tiny: Path, tmp_path: Path) -> None:
    """Rows together, one of which ends first, against texts that are read anew for each token.

    The answers, and their KV, are those of a model with other drafts.
    """
    folder = tiny if kind == "llama" else converted_folder(write_gguf(tmp_path / "a.gguf", kind, mlp=128))
    config = EngineConfig(target=str(folder), quant=QuantConfig.parse("hqq:3:64"), max_batch=2, max_context=128)
    other = LLM.from_config(replace(config, quant=QuantConfig.parse("hqq:2:64")), ("naive", "share")).runtime
    runtime = LLM.from_config(config, ("naive", "share")).runtime
    texts = [[5, 6, 7], list(range(20, 30)), [9, 8]]
    with torch.inference_mode():
        equal, overlaps, cache, first = 0, list[float](), runtime.step.new_cache(1, 64), texts[0]
        for _ in range(4):
            first = [*first, int(prefill(runtime.step, cache, [first], [0]).argmax())]
        runtime.target.eos_ids = other.target.eos_ids = (first[-1],)
        greedy, sampled = answer(other, texts, 6), answer(other, texts, 6, seed=1)
        found = measure_agreement(runtime, greedy, sampled)
        again = measure_agreement(runtime, greedy, sampled)
        for answers in (greedy, sampled):
            for row, text in enumerate(texts):
                for step in answers[0].steps:
                    if not step.is_live_B[row]:
                        break
                    wanted = prefill(runtime.step, cache, [text], [0])
                    text = [*text, int(step.tokens_B[row])]
                    cache.lengths.fill_(len(text) - 1)
                    with runtime.model.switch.quantized_weights():
                        draft = runtime.step.forward(torch.tensor([text[-1:]]), cache)[0].float()
                    after = prefill(runtime.step, cache, [text], [0]).float()
                    if answers is greedy:
                        assert text[-1] == int(wanted.argmax())
                        equal += int(draft.argmax() == after.argmax())
                    else:
                        overlaps.append(float(torch.minimum(draft.softmax(-1), after.softmax(-1)).sum()))
    num_greedy = sum(int(step.is_live_B.sum()) for step in greedy[0].steps)
    assert 6 < num_greedy < 18 and found.num_tokens == num_greedy + len(overlaps)
    assert found.greedy == equal / num_greedy and 0 < found.greedy < 1
    assert found.overlap == pytest.approx(sum(overlaps) / len(overlaps), abs=0.01)
    assert found == again


@pytest.mark.slow
def test_settings_next_to_stored_weights_are_what_they_say(tmp_path: Path) -> None:
    """A start drafts with the upper halves of Q8_0, and a mixture with fewer experts: both are measured, too."""
    sizes = ["--num-questions", "1", "--max-new-tokens", "4", "--out-dir", f"{tmp_path}/out"]
    extra = {"context_length": 512}
    for architecture, keep, wanted in (
        ("llama", ["--keep", "none"], {"nested:4:64", "hqq:4:64,head=4"}),
        ("qwen3moe", [], {"nested:4:64,experts=1"}),
    ):
        file = write_gguf(tmp_path / "a.gguf", architecture, extra=extra, mlp=128, pads_to=16)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tune, "QUANTS", "hqq:4:64+head=4")
            assert main(["tune", "--target", str(file), *sizes, *keep]) == 0
        measured = json.loads((tmp_path / "out" / "tune.json").read_text())["measured"]
        assert {each["quant"] for each in measured} == wanted
        assert all((each["quantized_bytes"] > 0) == each["quant"].startswith("hqq") for each in measured)
    assert main(["tune", "--target", str(file), *sizes, "--keep", "down"]) == 2


def drafts_of(quant: str, alpha: float, draft: float, verify: float) -> Drafts:
    costs = made_costs({1: 2.0, 2: 2.0 * verify, 5: 8.0 * verify}, draft=2.0 * draft)
    return Drafts(quant=quant, quantized_bytes=1, alphas=(alpha, alpha), agreement=None, costs=(costs, costs))


def test_settings_differ_by_their_drafts_alone() -> None:
    """One of them was timed while verify steps took long; what it gains is that of its acceptance and draft steps."""
    drafts = [drafts_of("a", 0.8, 0.4, 1.1), drafts_of("b", 0.85, 0.4, 2.0), drafts_of("c", 0.7, 0.4, 1.1)]
    found = predict(drafts, 1)
    assert [each.speedup for each in found] == pytest.approx([(1 + alpha) / 1.5 for alpha in (0.8, 0.85, 0.7)])
    assert all(part.c == 0.4 and part.v == pytest.approx(1.1) for each in found for part in each.predicted)


def test_chance_of_equal_choices_with_the_same_noise() -> None:
    """Against 400,000 draws, and the bounds of Daliri et al.; tokens that one side never chooses count as well."""
    generator = torch.Generator().manual_seed(0)
    p_BV, q_BV = (3 * torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)).softmax(-1)
    q_BV[1], p_BV[2, 3], q_BV[2, 4] = p_BV[1], 0, 0
    q_BV[3] = torch.eye(12)[p_BV[3].argmax()]
    p_BV[2] /= p_BV[2].sum()
    q_BV[2] /= q_BV[2].sum()
    found_B = equal_with_same_noise(p_BV, q_BV)
    uniform_NV = torch.rand(400_000, 12, generator=generator, dtype=torch.float64)
    for p_V, q_V, found in zip(p_BV, q_BV, found_B.tolist(), strict=True):
        gumbel_NV = -(-uniform_NV.log()).log()
        equal_N = (p_V.log() + gumbel_NV).argmax(-1) == (q_V.log() + gumbel_NV).argmax(-1)
        assert found == pytest.approx(float(equal_N.double().mean()), abs=0.004)  # five standard deviations
        overlap = float(torch.minimum(p_V, q_V).sum())
        assert overlap / (2 - overlap) - 1e-9 <= found <= overlap + 1e-9
    assert found_B[1] == pytest.approx(1) and found_B[3] == pytest.approx(float(p_BV[3].max()))


def test_settings_are_measured_once_and_keep_what_they_can() -> None:
    names = [str(quant) for quant in settings_of(tune.QUANTS, tune.KEPT, DEFAULT)]
    heads = [f"hqq:4:{group},head={bits}" for group in (64, 32) for bits in (8, 4)]
    kept = ["hqq:4:64,head=4 skip proj=down", "hqq:4:64,head=4 skip layers=0"]
    assert names == ["hqq:8:64,head=8", "hqq:4:64", *heads, *kept]
    base = QuantConfig.parse("hqq:4:64,down=8,head=4")
    assert settings_of("hqq:4:64,hqq:4:64", "none", base) == [FOUR]
    without = [str(quant) for quant in settings_of("hqq:4:64", "down,head,layers=1+7", base, ["layers=0"])[1:]]
    assert without == ["hqq:4:64,head=4 skip proj=down", "hqq:4:64,down=8", f"{base} skip layers=1,7"]


def test_the_formula() -> None:
    costs = made_costs({1: 2.0, 2: 2.0, 4: 4.0, 5: 5.0}, draft=1.0)
    # alpha 0.5 and K = 3: 1 + 1/2 + 1/4 + 1/8 tokens in 3 * 0.5 + 2 plain steps
    assert expected_speedup(0.5, 3, costs) == pytest.approx(1.875 / 3.5)
    assert expected_speedup(1.0, 3, costs) == pytest.approx(4 / 3.5)
    assert expected_speedup(0.0, 1, costs) == pytest.approx(1 / 1.5)
    assert best_length(0.0, costs, 4) == 1
    assert best_length(1.0, made_costs({1: 2.0, 9: 2.0}, draft=0.1), 8) == 8


def place(**other: str) -> TuningKey:
    fields = {"model": "/models/a", "dtype": "bfloat16", "device": "cpu", "processor": "p", "version": "1"}
    return TuningKey(**{**fields, **other})


def test_a_setting_is_kept_for_its_place_alone(tmp_path: Path) -> None:
    quant = QuantConfig.parse("hqq:4:64,head=4", ["layers=0", "proj=down"])
    assert load_tuned(place()) is None
    save_tuned(place(), FOUR, {})
    file = save_tuned(place(), quant, {"speedup": 2.0})
    assert load_tuned(place()) == quant and list((tmp_path / "cache/settings").iterdir()) == [file]
    for name in ("model", "dtype", "device", "processor", "version"):
        assert load_tuned(place(**{name: "other"})) is None


def test_an_entry_that_cannot_be_read_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    file = save_tuned(place(), FOUR, {})
    file.write_text(file.read_text().replace("hqq:4:64", "hqq:5:64"))
    with caplog.at_level(logging.WARNING, "sharesd.weights.quant_tuning_cache"):
        assert load_tuned(place()) is None
    assert f"{file} cannot be read and is replaced" in caplog.text and len(caplog.records) == 1


def test_auto_falls_back_to_the_default_and_says_so(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sharesd.weights.quant_tuning_cache"):
        config = config_of("--target", str(tiny), "--draft-quant", "auto")
    assert config == config_of("--target", str(tiny))
    [record] = caplog.records
    assert record.levelno == logging.INFO and "nothing was measured for this model" in record.message
    assert "sharesd tune" in record.message


@pytest.mark.parametrize("by_flags", [True, False])
def test_auto_on_stored_weights_is_what_a_start_uses_until_another_is_measured(by_flags: bool, tmp_path: Path) -> None:
    """Upper halves of Q8_0; also where what was measured best is the default of other targets."""
    file = str(write_gguf(tmp_path / "a.gguf", mlp=128, pads_to=16))

    def drafts() -> str:
        given = {"target": file, "device": "cpu", "quant": "auto", "max_context": 64}
        flags = ("--target", file, "--device", "cpu", "--draft-quant", "auto", "--max-context", "64")
        config = config_of(*flags) if by_flags else engine_config(given, modes=("share",))
        return str(resolve_config(config, ("share",)).config.quant)

    assert drafts() == "nested:4:64"
    save_tuned(tuning_key(with_dequantize(EngineConfig(target=file, device="cpu"))), DEFAULT, {})
    assert drafts() == str(DEFAULT)


def test_auto_takes_what_was_measured_for_dtype_and_device(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    quant = QuantConfig.parse("hqq:8:64", ["proj=o"])
    save_tuned(tuning_key(EngineConfig(target=str(tiny), device="cpu")), quant, {})
    auto = ("--target", str(tiny), "--draft-quant", "auto", "--device", "cpu", "--dtype")
    with caplog.at_level(logging.INFO, "sharesd.weights.quant_tuning_cache"):
        assert config_of(*auto, "bf16").quant == quant
    assert "measured best" in caplog.text
    assert config_of(*auto, "fp32").quant == DEFAULT
    with pytest.raises(ValueError, match="--draft-quant auto chooses what to skip, and --quant-skip is 'proj=o'; drop"):
        config_of(*auto, "fp32", "--quant-skip", "proj=o")


def test_a_place_names_content_processor_and_version(tiny: Path, tmp_path: Path) -> None:
    found = tuning_key(EngineConfig(target=str(tiny), device="cpu"))
    assert found.processor and found.version == quant_tuning_cache.__version__
    copy = shutil.copytree(tiny, tmp_path / "copy")
    assert tuning_key(EngineConfig(target=str(copy), device="cpu")) == found
    changed = bytearray((copy / "model.safetensors").read_bytes())
    changed[-1] ^= 1
    (copy / "model.safetensors").write_bytes(changed)
    assert tuning_key(EngineConfig(target=str(copy), device="cpu")) != found


CHAIN = DraftKind("", False)


@pytest.mark.parametrize("four", [1.9, 0.8, 0.5], ids=["as it is", "equal", "sooner"])
def test_draft_steps_are_never_free(four: float) -> None:
    """Amid noise, four steps may have been timed as short as one, or shorter."""
    ratios = {(STEP, 1, False): [1.0], (CHAIN, 1, False): [0.8], (CHAIN, 4, False): [four]}
    costs = fit_costs(ratios, {False: [2.0], True: []}, near=10.0, far=None)
    each, begin = (2 * (four - 0.8) / 3, 1.6) if four > 0.8 else (2 * four / 4, 1.6)
    assert costs.chain.step == pytest.approx(each) and costs.chain.step > 0
    assert costs.chain.step + costs.chain.begin == pytest.approx(begin)


def test_a_long_context_timed_amid_noise_leaves_no_step_free() -> None:
    """A step that another program held up at the long context would begin below zero without one."""
    ratios = {(what, 1, far): [ratio] for what, ratio in ((STEP, 1.0), (CHAIN, 0.8)) for far in (False, True)}
    costs = fit_costs(ratios, {False: [1.0], True: [99.0]}, near=100.0, far=200.0, single_pass=[""])
    assert costs.step[1] == pytest.approx(0.5) and costs.chain.step == pytest.approx(0.4)
