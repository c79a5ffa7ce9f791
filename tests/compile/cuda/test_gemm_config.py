"""Which GPU is meant, and settings of its libraries, made before any of them runs; there need be none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compile import op_registry
from sharesd.cli import options
from sharesd.cli.parser import Parser
from sharesd.config import EngineConfig
from sharesd.devices import selection
from sharesd.devices.selection import CUBLAS_WITHOUT_SPLITS, prepare_cuda, steady_cublas
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from tests.helpers.oracle import new_engine, tiny_decoder


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No settings at first, and those of before afterwards."""
    matmul, cuda = torch.backends.cuda.matmul, torch.backends.cuda
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    cudnn = cuda.cudnn_sdp_enabled()
    for name in CUBLAS_WITHOUT_SPLITS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield monkeypatch
    matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before
    cuda.enable_cudnn_sdp(cudnn)


def test_cublas_is_told_in_time_or_not_at_all(untouched: pytest.MonkeyPatch) -> None:
    untouched.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not steady_cublas()  # too late: it has read its environment
    for name in CUBLAS_WITHOUT_SPLITS:
        untouched.delenv(name)
    untouched.setattr(torch.cuda, "is_initialized", lambda: False)
    untouched.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
    assert steady_cublas()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:2"  # what the user said
    assert os.environ["CUBLASLT_WORKSPACE_SIZE"] == "1"
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    untouched.setattr(torch.cuda, "is_initialized", lambda: True)
    assert steady_cublas()  # a second model of the same process


def test_preparing_says_when_it_is_too_late(untouched: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    untouched.setattr(torch.cuda, "is_initialized", lambda: True)
    prepare_cuda(steady=False)
    assert not caplog.records and not CUBLAS_WITHOUT_SPLITS.keys() & os.environ.keys()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    prepare_cuda(steady=True)
    assert "cuBLAS was in use before" in caplog.text


def test_the_option() -> None:
    parser = Parser()
    options.add_model_options(parser)
    for given in ([], ["--cublas-no-split-k"]):
        config = options.engine_config(parser.parse_args(given), modes=("naive",))
        assert config.steady_cublas == bool(given)


def test_a_gpu_has_its_number_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without one is no device that tensors are on, and copies there go to whichever is current."""
    monkeypatch.setattr(selection, "_auto", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("auto", "cuda", "cuda:0"):
        assert selection.device_of(name) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert selection.device_of("cuda") == torch.device("cuda", 2)
    assert selection.device_of("cuda:3") == torch.device("cuda", 3)
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cpu", "cuda:3"):
        selection.use(torch.device(name))
    assert current == [torch.device("cuda:3")], "the one that was asked for becomes the current one"


def test_loading_and_every_call_make_it_so(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    for module in ("startup.resolve", "engine.engine"):
        monkeypatch.setattr(f"sharesd.{module}.use", used.append)
    Runtime(EngineConfig(target=str(checkpoint()), device="cpu", compile="off", max_context=64), ("naive",))
    assert used == [torch.device("cpu")]
    engine, params = new_engine(tiny_decoder(0)), SamplingParams(max_new_tokens=2)
    engine.generate([[1]], params)
    before = len(used)
    assert before > 1, "the calling thread may be another one"
    engine.add([1], params)
    engine.step()
    assert len(used) == before + 1


def test_kernels_are_launched_where_their_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Any] = {}
    current: list[Tensor | None] = [None]

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    def impl(name: str, kernel: Any, key: str) -> None:
        registered[f"{name} on {key}"] = kernel

    monkeypatch.setattr(op_registry, "LIBRARY", SimpleNamespace(impl=impl))
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for name in ("one", "many"):
        op_registry.register_cuda(name, lambda first, *rest, sinks=None: (current[-1], rest, sinks))
    one, many = registered["one on CUDA"], registered["many on CUDA"]
    tensors = [torch.zeros(1), torch.zeros(2)]
    assert one(tensors[0], 3, "x", sinks="s") == (tensors[0], (3, "x"), "s")
    assert many(tensors[::-1]) == (tensors[1], (), None) and current == [None]
