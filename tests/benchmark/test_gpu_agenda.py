"""`python -m benchmark gpu`: steps in processes of their own; one that dies or hangs is noted, and the next goes on."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from benchmark.__main__ import main
from benchmark.gpu import agenda, command, machine, made, own_kernels, tiles
from benchmark.gpu.agenda import STEPS, AgendaStep, run_step
from benchmark.gpu.others import transformers_config
from benchmark.gpu.shapes import SHAPES
from benchmark.gpu.worker import FAILED, Job, NotHere, the_only_gpu
from compile.attention import attend_reference
from compile.cuda import gemm_config
from compile.cuda.gemm_config import Tile
from compile.linear import PackedLinear
from quant.formats.hqq.solver import solve
from quant.quantized_weight import QuantizedWeight
from sharesd.models.architectures import config_from_hf
from sharesd.models.decoder import Decoder
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_tree import chain
from sharesd.weights.quantize import solve_on_cpu
from tests.helpers.in_mode import in_mode


def python(code: str) -> list[str]:
    return [sys.executable, "-X", "faulthandler", "-c", code]


def outcome_of(folder: Path, rest: str, **limit: float) -> dict[str, Any]:
    """The exit of a step that finds something and continues with the rest."""
    code = f"open({str(folder / 'found')!r}, 'w').write('{{\"figure\": 7}}'); {rest}"
    outcome = run_step(AgendaStep("trial", 60, "", "what is tried"), python(code), folder / "found", **limit)
    assert outcome["found"] == {"figure": 7}
    return outcome


def steps_and_states(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    steps = json.loads((folder / "gpu.json").read_text())["steps"]
    return steps, {name: outcome["state"] for name, outcome in steps.items()}


@pytest.mark.parametrize(
    ("rest", "state", "reason", "tail"),
    [
        ("print('well')", "done", None, ""),
        ("raise RuntimeError('out of memory')", "failed", "exit status 1", "RuntimeError: out of memory"),
        ("import os; os.kill(os.getpid(), 11)", "failed", "ended by SIGSEGV", "Segmentation fault"),
    ],
)
def test_what_a_process_found_counts_even_if_it_died(
    tmp_path: Path, rest: str, state: str, reason: str | None, tail: str
) -> None:
    outcome = outcome_of(tmp_path, rest)
    assert (outcome["state"], outcome.get("reason")) == (state, reason) and tail in outcome.get("tail", "")


def test_a_process_that_hangs_says_where_and_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over when it has come to where it hangs."""

    class Clocked(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            if timeout != 3:
                return super().wait(timeout)
            while not (child.exists() and child.read_text()):
                assert self.poll() is None
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(agenda.subprocess, "Popen", Clocked)
    child, sleep = tmp_path / "child", python("import time; time.sleep(900)")
    rest = f"import subprocess; p = subprocess.Popen({sleep!r}); open({str(child)!r}, 'w').write(str(p.pid)); p.wait()"
    outcome = outcome_of(tmp_path, rest, limit_s=3)
    assert outcome["reason"] == "not finished after 3 s"
    assert 'File "<string>", line 1 in' in outcome["tail"]  # the traceback of where it stood
    pid, deadline = int(child.read_text()), time.monotonic() + 300
    with suppress(psutil.NoSuchProcess):  # one that has ended may wait for its parent to be told
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_steps_fit_into_31_minutes_and_their_functions_exist() -> None:
    assert sum(step.limit_s for step in STEPS) <= command.BUDGET_S == 31 * 60
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert [step.name for step in STEPS[:7]] == ["machine", "7b", "starts", "peer", "server", "offload", "7b-costs"]
    assert sum(step.limit_s for step in STEPS[:6]) < 540 and STEPS[6].limit_s < 150, "two calls on a lent card"
    for step in STEPS:
        module, _, function = step.measure.partition(":")
        assert callable(getattr(importlib.import_module(f"benchmark.gpu.{module}"), function))


@pytest.mark.subprocess
def test_steps_are_measured_and_reported(tmp_path: Path, tiny: Path, capsys: Any) -> None:
    """On a CPU, in tiny sizes: a step without time, two modes of a model widened in memory."""
    options = ["--device", "cpu", "--target", str(tiny), "--out-dir", str(tmp_path), "--budget", "120"]
    assert main(["gpu", *options, "--step", "7b,machine"]) == 0
    steps, states = steps_and_states(tmp_path)
    assert states == {"machine": "done", "7b": "skipped"}
    assert steps["machine"]["found"]["copy_bytes_per_second"] > 0
    assert main(["gpu", *options, "--step", "classic"]) == 0
    steps, _ = steps_and_states(tmp_path)
    assert list(steps) == ["machine", "7b", "classic"], "in the order of the agenda, earlier ones too"
    found = steps["classic"]["found"]
    assert found["model"].endswith("widened to a little more")
    assert [(row["mode"], row["identical"]) for row in found["modes"]] == [("naive", "1 of 1"), ("classic", "1 of 1")]
    assert all(row["captures later"] == row["compiled later"] == 0 < row["tok/s"] for row in found["modes"])
    text = (tmp_path / "gpu.md").read_text()
    assert "| classic | T=0 |" in text and "| classic | done |" in text
    assert "report:" in capsys.readouterr().out


@pytest.mark.subprocess
def test_one_that_fails_is_noted_and_the_next_goes_on(tmp_path: Path, capsys: Any) -> None:
    options = ["--device", "cpu", "--target", "no/such/folder/here", "--out-dir", str(tmp_path)]
    assert main(["gpu", *options, "--step", "1b,kernels"]) == 1
    assert steps_and_states(tmp_path)[1] == {"1b": "failed", "kernels": "not here"}, "the next one needs a GPU"
    assert "no/such/folder/here does not exist" in (tmp_path / "gpu.md").read_text()
    assert "1b failed: exit status 1" in capsys.readouterr().err


class Library(nn.Module):
    """A linear of the library, in place of one of ours; `low` as if its codes had been put in place."""

    def __init__(self, linear: nn.Linear, max_rows: int) -> None:
        super().__init__()
        self.weight, self.nbytes = linear.weight, linear.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)

    @classmethod
    def low(cls, solved: QuantizedWeight, bias: None, *, dtype: torch.dtype, max_rows: int) -> Library:
        if solved.bits == 8:
            raise RuntimeError("no kernel image")
        linear = nn.Linear(1, 1, device="meta")
        linear.weight = nn.Parameter(solved.dequantize().to(dtype), requires_grad=False)
        return cls(linear, max_rows)


@pytest.mark.usefixtures("one_thread")
def test_kernels_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With others in their place, of which those of 8 bits fail; the rest goes on."""

    def attend(q, k, v, cos, sin, k_cache, v_cache, lengths, depth, path, scale, window, recent, softcap):  # type: ignore[no-untyped-def]
        return attend_reference(q, k, v, k_cache, v_cache, lengths, scale=scale, window=window, recent=recent)

    kernels = SimpleNamespace(linear=Library, low=Library.low, attend=attend, one_by_one=nullcontext)
    monkeypatch.setattr(own_kernels, "_kernels", lambda job: kernels)
    monkeypatch.setattr(own_kernels, "solve", lambda w, bits, n: (solve if bits == 8 else solve_on_cpu)(w, bits, n))
    job = Job("cpu", tmp_path / "found")
    own_kernels.measure(job)
    assert [row["kind"] for row in job.table("attention")] == ["chain", "window", "recent"] * 2
    assert [row["linear"] for row in job.table("linears")] == ["o"] and len(job.table("low-bit linears")) == 1
    assert all(row["us, 1 rows"] > 0 < row["of copy, 1"] for row in job.table("attention") + job.table("linears"))
    assert len(job.table("dependent launch")) == 1
    assert job.table(FAILED) == [{"part": "o, 8 bits", "error": "RuntimeError: no kernel image"}]
    assert "no kernel image" in capsys.readouterr().err


def test_tiles_are_measured_once_kept_and_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of a shape; what fails costs its own shape; another run measures what is not there yet."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    tune = importlib.import_module("compile.cuda.autotune")
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    shapes = [("first", tune.WeightShape(96, 256)), ("second", tune.WeightShape(64, 512, 4, 64))]
    tried: list[Any] = []

    def measured(given: list[Any], device: torch.device) -> Any:
        tried.extend(given)
        if given[0].bits == 4 and len(tried) == 2:
            raise RuntimeError("out of memory")
        found = {given[0]: {Tile(32, 64, 1, 4, 4): 2e-6, Tile(64, 64, 1, 2, 4): 1e-6}}
        gemm_config.write_tiles(gemm_config.own_file("interpreter"), tune.fastest(found))
        return found

    for run in (1, 2):
        (tmp_path / f"{run}").mkdir()
        job = Job("cpu", tmp_path / f"{run}" / "tiles.json")
        tiles.run(job, measured, shapes, torch.device("cpu"))
        kept = gemm_config.read_tiles(tmp_path / f"{run}/measured/interpreter.json")
        assert kept == {shape.key: Tile(64, 64, 1, 2, 4) for _, shape in shapes[:run]}
        [row, *_] = job.table("tiles")
        assert (row["linear"], row["us"], row["by rule"]) == (shapes[run - 1][0], 1.0, False)
        assert len(job.table(FAILED)) == (run == 1)
    assert tried == [shapes[0][1], shapes[1][1], shapes[1][1]]


def test_every_shape_that_models_multiply_with_is_tuned_those_of_a_target_first(tiny: Path) -> None:
    names = [name for name, _ in tiles._sizes()]
    assert len(set(names)) == len(names) == 3 * (5 + 4) + 4 * 8 and names[0] == "qkv, 7b, 16 bits"
    assert ("gate_up, 7b, 4 bits", (22016, 4096, 4, 64)) in tiles._sizes()
    first = {shape[:2] for _, shape in tiles._sizes(str(tiny))[:4]}
    model = Decoder(config_from_hf(json.loads((tiny / "config.json").read_text())), device="meta")
    linears = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear) and "head" not in name}
    assert linears and {tuple(each.weight.shape) for each in linears.values()} <= first


def test_outcomes_of_tests_are_noted_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text("def test_right(): pass\ndef test_wrong(): assert 1 == 2\n")
    job = Job("cpu", tmp_path / "found.json")
    with pytest.raises(RuntimeError, match="ended with status 1"):
        machine.run_tests(job, ["-c", str(agenda.ROOT / "pyproject.toml"), str(file)])
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["passed"], found["failed"]) == (1, 1) and "1 failed, 1 passed" in found["summary"]
    assert [row["test"].rpartition("::")[2] for row in found["tests that failed"]] == ["test_wrong"]
    assert "assert 1 == 2" in (tmp_path / "tests.txt").read_text()


def test_one_gpu_is_all_that_a_step_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [the_only_gpu(name) for name in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda", "cuda"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    the_only_gpu("cuda:1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.long
def test_all_steps_go_through_on_a_cpu(tmp_path: Path, tiny: Path) -> None:
    assert main(["gpu", "--device", "cpu", "--target", str(tiny), "--out-dir", str(tmp_path)]) == 0
    steps, states = steps_and_states(tmp_path)
    assert states.keys() == {step.name for step in STEPS}
    need_a_gpu = {"kernels", "stored", "tiles", "gemlite", "tests", "offload"}
    assert {name for name, state in states.items() if state != "done"} == need_a_gpu
    assert steps["135m"]["found"]["all_texts_identical"]
    values = json.loads((tmp_path / "gpu.json").read_text())
    assert command.markdown(values) == (tmp_path / "gpu.md").read_text()


@pytest.mark.parametrize("size", ["1b", "7b"])
def test_transformers_takes_the_sizes_of_widened_models(size: str, tmp_path: Path) -> None:
    """Their heads have 64 dimensions each, whatever the hidden size is."""
    import transformers

    sizes = SHAPES[size]
    given = asdict(sizes) | {"model_type": "llama", "head_dim": 64, "num_hidden_layers": 1, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(given))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers_config(tmp_path))
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (64 * sizes.num_attention_heads, sizes.hidden_size)
    assert attention.k_proj.weight.shape == (64 * sizes.num_key_value_heads, sizes.hidden_size)
    assert model.config.num_attention_heads == sizes.num_attention_heads


def ran(folder: Path, state: dict[str, str], *options: str) -> tuple[list[str], dict[str, str]]:
    """The steps that a call measures in a folder with steps in these states, and the states afterwards."""
    measured: list[str] = []

    def outcome(step: AgendaStep, folder: Path, args: Any) -> dict[str, Any]:
        measured.append(step.name)
        assert steps_and_states(folder)[1][step.name] == "cut off", "what a killed call leaves"
        return {"state": "done", "found": {}}

    steps = {name: {"state": each, "reason": "", "found": {}} for name, each in state.items()}
    (folder / "gpu.json").write_text(json.dumps({"steps": steps}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_outcome", outcome)
        assert main(["gpu", "--device", "cpu", "--out-dir", str(folder), *options]) == 0
    return measured, steps_and_states(folder)[1]


def test_a_later_call_goes_on(tmp_path: Path, capsys: Any) -> None:
    """Steps that are done stay; what failed, was cut off or had no time left is measured."""
    names = [step.name for step in STEPS]
    states = dict.fromkeys(names[:3], "done") | {names[3]: "cut off", names[4]: "failed", names[5]: "skipped"}
    measured, after = ran(tmp_path, states)
    assert measured == names[3:] and set(after.values()) == {"done"}
    assert "machine is done; --step machine measures it again" in capsys.readouterr().err
    assert ran(tmp_path, after)[0] == [] and ran(tmp_path, after, "--step", "machine")[0] == ["machine"]
    measured, after = ran(tmp_path, {names[1]: "failed"}, "--budget", str(STEPS[1].limit_s - 1))
    assert names[1] not in measured and after[names[1]] == "failed", "an outcome of before stays"
    assert after["offload"] == "skipped" and measured[0] == "machine"


def test_drafts_hold_as_often_as_wished(tmp_path: Path) -> None:
    """A drafter that knows the text: rounds accept as many tokens as its right ones in a row, and texts stay."""
    job = Job("cpu", tmp_path / "found")
    with made.made_model(job, "1b", made.MODES) as llm:
        runtime = llm.runtime
        prompt, params = list(range(40, 60)), SamplingParams(max_new_tokens=61, ignore_eos=True)
        text = in_mode(runtime, "naive").generate([prompt], params)[0].token_ids
        for mode in ("share", "eagle"):
            engine = in_mode(runtime, mode, warm=params)
            variant, drafter, tau = engine.variant(params), engine.drafter, []
            for alpha in (0.0, 0.7, 1.0):
                variant.policy.pinned = chain(5)
                with made.knowing(engine, mode, [*prompt, *text], alpha, variant.round().context):
                    assert engine.generate([prompt], params)[0].token_ids == text
                tau.append(engine.stats.tau)
            assert engine.drafter is drafter
            assert tau[0] == 1 and tau[2] == 6 and 2 < tau[1] < 4, tau


def test_costs_and_gains_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with a tiny model; its products are timed as those of a GPU are."""
    job = Job("cpu", tmp_path / "found")
    monkeypatch.setattr(made, "RowLinear", PackedLinear)
    monkeypatch.setattr(made.F, "linear", lambda x, weight: x)
    made.measure(job, "7b")
    assert [row["mode"] for row in job.table("steps, of a plain one")] == ["share", "eagle"]
    rows = job.table("drafts that hold")
    assert [row["mode"] for row in rows] == ["share", "eagle"]
    assert all(row["acceptance"] == 0.9 and row["identical"] and row["x naive"] > 0 and row["tau"] > 1 for row in rows)
    plain = [row["what"] for row in job.table("plain step")]
    assert plain == ["products, our kernels", "products, cuBLAS", "whole steps"]
    assert not job.table(FAILED)


def test_without_the_embedded_model_or_triton_steps_are_not_here(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("sharesd.models.hub.EMBEDDED_PACKAGE", "no_such_package")
    for step in agenda.named(["135m", "1b", "7b", "starts", "peer", "server"]):
        module, _, function = step.measure.partition(":")
        measure = getattr(importlib.import_module(f"benchmark.gpu.{module}"), function)
        with pytest.raises(NotHere, match="the demo model is not installed"):
            measure(Job("cpu", tmp_path / "found"), **step.settings)
    with pytest.raises(ValueError, match="no/such/folder/here does not exist"):
        Job("cpu", tmp_path / "found", "no/such/folder/here").source()
    monkeypatch.setattr(own_kernels, "HAS_TRITON", False)
    with pytest.raises(NotHere, match="Triton, which is not installed"):
        own_kernels._kernels(Job("cuda", tmp_path / "found"))


def test_requests(capsys: Any) -> None:
    assert main(["gpu", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"| {step.name} | {step.limit_s:g} s |" in listed for step in STEPS)
    assert main(["gpu", "--step", "3b"]) == 2
    assert "unknown step '3b'; choose from machine, 7b" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unknown step"):
        agenda.named(["machine", "7B"])
    if not torch.cuda.is_available():
        assert main(["gpu"]) == 2
        assert "finds no GPU" in capsys.readouterr().err
