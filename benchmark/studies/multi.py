"""`multi`: what do stages on several devices give, against what formulas say?

Rounds of plain decoding and of `share` are timed on one device and in stages, in turns. From those on one device, and
the time of a hop, follows what stages should give: a plain token takes T + P h, a round of D drafts R + (D + 1) P h.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmark import arguments
from benchmark.arguments import markdown_table, rich_table
from benchmark.environment import environment
from benchmark.questions.records import replace_file, write_json
from sharesd.cli import options
from sharesd.cli.console import console, err_console
from sharesd.config import EngineConfig, Mode, SamplingParams, SplitConfig

if TYPE_CHECKING:
    from sharesd.load import Runtime

MODES: tuple[Mode, ...] = ("naive", "share")
PROMPT = "Write a short story about a lighthouse."
SENT = 20
"""Hops that are timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Of a mode in so many stages."""

    stages: int
    mode: str
    num_draft: int
    tau: float
    """Tokens emitted per round."""
    round_s: float
    """Median seconds of a round."""
    predicted_round_s: float
    """The same, from that of one stage; of one stage what was measured."""

    @property
    def tokens_per_second(self) -> float:
        return self.tau / self.round_s

    @property
    def predicted(self) -> float:
        """Tokens per second."""
        return self.tau / self.predicted_round_s


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "multi",
        help="what do stages on several devices give, against what was predicted?",
        description="Decode in one and in several stages; compare with what times on one device and hops predict.",
    )
    parser.set_defaults(run=run, parser=parser)
    group = parser.add_argument_group("study")
    group.add_argument("--stages", type=arguments.numbers, default="2,3", metavar="LIST", help="how many stages")
    group.add_argument("--hop", type=float, default=20.0, metavar="MS", help="milliseconds that hops are held back")
    group.add_argument("--repeats", type=arguments.number, default=3, metavar="N", help="answers of each, in turns")
    arguments.add_out_dir(group, "multi")
    options.add_model_options(parser)
    options.add_sampling_options(parser, max_new_tokens=48)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write multi.json and multi.md; returns the exit status."""
    if args.num_draft == "auto":
        args.num_draft = 4  # formulas are about rounds of one length
    config = options.engine_config(args, modes=MODES)
    if config.split.max_memory or config.split.device_map is not None or config.tensor_parallel > 1:
        raise ValueError("stages of `multi` are those of --stages on --devices; drop other ways to several devices")
    if not args.hop >= 0:
        raise ValueError(f"--hop is {args.hop:g}; give milliseconds")
    params, out_dir = options.sampling_params(args), arguments.out_folder(args.out_dir, "multi")
    found, hop_s, several = measure(config, args.stages, args.hop / 1000, params, args.repeats)
    head = ["stages", "mode", "drafts", "tau", "round, ms", "tok/s", "predicted", "of predicted"]
    rows = [
        [
            *(str(one.stages), one.mode, str(one.num_draft), f"{one.tau:.2f}", f"{1000 * one.round_s:.1f}"),
            *(f"{one.tokens_per_second:.2f}", f"{one.predicted:.2f}", f"{one.tokens_per_second / one.predicted:.0%}"),
        ]
        for one in found
    ]
    held = f"of which {args.hop:g} ms are held back" if args.hop else "nothing held back"
    link = "" if several else " Links between devices, and ranks on several: not measured, there is one device."
    basis = f"A hop takes {1000 * hop_s:.2f} ms, {held}.{link}"
    console.print(rich_table("Stages", head, rows, left=2))
    console.print(basis, highlight=False, soft_wrap=True)
    report = {
        "command": arguments.command(),
        "environment": environment(config.split.devices[0] if config.split.devices else config.device),
        "hop_s": hop_s,
        "held_back_s": args.hop / 1000,
        "several_devices": several,
        "figures": list(map(asdict, found)),
    }
    write_json(out_dir / "multi.json", report)
    replace_file(out_dir / "multi.md", f"# Stages\n\n{basis}\n\n{markdown_table(head, rows, left=2)}\n")
    console.print(f"results: {out_dir / 'multi.md'}", markup=False, highlight=False, soft_wrap=True)
    return 0


def measure(
    config: EngineConfig, stages: Sequence[int], hop_s: float, params: SamplingParams, repeats: int
) -> tuple[list[Figures], float, bool]:
    """Figures of one and of each number of stages (on the devices of the config in turns, or on its one), seconds of a
    hop, and whether there are several devices. Raises RuntimeError where texts differ.
    """
    from sharesd.load import Runtime

    params = replace(params, ignore_eos=True)  # rounds are wanted, whatever they say
    devices = config.split.devices or ("cpu" if config.device == "auto" else config.device,)
    runtimes = {}
    for count in sorted({1, *stages}):
        names = tuple(devices[number % len(devices)] for number in range(count))
        split = SplitConfig(devices=names, hop_seconds=hop_s)
        with err_console.status(f"loading {count} stages"):
            runtimes[count] = Runtime(replace(config, device="auto", split=split), MODES)
    texts: dict[str, list[int]] = {}
    seconds: dict[tuple[int, str], list[float]] = {(count, mode): [] for mode in MODES for count in runtimes}
    taus: dict[str, float] = {}
    for repeat in range(1 + repeats):
        for count, mode in seconds:
            engine = runtimes[count].engine(mode, warm=params)  # type: ignore[arg-type]
            rounds: list[float] = []
            before: float | None = None
            tokens: list[int] = []
            for chunk in engine.generate([PROMPT], params):
                now = time.perf_counter()
                if before is not None:  # the first token comes from the prompt
                    rounds.append(now - before)
                before, tokens = now, [*tokens, *chunk.token_ids]
            if texts.setdefault("", tokens) != tokens:
                raise RuntimeError(f"{mode} in {count} stages says something else; that is an error of this program")
            seconds[count, mode] += rounds if repeat else []  # the first time, much is new
            taus[mode] = engine.stats.tau
    hop = _hop_seconds(runtimes[max(runtimes)])
    found = []
    for (count, mode), all_rounds in seconds.items():
        drafts = config.most_draft if mode == "share" else 0
        hops = (drafts + 1) * count * hop if count > 1 else 0.0
        found.append(
            Figures(
                stages=count,
                mode=mode,
                num_draft=drafts,
                tau=taus[mode],
                round_s=median(all_rounds),
                predicted_round_s=median(seconds[1, mode]) + hops,
            )
        )
    return found, hop, len(set(devices)) > 1


def _hop_seconds(runtime: Runtime) -> float:
    """Median seconds in which a row of the residual stream comes from the first stage to the last."""
    import torch

    from sharesd.models.decoder import Decoder

    target = runtime.target
    assert isinstance(target, Decoder)  # no other is split
    split = target.split
    first, last = split.stages[0].device, split.stages[-1].device
    row = torch.ones(1, 1, target.config.hidden_size, dtype=runtime.dtype, device=first)
    times = []
    for _ in range(SENT):
        started = time.perf_counter()
        split.send(row, last)[0, 0, 0].item()
        times.append(time.perf_counter() - started)
    return median(times)
