"""`exact`: does every mode give the tokens of naive decoding, at every draft length?

First turns are answered by `naive` and by each other mode, at each temperature and seed. Where an answer differs, the
report says by how much the target prefers its first choice there: a gap of a few units in the last place points at
rounding that depends on the shape of a step, a large one at a bug.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from rich.markup import escape
from rich.table import Table

from benchmark import arguments
from benchmark.questions import questions as question_files
from benchmark.questions.job import model_name
from benchmark.questions.questions import Question
from benchmark.questions.records import write_json
from sharesd.cli import options
from sharesd.cli.console import console, err_console, loading_bars
from sharesd.config import MODES, EngineConfig, Mode, SamplingParams
from sharesd.models.progress import Progress, silent

if TYPE_CHECKING:
    from sharesd.engine.engine import Engine

NUM_QUESTIONS, MAX_NEW_TOKENS = 8, 64
SHOWN = 20
"""Mismatches on the terminal; exact.json holds all of them."""
AUTO = "auto"
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """The first token in which an answer differs from that of naive decoding."""

    question_id: str | int
    position: int
    """Of the token in the answer, from 0."""
    naive_token: int | None
    """Its id in naive decoding; None where that answer ended before it."""
    token: int | None
    """Its id in the other mode; None where that answer ended before it."""
    naive_text: str
    text: str
    logit_gap: float
    """By how much the target's largest logit exceeds the second there, from a plain forward pass over the text."""
    score_gap: float
    """The same of what decides: the logits when greedy, else logits / temperature + Gumbel noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The answers of one mode with one draft length and one way of sampling."""

    mode: str
    num_draft: int | None
    """Draft tokens per round; None = chosen for each round."""
    temperature: float
    seed: int
    verify_width: int
    """Rows of a verify step at most."""
    num_turns: int
    num_tokens: int
    """Tokens that naive decoding gave."""
    mismatches: tuple[Mismatch, ...]

    @property
    def num_identical(self) -> int:
        """Turns that gave the same tokens."""
        return self.num_turns - len(self.mismatches)


def add_parser(subparsers: Any, name: str = "exact") -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        name,
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
    group.add_argument("--questions", metavar="FILE", help="JSON Lines, perhaps gzipped (default: ShareSD's own)")
    group.add_argument(
        "--num-questions", type=int, default=NUM_QUESTIONS, metavar="N", help="first turns of N questions"
    )
    group.add_argument(
        "--max-new-tokens", type=int, default=MAX_NEW_TOKENS, metavar="M", help="tokens per answer at most"
    )
    arguments.add_out_dir(group, "exact")


def run(args: argparse.Namespace) -> int:
    """Compare, print the tables, write exact.json; returns 0 if all is identical, else 1."""
    modes = options.modes_of(args, default=MODES)
    modes = ("naive", *(mode for mode in modes if mode != "naive"))
    if len(modes) == 1:
        raise ValueError("--mode is naive alone, which leaves nothing to compare; add another mode")
    config = options.engine_config(argparse.Namespace(**{**vars(args), "num_draft": AUTO}), modes=modes)
    configs = [replace(config, num_draft=None if num == AUTO else num) for num in args.num_draft]
    samplings = _samplings(args.temperatures, args.seeds, args.max_new_tokens)
    asked = question_files.load("mtbench", args.questions, args.num_questions)
    questions = [replace(question, turns=question.turns[:1]) for question in asked.questions]
    out_dir = arguments.out_folder(args.out_dir, "exact")
    cases: list[Case] = []
    total = len(configs) * len(samplings) * len(questions) * len(modes)
    with loading_bars() as progress:
        for config in configs:
            done = sum(case.num_turns for case in cases) * len(modes) // (len(modes) - 1)
            cases += _compare(config, modes, samplings, questions, progress=progress, done=done, total=total)
    identical = all(not case.mismatches for case in cases)
    write_json(out_dir / "exact.json", _report(configs[0], args, asked.label, identical, cases))
    _show(cases)
    console.print(f"details: {out_dir / 'exact.json'}", markup=False, highlight=False, soft_wrap=True)
    return 0 if identical else 1


def compare_answers(
    engines: Mapping[Mode, Engine],
    prompts: Mapping[str | int, list[int]],
    params: SamplingParams,
    *,
    num_draft: int | None,
    tick: Callable[[], None] = lambda: None,
) -> list[Case]:
    """A case for each engine but `naive`, which is what the others are compared with. `tick` follows every answer.

    `prompts` are token ids by question. The engines share one target and have a batch of 1.
    """
    naive = engines["naive"]
    found: dict[Mode, list[Mismatch]] = {mode: [] for mode in engines if mode != "naive"}
    num_tokens = 0
    for question_id, prompt in prompts.items():
        wanted = naive.generate([prompt], params)[0].token_ids
        num_tokens += len(wanted)
        tick()
        for mode, mismatches in found.items():
            given = engines[mode].generate([prompt], params)[0].token_ids
            tick()
            position = first_difference(wanted, given)
            if position is not None:
                mismatches.append(_mismatch(naive, question_id, prompt, wanted, given, position, params))
    return [
        Case(
            mode=mode,
            num_draft=num_draft,
            temperature=params.temperature,
            seed=params.seed,
            verify_width=_verify_width(engines[mode]),
            num_turns=len(prompts),
            num_tokens=num_tokens,
            mismatches=tuple(mismatches),
        )
        for mode, mismatches in found.items()
    ]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which two answers differ, the end of the shorter one included; None if they are equal."""
    differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, None if len(a) == len(b) else min(len(a), len(b)))


def _verify_width(engine: Engine) -> int:
    rows = 1 + engine.num_draft
    return next(width for width in engine.widths if width >= rows) if engine.widths else rows


def _compare(
    config: EngineConfig,
    modes: tuple[Mode, ...],
    samplings: Sequence[SamplingParams],
    questions: Sequence[Question],
    *,
    progress: Progress = silent,
    done: int,
    total: int,
) -> list[Case]:
    """The cases of one draft length; its models are gone when this returns."""
    from benchmark.questions.conversation import prompt_ids, require_room
    from sharesd.runtime import Runtime  # torch takes seconds, mistakes should not

    runtime = Runtime(config, modes, progress=progress)
    require_room(
        runtime.tokenizer, questions, max_new_tokens=samplings[0].max_new_tokens, max_context=runtime.max_context
    )
    prompts = {question.id: prompt_ids(runtime.tokenizer, question, []) for question in questions}
    cases: list[Case] = []

    def tick() -> None:
        nonlocal done
        done += 1
        progress("comparing answers", done, total)

    for params in samplings:
        engines = {mode: runtime.engine(mode, warm=params) for mode in modes}
        cases += compare_answers(engines, prompts, params, num_draft=config.num_draft, tick=tick)
    return cases


def _mismatch(
    naive: Engine,
    question_id: str | int,
    prompt: list[int],
    wanted: list[int],
    given: list[int],
    position: int,
    params: SamplingParams,
) -> Mismatch:
    logit_gap, score_gap = _gaps(naive, prompt + wanted[:position], params)
    tokens = [answer[position] if position < len(answer) else None for answer in (wanted, given)]
    texts = ["" if token is None else naive.tokenizer.decode([token], False) for token in tokens]
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
    """Between the best two choices for the token after these: of the target's logits, and of what decides."""
    import torch

    from sharesd import sampling
    from sharesd.models.prefill import prefill

    device = engine.cache.lengths.device
    with torch.inference_mode():
        logits_1V = prefill(engine.target, engine.cache, [tokens], [0])
        rows = sampling.RowSampling(batch=1, vocab_size=logits_1V.shape[-1], device=device)
        rows.place(0, params, 0, tokens)
        scores_11V = sampling.process(logits_1V[:, None], rows.kind([0]), rows)
        if not params.greedy:
            positions_11 = torch.tensor([[len(tokens)]]).to(device)
            scores_11V = scores_11V + sampling.gumbel(rows.seeds_B, positions_11, logits_1V.shape[-1])
    engine.forget()
    logit_gap, score_gap = (
        float(best[0] - best[1]) for best in (x.flatten().double().topk(2).values for x in (logits_1V, scores_11V))
    )
    return logit_gap, score_gap


def _samplings(temps: Sequence[float], seeds: Sequence[int], max_new_tokens: int) -> list[SamplingParams]:
    """All temperatures with all seeds, but greedy decoding once."""
    return [
        SamplingParams(temperature=temp, seed=seed, max_new_tokens=max_new_tokens)
        for temp in temps
        for seed in (seeds if temp else seeds[:1])
    ]


def _report(
    config: EngineConfig, args: argparse.Namespace, label: str, identical: bool, cases: Sequence[Case]
) -> dict[str, Any]:
    from benchmark.environment import environment
    from sharesd.devices.selection import device_of

    device = str(device_of(config.device))
    return {
        "identical": identical,
        "settings": {
            "command": arguments.command(),
            "model": model_name(config.target),
            "draft": config.draft,
            "questions": label,
            "num_questions": args.num_questions,
            "max_new_tokens": args.max_new_tokens,
            "dtype": config.dtype,
            "device": device,
            "quant": str(config.quant),
            "compile": config.compile,
        },
        "environment": environment(device),
        "cases": [asdict(case) for case in cases],
    }


def _show(cases: Sequence[Case]) -> None:
    """The share of identical turns, then what differs."""
    columns = list(dict.fromkeys(map(_sampling, cases)))
    table = Table(title="turns identical to naive", box=None, title_justify="left", header_style="")
    for name in ("mode", "draft", "width", *columns):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in dict.fromkeys(map(_row, cases)):
        cells = {_sampling(case): _share(case) for case in cases if _row(case) == row}
        table.add_row(*row, *(cells[column] for column in columns))
    console.print(table)
    differing = [(case, mismatch) for case in cases for mismatch in case.mismatches]
    if not differing:
        return
    table = Table(title="first differing tokens", box=None, title_justify="left", header_style="")
    for name in ("mode", "draft", "width", "sampling", "question", "position", "naive", "mode's", "logit gap", "gap"):
        table.add_column(name)
    for case, mismatch in differing[:SHOWN]:
        tokens = (
            "end" if token is None else f"{token} {text!r}"
            for token, text in ((mismatch.naive_token, mismatch.naive_text), (mismatch.token, mismatch.text))
        )
        place = (mismatch.question_id, mismatch.position, *tokens)
        gaps = (f"{mismatch.logit_gap:.3g}", f"{mismatch.score_gap:.3g}")
        table.add_row(*(escape(str(cell)) for cell in (*_row(case), _sampling(case), *place, *gaps)))
    console.print(table)
    if len(differing) > SHOWN:
        err_console.print(f"and {len(differing) - SHOWN} more, in exact.json", highlight=False)


def _row(case: Case) -> tuple[str, str, str]:
    return case.mode, AUTO if case.num_draft is None else str(case.num_draft), str(case.verify_width)


def _sampling(case: Case) -> str:
    return f"T={case.temperature:g} seed {case.seed}" if case.temperature else "greedy"


def _share(case: Case) -> str:
    text = f"{case.num_identical}/{case.num_turns}"
    return f"[bold red]{text}[/]" if case.mismatches else text


def _list_of(convert: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    """A type of argparse: values with commas, each once."""

    def numbers(text: str) -> tuple[_T, ...]:
        try:
            return tuple(dict.fromkeys(map(convert, text.split(","))))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,2") from None

    return numbers
