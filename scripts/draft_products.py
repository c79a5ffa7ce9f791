#!/usr/bin/env python
"""Rate of products with quantized weights over that of a loop that reads the same bytes, on a CPU.

Usage: draft_products.py THREADS [BITS:GROUP...]; linears of 2048 inputs and 49152 outputs on huge pages, too large
together for the cache, with 1, 2 and 4 rows. They are that large because a call from Python takes microseconds, which
decoders do not spend. Products and loops run in turns; medians of ratios.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compile.huge_pages import weights_on_huge_pages
from compile.linear import QuantizedPackedLinear
from scripts.stored_rows import read_loop

N, K, NUM_LINEARS, TURNS = 49152, 2048, 4, 15
ROWS = (1, 2, 4)


@torch.inference_mode()
def main(threads: str, *kinds: str) -> None:
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    for kind in kinds or ("4:64", "4:32"):
        bits, group = map(int, kind.split(":"))
        linears = [_linear(bits, group) for _ in range(NUM_LINEARS)]
        weights_on_huge_pages(torch.nn.ModuleList(linears))
        read = read_loop([each.weight for each in linears])
        num_bytes = sum(each.nbytes for each in linears)
        rates: dict[int, list[float]] = {rows: [] for rows in ROWS}
        loops = []
        for _ in range(TURNS):
            for rows in ROWS:
                x = torch.randn(1, rows, K, dtype=torch.bfloat16)
                before, took, after = seconds(read), seconds(partial(_products, linears, x)), seconds(read)
                rates[rows].append((before + after) / 2 / took)
                loops.append(num_bytes / before / 1e9)
        found = "  ".join(f"{rows}: {median(each):.2f}" for rows, each in rates.items())
        print(f"{kind:5}  rows {found}  loop {median(loops):.1f} GB/s")


def _products(linears: Sequence[QuantizedPackedLinear], x: torch.Tensor) -> None:
    for each in linears:
        each(x)


def _linear(bits: int, group: int) -> QuantizedPackedLinear:
    codes = torch.randint(2**bits, (N, K), dtype=torch.uint8)
    scales, offsets = torch.rand(N, K // group) / 100, torch.rand(N, K // group) / 100
    return QuantizedPackedLinear(codes, scales, offsets, None, bits=bits)


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main(*sys.argv[1:])
