"""Ranks that share a model: the logits and texts of one, whatever comes late, and an end for all when one ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import psutil
import pytest
import torch

from multigpu.process_group import ThreadGroup
from multigpu.tensor_parallel import Shard, all_reduce, require_divisible
from sharesd.config import EngineConfig, OffloadConfig
from sharesd.models.architectures import config_from_hf
from sharesd.models.decoder import Decoder
from sharesd.models.loader import Tensors
from sharesd.models.weight_mapping import check_tensor_parallel, decoder_tensors
from sharesd.parallel.tensor_parallel import EAGER_TILE
from sharesd.runtime import Runtime
from tests.helpers import tensor_ranks
from tests.helpers.in_mode import in_mode
from tests.helpers.paths import ROOT
from tests.helpers.recorded_graphs import host_reads, take_the_way_of_cuda
from tests.helpers.tensor_ranks import GREEDY, MODES, SAMPLED, SMALL, logits_of, texts_of, texts_of_moved_rows, threads

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")

REDUCED: dict[str, Any] = {"tensor_parallel": 2, "tensor_parallel_style": "reduce"}
CHAINS, TREES = {"max_draft": 4, "num_draft": None}, {"num_draft": 6, "tree": (2, 3, 6)}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},  # biases of q, k, v
    "qwen3": {"head_dim": 32},  # norms of heads
    "phi3": {},  # merged linears
    "gemma2": {"head_dim": 32, "sliding_window": 5},  # norms behind attention and MLP, tied head, capped logits
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    """Eight heads, four of keys and values."""
    return checkpoint(hidden=128)


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(**{**SMALL, "target": str(folder), **options})


@pytest.mark.parametrize("compile", ["native", "off"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("size", [2, 4])
def test_logits_are_those_of_one_rank(folder: Path, size: int, dtype: str, compile: str) -> None:
    config = config_of(folder, dtype=dtype, compile=compile, max_batch=3)
    with threads(replace(config, tensor_parallel=size)) as runtime:
        assert runtime.target.blocks[0].attn.num_key_value_heads == 4 // size  # type: ignore[union-attr, index]
        assert all(map(torch.equal, logits_of(runtime), logits_of(Runtime(config))))


def make_family(folder: Path, tmp_path: Path, family: str, mlp: int) -> Tensors:
    """A model of this family in `tmp_path`, with a tokenizer from `folder`; returns its tensors."""
    raw = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": mlp, "num_hidden_layers": 3}
    raw |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2}
    raw |= {"model_type": family, **FAMILIES[family]}
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    whole, dice = Decoder(config_from_hf(raw)), torch.Generator().manual_seed(0)
    for parameter in whole.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=dice) * parameter.shape[-1] ** -0.5)

    return lambda: decoder_tensors(whole)


@pytest.mark.thin
@pytest.mark.parametrize("compile", ["native", "off"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_each_family(folder: Path, tmp_path: Path, family: str, compile: str) -> None:
    mlp = {"native": 96, "off": 128}[compile]  # torch's activations round by whole vectors
    tensors = make_family(folder, tmp_path, family, mlp)
    config = config_of(tmp_path, dtype="float32", compile=compile, max_batch=2)
    with threads(replace(config, tensor_parallel=2), tensors=tensors) as runtime:
        assert all(map(torch.equal, logits_of(runtime), logits_of(Runtime(config, tensors=tensors))))


@pytest.mark.parametrize("options", [CHAINS, TREES])
def test_texts_of_all_modes_are_those_of_one_rank(folder: Path, options: dict[str, Any]) -> None:
    """With lengths that clocks decide, and with trees."""
    config = config_of(folder, max_batch=3, **options)
    alone = Runtime(config, ("naive",))
    with threads(replace(config, tensor_parallel=2), (*MODES, "classic")) as runtime:
        for params in (GREEDY, SAMPLED):
            wanted = texts_of(alone, "naive", params)
            for mode in runtime.modes:
                assert texts_of(runtime, mode, params) == wanted, mode


@pytest.mark.parametrize(
    ("options", "modes"),
    [
        (TREES, (*MODES, "classic")),
        (TREES | {"compile": "off"}, ("naive", "share")),
        pytest.param(CHAINS, (*MODES, "classic"), marks=pytest.mark.long),
    ],
)
def test_texts_of_all_modes_where_sums_are_split(folder: Path, options: dict[str, Any], modes: Any) -> None:
    config = config_of(folder, **REDUCED, max_batch=3, **options)
    with threads(config, modes) as runtime:
        for params in (GREEDY, SAMPLED):
            wanted = texts_of(runtime, "naive", params)
            for mode in runtime.modes:
                assert texts_of(runtime, mode, params) == wanted, mode


@pytest.mark.thin
@pytest.mark.parametrize("compile", ["native", "off"])
@pytest.mark.parametrize("family", FAMILIES)
def test_split_sums_are_those_of_one_rank_but_for_rounding(
    folder: Path, tmp_path: Path, family: str, compile: str
) -> None:
    """Biases, which are added once, and linears that are merged, too."""
    tensors = make_family(folder, tmp_path, family, 128)
    config = config_of(tmp_path, dtype="float64", compile=compile, max_batch=2)
    with threads(replace(config, **REDUCED), tensors=tensors) as runtime:
        assert runtime.target.part.reduces  # type: ignore[union-attr]
        for split, whole in zip(logits_of(runtime), logits_of(Runtime(config, tensors=tensors)), strict=True):
            torch.testing.assert_close(split, whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("size", [2, 4])
def test_split_sums_are_as_near_to_the_truth_as_whole_ones(folder: Path, size: int, caplog: Any) -> None:
    """And are told."""
    config = config_of(folder, max_batch=3)
    truth, whole = (logits_of(Runtime(replace(config, dtype=dtype))) for dtype in ("float64", "bfloat16"))
    caplog.clear()
    with threads(replace(config, **{**REDUCED, "tensor_parallel": size})) as runtime:
        assert caplog.messages == [
            "tensor_parallel_style is reduce: sums are split, so texts may be others than with another number of ranks"
        ]
        for split, one, exact in zip(logits_of(runtime), whole, truth, strict=True):
            assert (split - exact).norm() < 1.2 * (one - exact).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_sums_are_the_same_on_all_ranks_and_in_steps_of_any_width(dtype: torch.dtype) -> None:
    parts_RMN = torch.randn(4, 5, 48, generator=torch.Generator().manual_seed(0)).to(dtype)

    def summed(rows: slice) -> list[torch.Tensor]:
        with ThreadPoolExecutor(4) as ranks:
            return list(ranks.map(lambda group: all_reduce(group, parts_RMN[group.rank, rows]), ThreadGroup.new(4)))

    first, *others = summed(slice(None))
    assert all(torch.equal(other, first) for other in others)
    assert torch.equal(summed(slice(2, 3))[1], first[2:3])
    torch.testing.assert_close(first, parts_RMN.double().sum(0).to(dtype))


@pytest.mark.parametrize("style", ["gather", "reduce"])
def test_rank_0_reads_once_a_round(folder: Path, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for addresses, which kernels for CPUs read. Other ranks read nothing but what rank 0 tells them to do."""
    take_the_way_of_cuda(monkeypatch)
    options: dict[str, Any] = {**REDUCED, "tensor_parallel_style": style, "compile": "off"}
    with threads(config_of(folder, **options), ("share",)) as runtime:
        chunks = in_mode(runtime, "share", warm=GREEDY).stream([[1, 2, 3]], replace(GREEDY, max_new_tokens=60))
        next(chunks)
        reads: list[tuple[bool, str]] = []
        for _ in range(3):
            reads.clear()
            with host_reads(lambda name: reads.append((current_thread() is main_thread(), name))):
                next(chunks)
            assert [name for by_rank_0, name in reads if by_rank_0 and name != "data_ptr"] == ["tolist"]
            told = [name for by_rank_0, name in reads if not by_rank_0 and name != "data_ptr"]
            assert told == ["tolist"] * len(told)
        chunks.close()


@pytest.mark.parametrize(
    ("style", "exempt"), [("gather", True), ("reduce", True), pytest.param("gather", False, marks=pytest.mark.slow)]
)
def test_ranks_share_no_tensor_but_through_the_group(folder: Path, style: str, exempt: bool, monkeypatch: Any) -> None:
    """As on devices of their own, in the way of CUDA; what the group itself does is noticed where it is watched."""
    take_the_way_of_cuda(monkeypatch)
    found: list[str] = []
    makers: dict[int, tuple[int, Any]] = {}
    trees, mode = (TREES, "share") if (style, exempt) == ("gather", True) else ({}, "share" if exempt else "naive")
    options: dict[str, Any] = {**REDUCED, "tensor_parallel_style": style, "compile": "off", **trees}
    with threads(
        config_of(folder, **options),
        (mode,),
        wrap=(lambda group: tensor_ranks.Unwatched(group, 0)) if exempt else (lambda group: group),
        around=lambda group: tensor_ranks.OwnTensors(group, makers, found),
    ) as runtime:
        in_mode(runtime, mode, warm=SAMPLED).generate(tensor_ranks.PROMPTS[:2], replace(SAMPLED, max_new_tokens=6))
    assert {rank for rank, _ in makers.values()} == {0, 1}
    assert (found == []) == exempt, found[:3]


def test_ranks_draft_with_their_own_quantized_rows(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """And know them again at the next start: rows of another rank would be the wrong ones."""
    for module in ("sharesd_files", "sharesd.runtime", "sharesd.weights.quantize"):
        monkeypatch.setattr(f"{module}.cache_root", lambda: tmp_path)
    taus = []
    for size in (1, 2, 2):
        with threads(config_of(folder, tensor_parallel=size), ("share",)) as runtime:
            engine = in_mode(runtime, "share", warm=GREEDY)
            engine.generate([[5, 6, 7] * 5], replace(GREEDY, max_new_tokens=100))
            taus.append(engine.stats.tau)
            assert runtime.report("share").quant.from_cache == (len(taus) == 3)  # type: ignore[union-attr]
    assert taus[1] == taus[2] == pytest.approx(taus[0], rel=0.15)


def test_late_ranks_change_nothing_and_rows_that_move_move_on_all_ranks(folder: Path) -> None:
    params, config = replace(SAMPLED, max_new_tokens=60), config_of(folder, max_batch=2)
    alone, late = Runtime(config, ("naive",)), lambda group: tensor_ranks.Delayed(group, 0.002)
    wanted, moved = texts_of(alone, "naive", params), texts_of_moved_rows(alone)
    with threads(replace(config, tensor_parallel=2), ("hybrid",), wrap=late) as runtime:
        assert texts_of_moved_rows(runtime) == moved
        for _ in range(2):
            assert texts_of(runtime, "hybrid", params) == wanted


def test_a_step_that_was_broken_off_is_the_last(folder: Path) -> None:
    with threads(config_of(folder, tensor_parallel=2)) as runtime:
        engine = in_mode(runtime, warm=GREEDY)
        runtime._group.close()  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="another rank has ended"):
            engine.generate([[5]], GREEDY)
        with pytest.raises(RuntimeError, match="rank 0 aborted a step"):
            engine.generate([[5]], GREEDY)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel is 0; it must be at least 1"),
        ({"tensor_parallel": 3}, "is 3, and the model's 4 key/value heads cannot be divided evenly; use 2 or 4, or"),
        ({"tensor_parallel": 2, "tensor_parallel_style": "sum"}, "tensor_parallel_style is 'sum'; choose one of"),
        ({"tensor_parallel": 2, "compile": "regional"}, "compile is 'regional' and tensor_parallel is 2"),
        ({"tensor_parallel": 2, "offload": OffloadConfig(host_memory=10**9)}, "2, and ranks keep all of their weights"),
    ],
)
def test_mistakes(folder: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Runtime(config_of(folder, **options))


def test_what_cannot_be_cut_is_named_and_torchs_activations_need_whole_vectors() -> None:
    cuts = {"heads": (6, 1), "outputs": (96, 16)}
    require_divisible(2, cuts)
    with pytest.raises(ValueError, match="the model's 6 heads cannot be divided evenly; use 2 or 3 or 6, or leave"):
        require_divisible(4, cuts)
    with pytest.raises(ValueError, match="96 outputs cannot be divided evenly in whole tiles of 16; use 2 or 3"):
        require_divisible(4, {**cuts, "heads": (12, 1)})
    with pytest.raises(ValueError, match="5 heads cannot be divided evenly; leave it out"):
        require_divisible(2, {"heads": (5, 1), "outputs": (96, 16)})
    weight = torch.arange(12)[:, None]
    assert Shard(1, 2).cut(weight, (8, 4)).flatten().tolist() == [4, 5, 6, 7, 10, 11]
    raw = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = config_from_hf({**raw, "num_attention_heads": 4, "num_key_value_heads": 2, "model_type": "llama"})
    check_tensor_parallel(config, 2)
    with pytest.raises(ValueError, match="96 outputs of gate and up cannot be divided evenly in whole tiles of 64"):
        check_tensor_parallel(config, 2, EAGER_TILE)


def start(*args: str, **environment: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "tests.helpers.tensor_ranks", *args], env=environment, **pipes)


def check(process: subprocess.Popen[str]) -> None:
    try:
        _, err = process.communicate(timeout=1800)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")


@pytest.mark.subprocess
@pytest.mark.parametrize(("size", "dtype"), [("2", "bfloat16"), pytest.param("4", "float64", marks=pytest.mark.long)])
def test_processes(folder: Path, size: str, dtype: str) -> None:
    check(start("equal", str(folder), size, dtype, "native"))


@pytest.mark.subprocess
@pytest.mark.slow
def test_rounds_of_late_processes(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [start("delayed", str(folder), "100", "0.002", RANK=str(rank), **place) for rank in range(2)]
    for rank in ranks:
        check(rank)


KILL, KILLED, SLOW = signal.SIGKILL, "has ended: killed by signal 9 (SIGKILL)", pytest.mark.slow


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("task", "size", "victims", "by", "statuses", "told"),
    [
        ("endless", 2, [1], KILL, (2, 3), f"error: rank 1 {KILLED}"),
        pytest.param("idle", 4, [3], KILL, (2, 3), f"error: rank 3 {KILLED}", marks=SLOW),
        pytest.param("endless", 2, [0], KILL, (-9,), "rank 0 has ended: it was killed, or its machine is", marks=SLOW),
        pytest.param("idle", 2, [1, 0], signal.SIGINT, (130,), "interrupted\n", marks=SLOW),
    ],
)
def test_the_end_of_a_rank_ends_all(
    folder: Path, task: str, size: int, victims: list[int], by: int, statuses: tuple[int, ...], told: str
) -> None:
    """None of them would end by itself. Ctrl-C is for rank 0."""
    ranks: list[Any] = [start(task, str(folder), str(size))]
    try:
        assert ranks[0].stdout.readline() == "ready\n"
        ranks += psutil.Process(ranks[0].pid).children()
        assert len(ranks) == size
        for victim in victims:
            ranks[victim].send_signal(by)
        ranks[0].wait(120)
        assert not psutil.wait_procs(ranks[1:], timeout=120)[1]
        _, err = ranks[0].communicate()
        assert ranks[0].returncode in statuses and err.count("\n") == 1 and told in err
    finally:
        ranks[0].kill()
        for other in ranks[1:]:
            if other.is_running():
                other.kill()


def generate(folder: Path, *args: str, launcher: tuple[str, ...] = (sys.executable,)) -> tuple[int, str, str]:
    command = [*launcher, "-m", "sharesd", "generate", "-", "--target", str(folder), "--max-new-tokens", "20", *args]
    options: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "timeout": 1800}
    done = subprocess.run(command, input="why is the sky blue", capture_output=True, text=True, **options)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.subprocess
@pytest.mark.slow
def test_the_command_alone_and_under_torchrun(folder: Path) -> None:
    alone = generate(folder, "--mode", "naive")
    assert alone[0] == 0 and alone[1].strip()
    status, out, err = generate(folder, "--tensor-parallel", "2")
    assert (status, out) == alone[:2] and err.startswith("mode auto drafts with ")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    share = ("--mode", "share", "--num-speculative-tokens", "3")  # which measures less than auto does
    status, out, _ = generate(folder, "--tensor-parallel", "2", *share, launcher=torchrun)
    assert (status, out) == alone[:2]
    status, out, err = generate(folder, "--tensor-parallel", "4", launcher=torchrun)
    assert status != 0 and out == "" and "tensor_parallel is 4, and this is rank 0 of 2" in err
