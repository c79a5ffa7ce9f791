"""`widen`: a small model made as large as wanted without changing what it computes.

A checkpoint's weights become the first rows and columns of larger matrices; the residual dimensions that are added stay
exactly zero. What else is added is random noise which nothing reads. The result moves and multiplies as many bytes as a
true model of its size and says what the small one says: real text and real acceptance at the cost of the size. Call it
by its name, "SmolLM2-135M-Instruct widened to 7B", wherever a number of it is shown.

Shapes, for heads of 64 and three query heads to a key/value head, with a tied embedding of 49,152 tokens:

| --to | parameters | hidden | MLP | heads | layers | bfloat16 |
| --- | --- | --- | --- | --- | --- | --- |
| 1b | 1.01e9 | 2,304 | 2,688 | 24 + 8 | 32 | 2.0 GB |
| 7b | 6.73e9 | 4,096 | 11,008 | 66 + 22 | 36 | 13.5 GB |
| 13b | 12.87e9 | 5,120 | 13,824 | 78 + 26 | 45 | 25.7 GB |

`1b` has four times the hidden size of SmolLM2-135M: norms are scaled by exactly 1/2, so that bfloat16 rounds as before.
At the other sizes results agree up to rounding, as those of another kernel would.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharesd.console import console, loading_bars


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes of a decoder that widening may choose; head size and vocabulary stay as they are."""

    hidden_size: int
    """Size of the residual stream."""
    mlp_size: int
    """Size between gate/up and down."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key/value heads."""
    num_layers: int
    """Blocks."""

    def num_parameters(self, *, vocab_size: int, head_dim: int, tied: bool) -> int:
        """Weights of the whole model."""
        D = self.hidden_size
        attention = 2 * D * head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * D * self.mlp_size + 2 * D) + D + vocab_size * D * (1 if tied else 2)


SHAPES = {
    "1b": Shape(hidden_size=2304, mlp_size=2688, num_heads=24, num_kv_heads=8, num_layers=32),
    "7b": Shape(hidden_size=4096, mlp_size=11008, num_heads=66, num_kv_heads=22, num_layers=36),
    "13b": Shape(hidden_size=5120, mlp_size=13824, num_heads=78, num_kv_heads=26, num_layers=45),
}
"""Values of --to. All sizes are multiples of 128."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "widen",
        help="make a small model as large as wanted without changing what it says",
        description="Write a checkpoint of the given size which computes what the target computes.",
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--to", choices=SHAPES, required=True, help="parameters of the result")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to write; it must not exist, or be empty")
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="checkpoint folder, .gguf file or hub id (default: the embedded SmolLM2-135M-Instruct)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise")


def run(args: argparse.Namespace) -> int:
    """Widen the target; returns the exit status."""
    from benchmark.job import model_name  # torch takes seconds, mistakes should not
    from benchmark.widening import widen
    from sharesd.models.resolve import resolve

    out = Path(args.out)
    with loading_bars() as progress:
        folder = resolve(args.target, progress=progress)
        name = f"{model_name(args.target).removesuffix(' (embedded)')} widened to {args.to.upper()}"
        num_parameters = widen(folder, out, SHAPES[args.to], name=name, seed=args.seed, progress=progress)
    console.print(
        f"{name}: {num_parameters / 1e9:.2f}e9 parameters in {out}; use it with --target {out}",
        highlight=False,
        soft_wrap=True,
    )
    return 0
