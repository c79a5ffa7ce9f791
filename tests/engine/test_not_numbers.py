"""Logits that are not numbers end their request with an error; requests beside it go on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sharesd import SamplingParams
from sharesd.cli.main import main
from sharesd.config import EngineConfig
from sharesd.data.request_errors import NonFiniteLogits
from sharesd.engine.engine import Engine
from sharesd.engine.outputs import Completion
from sharesd.engine.request import Request
from sharesd.engine.warmup import warm_up
from sharesd.runtime import Runtime
from tests.cases.inputs import llama
from tests.cases.test_checkpoints import inf_row
from tests.engine.test_rows import new
from tests.helpers.oracle import OracleDrafter, new_engine
from tests.helpers.recorded_graphs import RecordedGraphs, take_the_way_of_cuda

BAD = {"nan": math.nan, "inf": math.inf, "none": -math.inf}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(llama(tmp_path_factory.mktemp("not-numbers") / "x", seed=90))


def spoil(engine: Engine, monkeypatch: pytest.MonkeyPatch, token: int | torch.Tensor, bad: float) -> None:
    """Logits after this token are spoilt: one of them, or all if `bad` is minus infinity."""
    forward = type(engine.target).forward

    def spoilt(self: Any, tokens_BT: Any, cache: Any, keep_BR: Any = None, **more: Any) -> Any:
        logits_BTV = forward(self, tokens_BT, cache, keep_BR, **more)
        is_hit_BT = tokens_BT == token
        if keep_BR is not None:
            is_hit_BT = is_hit_BT.gather(1, keep_BR)
        where_BTV = is_hit_BT[..., None].expand_as(logits_BTV).clone()
        if bad != -math.inf:
            where_BTV[..., 1:].fill_(False)
        return logits_BTV.masked_fill(where_BTV, bad)

    monkeypatch.setattr(type(engine.target), "forward", spoilt)


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[tuple[Completion, Exception | None]]:
    requests: list[Request] = [engine.add(prompt, params, i) for i, prompt in enumerate(prompts)]
    found: dict[Request, tuple[Completion, Exception | None]] = {request: (Completion(), None) for request in requests}
    while engine.num_running or engine.num_waiting:
        for chunk in engine.step():
            found[chunk.request][0].add(chunk)
            found[chunk.request] = found[chunk.request][0], chunk.error
    return list(found.values())


@pytest.mark.parametrize("mode", ["naive", "suffix", "share", "classic"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("more", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}, {"logprobs": True}], ids=str)
def test_only_its_request_ends(
    target: str, mode: Any, bad: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the token that naive would have to choose, whatever the draft."""
    runtime = Runtime(EngineConfig(target=target, device="cpu", dtype="float32", max_context=96, max_batch=3), (mode,))
    engine = runtime.engine(mode)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, **more)
    prompts = [runtime.tokenizer.encode(text) for text in ("the old tree", "the river", "a bird sings")]
    healthy = [done for done, _ in run(engine, prompts, params)]
    seen = [set(done.token_ids) for done in healthy]
    token = next(t for t in healthy[0].token_ids[3:] if t not in seen[1] | seen[2] | {t for p in prompts for t in p})
    place = healthy[0].token_ids.index(token) + 1  # of the token that cannot be chosen
    spoil(engine, monkeypatch, token, BAD[bad])
    (ended, error), *others = run(engine, prompts, params)
    assert isinstance(error, NonFiniteLogits) and ended.finish_reason == "error"
    assert ended.token_ids == healthy[0].token_ids[:place]
    assert f"position {len(prompts[0]) + place} " in str(error) and "float32" in str(error) and target in str(error)
    for (done, none), wanted in zip(others, healthy[1:], strict=True):
        assert none is None
        assert (done.token_ids, done.logprobs, done.text) == (wanted.token_ids, wanted.logprobs, wanted.text)
    assert not any(len(ids) >= 3 and ids[:3] == prompts[0][:3] for ids in engine.cache.cached_ids), "KV is not reused"
    for tensor in (*engine.cache.k, *engine.cache.v):
        assert tensor.isfinite().all()
    monkeypatch.undo()
    again = [done.token_ids for done, _ in run(engine, prompts, params)]
    assert again == [done.token_ids for done in healthy]
    runtime.close()


class SpoiltDrafts(OracleDrafter):
    """Right guesses, with a token between them whose KV is not numbers."""

    spoilt = 0

    def _guess(self, row: int, at: int) -> int:
        return self.spoilt if at % 3 == 1 else super()._guess(row, at)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_rejected_draft_that_is_no_number_is_without_effect(dtype: Any, tmp_path: Path) -> None:
    folder = str(inf_row(tmp_path / "x"))
    runtime = Runtime(EngineConfig(target=folder, mode="naive", device="cpu", dtype=dtype, max_context=96, max_batch=2))
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    prompts = [runtime.tokenizer.encode(text) for text in ("the old tree", "the river")]
    wanted = [done.token_ids for done, _ in run(runtime.engine(), prompts, params)]
    drafter: Any = SpoiltDrafts(dict(zip(map(tuple, prompts), wanted, strict=True)), num_draft=5, accuracy=1.0)
    [drafter.spoilt] = runtime.tokenizer.encode(" moon", add_special_tokens=False)
    engine = new_engine(runtime.engine().target, drafter, batch=2)
    found = run(engine, prompts, params)
    assert engine.stats.drafted_tokens > 0 and not any(drafter.spoilt in ids for ids in wanted)
    assert [(done.token_ids, error) for done, error in found] == [(ids, None) for ids in wanted]
    runtime.close()


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("mode", ["naive", "share", "classic"])
def test_it_is_found_in_replayed_rounds(mode: str, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of CUDA. Rows of failed requests serve later ones."""
    take_the_way_of_cuda(monkeypatch)
    graphs = RecordedGraphs()
    options: dict[str, Any] = {"widths": [5], "auto_length": False, "async_scheduling": async_scheduling}
    engine = new(mode, batch=2, graphs=graphs, **options)
    spoilt_1 = torch.tensor([-1])  # as graphs read it
    spoil(engine, monkeypatch, spoilt_1, math.nan)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], [9, 8], [11, 12, 13, 14]]
    warm_up(engine, params)
    healthy = [done.token_ids for done, _ in run(engine, prompts, params)]
    others = {*healthy[1], *healthy[2], *(token for prompt in prompts for token in prompt), 0}
    token = next(token for token in healthy[0][2:] if token not in others)
    place = healthy[0].index(token) + 1
    replays = graphs.num_replays
    spoilt_1.fill_(token)
    found = run(engine, prompts, params)
    assert graphs.num_replays > replays
    spoilt_1.fill_(-1)
    assert [done.token_ids for done, _ in found] == [healthy[0][:place], *healthy[1:]]
    assert isinstance(found[0][1], NonFiniteLogits) and f"position {3 + place} " in str(found[0][1])
    assert [done.token_ids for done, _ in run(engine, prompts, params)] == healthy


def test_the_command_line_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(inf_row(tmp_path / "x"))
    sizes = ("--device", "cpu", "--max-context", "64", "--max-new-tokens", "4", "--raw", "--mode", "naive")
    prompts = ("under the moon", "the river")
    assert main(["generate", "--target", folder, *sizes, "--json", "--logprobs", *prompts]) == 1
    said = capsys.readouterr()
    [line] = said.out.splitlines()
    found = json.loads(line, parse_constant=pytest.fail)
    assert found["prompt"] == "the river" and len(found["token_ids"]) == 4
    [error] = [line for line in said.err.splitlines() if "error" in line]
    assert f"{folder} in bfloat16" in error and "position 3 " in error
