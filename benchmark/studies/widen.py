"""Command `widen`: enlarge a model without changing its function.

Weights become the first rows and columns of larger matrices. Added residual dimensions are exactly zero. Other added
weights are noise without effect on the output.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmark.studies.wide_shapes import SHAPES
from sharesd.cli.console import console, loading_bars
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
    console.print(
        f"{name}: {num_parameters / 1e9:.2f}e9 parameters in {out}; use it with --target {out}",
        highlight=False,
        soft_wrap=True,
    )
    return 0
