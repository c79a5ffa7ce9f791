"""Drafts of one row as streams: chosen by the widest draft and by card, compiled by NVRTC, launched and captured."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch

from compile.cuda import stream
from compile.cuda.nvrtc import NvrtcError
from sharesd.config import EngineConfig
from sharesd.sampling_params import SamplingParams
from tests.helpers.shared_runtimes import Shared
from tests.stand_in.decoding import decode, load
from tests.stand_in.plausible import install
from tests.stand_in.worker import run

PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)
AS_STREAMS, IN_TILES = "drafts: 4 bits as streams", "drafts: 4 bits in tiles"


def decoded(config: EngineConfig) -> dict[str, Any]:
    found = decode(config, ("share",), "share", PARAMS, ids=range(60, 300))
    return found | layouts(config) | {"launched as streams": launches[0]}


def layouts(config: EngineConfig) -> dict[str, Any]:
    """Load; count linears of drafts by their layout."""
    from compile.cuda.lowbit import QuantizedRowLinear, StreamLinear

    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    install()
    runtime = load(config, ("share",))
    modules = list(runtime.target.modules())
    return {
        "kernels": runtime.config.kernels,
        "streams": sum(isinstance(module, StreamLinear) for module in modules),
        "tiled": sum(isinstance(module, QuantizedRowLinear) for module in modules),
    }


def without_nvrtc(config: EngineConfig) -> dict[str, Any]:
    def missing(*args: object) -> bytes:
        raise NvrtcError("NVRTC is not installed (no file); pip install nvidia-cuda-nvrtc")

    stream.cubin_of = missing  # type: ignore[assignment]
    return layouts(config)


launches = [0]


def counted() -> None:
    """Count launches from here on, in the process of the driver."""
    launch = stream.launch

    def count(*args: Any) -> None:
        launches[0] += 1
        launch(*args)

    stream.launch = count


def config_of(shared: Shared, **options: Any) -> EngineConfig:
    return EngineConfig(target=str(shared.checkpoint(hidden=256)), device="cuda", num_draft=3, **options)


@pytest.mark.parametrize("card", ["9.0", "8.6", pytest.param("12.0", marks=pytest.mark.long)])
def test_drafts_of_one_row_are_streams(shared: Shared, card: str) -> None:
    """All products of 2 layers and the head; launches are captured, and none is outside of its memory."""
    _, outcome = run([counted, partial(decoded, config_of(shared))], FAKE_CC=card)
    assert not outcome.trouble, outcome.trouble
    assert AS_STREAMS in outcome.log
    found = outcome.value
    assert found["kernels"] == "streams" and found["streams"] == 9 and found["tiled"] == 0, found
    assert found["launched as streams"] >= 18, found
    assert found["modules"] == found["after"] == 0, "loaded or captured after warming up"


def test_wide_drafts_and_old_cards_are_tiled(shared: Shared) -> None:
    """By option or by rule; asked for by name, each is refused with its reason."""
    rule = [config_of(shared, max_batch=2), config_of(shared, tree=(2, 2, 3)), config_of(shared, kernels="triton")]
    asked = [config_of(shared, kernels="streams", **more) for more in ({"max_batch": 2}, {"dtype": "float16"})]
    outcomes = run(
        [*(partial(layouts, config) for config in rule), *(partial(load, each, ("share",)) for each in asked)]
    )
    for outcome in outcomes[:3]:
        assert not outcome.trouble, outcome.trouble
        assert outcome.value["kernels"] == "triton" and outcome.value["streams"] == 0 < outcome.value["tiled"]
    assert [IN_TILES in outcome.log for outcome in outcomes[:3]] == [True, True, False]
    refusals = [outcome.error.strip().splitlines()[-1] for outcome in outcomes[3:]]
    assert refusals == [
        "ValueError: kernels is 'streams', and drafts have up to 2 rows (max_batch 2), and they are for one; use "
        "--kernels triton",
        "ValueError: kernels is 'streams', and dtype is float16, and they take bfloat16; use --kernels triton",
    ]
    (old,) = run([partial(layouts, config_of(shared))], FAKE_CC="7.5")
    assert not old.trouble and old.value["kernels"] == "triton", old.trouble


def test_without_nvrtc_drafts_are_tiled(shared: Shared) -> None:
    """One line says so; asked for by name they are refused."""
    by_name = partial(load, config_of(shared, kernels="streams"), ("share",))
    quiet, refused = run([partial(without_nvrtc, config_of(shared)), by_name])
    assert not quiet.trouble, quiet.trouble
    assert (
        quiet.log.count("drafts do not run as streams, which is slower: their kernel does not run on cuda:0: NVRTC")
        == 1
    )
    assert quiet.value["kernels"] == "triton" and quiet.value["tiled"] == 9
    assert refused.error.strip().endswith("pip install nvidia-cuda-nvrtc; use --kernels triton")


def product_on_the_second_card() -> int:
    """The current card is the first, as in a process that has a model on each."""
    torch.cuda.set_device(0)
    weight = torch.zeros(1, 1, stream.chunk_bytes(64), dtype=torch.uint8, device="cuda:1")
    x = torch.zeros(1, stream.CHUNK_INPUTS, dtype=torch.bfloat16, device="cuda:1")
    stream._stream_linear(x, weight, None, None, 0.0, None, "", 64)
    return torch.cuda.current_device()


def test_a_stream_is_launched_on_the_card_of_its_tensors() -> None:
    (outcome,) = run([product_on_the_second_card], FAKE_DEVICES="2", FAKE_STRICT="1")
    assert not outcome.trouble, outcome.trouble
    assert outcome.value == 0, "the current card is what it was"
