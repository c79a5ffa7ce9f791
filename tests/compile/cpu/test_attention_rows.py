"""The CPU kernel of attention: what rows of a step do not attend to is without effect on them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from compile.attention import attend
from compile.kv_layout import CHUNK
from tests.compile.cpu.test_kernels import EACH_DTYPE, check_attention, keep_threads, make_case

__all__ = ["keep_threads"]


@EACH_DTYPE
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"recent": 1}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize(("heads", "d"), [((4, 2), 16), ((7, 1), 64), ((2, 2), 120)])
def test_a_token_that_is_no_number_spoils_no_row_before_it(
    heads: tuple[int, int], d: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Rows of the same step, before the middle of a block and at the borders of blocks and chunks."""
    settings = {"scale": d**-0.5, **options}
    case = make_case(dtype, T=17, heads=heads, d=d, lengths=(0, 30, CHUNK - 5), slots=2 * CHUNK)
    wanted = attend(*case.fresh(), **settings)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for token in (0, 1, 5, 16):
            for bad in (math.nan, -math.inf):
                spoilt = case._replace(k=case.k.clone(), v=case.v.clone())
                spoilt.k[:, token], spoilt.v[:, token] = bad, bad
                out = attend(*spoilt.fresh(), **settings)
                assert torch.equal(out[:, :token], wanted[:, :token])
                assert not out[:, token].isfinite().any()


def test_windows_smaller_than_a_step_cross_chunks() -> None:
    """Some rows of a step see nothing of a chunk that others see."""
    for length in (CHUNK - 20, 2 * CHUNK - 20, 3 * CHUNK - 30):
        check_attention(make_case(torch.float32, T=33, lengths=(length,), slots=4 * CHUNK), window=3)
