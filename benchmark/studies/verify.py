"""Compare every mode's tokens with naive decoding: `sharesd verify`.

A difference is reported with the gap between the target's two largest logits: a few units in the last place suggest
rounding by the shape of a step, a large gap suggests a bug.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from rich.markup import escape

from benchmark import arguments
from sharesd.cli import options
from sharesd.cli.console import console, err_console, loading_bars
from sharesd.config import EngineConfig, Mode
from sharesd.drafters import registry
from sharesd.models.checkpoint import Progress, silent
from sharesd.reports import environment
from sharesd.reports.questions import Question, first_turns, prompts_of
from sharesd.reports.tables import Section
from sharesd.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sharesd.engine.engine import Engine
    from sharesd.llm import LLM

NUM_QUESTIONS, MAX_NEW_TOKENS = 8, 64
MAX_SHOWN = 20
"""Max mismatches on the terminal; verify.json has all mismatches."""
AUTO = "auto"
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """First difference from naive decoding; token ids are None after the end."""

    question_id: str | int
    position: int
    naive_token: int | None
    token: int | None
    naive_text: str
    text: str
    logit_gap: float
    """Gap between the target's two largest logits, by a plain forward pass."""
    score_gap: float
    """Gap between scores: logits / temperature + Gumbel noise; greedy: logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyCase:
    mode: str
    num_draft: int | None
    """Draft tokens per round; None = chosen for each round."""
    temperature: float
    seed: int
    verify_width: int
    num_turns: int
    num_tokens: int
    mismatches: tuple[Mismatch, ...]

    @property
    def num_identical(self) -> int:
        return self.num_turns - len(self.mismatches)

    @property
    def row(self) -> tuple[str, str, str]:
        return self.mode, AUTO if self.num_draft is None else str(self.num_draft), str(self.verify_width)

    @property
    def sampling(self) -> str:
        return f"T={self.temperature:g} seed {self.seed}" if self.temperature else "greedy"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="does every mode give the tokens of naive decoding?",
        description="Compare the answers of every mode, at every draft length, with those of naive decoding. The exit "
        "status is 0 if all are identical, else 1.",
        conflict_handler="resolve",  # the number of draft tokens becomes a list
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    group = parser.add_argument_group("comparison")
    options.add_mode_option(group, several=True)
    group.add_argument(
        "--num-speculative-tokens",
        dest="num_draft",
        type=_list_of(lambda text: AUTO if text == AUTO else int(text)),
        default=f"1,2,4,8,{AUTO}",
        metavar="LIST",
        help=f"draft lengths; {AUTO}: chosen for each round",
    )
    group.add_argument("--temperatures", type=_list_of(float), default="0,1", metavar="LIST", help="0 = greedy")
    group.add_argument(
        "--seeds", type=_list_of(int), default="0,1", metavar="LIST", help="seeds; greedy decoding needs no second one"
    )
    arguments.add_questions(group, NUM_QUESTIONS, MAX_NEW_TOKENS)
    arguments.add_out_dir(group, "verify")
    group.add_argument(
        "--against",
        metavar="MODEL",
        help="compare the target's logits, instead of modes, with those of this model in float32: their KL divergence "
        "over the questions, or --texts. The target's own file shows what the rounding of activations changes, and the "
        "folder of --target-quant what quantizing changes",
    )
    group.add_argument("--texts", metavar="FILE", help="a text on which --against compares (default: the questions)")


def run(args: argparse.Namespace) -> int:
    """Compare all modes; return 0 if all tokens are identical, else 1."""
    if args.against is not None:
        return _run_against(args)
    if args.texts is not None:
        raise ValueError(f"--texts is {args.texts}, which only --against reads; add --against, or remove it")
    modes = options.modes_of(args, default=registry.modes())
    modes = ("naive", *(mode for mode in modes if mode != "naive"))
    if len(modes) == 1:
        raise ValueError("--mode is only naive, which leaves nothing to compare; add another mode")
    config = options.engine_config(argparse.Namespace(**{**vars(args), "num_draft": AUTO}), modes=modes)
    configs = [replace(config, num_draft=None if num == AUTO else num) for num in args.num_draft]
    samplings = [  # greedy decoding once
        SamplingParams(temperature=temperature, seed=seed, max_new_tokens=args.max_new_tokens)
        for temperature in args.temperatures
        for seed in (args.seeds if temperature else args.seeds[:1])
    ]
    asked = first_turns(args.questions, args.num_questions).questions
    out_dir = environment.out_folder(args.out_dir, "verify")
    cases: list[VerifyCase] = []
    total = len(configs) * len(samplings) * len(asked) * len(modes)
    with loading_bars() as progress:
        for config in configs:
            done = sum(case.num_turns for case in cases) * len(modes) // (len(modes) - 1)
            cases += _compare(config, modes, samplings, asked, progress=progress, done=done, total=total)
    identical = all(not case.mismatches for case in cases)
    _show(cases)
    sizes = {name: getattr(args, name) for name in ("questions", "num_questions", "max_new_tokens")}
    about = environment.conditions(configs[0], modes, **sizes)
    results = {"identical": identical, **about, "cases": [asdict(case) for case in cases]}
    environment.write_results(out_dir / "verify.json", results)
    return 0 if identical else 1


def _run_against(args: argparse.Namespace) -> int:
    """Show how far the target's logits are from a reference's."""
    config = options.engine_config(argparse.Namespace(**{**vars(args), "num_draft": AUTO}), modes=("naive",))
    asked = first_turns(args.questions, args.num_questions).questions
    out_dir = environment.out_folder(args.out_dir, "verify")
    from benchmark.studies import divergence

    with loading_bars() as progress:
        found = divergence.measure(config, args.against, args.texts, asked, progress)
    console.print(found.section("divergence from the reference").table())
    sizes = {name: getattr(args, name) for name in ("against", "texts", "questions", "num_questions")}
    about = environment.conditions(config, ("naive",), **sizes)
    environment.write_results(out_dir / "verify.json", {**about, "divergence": asdict(found)})
    return 0


def compare_answers(
    llm: LLM,
    modes: Sequence[Mode],
    prompts: Mapping[str | int, list[int]],
    params: SamplingParams,
    *,
    num_draft: int | None,
    tick: Callable[[], None] = lambda: None,
) -> list[VerifyCase]:
    """Return a case for each mode but `naive`, at batch size 1."""
    found: dict[Mode, list[Mismatch]] = {mode: [] for mode in modes if mode != "naive"}
    num_tokens = 0
    for question_id, prompt in prompts.items():
        wanted = llm.generate([prompt], params, mode="naive")[0].token_ids
        num_tokens += len(wanted)
        tick()
        for mode, mismatches in found.items():
            given = llm.generate([prompt], params, mode=mode)[0].token_ids
            tick()
            if given != wanted:
                mismatches.append(_mismatch(llm.runtime.engine, question_id, prompt, wanted, given, params))
    return [
        VerifyCase(
            mode=mode,
            num_draft=num_draft,
            temperature=params.temperature,
            seed=params.seed,
            verify_width=_verify_width(llm.runtime.engine, mode),
            num_turns=len(prompts),
            num_tokens=num_tokens,
            mismatches=tuple(mismatches),
        )
        for mode, mismatches in found.items()
    ]


def _verify_width(engine: Engine, mode: Mode) -> int:
    rows = 1 + engine.modes[mode].num_draft
    return next(width for width in engine.options.widths if width >= rows) if engine.options.widths else rows


def _compare(
    config: EngineConfig,
    modes: tuple[Mode, ...],
    samplings: Sequence[SamplingParams],
    asked: Sequence[Question],
    *,
    progress: Progress = silent,
    done: int,
    total: int,
) -> list[VerifyCase]:
    """Return the cases of one draft length, then free the models."""
    from sharesd.llm import LLM  # torch takes seconds, mistakes should not

    llm = LLM.from_config(config, modes, reuse=False, progress=progress)
    sizes = {"max_new_tokens": samplings[0].max_new_tokens, "max_context": llm.max_context}
    prompts = prompts_of(llm.tokenizer, asked, **sizes)
    cases: list[VerifyCase] = []

    def tick() -> None:
        nonlocal done
        done += 1
        progress("comparing answers", done, total)

    for params in samplings:
        for mode in modes:
            llm.runtime.warm_up(mode, params)
        cases += compare_answers(llm, modes, prompts, params, num_draft=config.num_draft, tick=tick)
    return cases


def _mismatch(
    engine: Engine,
    question_id: str | int,
    prompt: list[int],
    wanted: list[int],
    given: list[int],
    params: SamplingParams,
) -> Mismatch:
    same = (i for i, (a, b) in enumerate(zip(wanted, given, strict=False)) if a != b)
    position = next(same, min(len(wanted), len(given)))
    logit_gap, score_gap = _gaps(engine, prompt + wanted[:position], params)
    tokens = [answer[position] if position < len(answer) else None for answer in (wanted, given)]
    texts = ["" if token is None else engine.tokenizer.decode([token], False) for token in tokens]
    return Mismatch(
        question_id=question_id,
        position=position,
        naive_token=tokens[0],
        token=tokens[1],
        naive_text=texts[0],
        text=texts[1],
        logit_gap=logit_gap,
        score_gap=score_gap,
    )


def _gaps(engine: Engine, tokens: list[int], params: SamplingParams) -> tuple[float, float]:
    """Return the logit gap and the score gap after `tokens`."""
    import torch

    from sharesd import sampling
    from sharesd.models.prefill import prefill

    device = engine.cache.lengths.device
    with torch.inference_mode():
        logits_1V = prefill(engine.target, engine.cache, [tokens], [0])
        rows = sampling.RowSampling(batch=1, vocab_size=logits_1V.shape[-1], device=device)
        rows.assign(0, params, 0, tokens)
        scores_11V = sampling.process(logits_1V[:, None], rows.kind([0]), rows)
        if not params.greedy:
            positions_11 = torch.tensor([[len(tokens)]]).to(device)
            scores_11V = scores_11V + sampling.gumbel(rows.seeds_B, positions_11, logits_1V.shape[-1])
    engine.forget()
    best = [x.flatten().double().topk(2).values for x in (logits_1V, scores_11V)]
    logit_gap, score_gap = (float(first - second) for first, second in best)
    return logit_gap, score_gap


def _show(cases: Sequence[VerifyCase]) -> None:
    samplings = list(dict.fromkeys(case.sampling for case in cases))
    by_row: dict[tuple[str, str, str], dict[str, str]] = {}
    for case in cases:
        text = f"{case.num_identical}/{case.num_turns}"
        by_row.setdefault(case.row, {})[case.sampling] = f"[bold red]{text}[/]" if case.mismatches else text
    rows = [[*row, *(cells[sampling] for sampling in samplings)] for row, cells in by_row.items()]
    console.print(Section("turns identical to naive", ("mode", "draft", "width", *samplings), rows, left=9).table())
    differing = [(case, mismatch) for case in cases for mismatch in case.mismatches]
    if not differing:
        return
    rows = []
    for case, mismatch in differing[:MAX_SHOWN]:
        tokens = (
            "end" if token is None else f"{token} {text!r}"
            for token, text in ((mismatch.naive_token, mismatch.naive_text), (mismatch.token, mismatch.text))
        )
        gaps = (f"{mismatch.logit_gap:.3g}", f"{mismatch.score_gap:.3g}")
        cells = (*case.row, case.sampling, mismatch.question_id, mismatch.position, *tokens, *gaps)
        rows.append([escape(str(cell)) for cell in cells])
    head = ("mode", "draft", "width", "sampling", "question", "position", "naive", "mode's", "logit gap", "gap")
    console.print(Section("first differing tokens", head, rows, left=9).table())
    if len(differing) > MAX_SHOWN:
        err_console.print(f"and {len(differing) - MAX_SHOWN} more, in verify.json", highlight=False)


def _list_of(convert: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    def values(text: str) -> tuple[_T, ...]:
        try:
            return tuple(dict.fromkeys(map(convert, text.split(","))))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,2") from None

    return values
