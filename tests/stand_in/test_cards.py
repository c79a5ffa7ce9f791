"""Cards of several generations and sizes: modes load, are captured and replayed on each, within its memory."""

from __future__ import annotations

from functools import partial

import pytest

from sharesd.config import EngineConfig, OffloadConfig
from sharesd.sampling_params import SamplingParams
from tests.helpers.shared_runtimes import Shared
from tests.stand_in.decoding import decode
from tests.stand_in.points import Point
from tests.stand_in.test_decoding import check
from tests.stand_in.worker import Outcome, run

CARDS = {"7.5": "16e9", "8.0": "40e9", "8.6": "12e9", "8.9": "24e9", "12.0": "32e9"}
"""Compute capability -> bytes. (All other tests are of 9.0, with 80 GB.)"""
POINTS = [
    Point("naive", "one", logprobs="top"),
    Point("share, trees", "one", penalties="penalties"),
    Point("suffix", "rows differ", choice="top-p"),
    Point("eagle 3", "one", joins="joins"),
]


@pytest.fixture(scope="class")
def outcomes(request: pytest.FixtureRequest, shared: Shared) -> dict[Point, Outcome]:
    """By point, on one card."""
    card = request.param
    return dict(zip(POINTS, run([p.call(shared) for p in POINTS], FAKE_CC=card, FAKE_TOTAL=CARDS[card]), strict=True))


@pytest.mark.parametrize(
    "outcomes",
    [pytest.param(card, marks=() if card in ("7.5", "12.0") else pytest.mark.long) for card in CARDS],
    indirect=True,
)
class TestCards:
    @pytest.mark.parametrize("point", POINTS, ids=str)
    def test_decodes(self, outcomes: dict[Point, Outcome], point: Point) -> None:
        check(point, outcomes[point])


class TestMemory:
    """Cards that are nearly full."""

    def decode(self, shared: Shared, **options: object) -> Outcome:
        config = EngineConfig(target=str(shared.checkpoint(hidden=128, layers=8)), device="cuda", **options)  # type: ignore
        params = SamplingParams(max_new_tokens=8, ignore_eos=True)
        return run([partial(decode, config, ("naive",), "naive", params, ids=range(60, 300))], FAKE_TOTAL="300M")[0]

    def test_the_context_is_what_the_memory_holds(self, shared: Shared) -> None:
        outcome = self.decode(shared, max_batch=200, offload=OffloadConfig(when="off"))
        assert not outcome.trouble, outcome.trouble
        assert "what half of the free memory" in outcome.log
        assert outcome.value["taken"] < 300e6

    def test_what_cannot_fit_is_an_error_with_a_remedy(self, shared: Shared) -> None:
        outcome = self.decode(shared)
        assert "does not fit" in outcome.error and "at least" in outcome.error
