"""`offload`: how fast is a model that does not fit, against what was predicted?

For each limit of memory, plain decoding and drafters run as planned, each in a process of its own: what one left behind
would count against the limit of the next.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, cast

from benchmark import arguments
from benchmark.arguments import markdown_table, rich_table
from benchmark.questions import questions as question_files
from benchmark.questions.job import model_name
from benchmark.questions.records import replace_file, write_json
from sharesd.cli import options
from sharesd.cli.console import console, err_console
from sharesd.cli.pictures import can_draw
from sharesd.config import TABLES, EngineConfig, Mode, SamplingParams
from sharesd.devices.selection import device_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GB = 1e9
SAMPLE_S = 0.05
"""Seconds between two looks at how much memory the process has."""

NAMES = ("memory", "drafter")
TABLES_SHOWN = {
    "speed": ("tok/s", "times naive", "of plan", "of predicted", "same texts"),
    "what stays, and how far it drafts": ("peak", "resident", "depth", "tau"),
    "what travels": ("MB/token", "link in use", "a pass", "its bytes"),
}
"""On the terminal, each behind `NAMES`; files have all in one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What was measured under a limit."""

    limit: float
    """Bytes."""
    drafter: str
    """The mode, with bits where quantized weights draft."""
    depth: int
    """Tokens, or levels of a tree, to draft at most, as planned."""
    nodes: int
    """Of the trees that are drafted, as planned; 0: chains."""
    resident: float
    """Share of the blocks that stay."""
    tokens_per_second: float
    planned: float
    """The same, as planned."""
    predicted: float
    """The same of answers of these lengths."""
    tau: float
    """Tokens emitted per round."""
    bytes_per_token: float
    link_utilisation: float
    pass_s: float
    """Seconds of a step that verifies, on average."""
    transfer_s: float
    """Seconds that a pass's bytes travel, as planned."""
    peak_bytes: int
    """Most memory of its own that the process had, loading included; on a GPU what torch took of its memory."""
    texts: list[list[int]]

    @property
    def of_planned(self) -> float:
        """What was measured as a share of what was planned, which is meant for long answers."""
        return self.tokens_per_second / self.planned

    @property
    def of_predicted(self) -> float:
        """The same of what the plan predicts of answers of these lengths."""
        return self.tokens_per_second / self.predicted


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "offload",
        help="how fast is a model that does not fit?",
        description="Decode with less memory than the model takes, under several limits: plainly, and with drafts. "
        "With --link the disk (on a GPU: the bus) is slowed down, to see what slower machines do.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    group = parser.add_argument_group("offload")
    group.add_argument("--memory", default="1.2,1.6", metavar="LIST", help="limits of memory (a GPU's, on one), in GB")
    group.add_argument(
        "--drafters", default="share", metavar="LIST", help="modes besides naive, as share,hybrid,suffix"
    )
    group.add_argument("--bits", default="4,8", metavar="LIST", help="bits of the drafter's weights")
    group.add_argument("--link", type=float, metavar="GB/S", help="rate at which blocks come (default: the disk's own)")
    group.add_argument("--questions", metavar="FILE", help="JSON Lines, perhaps gzipped (default: ShareSD's own)")
    group.add_argument("--num-questions", type=arguments.number, default=2, metavar="N", help="of which N are asked")
    group.add_argument("--max-new-tokens", type=arguments.number, default=48, metavar="N", help="tokens of an answer")
    arguments.add_out_dir(group, "offload")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write offload.json, .md and .png; returns 0, or 1 where texts differ."""
    limits = [GB * limit for limit in arguments.each("--memory", _positive, args.memory)]
    bits = arguments.each("--bits", int, args.bits)
    modes: list[Mode] = [_drafter(mode) for mode in args.drafters.split(",")]
    rate = None if args.link is None else GB * _positive(args.link)
    base = options.engine_config(args, modes=modes)
    if base.offload.when != "auto" or base.offload.limited:
        raise ValueError("--offload and limits do not belong here, --memory has several; drop them")
    found = question_files.load("mtbench", args.questions, args.num_questions)
    prompts = [question.turns[0] for question in found.questions]
    out_dir = arguments.out_folder(args.out_dir, "offload")
    params = SamplingParams(max_new_tokens=args.max_new_tokens, ignore_eos=True)
    figures: list[Figures] = []
    on_gpu = device_of(base.device).type == "cuda"
    for limit in limits:
        device, host = (int(limit), None) if on_gpu else (None, int(limit))
        offload = replace(base.offload, device_memory=device, host_memory=host, rate=rate, choose_bits=False)
        config = replace(base, offload=offload, mode="naive")
        quants = [replace(base.quant, bits=each, head_bits=base.quant.head_bits and each) for each in bits]
        drafting = [
            replace(config, mode=mode, quant=quant)
            for mode in modes
            for quant in quants[: 1 if mode in TABLES else None]
        ]
        for each in (config, *drafting):
            with err_console.status(f"measuring {_name(each)} under {limit / GB:g} GB"):
                figures.append(in_a_process(each, prompts, params))
    same = [each.texts == figures[0].texts for each in figures]
    settings = {"command": arguments.command(), "model": model_name(base.target), "bytes_per_second": rate}
    write_json(out_dir / "offload.json", {"settings": settings, "figures": [asdict(each) for each in figures]})
    head, rows = _rows(figures, same)
    title = f"{settings['model']}, {'its own link' if rate is None else f'link {args.link:g} GB/s'}"
    replace_file(out_dir / "offload.md", f"{title}\n\n{markdown_table(head, rows, 2)}\n")
    if can_draw("offload.png"):
        draw(out_dir / "offload.png", title, figures)
    for caption, columns in TABLES_SHOWN.items():
        chosen = [head.index(name) for name in (*NAMES, *columns)]
        caption = f"{title}: {caption}"
        console.print(rich_table(caption, [head[i] for i in chosen], [[row[i] for i in chosen] for row in rows], 2))
    console.print(f"details: {out_dir / 'offload.json'}", markup=False, highlight=False, soft_wrap=True)
    return 0 if all(same) else 1


def in_a_process(config: EngineConfig, prompts: Sequence[str], params: SamplingParams) -> Figures:
    """`measure` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, config, prompts, params).result()


def measure(config: EngineConfig, prompts: Sequence[str], params: SamplingParams) -> Figures:
    """Decode as planned for the config's limit. ValueError where that leaves no way."""
    import torch

    from benchmark.timed import generate
    from sharesd.runtime import Runtime

    mode: Mode = config.mode
    with PeakMemory() as peak:
        runtime = Runtime(config, (mode,))
        plan = runtime.plan
        assert plan is not None, "a limit was given"
        engine = runtime.engine(mode, warm=params)
        asked = [runtime.tokenizer.ask(each) for each in prompts]
        texts = [done.token_ids for done in generate(engine, asked, params)]
        runtime.close()
    stats, traffic = engine.stats, engine.stats.traffic
    return Figures(
        limit=float(config.offload.device_memory or config.offload.host_memory or 0),
        drafter=_name(config),
        depth=plan.depth,
        nodes=plan.nodes,
        resident=len(plan.resident) / plan.num_blocks,
        tokens_per_second=stats.tokens_per_second,
        planned=plan.tokens_per_second,
        predicted=plan.speed_of([sum(rounds) for rounds in stats.accept_lengths]),
        tau=stats.tau,
        bytes_per_token=traffic.num_bytes / stats.new_tokens if traffic else 0.0,
        link_utilisation=traffic.utilisation if traffic else 0.0,
        pass_s=stats.verify_s / stats.steps if stats.steps else 0.0,
        transfer_s=plan.transfer_s,
        peak_bytes=torch.cuda.max_memory_reserved() if runtime.device.type == "cuda" else peak.bytes,
        texts=texts,
    )


class PeakMemory:
    """Looks, every so often, how much memory of its own the process has: a context manager."""

    def __init__(self) -> None:
        self.bytes = 0
        """The most that was seen."""
        self._over = Event()
        self._thread = Thread(target=self._look, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        from sharesd.devices.host_memory import own_memory

        while True:
            self.bytes = max(self.bytes, own_memory())
            if self._over.wait(SAMPLE_S):
                return


def _positive(value: str | float) -> float:
    number = float(value)
    if not number > 0:
        raise ValueError(f"{value} is given as a size or a rate in GB; give a number above 0")
    return number


def _name(config: EngineConfig) -> str:
    drafts_low = config.mode in ("share", "classic", "hybrid")
    return f"{config.mode}, {config.quant.bits} bits" if drafts_low else config.mode


def _drafter(name: str) -> Mode:
    if name not in ("share", "classic", "hybrid", *TABLES):
        raise ValueError(f"--drafters names {name!r}; choose from share, classic, hybrid, {', '.join(TABLES)}")
    return cast(Mode, name)


def _rows(figures: Sequence[Figures], same: Sequence[bool]) -> tuple[list[str], list[list[str]]]:
    head = ["memory", "drafter", "peak", "resident", "depth", "tau", "tok/s", "times naive", "of plan", "of predicted"]
    head += ["MB/token", "link in use", "a pass", "its bytes", "same texts"]
    naive = {each.limit: each.tokens_per_second for each in figures if each.drafter == "naive"}
    rows = [
        [
            f"{each.limit / GB:g} GB",
            each.drafter,
            f"{each.peak_bytes / GB:.2f} GB",
            f"{each.resident:.0%}",
            f"{each.depth}, {each.nodes} nodes" if each.nodes else str(each.depth),
            f"{each.tau:.1f}",
            f"{each.tokens_per_second:.2f}",
            f"{each.tokens_per_second / naive[each.limit]:.2f}",
            f"{each.of_planned:.2f}",
            f"{each.of_predicted:.2f}",
            f"{each.bytes_per_token / 1e6:.0f}",
            f"{each.link_utilisation:.0%}",
            f"{each.pass_s:.2f} s",
            f"{each.transfer_s:.2f} s",
            "yes" if is_same else "NO",
        ]
        for each, is_same in zip(figures, same, strict=True)
    ]
    return head, rows


def draw(path: Path, title: str, figures: Sequence[Figures]) -> None:
    """Write the picture."""
    from benchmark.reports.plots import save_figure

    save_figure(path, picture(title, figures))


def picture(title: str, figures: Sequence[Figures]) -> Figure:
    """Tokens per second against memory, a colour for each drafter: measured as lines, predicted as crosses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
    place = figure.add_subplot()
    place.set_title(f"Decoding with blocks that travel\n{title}", fontsize=10)
    for drafter in dict.fromkeys(each.drafter for each in figures):
        chosen = [each for each in figures if each.drafter == drafter]
        memory = [each.limit / GB for each in chosen]
        [line] = place.plot(memory, [each.tokens_per_second for each in chosen], marker="o", label=drafter)
        predicted = [each.predicted for each in chosen]
        place.plot(memory, predicted, "x", color=line.get_color(), label=f"{drafter}, predicted")
    place.set_xlabel("memory (GB)")
    place.set_ylabel("tokens per second")
    place.set_ylim(bottom=0)
    place.spines[["top", "right"]].set_visible(False)
    place.legend(frameon=False, fontsize=8)
    return figure
