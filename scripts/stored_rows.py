"""Cost of rows, exact and fast, and the rate of reading, of weights that run as they are stored.

    python scripts/stored_rows.py --target FILE.gguf [--rows 1,2,4,8] [--repeats 40]

Steps of the whole decoder behind an empty cache, `fast` and `exact` in turn, and a loop that reads the same weights.
Prints medians; of the rate, the fastest tenth of steps of one row and of loops.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from compile.block_linear import BlockLinear  # noqa: E402
from compile.cpp_extension import FLAGS, compiler  # noqa: E402
from sharesd.config import EngineConfig  # noqa: E402
from sharesd.runtime import Runtime  # noqa: E402

ACTIVATIONS = ("fast", "exact")
READ_LOOP = """
#include <cstdint>
extern "C" uint64_t read_words(const uint64_t* words, int64_t num, int threads) {
  uint64_t total = 0;
#pragma omp parallel for num_threads(threads) reduction(^ : total)
  for (int64_t t = 0; t < threads; ++t) {
    const int64_t end = num * (t + 1) / threads;
    uint64_t mine[32] = {};
    for (int64_t i = num * t / threads; i + 32 <= end; i += 32) {
      for (int64_t line = 0; line < 32; line += 8) __builtin_prefetch(words + i + line + 256);
      for (int64_t j = 0; j < 32; ++j) mine[j] ^= words[i + j];
    }
    for (int64_t j = 0; j < 32; ++j) total ^= mine[j];
  }
  return total;
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    config = EngineConfig(target=args.target, device="cpu", dequantize=False, max_context=128, mode="naive")
    target = Runtime(config, ("naive",)).target
    linears = [module for module in target.modules() if isinstance(module, BlockLinear)]
    cache, rows = target.new_cache(1, 64), [int(each) for each in args.rows.split(",")]
    tokens = torch.randint(target.vocab_size, (1, max(rows)), generator=torch.Generator().manual_seed(0))

    def step(num: int, activations: str) -> None:
        for linear in linears:
            linear.table[0, 1] = int(activations == "exact")
        target.forward(tokens[:, :num], cache)

    steps = {(num, each): Timed(lambda num=num, each=each: step(num, each)) for num in rows for each in ACTIVATIONS}
    reading = Timed(read_loop([linear.weight for linear in linears]))
    with torch.inference_mode():
        for _ in range(args.repeats):
            for measure in (*steps.values(), reading):
                measure()
    times = {key: statistics.median(measure.seconds[1:]) for key, measure in steps.items()}
    size = sum(linear.nbytes for linear in linears) / 1e6
    print(f"{Path(args.target).name}, {torch.get_num_threads()} threads, {size:.0f} MB")
    print("rows  fast ms  over one row  exact ms  over one row  exact over fast")
    for num in rows:
        fast, exact = (times[num, each] for each in ACTIVATIONS)
        ones = [times[rows[0], each] for each in ACTIVATIONS]
        print(
            f"{num:4}  {1e3 * fast:7.2f}  {fast / ones[0]:12.2f}  {1e3 * exact:8.2f}  {exact / ones[1]:12.2f}"
            f"  {exact / fast:15.2f}"
        )
    rate = (
        statistics.quantiles(reading.seconds[1:], n=10)[0] / statistics.quantiles(steps[1, "fast"].seconds[1:], n=10)[0]
    )
    print(f"a step of one row, fast, reads its weights at {rate:.2f} of the loop's rate")


def read_loop(weights: list[torch.Tensor]) -> Callable[[], None]:
    """Return a call that reads all words of some tensors."""
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "read.cpp", Path(folder) / "read.so"
        source.write_text(READ_LOOP)
        subprocess.run([compiler(), *FLAGS, str(source), "-o", str(built)], check=True)
        function = ctypes.CDLL(str(built)).read_words
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]

    def read() -> None:
        for each in weights:
            function(each.data_ptr(), each.nbytes // 8, torch.get_num_threads())

    return read


class Timed:
    """A call, and the seconds that it took each time."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call, self.seconds = call, list[float]()

    def __call__(self) -> None:
        start = time.perf_counter()
        self.call()
        self.seconds.append(time.perf_counter() - start)


if __name__ == "__main__":
    main()
