"""Search for the fastest quantization for `share`: `sharesd tune`.

The best draft length K has the highest expected speedup (Leviathan et al. 2022):

    (1 - alpha^(K + 1)) / ((1 - alpha) * (K c + v))

The setting with the highest measured speedup at its K is saved for `--draft-quant auto`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmark import arguments
from benchmark.studies import calibration
from benchmark.studies.agreement import Agreement, measure_agreement
from quant.config import HEAD, QuantConfig
from sharesd.cli import options
from sharesd.cli.console import console, err_console, loading_bars
from sharesd.cli.parse_types import parts_of
from sharesd.config import EngineConfig, Mode
from sharesd.models.checkpoint import Progress, silent
from sharesd.reports import environment
from sharesd.reports.questions import Question, first_turns, prompts_of
from sharesd.reports.tables import Section
from sharesd.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sharesd.engine.stats import Stats
    from sharesd.llm import LLM
    from sharesd.speculation.cost_model import Costs

NUM_QUESTIONS, MAX_NEW_TOKENS = 4, 96
QUANTS = "hqq:8:64,hqq:4:64,hqq:4:64+head=4,hqq:3:64+head=4"
PROJECTIONS = "qkv,o,gate_up,down"
NONE = "none"
TEACHER_DRAFT = 4
"""Default draft tokens per round for measuring alpha."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    quant: str
    quantized_bytes: int
    c: float
    """Time of a draft step over that of a plain step."""
    v: float
    """Time of a verify step (1 + `num_draft` rows) per plain step."""
    alpha: float
    """Acceptance probability of a draft token after accepted ones, on real texts."""
    agreement: Agreement | None
    """How often the first draft token is the target's; None: not with ranks, or models of transformers."""
    num_draft: int
    expected: float
    speedup: float
    """Measured speedup at `num_draft`: tokens/s of `share` over `naive`."""
    naive_tokens_per_second: float
    share_tokens_per_second: float
    tau: float
    """Mean tokens per round, measured at `num_draft`."""
    identical: float
    """Share of questions with the same tokens as `naive`."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="which quantization makes mode share fastest here?",
        description="Measure mode share under several quantizations and keep the best one for --draft-quant auto. Or, "
        "with --calibrate, round weights of drafts for the model's own answers, so that more drafts are accepted.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="calibrate --draft-quant (default: what auto would use) for --draft-quant auto, and measure nothing; what "
        "was interrupted goes on where it stopped",
    )
    group = parser.add_argument_group("measurement")
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
    arguments.add_questions(group, NUM_QUESTIONS, MAX_NEW_TOKENS)
    arguments.add_out_dir(group, "tune")


def run(args: argparse.Namespace) -> int:
    """Measure all settings and save the best, or calibrate one; return the exit status."""
    given = options.engine_config(args, modes=("share",))
    if args.calibrate:
        calibration.run(given, is_chosen=getattr(args, "quant", "auto") != "auto")
        return 0
    if given.explicit_tree is not None:
        raise ValueError("tune measures chains, not trees; remove --tree")
    quants = settings_of(args.quants, args.keep, given.quant, args.quant_skip)
    teacher_draft = given.num_draft or min(TEACHER_DRAFT, given.max_draft)
    config = replace(given, num_draft=None, max_draft=max(given.max_draft, teacher_draft), tree="off")
    asked = first_turns(args.questions, args.num_questions).questions
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    out_dir = environment.out_folder(args.out_dir, "tune")
    measured: list[Measured] = []
    with loading_bars() as progress:
        for quant in quants:
            progress("measuring settings", len(measured), len(quants))
            here = replace(config, quant=quant)
            measured.append(measure(here, asked, params, teacher_draft=teacher_draft, progress=progress))
    best = max(measured, key=lambda each: each.speedup)
    _show(measured, best)
    for each in measured:
        if each.identical < 1:
            err_console.print(f"[bold red]{each.quant} differs from naive in some tokens[/]")
    _keep(config, quants[measured.index(best)], best)
    sizes = {name: getattr(args, name) for name in ("questions", "num_questions", "max_new_tokens")}
    about = environment.conditions(config, ("share",), teacher_draft=teacher_draft, **sizes)
    results = {**about, "best": best.quant, "measured": [asdict(each) for each in measured]}
    environment.write_results(out_dir / "tune.json", results)
    return 0


def settings_of(quants: str, keep: str, base: QuantConfig, skips: Sequence[str] = ()) -> list[QuantConfig]:
    """Return listed settings, then variants of `base` with one projection in full."""
    listed = [QuantConfig.parse(text.replace("+", ","), skips) for text in parts_of("--quants", quants)]
    kept = [] if keep == NONE else [_without(base, projection) for projection in parts_of("--keep", keep)]
    return list(dict.fromkeys((*listed, *kept)))


def _without(base: QuantConfig, projection: str) -> QuantConfig:
    if projection == HEAD:
        return replace(base, head_bits=None)
    bits = {name: bits for name, bits in dict(base.proj_bits).items() if name != projection}
    return replace(base, proj_bits=bits, skip_projs=(*base.skip_projs, projection))


def measure(
    config: EngineConfig,
    asked: Sequence[Question],
    params: SamplingParams,
    *,
    teacher_draft: int,
    progress: Progress = silent,
) -> Measured:
    """Load, measure and free one setting."""
    from sharesd.engine.stats import Stats
    from sharesd.llm import LLM  # torch takes seconds, mistakes should not
    from sharesd.models.decoder import Decoder
    from sharesd.speculation.draft_tree import chain
    from sharesd.startup.cost_profiler import measure_costs

    llm = LLM.from_config(config, ("naive", "share"), reuse=False, progress=progress)
    runtime = llm.runtime
    sizes = {"max_new_tokens": params.max_new_tokens, "max_context": runtime.max_context}
    prompts = list(prompts_of(runtime.tokenizer, asked, **sizes).values())
    for mode in runtime.modes:
        runtime.warm_up(mode, params)
    engine = runtime.engine
    policy = engine.variant(params, "share").policy
    policy.pinned = chain(teacher_draft)
    teacher = Stats()
    for prompt in prompts:
        llm.generate([prompt], params, mode="share")
        teacher.merge(engine.stats)
    agreement = None
    if isinstance(runtime.target, Decoder) and config.tensor_parallel == 1:
        agreement = measure_agreement(runtime, prompts, params.max_new_tokens)
    costs, _ = measure_costs(engine, "share", params)
    num_draft = best_length(teacher.alpha, costs, config.max_draft)
    policy.pinned = chain(num_draft)
    stats, num_identical = take_turns(llm, runtime.modes, prompts, params)
    naive_speed, share_speed = (stats[mode].tokens_per_second for mode in ("naive", "share"))
    report = runtime.report("share").quant
    assert report is not None
    plain = costs.of_step(1)
    return Measured(
        quant=report.spec,
        quantized_bytes=report.quantized_bytes,
        c=costs.of_draft(chain(num_draft)) / num_draft / plain,
        v=costs.of_step(1 + num_draft) / plain,
        alpha=teacher.alpha,
        agreement=agreement,
        num_draft=num_draft,
        expected=expected_speedup(teacher.alpha, num_draft, costs),
        speedup=share_speed / naive_speed if naive_speed else 0.0,
        naive_tokens_per_second=naive_speed,
        share_tokens_per_second=share_speed,
        tau=stats["share"].tau,
        identical=num_identical / len(prompts),
    )


def expected_speedup(alpha: float, num_draft: int, costs: Costs) -> float:
    """Return expected tokens per round over its cost in plain steps."""
    tokens = num_draft + 1 if alpha == 1 else (1 - alpha ** (num_draft + 1)) / (1 - alpha)
    return tokens * costs.of_step(1) / (num_draft * costs.draft + costs.draft_begin + costs.of_step(1 + num_draft))


def best_length(alpha: float, costs: Costs, max_length: int) -> int:
    """Return the length in 1..`max_length` with the highest expected speedup."""
    return max(range(1, max_length + 1), key=lambda num: expected_speedup(alpha, num, costs))


def take_turns(
    llm: LLM, modes: Sequence[Mode], prompts: Sequence[list[int]], params: SamplingParams
) -> tuple[dict[str, Stats], int]:
    """Return stats by mode, alternating the order, and the equal answers' number."""
    from sharesd.engine.stats import Stats

    stats = {mode: Stats() for mode in modes}
    num_identical = 0
    for index, prompt in enumerate(prompts):
        answers = []
        for mode in list(modes)[:: -1 if index % 2 else 1]:
            answers.append(llm.generate([prompt], params, mode=mode)[0].token_ids)
            stats[mode].merge(llm.runtime.engine.stats)
        num_identical += answers[0] == answers[1]
    return stats, num_identical


def _keep(config: EngineConfig, quant: QuantConfig, best: Measured) -> None:
    from sharesd.weights.quant_tuning_cache import save_tuned, tuning_key

    file = save_tuned(tuning_key(config), quant, {"command": environment.command(), **asdict(best)})
    console.print(f"--draft-quant auto now uses {quant}: {file}", markup=False, highlight=False, soft_wrap=True)


def _agreement_cells(agreement: Agreement | None) -> tuple[str, str, str]:
    if agreement is None:
        return "-", "-", "-"
    return f"{agreement.greedy:.3f}", f"{agreement.overlap:.3f}", f"{agreement.same_noise:.3f}"


def _show(measured: Sequence[Measured], best: Measured) -> None:
    head = ("drafts", "c", "v", "alpha", "agree", "overlap", "same noise", "K", "expected", "measured")
    rows = [
        [
            f"{each.quant} *" if each is best else each.quant,
            *(f"{value:.3f}" for value in (each.c, each.v, each.alpha)),
            *_agreement_cells(each.agreement),
            str(each.num_draft),
            f"{each.expected:.2f}x",
            f"{each.speedup:.2f}x",
        ]
        for each in measured
    ]
    title = "mode share by quantization of drafts (* best measured)"
    console.print(Section(title, head, rows).table())
