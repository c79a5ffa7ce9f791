"""`calibrate`: which quantization makes `share` fastest on this model and machine?

Each setting is measured in turn: c (a draft step over a plain step), v (a verify step over a plain step), alpha (from
real texts, drafted with a fixed length), from these the best length K and the speedup that

    (1 - alpha^(K + 1)) / ((1 - alpha) * (K c + v))

promises (Leviathan et al. 2022), and the speedup over `naive` that decoding with this K really has. The setting with
the best measured speedup is kept for `--draft-quant auto`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmark import arguments
from benchmark.arguments import rich_table
from benchmark.questions import questions as question_files
from benchmark.questions.job import model_name
from benchmark.questions.questions import Question
from benchmark.questions.records import write_json
from benchmark.reports.text import times
from quant.config import HEAD, QuantConfig
from sharesd.cli import options
from sharesd.cli.console import console, err_console, loading_bars
from sharesd.config import EngineConfig, SamplingParams
from sharesd.models.progress import Progress, silent

if TYPE_CHECKING:
    from sharesd.engine.engine import Engine
    from sharesd.engine.stats import Stats
    from sharesd.speculation.cost_model import Costs

NUM_QUESTIONS, MAX_NEW_TOKENS = 4, 96
QUANTS = "hqq:8:64,hqq:4:64,hqq:4:64+head=4,hqq:3:64+head=4"
PROJECTIONS = "qkv,o,gate_up,down"
NONE = "none"
TEACHER_DRAFT = 4
"""Draft tokens per round where alpha is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was found out about a setting."""

    quant: str
    """The setting in canonical form."""
    low_bytes: int
    """Bytes of its quantized weights."""
    c: float
    """A draft step over a plain step."""
    v: float
    """A verify step of 1 + `num_draft` rows over a plain step."""
    alpha: float
    """Probability that a draft token is accepted, given that those before it were."""
    num_draft: int
    """The draft length that the formula likes best."""
    expected: float
    """Speedup by the formula at this length."""
    speedup: float
    """Speedup measured at this length: tokens per second of `share` over those of `naive`."""
    naive_tokens_per_second: float
    share_tokens_per_second: float
    tau: float
    """Mean tokens per round, measured at this length."""
    identical: float
    """Share of questions with the tokens of `naive`."""


def add_parser(subparsers: Any, name: str = "calibrate") -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        name,
        help="which quantization makes mode share fastest here?",
        description="Measure mode share under several quantizations and keep the best one for --draft-quant auto.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    group = parser.add_argument_group("calibration")
    group.add_argument(
        "--quants",
        default=QUANTS,
        metavar="LIST",
        help="settings, with + before each PROJECTION=BITS, since commas separate settings",
    )
    group.add_argument(
        "--keep",
        default=PROJECTIONS,
        metavar="LIST",
        help=f"projections which are kept at full precision in turn, with the others as --draft-quant says; or {NONE}",
    )
    group.add_argument(
        "--num-questions", type=arguments.number, default=NUM_QUESTIONS, metavar="N", help="first turns of N questions"
    )
    group.add_argument(
        "--max-new-tokens", type=arguments.number, default=MAX_NEW_TOKENS, metavar="M", help="tokens per answer at most"
    )
    arguments.add_out_dir(group, "calibrate")


def run(args: argparse.Namespace) -> int:
    """Measure all settings, print the table, write calibration.json and keep the best; returns the exit status."""
    given = options.engine_config(args, modes=("share",))
    if given.given_tree is not None:
        raise ValueError("--tree does not belong here, calibrate measures chains; drop it")
    quants = settings_of(args.quants, args.keep, given.quant, args.quant_skip)
    teacher_draft = given.num_draft or min(TEACHER_DRAFT, given.max_draft)
    config = replace(given, num_draft=None, max_draft=max(given.max_draft, teacher_draft), tree="off")
    found = question_files.load("mtbench", None, args.num_questions)
    questions = [replace(question, turns=question.turns[:1]) for question in found.questions]
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    out_dir = arguments.out_folder(args.out_dir, "calibrate")
    measured: list[Measured] = []
    with loading_bars() as progress:
        for quant in quants:
            progress("measuring settings", len(measured), len(quants))
            here = replace(config, quant=quant)
            measured.append(measure(here, questions, params, teacher_draft=teacher_draft, progress=progress))
    best = max(measured, key=lambda each: each.speedup)
    write_json(out_dir / "calibration.json", _report(args, config, found.label, teacher_draft, measured, best))
    _show(measured, best)
    for each in measured:
        if each.identical < 1:
            err_console.print(f"[bold red]{each.quant} did not give the tokens of naive everywhere[/]")
    _keep(config, quants[measured.index(best)], best)
    console.print(f"details: {out_dir / 'calibration.json'}", markup=False, highlight=False, soft_wrap=True)
    return 0


def settings_of(quants: str, keep: str, base: QuantConfig, skips: Sequence[str] = ()) -> list[QuantConfig]:
    """The settings to measure, each once: those listed, then `base` without each projection. ValueError if wrong."""
    listed = arguments.each(
        "--quants", lambda text: QuantConfig.parse(text.replace("+", ","), skips), quants, separator=","
    )
    if keep == NONE:
        return list(listed)
    kept = arguments.each("--keep", functools.partial(_without, base), keep)
    return list(dict.fromkeys((*listed, *kept)))


def _without(base: QuantConfig, projection: str) -> QuantConfig:
    if projection == HEAD:
        return replace(base, head_bits=None)
    bits = {name: bits for name, bits in dict(base.proj_bits).items() if name != projection}
    return replace(base, proj_bits=bits, skip_projs=(*base.skip_projs, projection))


def measure(
    config: EngineConfig,
    questions: Sequence[Question],
    params: SamplingParams,
    *,
    teacher_draft: int,
    progress: Progress = silent,
) -> Measured:
    """Load one setting and measure it; its model is gone when this returns."""
    from benchmark.questions.conversation import prompt_ids, require_room
    from sharesd.engine.stats import Stats
    from sharesd.engine.warmup import measure_costs
    from sharesd.runtime import Runtime  # torch takes seconds, mistakes should not
    from sharesd.speculation.draft_tree import chain

    runtime = Runtime(config, ("naive", "share"), progress=progress)
    require_room(runtime.tokenizer, questions, max_new_tokens=params.max_new_tokens, max_context=runtime.max_context)
    prompts = [prompt_ids(runtime.tokenizer, question, []) for question in questions]
    engines = {mode: runtime.engine(mode, warm=params) for mode in ("naive", "share")}
    share = engines["share"]
    policy = share.way(params).policy
    policy.pinned = chain(teacher_draft)
    teacher = Stats()
    for prompt in prompts:
        share.generate([prompt], params)
        teacher.merge(share.stats)
    costs, _ = measure_costs(share, params)
    num_draft = best_length(teacher.alpha, costs, config.max_draft)
    policy.pinned = chain(num_draft)
    stats, num_identical = take_turns(engines, prompts, params)
    naive_speed, share_speed = (stats[mode].tokens_per_second for mode in ("naive", "share"))
    report = runtime.report("share").quant
    assert report is not None
    plain = costs.of_step(1)
    return Measured(
        quant=report.spec,
        low_bytes=report.low_bytes,
        c=costs.of_draft(chain(num_draft)) / num_draft / plain,
        v=costs.of_step(1 + num_draft) / plain,
        alpha=teacher.alpha,
        num_draft=num_draft,
        expected=expected_speedup(teacher.alpha, num_draft, costs),
        speedup=share_speed / naive_speed if naive_speed else 0.0,
        naive_tokens_per_second=naive_speed,
        share_tokens_per_second=share_speed,
        tau=stats["share"].tau,
        identical=num_identical / len(prompts),
    )


def expected_speedup(alpha: float, num_draft: int, costs: Costs) -> float:
    """By the formula: tokens of a round over what it takes, in plain steps."""
    tokens = num_draft + 1 if alpha == 1 else (1 - alpha ** (num_draft + 1)) / (1 - alpha)
    return tokens * costs.of_step(1) / (num_draft * costs.draft + costs.draft_begin + costs.of_step(1 + num_draft))


def best_length(alpha: float, costs: Costs, most: int) -> int:
    """The draft length from 1 to `most` whose expected speedup is best."""
    return max(range(1, most + 1), key=lambda num: expected_speedup(alpha, num, costs))


def take_turns(
    engines: dict[str, Engine], prompts: Sequence[list[int]], params: SamplingParams
) -> tuple[dict[str, Stats], int]:
    """Both modes answer each question, now one first, now the other: their statistics, and how many answers agree."""
    from benchmark.timed import generate
    from sharesd.engine.stats import Stats

    stats = {mode: Stats() for mode in engines}
    num_identical = 0
    for index, prompt in enumerate(prompts):
        answers = []
        for mode in list(engines)[:: -1 if index % 2 else 1]:
            answers.append(generate(engines[mode], [prompt], params)[0].token_ids)
            stats[mode].merge(engines[mode].stats)
        num_identical += answers[0] == answers[1]
    return stats, num_identical


def _keep(config: EngineConfig, quant: QuantConfig, best: Measured) -> None:
    from sharesd.weights.quant_tuning_cache import place_of, remember

    file = remember(place_of(config), quant, {"command": arguments.command(), **asdict(best)})
    console.print(f"--draft-quant auto now uses {quant}: {file}", markup=False, highlight=False, soft_wrap=True)


def _report(
    args: argparse.Namespace,
    config: EngineConfig,
    questions: str,
    teacher_draft: int,
    measured: Sequence[Measured],
    best: Measured,
) -> dict[str, Any]:
    from benchmark.environment import environment
    from sharesd.weights.quant_tuning_cache import place_of

    place = place_of(config)
    return {
        "settings": {
            "command": arguments.command(),
            "model": model_name(config.target),
            "questions": questions,
            "num_questions": args.num_questions,
            "max_new_tokens": args.max_new_tokens,
            "teacher_draft": teacher_draft,
            "max_draft": config.max_draft,
            "dtype": place.dtype,
            "device": place.device,
            "compile": config.compile,
        },
        "environment": environment(place.device),
        "best": best.quant,
        "measured": [asdict(each) for each in measured],
    }


def _show(measured: Sequence[Measured], best: Measured) -> None:
    head = ("drafts", "c", "v", "alpha", "K", "expected", "measured")
    rows = [
        [
            f"{each.quant} *" if each is best else each.quant,
            *(f"{value:.3f}" for value in (each.c, each.v, each.alpha)),
            str(each.num_draft),
            times(each.expected),
            times(each.speedup),
        ]
        for each in measured
    ]
    console.print(rich_table("mode share by quantization of drafts (* best measured)", head, rows))
