"""Command `widen`: enlarge a model without changing its function.

Weights become the first rows and columns of larger matrices. Added residual dimensions are exactly zero. Other added
weights are noise without effect on the output.

| --to | parameters | hidden | MLP | heads | layers | bfloat16 |
| --- | --- | --- | --- | --- | --- | --- |
| 135m | 0.13e9 | 576 | 1,536 | 9 + 3 | 30 | 0.3 GB |
| 1b | 1.01e9 | 2,304 | 2,688 | 24 + 8 | 32 | 2.0 GB |
| 7b | 6.73e9 | 4,096 | 11,008 | 66 + 22 | 36 | 13.5 GB |
| 13b | 12.87e9 | 5,120 | 13,824 | 78 + 26 | 45 | 25.7 GB |

Heads have 64 numbers. `135m` makes a copy of SmolLM2-135M. `1b` has four times its hidden size: norms are scaled by
exactly 1/2, so that bfloat16 rounds as before. At the other sizes results agree up to rounding, as those of another
kernel would.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmark.gpu.shapes import SHAPES
from sharesd.cli.console import loading_bars, print_line
from sharesd.models.hub import model_name, resolve


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "widen",
        help="make a small model larger without changing its output",
        description="Write a checkpoint of the given size that computes the same as the target.",
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--to", choices=SHAPES, required=True, help="parameters of the result")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to write, new or empty")
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="checkpoint folder, .gguf file or hub id (default: the embedded SmolLM2-135M-Instruct)",
    )
    parser.add_argument(
        "--dither",
        action="store_true",
        help="add error of the size of 4-bit rounding to the weights. Those of the embedded model lie on a grid of 4 "
        "bits, which drafts find again; with this option its drafts agree as those of a 16-bit model. The text changes",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise")


def run(args: argparse.Namespace) -> int:
    from benchmark.studies.widening import widen

    out = Path(args.out)
    with loading_bars() as progress:
        folder = resolve(args.target, progress=progress)
        name = f"{model_name(args.target).removesuffix(' (embedded)')} widened to {args.to.upper()}"
        name += ", dithered" if args.dither else ""
        options = {"seed": args.seed, "dither": args.dither, "progress": progress}
        num_parameters = widen(folder, out, SHAPES[args.to], name=name, **options)
    print_line(f"{name}: {num_parameters / 1e9:.2f}e9 parameters in {out}; use it with --target {out}")
    return 0
