"""Search for the fastest quantization for `share`: `sharesd tune`.

The best draft length K has the highest expected speedup (Leviathan et al. 2022):

    (1 - alpha^(K + 1)) / ((1 - alpha) * (K c + v))

alpha is how often a draft token is the target's choice along the target's own answers, at temperatures 0 and 1. The
target answers once, and v is one for all settings, so that they differ by their drafts alone. The setting with the
highest mean of both speedups is decoded in turns with `naive`, and saved for `--draft-quant auto`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmark import arguments
from quant.config import HEAD, QuantConfig
from sharesd.cli import options
from sharesd.cli.console import console, err_console, loading_bars
from sharesd.cli.parse_types import parts_of
from sharesd.config import EngineConfig, Mode
from sharesd.engine.stats import Stats
from sharesd.models.checkpoint import Progress, silent
from sharesd.reports import environment
from sharesd.reports.questions import Question, first_turns, prompts_of
from sharesd.reports.tables import Section
from sharesd.sampling_params import SamplingParams

if TYPE_CHECKING:
    from benchmark.studies.agreement import Agreement, FollowedAnswers
    from sharesd.llm import LLM
    from sharesd.speculation.cost_model import Costs

NUM_QUESTIONS, MAX_NEW_TOKENS = 8, 96
NUM_DECODED = 4
"""Questions that are decoded with the best setting."""
QUANTS = "hqq:8:64+head=8,hqq:4:64,hqq:4:64+head=8,hqq:4:64+head=4,hqq:4:32+head=8,hqq:4:32+head=4"
KEPT = "down,layers=0"
NONE = "none"
MOST_EXPERTS = 3
"""Experts of a token in drafts of mixtures that are measured."""
TEMPERATURES = (0.0, 1.0)
TEACHER_DRAFT = 4
"""Draft tokens per round by which alpha is measured where answers cannot be followed token by token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """What drafts of a setting gain at one temperature."""

    temperature: float
    c: float
    """Time of a draft step per plain step."""
    alpha: float
    num_draft: int
    """The best length of a chain, K."""
    v: float
    """Time of a verify step (1 + `num_draft` rows) per plain step."""
    speedup: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafts:
    """What was measured of the drafts of a setting."""

    quant: str
    quantized_bytes: int
    alphas: tuple[float, ...]
    """How often a draft token is accepted, by temperature: `Agreement.greedy` and `same_noise`."""
    agreement: Agreement | None
    """None with ranks and models of transformers, for which alpha is the acceptance of decoded chains."""
    costs: tuple[Costs, ...]
    """Of rounds, by temperature: drawing tokens takes time, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    quant: str
    quantized_bytes: int
    agreement: Agreement | None
    predicted: tuple[Predicted, ...]
    """By temperature."""

    @property
    def speedup(self) -> float:
        """Mean of the predicted speedups."""
        return sum(each.speedup for each in self.predicted) / len(self.predicted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """The best setting and `naive`, in turns at one temperature."""

    temperature: float
    speedup: float
    """Tokens/s of `share` over `naive`."""
    naive_tokens_per_second: float
    share_tokens_per_second: float
    tau: float
    """Mean tokens per round."""
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
        "was interrupted resumes",
    )
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--quants",
        metavar="LIST",
        help="settings, with + before each PROJECTION=BITS, since commas separate settings; those that are calibrated "
        f"are measured without and with their calibration (default: {QUANTS}, and what a start uses; of mixtures whose "
        f"experts are not copied, 1 to {MOST_EXPERTS} experts)",
    )
    group.add_argument(
        "--keep",
        metavar="LIST",
        help="projections, or layers=0+29, which are kept at full precision in turn, with the others as --draft-quant "
        f"says; or {NONE} (default: {KEPT}; {NONE} of mixtures whose experts are not copied)",
    )
    arguments.add_questions(group, NUM_QUESTIONS, MAX_NEW_TOKENS)
    arguments.add_out_dir(group, "tune")


def run(args: argparse.Namespace) -> int:
    """Measure all settings and save the best, or calibrate one; return the exit status."""
    given = options.engine_config(args, modes=("share",))
    if args.calibrate:
        from benchmark.studies import calibration

        calibration.run(given, is_chosen=getattr(args, "quant", "auto") != "auto")
        return 0
    if given.explicit_tree is not None:
        raise ValueError("tune measures chains, not trees; remove --tree")
    listed = settings_of(args.quants or QUANTS, args.keep or KEPT, given.quant, args.quant_skip)
    as_listed = replace(given.offload, choose_bits=False)
    config = replace(given, num_draft=None, max_draft=max(given.max_draft, TEACHER_DRAFT), tree="off")
    asked = first_turns(args.questions, args.num_questions).questions
    params = SamplingParams(max_new_tokens=args.max_new_tokens, seed=0)
    out_dir = environment.out_folder(args.out_dir, "tune")
    drafts: list[Drafts] = []
    answers: dict[float, list[FollowedAnswers]] = {}
    with loading_bars() as progress:
        if args.quants is None:
            listed = settings_here(given, listed, args.keep, progress)
        config = replace(config, offload=as_listed)
        quants = [each for quant in listed for each in (quant, *_calibrated(quant, given))]
        for quant in quants:
            progress("measuring settings", len(drafts), len(quants))
            drafts.append(measure(replace(config, quant=quant), asked, params, answers, progress=progress))
        measured = predict(drafts, config.max_draft)
        best = max(measured, key=lambda each: each.speedup)
        quant = quants[measured.index(best)]
        decoded = decode(replace(config, quant=quant), best, asked[:NUM_DECODED], params, progress=progress)
    _show(measured, best, decoded)
    _keep(config, quant, best)
    sizes = {name: getattr(args, name) for name in ("questions", "num_questions", "max_new_tokens")}
    about = environment.conditions(config, ("share",), **sizes)
    results = {"best": best.quant, "measured": [*map(asdict, measured)], "decoded": [*map(asdict, decoded)]}
    environment.write_results(out_dir / "tune.json", {**about, **results})
    return 0


def settings_of(quants: str, keep: str, base: QuantConfig, skips: Sequence[str] = ()) -> list[QuantConfig]:
    """Return listed settings, then variants of `base` with one projection in full."""
    listed = [QuantConfig.parse(text.replace("+", ","), skips) for text in parts_of("--quants", quants)]
    kept = [] if keep == NONE else [_without(base, projection) for projection in parts_of("--keep", keep)]
    return list(dict.fromkeys((*listed, *kept)))


def settings_here(
    config: EngineConfig, listed: Sequence[QuantConfig], keep: str | None, progress: Progress
) -> list[QuantConfig]:
    """Return what a start uses and the listed settings, or numbers of experts of a mixture that is not copied.

    Raises ValueError if `keep` names projections of such a mixture.
    """
    from sharesd.startup.auto_mode import chooses_experts
    from sharesd.startup.resolve import resolve_config

    resolved = resolve_config(config, ("share",), progress=progress)
    start = resolved.config.quant
    if start.experts is None:
        return list(dict.fromkeys((start, *listed)))
    if keep not in (None, NONE):
        raise ValueError(f"--keep is {keep!r}, and drafts of this mixture quantize no linear; leave it out")
    chosen = chooses_experts(resolved.folder, resolved.device)
    return [replace(start, experts=experts) for experts in range(1, min(MOST_EXPERTS + 1, chosen))]


def _without(base: QuantConfig, kept: str) -> QuantConfig:
    if kept == HEAD:
        return replace(base, head_bits=None)
    if "=" in kept:
        layers = QuantConfig.parse(base.method, [kept.replace("+", ",")]).skip_layers
        return replace(base, skip_layers=(*base.skip_layers, *layers))
    bits = {name: bits for name, bits in dict(base.proj_bits).items() if name != kept}
    return replace(base, proj_bits=bits, skip_projs=(*base.skip_projs, kept))


def _calibrated(quant: QuantConfig, config: EngineConfig) -> list[QuantConfig]:
    """Return a setting with its calibration, if there is one that mode share uses here."""
    from sharesd.startup.resolve import with_dequantize
    from sharesd.weights.quant_tuning_cache import with_calibration

    found = with_calibration(quant, with_dequantize(config))
    return [found] if found.calibrated and not quant.calibrated else []


def measure(
    config: EngineConfig,
    asked: Sequence[Question],
    params: SamplingParams,
    answers: dict[float, list[FollowedAnswers]],
    *,
    progress: Progress = silent,
) -> Drafts:
    """Load, measure and free one setting.

    `answers`: the target's own by temperature; the first setting that is measured fills them in.
    """
    from sharesd.speculation.draft_tree import chain
    from sharesd.startup.cost_profiler import measure_costs  # torch takes seconds, mistakes should not

    llm, prompts = _loaded(config, asked, params, progress)
    with llm:
        runtime = llm.runtime
        costs = []
        for temperature in TEMPERATURES:
            here = replace(params, temperature=temperature)
            policy = runtime.engine.variant(here, "share").policy
            policy.pinned = chain(TEACHER_DRAFT)
            policy.reset(policy.live.table)  # rounds are timed below, not by the warm-up
            runtime.warm_up("share", here)
            costs.append(measure_costs(runtime.engine, "share", here)[0])
        alphas, agreement = _acceptance(llm, prompts, params, answers)
        report = runtime.report("share").quant
    assert report is not None
    return Drafts(
        quant=str(config.quant),
        quantized_bytes=report.quantized_bytes,
        alphas=alphas,
        agreement=agreement,
        costs=tuple(costs),
    )


def predict(drafts: Sequence[Drafts], max_draft: int) -> list[Measured]:
    """Return what settings gain, in plain steps; a verify step takes the median of all settings."""
    predicted: list[list[Predicted]] = [[] for _ in drafts]
    for place, temperature in enumerate(TEMPERATURES):
        of_all = [each.costs[place] for each in drafts]
        widths = set.intersection(*(set(costs.step) for costs in of_all))
        step = {width: median(costs.of_step(width) / costs.of_step(1) for costs in of_all) for width in widths}
        for each, timed, found in zip(drafts, of_all, predicted, strict=True):
            scaled = {kind: cost.scaled(1 / timed.of_step(1)) for kind, cost in timed.drafts.items()}
            alpha, costs = each.alphas[place], replace(timed, step=step, drafts=scaled)
            num_draft = best_length(alpha, costs, max_draft)
            c, v = costs.chain.step, costs.of_step(1 + num_draft)
            speedup = expected_speedup(alpha, num_draft, costs)
            found.append(
                Predicted(temperature=temperature, c=c, alpha=alpha, num_draft=num_draft, v=v, speedup=speedup)
            )
    return [
        Measured(
            quant=each.quant,
            quantized_bytes=each.quantized_bytes,
            agreement=each.agreement,
            predicted=tuple(found),
        )
        for each, found in zip(drafts, predicted, strict=True)
    ]


def _loaded(
    config: EngineConfig, asked: Sequence[Question], params: SamplingParams, progress: Progress
) -> tuple[LLM, list[list[int]]]:
    """Return a model and the prompts of questions."""
    from sharesd.llm import LLM

    llm = LLM.from_config(config, ("naive", "share"), reuse=False, progress=progress)
    sizes = {"max_new_tokens": params.max_new_tokens, "max_context": llm.max_context}
    return llm, list(prompts_of(llm.tokenizer, asked, **sizes).values())


def _acceptance(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, answers: dict[float, list[FollowedAnswers]]
) -> tuple[tuple[float, ...], Agreement | None]:
    """Return how often a draft token is accepted by temperature, and the agreement if answers can be followed."""
    from benchmark.studies.agreement import answer, measure_agreement
    from sharesd.models.decoder import Decoder
    from sharesd.speculation.draft_tree import chain

    runtime = llm.runtime
    if isinstance(runtime.target, Decoder) and runtime.config.tensor_parallel == 1:
        for temperature in TEMPERATURES if not answers else ():
            seed = params.seed if temperature else None
            answers[temperature] = answer(runtime, prompts, params.max_new_tokens, seed)
        agreement = measure_agreement(runtime, *answers.values())
        return (agreement.greedy, agreement.same_noise), agreement
    alphas = []
    for temperature in TEMPERATURES:
        here = replace(params, temperature=temperature)
        runtime.engine.variant(here, "share").policy.pinned = chain(TEACHER_DRAFT)
        llm.generate(prompts, here, mode="share")
        alphas.append(runtime.engine.stats.alpha)
    return tuple(alphas), None


def decode(
    config: EngineConfig,
    best: Measured,
    asked: Sequence[Question],
    params: SamplingParams,
    *,
    progress: Progress = silent,
) -> list[Decoded]:
    """Decode chains of the predicted lengths and `naive` in turns, at each temperature."""
    from sharesd.speculation.draft_tree import chain

    llm, prompts = _loaded(config, asked, params, progress)
    with llm:
        runtime, decoded = llm.runtime, []
        for predicted in best.predicted:
            here = replace(params, temperature=predicted.temperature)
            for mode in runtime.modes:
                runtime.warm_up(mode, here)
            runtime.engine.variant(here, "share").policy.pinned = chain(predicted.num_draft)
            stats, num_identical = take_turns(llm, runtime.modes, prompts, here)
            naive_speed, share_speed = (stats[mode].tokens_per_second for mode in ("naive", "share"))
            decoded.append(
                Decoded(
                    temperature=predicted.temperature,
                    speedup=share_speed / naive_speed if naive_speed else 0.0,
                    naive_tokens_per_second=naive_speed,
                    share_tokens_per_second=share_speed,
                    tau=stats["share"].tau,
                    identical=num_identical / len(prompts),
                )
            )
    return decoded


def expected_speedup(alpha: float, num_draft: int, costs: Costs) -> float:
    """Return expected tokens per round over its cost in plain steps."""
    tokens = num_draft + 1 if alpha == 1 else (1 - alpha ** (num_draft + 1)) / (1 - alpha)
    return tokens * costs.of_step(1) / (costs.chain.of_draft(num_draft) + costs.of_step(1 + num_draft))


def best_length(alpha: float, costs: Costs, max_length: int) -> int:
    """Return the length in 1..`max_length` with the highest expected speedup."""
    return max(range(1, max_length + 1), key=lambda num: expected_speedup(alpha, num, costs))


def take_turns(
    llm: LLM, modes: Sequence[Mode], prompts: Sequence[list[int]], params: SamplingParams
) -> tuple[dict[str, Stats], int]:
    """Return stats by mode, alternating the order, and the equal answers' number."""
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
    from sharesd.startup.resolve import with_dequantize
    from sharesd.weights.quant_tuning_cache import save_tuned, tuning_key

    file = save_tuned(tuning_key(with_dequantize(config)), quant, {"command": environment.command(), **asdict(best)})
    console.print(f"--draft-quant auto now uses {quant}: {file}", markup=False, highlight=False, soft_wrap=True)


def _show(measured: Sequence[Measured], best: Measured, decoded: Sequence[Decoded]) -> None:
    rows = [
        [
            each.quant,
            f"{each.quantized_bytes / 1e6:.1f}",
            *(cell for part in each.predicted for cell in _cells(part)),
        ]
        for each in sorted(measured, key=lambda each: -each.speedup)
    ]
    head = ("drafts", "MB", *(name for at in TEMPERATURES for name in ("c", "alpha", "K", f"T = {at:.0f}")))
    title = "predicted speedups of mode share by quantization of drafts, best first"
    console.print(Section(title, head, rows).table())
    for each in decoded:
        text = f"{best.quant} at T = {each.temperature:.0f}: {each.speedup:.2f}x, in turns with naive"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        if each.identical < 1:
            err_console.print(f"[bold red]{best.quant} differs from naive in some tokens[/]")


def _cells(predicted: Predicted) -> tuple[str, ...]:
    return f"{predicted.c:.2f}", f"{predicted.alpha:.3f}", str(predicted.num_draft), f"{predicted.speedup:.2f}x"
