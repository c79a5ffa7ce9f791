"""A clock that stands still unless it is told to go on, and a device which has one of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest

from compile import device_timer
from sharesd.engine import engine, output_processor, prefill_scheduler, round_launcher
from sharesd.engine.decode_round import Round
from sharesd.engine.engine import Engine
from sharesd.engine.output_processor import OutputProcessor


class FakeTime:
    """Stands in for `time` and `compile.device_timer.Clock`; the device works while the host goes on."""

    now = 1000.0
    """Time of the host."""
    done_at = 0.0
    """When the device will have done all that was asked of it."""

    def perf_counter(self) -> float:
        return self.now

    def launch(self, host_s: float, device_s: float) -> None:
        self.now += host_s
        self.done_at = max(self.done_at, self.now) + device_s

    def mark(self) -> float:
        return max(self.done_at, self.now)

    def wait(self, mark: float) -> None:
        self.now = max(self.now, mark)

    def seconds(self, start: float, end: float) -> float:
        return end - start


@contextmanager
def fake_time(decoder: Engine, *, runs_ahead: bool) -> Iterator[FakeTime]:
    """Rounds of this engine take made-up times within; `runs_ahead`: on a device that the host does not wait for."""
    made_up = FakeTime()

    def takes(host_s: float, device_s: float, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            made_up.launch(host_s, device_s)
            if not runs_ahead:
                made_up.wait(made_up.done_at)
            return found

        return timed

    with pytest.MonkeyPatch.context() as patch:
        for module in (engine, round_launcher, output_processor, prefill_scheduler, device_timer):
            patch.setattr(module, "time", made_up)
        if runs_ahead:
            for part in (decoder._launcher, decoder._outputs):
                patch.setattr(part, "_clock", made_up)
        patch.setattr(Round, "run", takes(0.001, 0.010, Round.run))
        patch.setattr(OutputProcessor, "emit", takes(0.002, 0.0, OutputProcessor.emit))
        patch.setattr(prefill_scheduler, "read_piece", takes(0.001, 0.020, prefill_scheduler.read_piece))
        if decoder.drafter is not None:
            patch.setattr(decoder.drafter, "draft", takes(0.001, 0.004, decoder.drafter.draft))
        yield made_up
