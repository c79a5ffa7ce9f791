"""When requests leave: gaps of a Gamma distribution, as vLLM's client draws them."""

from __future__ import annotations

import math
from itertools import accumulate
from random import Random


def departures(num: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """When each of `num` requests leaves, in seconds from the beginning, in ascending order.

    Gaps are Gamma(burstiness, 1 / (rate * burstiness)): 1 is a Poisson process, below 1 requests come in bursts, `inf`
    gives equal gaps. All are rescaled so that the last request leaves at num / rate: every seed asks for the same rate.
    A rate of `inf` sends all at once.
    """
    if rate == math.inf:
        return [0.0] * num
    rng = Random(seed)
    gaps = [1.0 if burstiness == math.inf else rng.gammavariate(burstiness, 1.0) for _ in range(num)]
    times = list(accumulate(gaps))
    return [time / times[-1] * num / rate for time in times]
