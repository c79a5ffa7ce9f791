"""`multi`: what do several devices give, against what formulas say?

Rounds of plain decoding and of speculation are timed on one device, in stages and by ranks, in turns. From those on one
device, and the times of a hop and of what ranks exchange, follows what the others should take:

T, R: a round on one device, plain and with D drafts. h: a hop to the next of P stages. E(M): what ranks exchange in a
pass of M rows. c, a: a draft step over T, and the chance that a draft holds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from benchmark import arguments
from benchmark.arguments import markdown_table, rich_table
from benchmark.environment import environment
from benchmark.questions.records import replace_file, write_json
from sharesd.cli import options
from sharesd.cli.console import console, err_console
from sharesd.config import EngineConfig, Mode, SamplingParams, SplitConfig, TensorParallelStyle

if TYPE_CHECKING:
    from compile.block_ranges import Range
    from sharesd.models.decoder import Decoder
    from sharesd.runtime import Runtime

MODES: tuple[Mode, ...] = ("naive", "share", "classic")
RANK_MODES: tuple[Mode, ...] = ("naive", "share")
PROMPT = "Write a short story about a lighthouse."
SENT = 20
"""Hops that are timed."""
PASSES = 20
"""Passes in which stages are timed."""
MOST_RANKS = 8
"""Tried out in finding the fewest that can share a model."""
NOT_MEASURED = "not measured"
ONE = "1 device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Of a mode at a place."""

    place: str
    """Where blocks are, or by whom they are shared."""
    mode: str
    tau: float
    """Tokens emitted per round."""
    formula: str
    """What a round should take."""
    predicted_round_s: float
    """That in seconds; of one device what was measured."""
    round_s: float | None = None
    """Median seconds of a round; None = not measured."""

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.round_s is None else self.tau / self.round_s

    @property
    def predicted(self) -> float:
        """Tokens per second."""
        return self.tau / self.predicted_round_s

    def row(self) -> list[str]:
        """Of the table."""
        measured = [NOT_MEASURED, ""]
        if self.tokens_per_second is not None:
            measured = [f"{self.tokens_per_second:.2f}", f"{self.tokens_per_second / self.predicted:.0%}"]
        return [self.place, self.mode, self.formula, f"{self.tau:.2f}", f"{self.predicted:.2f}", *measured]


HEAD = ["where", "mode", "a round takes", "tau", "predicted", "tok/s", "share"]
LEGEND = (
    "tok/s are tau over a round. T, R: a plain round on one device, and one with D drafts. P stages, h: a hop. E(M): "
    "what ranks exchange in a pass of M rows. c: a draft step over T. a: the chance that a draft holds."
)


@dataclass(slots=True)
class Found:
    """What the study found, as it goes to the file."""

    several_devices: bool
    held_back_s: float
    hop_s: float = 0.0
    """Seconds of a hop, what it is held back included."""
    stage_s: dict[str, list[float]] = field(default_factory=dict)
    """Place -> median seconds that the blocks of each stage take in a plain step."""
    ranks: int = 0
    exchange_s: dict[str, list[float]] = field(default_factory=dict)
    """Style -> median seconds of what ranks exchange in passes of one row, and of a row for each draft and one more."""
    figures: list[Figures] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was not measured, and why."""


class Case(NamedTuple):
    """What is timed in turns with others, and what its rounds should take."""

    place: str
    mode: Mode
    runtime: Runtime
    formula: str
    spent_s: float = 0.0
    """Seconds that a round takes besides."""
    share: float = 1.0
    """Of a round's seconds on one device."""
    threads: int | None = None
    """Of this process, unless the config says; None = all."""
    held: Callable[[], Any] = nullcontext
    """Within the context of this."""


@dataclass(slots=True)
class Rounds:
    """Of a case."""

    seconds: list[float] = field(default_factory=list)
    draft_step_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    tau: float = 1.0
    alpha: float = 0.0

    @property
    def median(self) -> float:
        return median(self.seconds)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "multi",
        help="what do several devices give, against what was predicted?",
        description="Decode on one device, in stages and by ranks that share every linear; compare with what times on "
        "one device, of hops and of gathers predict.",
    )
    parser.set_defaults(run=run, parser=parser)
    group = parser.add_argument_group("study")
    group.add_argument("--stages", type=arguments.numbers, default="2,3", metavar="LIST", help="how many stages")
    group.add_argument("--hop", type=float, default=20.0, metavar="MS", help="milliseconds that hops are held back")
    group.add_argument(
        "--ranks",
        type=arguments.number,
        metavar="N",
        help="how many ranks (default: the fewest that can share the model)",
    )
    group.add_argument("--repeats", type=arguments.number, default=2, metavar="N", help="answers of each, in turns")
    arguments.add_out_dir(group, "multi")
    options.add_model_options(parser)
    options.add_sampling_options(parser, max_new_tokens=16)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write multi.json and multi.md; returns the exit status."""
    if args.num_draft == "auto":
        args.num_draft = 4  # formulas are about rounds of one length
    config = options.engine_config(args, modes=MODES)
    if config.split.max_memory or config.split.device_map is not None or config.tensor_parallel > 1:
        raise ValueError(
            "stages and ranks of `multi` are those of --stages, on --devices, and --ranks; drop other ways to several "
            "devices"
        )
    if not args.hop >= 0:
        raise ValueError(f"--hop is {args.hop:g}; give milliseconds")
    params, out_dir = options.sampling_params(args), arguments.out_folder(args.out_dir, "multi")
    found = measure(config, args.stages, args.hop / 1000, args.ranks, params, args.repeats)
    lines, rows = _lines(found), [each.row() for each in found.figures]
    console.print(rich_table("Several devices", HEAD, rows, left=3))
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    report = {
        "command": arguments.command(),
        "environment": environment(config.split.devices[0] if config.split.devices else config.device),
        **asdict(found),
    }
    write_json(out_dir / "multi.json", report)
    table = markdown_table(HEAD, rows, left=3)
    replace_file(
        out_dir / "multi.md", "\n".join(["# Several devices", "", *(f"- {line}" for line in lines), "", table, ""])
    )
    console.print(f"results: {out_dir / 'multi.md'}", markup=False, highlight=False, soft_wrap=True)
    return 0


def measure(
    config: EngineConfig,
    stages: Sequence[int],
    hop_s: float,
    ranks: int | None,
    params: SamplingParams,
    repeats: int,
) -> Found:
    """Figures of one device, of each number of stages (on the devices of the config in turns, or on its one), and of so
    many ranks (None: the fewest that can share the model). Raises RuntimeError where texts differ.
    """
    params = replace(params, ignore_eos=True)  # rounds are wanted, whatever they say
    devices = config.split.devices or ("cpu" if config.device == "auto" else config.device,)
    found = Found(several_devices=len(set(devices)) > 1, held_back_s=hop_s)
    if not found.several_devices:
        found.notes.append("links between devices, and ranks with a device each: there is one device")
    alone = _in_stages(config, devices, sorted({*stages} - {1}), hop_s, params, repeats, found)
    _by_ranks(config, alone, ranks, params, repeats, found)
    return found


# ---- stages


def _in_stages(
    config: EngineConfig,
    devices: Sequence[str],
    stages: Sequence[int],
    hop_s: float,
    params: SamplingParams,
    repeats: int,
    found: Found,
) -> Runtime:
    """Adds what stages give. Returns the runtime of one device."""
    from sharesd.runtime import Runtime

    def load(num_stages: int, modes: Sequence[Mode] = MODES, **options: Any) -> Runtime:
        names = tuple(devices[number % len(devices)] for number in range(num_stages))
        split = SplitConfig(devices=names, hop_seconds=hop_s)
        with err_console.status(f"loading {num_stages} stages"):
            return Runtime(replace(config, device="auto", split=split, **options), modes)

    alone, staged = load(1), {num: load(num) for num in stages}
    D, most = config.most_draft, max(stages, default=1)
    h = found.hop_s = _hop_seconds(staged[most]) if staged else 0.0
    cases = [Case(ONE, mode, alone, "T" if mode == "naive" else "R") for mode in MODES]
    for P, runtime in staged.items():
        place = f"{P} stages"
        found.stage_s[place] = _stage_seconds(runtime)
        cases += [
            Case(place, "naive", runtime, "T + P h", P * h),
            Case(place, "share", runtime, "R + (D+1) P h", (D + 1) * P * h),
            Case(place, "classic", runtime, "R + P h", P * h),
        ]
    if staged:
        apart = load(most, ("classic",), draft_device=devices[most % len(devices)])
        formula, held = "R + P h + 2 D h", partial(_held_back, _decoder(alone), _decoder(staged[most]), hop_s)
        cases += [
            Case(f"{most} stages, own draft", "classic", apart, formula, (most + 2 * D) * h),
            Case(f"{ONE}, waits as {most}", "naive", alone, "T + P h", most * h, held=held),
            Case(f"{ONE}, waits as {most}", "share", alone, "R + (D+1) P h", (D + 1) * most * h, held=held),
        ]
    rounds = _in_turns(cases, params, repeats)
    found.figures += [_figures(case, rounds) for case in cases]
    found.figures += _at_once(rounds, stages)
    found.notes.append(
        "drafts made while the target verifies, and chunks in flight: not built; hops are left out there"
    )
    return alone


def _at_once(rounds: dict[tuple[str, str], Rounds], stages: Sequence[int]) -> Iterator[Figures]:
    """What drafts would give that are made while the target verifies, which nothing here does; a round is a token."""
    plain_s, one = rounds[ONE, "naive"].median, rounds[ONE, "share"]
    c, miss = median(one.draft_step_s) / plain_s, 1 - one.alpha

    def figures(place: str, formula: str, pace: float) -> Figures:
        return Figures(place=place, mode="share", tau=1, formula=formula, predicted_round_s=plain_s * pace)

    yield figures("own draft, at once", "T (c + 1-a)", c + miss)
    for P in stages:
        pace = max(1 / P, c) + miss * (1 - 1 / P)
        yield figures(f"{P} stages, in flight", "T (max(1/P,c) + (1-a)(1-1/P))", pace)


@contextmanager
def _ranges_of(target: Decoder, ranges: Callable[[], Sequence[Range]]) -> Iterator[None]:
    """Its blocks run like this meanwhile."""
    before = target.ranges
    target.ranges = ranges
    try:
        yield
    finally:
        target.ranges = before


def _held_back(target: Decoder, staged: Decoder, seconds: float) -> Any:
    """Within the context a target on one device waits wherever a staged one hops: what waiting itself costs."""
    from compile.block_ranges import Range
    from sharesd.devices.transfer import hold_back

    wait = partial(hold_back, seconds)
    ranges = [Range(stage.first, stage.num_blocks, wait) for stage in staged.split.stages]
    return _ranges_of(target, lambda: ranges)


def _stage_seconds(runtime: Runtime) -> list[float]:
    """Median seconds that the blocks of each stage take in a plain step."""
    import torch

    target, cache = _decoder(runtime), runtime.cache
    ranges = target.ranges()
    took: list[list[float]] = [[] for _ in ranges]
    began = 0.0

    def now() -> float:
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def handed_over(each: Range, *given: Any) -> Any:
        nonlocal began
        assert each.hand_over is not None
        taken = each.hand_over(*given)
        began = now()
        return taken

    timed = [
        each._replace(hand_over=partial(handed_over, each), after=lambda times=times: times.append(now() - began))  # type: ignore[misc]
        for each, times in zip(ranges, took, strict=True)
    ]
    tokens_BT = torch.zeros(cache.batch, 1, dtype=torch.int64, device=cache.lengths.device)
    with torch.inference_mode(), _ranges_of(target, lambda: timed):
        for _ in range(PASSES):
            runtime.step.forward(tokens_BT, cache)
    return [median(times) for times in took]


def _hop_seconds(runtime: Runtime) -> float:
    """Median seconds in which a row of the residual stream comes from the first stage to the last."""
    import torch

    from sharesd.devices.transfer import hop

    target = _decoder(runtime)
    first, last = target.split.stages[0].device, target.split.stages[-1].device
    row = torch.ones(1, 1, target.config.hidden_size, dtype=runtime.dtype, device=first)
    times = []
    for _ in range(SENT):
        started = time.perf_counter()
        hop(last, row, seconds=target.split.hop_seconds)[0][0, 0, 0].item()
        times.append(time.perf_counter() - started)
    return median(times)


def _decoder(runtime: Runtime) -> Decoder:
    from sharesd.models.decoder import Decoder

    assert isinstance(runtime.target, Decoder)  # no other is split, and what runs on one device is a split of one
    return runtime.target


# ---- ranks


def _by_ranks(
    config: EngineConfig, alone: Runtime, ranks: int | None, params: SamplingParams, repeats: int, found: Found
) -> None:
    """Adds what ranks give; why not, where they cannot share this model, or have no devices."""
    from benchmark.studies.exchange import exchanges_of, seconds_of_passes
    from multigpu.launch import local_device
    from multigpu.tensor_parallel import Part
    from sharesd.models.loader import check_cuts
    from sharesd.runtime import Runtime

    device, drafts = alone.device, config.most_draft
    num = found.ranks = ranks or _fewest_ranks(alone)
    shape = _decoder(alone).config
    try:
        check_cuts(shape, num)
        local_device(device, num)
    except ValueError as reason:
        found.notes.append(f"{num} ranks: {reason}")
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = -(-num // cores) * cores / num if device.type == "cpu" else 1 / num
    how: dict[str, Any] = {"share": share, "threads": max(1, cores // num)}
    for style in get_args(TensorParallelStyle):
        place, exchanges = f"{num} ranks, {style}", exchanges_of(shape, Part(size=num, reduces=style == "reduce"))
        with err_console.status(f"loading {place}"):
            passes = [(1, exchanges), (1 + drafts, exchanges)]
            plain_s, verify_s = found.exchange_s[style] = seconds_of_passes(num, device, alone.dtype, passes)
            options: dict[str, Any] = {"tensor_parallel": num, "tensor_parallel_style": style, "split": SplitConfig()}
            try:
                runtime = Runtime(replace(config, **options), RANK_MODES)
            except ValueError as reason:  # groups of quantized weights that inputs cut through
                found.notes.append(f"{place}: {reason}")
                continue
        formula = f"{share:.3g} R + D E(1) + E(D+1)"
        cases = [
            *(Case(ONE, mode, alone, "") for mode in RANK_MODES),
            Case(place, "naive", runtime, f"{share:.3g} T + E(1)", plain_s, **how),
            Case(place, "share", runtime, formula, drafts * plain_s + verify_s, **how),
        ]
        try:
            rounds = _in_turns(cases, params, repeats, place if style == "reduce" else "")
        finally:
            runtime.close()
        found.figures += [_figures(case, rounds) for case in cases if case.runtime is runtime]


def _fewest_ranks(alone: Runtime) -> int:
    """That can share the model; 2 where none can."""
    from sharesd.models.loader import check_cuts

    for num in range(2, MOST_RANKS + 1):
        with suppress(ValueError):
            check_cuts(_decoder(alone).config, num)
            return num
    return 2


# ---- rounds


def _in_turns(
    cases: Sequence[Case], params: SamplingParams, repeats: int, own_texts: str = ""
) -> dict[tuple[str, str], Rounds]:
    """Rounds of each (place, mode). Raises RuntimeError where texts differ: of all places, but for one that may have
    `own_texts`.
    """
    from compile.adaptive_threads import CREW

    found: dict[tuple[str, str], Rounds] = {(case.place, case.mode): Rounds() for case in cases}

    def use_threads(case: Case) -> None:
        given = case.runtime.config.threads
        most = given or case.threads or CREW.available
        if CREW.most != most:  # else it goes on with what it has learnt of the machine
            CREW.reset(most, fixed=given is not None)

    engines = []
    for case in cases:
        use_threads(case)
        engines.append(case.runtime.engine(case.mode, warm=params))
    for _ in range(repeats):
        for case, engine in zip(cases, engines, strict=True):
            use_threads(case)
            seconds: list[float] = []
            before: float | None = None
            tokens: list[int] = []
            with case.held():
                for chunk in engine.stream([PROMPT], params):
                    now = time.perf_counter()
                    if before is not None:  # the first token comes from the prompt
                        seconds.append(now - before)
                    before, tokens = now, [*tokens, *chunk.token_ids]
            rounds, stats = found[case.place, case.mode], engine.stats
            rounds.tokens, rounds.tau, rounds.alpha = tokens, stats.tau, stats.alpha
            if tokens != found[own_texts if case.place == own_texts else ONE, "naive"].tokens:
                raise RuntimeError(f"{case.mode} of {case.place} says something else; that is an error of this program")
            rounds.seconds += seconds
            rounds.draft_step_s.append(stats.draft_s / max(1, stats.draft_steps))
    use_threads(cases[0])
    return found


def _figures(case: Case, rounds: dict[tuple[str, str], Rounds]) -> Figures:
    own = rounds[case.place, case.mode]
    return Figures(
        place=case.place,
        mode=case.mode,
        tau=own.tau,
        formula=case.formula,
        predicted_round_s=case.share * rounds[ONE, case.mode].median + case.spent_s,
        round_s=own.median,
    )


def _lines(found: Found) -> list[str]:
    """What stands below the table."""
    lines = [LEGEND]
    if found.hop_s:
        held = f"{1000 * found.held_back_s:g} ms of it held back" if found.held_back_s else "nothing held back"
        lines.append(f"h, a hop: {1000 * found.hop_s:.2f} ms, {held}")
    for place, seconds in found.stage_s.items():
        lines.append(f"blocks in {place}: {' + '.join(f'{1000 * each:.2f}' for each in seconds)} ms in a plain step")
    for style, (plain_s, verify_s) in found.exchange_s.items():
        lines.append(
            f"E, what {found.ranks} ranks exchange ({style}): {1000 * plain_s:.2f} ms in a pass of one row, "
            f"{1000 * verify_s:.2f} ms in one that verifies"
        )
    return [*lines, *(f"{NOT_MEASURED}: {note}" for note in found.notes)]
