"""`offline`: prompts with plain, speculative and prompt-lookup decoding.

`default` is mode naive, `ngram` prompt lookup, `speculative` mode classic with a draft model, else mode share.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.arguments import rotated
from benchmark.questions import summary
from benchmark.questions.records import Key, TurnRecord
from benchmark.questions.run_config import add_question_options, chosen_questions
from sharesd.cli import options
from sharesd.cli.console import console, err_console, print_line
from sharesd.cli.startup import load_llm, warm_up
from sharesd.config import Mode
from sharesd.data.json_lines import read_text
from sharesd.models.hub import resolve_target
from sharesd.reports.environment import conditions, load_meter, load_warning, resolved_settings
from sharesd.reports.questions import Question, QuestionSet, load, prompt_ids
from sharesd.reports.tables import Section, number, ranged, times, write_json
from sharesd.sampling_params import SamplingParams
from sharesd_files import file_hash

if TYPE_CHECKING:
    from sharesd.llm import LLM
    from sharesd.models.tokenizer import Tokenizer

PROMPTS_FILE = Path(__file__).parent / "data" / "offline_prompts.json"
DEMOS = {"te": "English completions", "tc": "Chinese completions", "chat": "chat"}
SAVE_OUTPUT = "inference_results_with_speculative.json"
DEFAULT_DEMO = "te"
DECODINGS = ("default", "speculative", "ngram")  # keys of the results
NUM_DRAFT = 5
Encode = Callable[[Question, Sequence[str]], list[int]]  # prompt of the turn after these answers


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "offline",
        help="built-in or other prompts: plain, speculative and prompt-lookup decoding side by side",
        description="Answer prompts or questions by plain decoding, with a draft model and by prompt lookup. The exit "
        f"status is 0 if all three give the same texts, else 1. Drafts have {NUM_DRAFT} tokens by default.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    options.add_sampling_options(parser)
    group = parser.add_argument_group("prompts and results")
    shown = ", ".join(f"{name}: {text}" for name, text in DEMOS.items())
    group.add_argument("--demo", choices=DEMOS, help=f"built-in prompts, {shown} (default: {DEFAULT_DEMO})")
    add_question_options(group, "the prompts of --demo")
    text = "Jinja chat template of demo chat and of questions (default: that of the checkpoint)"
    group.add_argument("--template", metavar="FILE", help=text)
    group.add_argument("--save-output", metavar="FILE", default=SAVE_OUTPUT, help="file for the results")


def run(args: argparse.Namespace) -> int:
    """Answer prompts by three decodings; return 0 for equal texts, else 1."""
    load_meter()
    speculative: Mode = "classic" if getattr(args, "draft", None) is not None else "share"
    modes: dict[str, Mode] = dict(zip(DECODINGS, ("naive", speculative, "ngram"), strict=True))
    config = options.engine_config(args, modes=("naive", "ngram", speculative))
    config = replace(config, num_draft=config.num_draft or NUM_DRAFT)
    params = options.sampling_params(args)
    output, demo = _output_file(args.save_output), _demo(args)
    template = _template(args.template, demo)
    asked, about_them = chosen_questions(args, _demo_questions(demo) if demo else load("mtbench", args.questions))
    from sharesd.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_target(config))
    encode = _encoder(tokenizer, demo, template)
    earlier = [(question, len(question.turns) - 1) for question in asked.questions]
    needed = max(len(encode(each, [""] * num)) + (num + 1) * params.max_new_tokens for each, num in earlier)
    params = _with_ends(params, tokenizer, template)
    llm = load_llm(config, tuple(modes.values()), reuse=False)
    if needed > llm.max_context:
        raise ValueError(
            f"the longest prompt and --max-new-tokens {params.max_new_tokens} need {needed} tokens, and the model's "
            f"context holds {llm.max_context}; lower --max-new-tokens"
        )
    for mode in modes.values():
        warm_up(llm, mode, params)
    found = answer_all(llm, modes, asked.questions, encode, params)
    unequal = differing(found)
    settings: dict[str, Any] = {"demo": demo, "questions": about_them, "template": args.template}
    settings |= {"max_tokens": params.max_new_tokens, "temperature": params.temperature, "seed": params.seed}
    about = conditions(config, tuple(modes.values()), **settings)
    about["settings"] |= resolved_settings(llm.runtime)
    about["settings"]["files"] |= {"questions": file_hash(Path(args.questions))} if args.questions else {}
    write_json(output, {**found, "equal": not unequal, **about})
    _show(found, f"{about['settings']['model']} · {asked.label}", load_warning(about["environment"]))
    if unequal:
        numbers = ", ".join(str(i + 1) for i in unequal)
        err_console.print(f"[bold red]the texts of prompts {numbers} differ[/], see {output}", highlight=False)
    else:
        console.print(f"all {about_them['num_turns']} texts are the same in all three decodings", highlight=False)
    print_line(f"results: {output}")
    return 1 if unequal else 0


def answer_all(
    llm: LLM, modes: Mapping[str, Mode], questions: Sequence[Question], encode: Encode, params: SamplingParams
) -> dict[str, dict[str, Any]]:
    """Return answers, totals and figures by category of each decoding; `modes`: their modes by name.

    Each question is answered by all decodings, of which another one begins each time.
    """
    from benchmark.questions.session import measure_turn

    records: dict[str, dict[Key, TurnRecord]] = {name: {} for name in modes}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in modes}
    with err_console.status("answering") as status:
        for i, question in enumerate(questions):
            for name in rotated(list(modes), i):
                status.update(f"prompt {i + 1} of {len(questions)}: {name}")
                answered: list[str] = []
                for turn, text in enumerate(question.turns, 1):
                    prompt = encode(question, answered)
                    record = measure_turn(llm, modes[name], prompt, params, run=1, question=question, turn=turn)
                    about = {"prompt": text, "question_id": question.id, "category": question.category, "turn": turn}
                    answer = {each: getattr(record, each) for each in ("text", "token_ids", "finish_reason")}
                    results[name].append({**about, **answer, **llm.runtime.engine.stats.to_dict()})
                    records[name][record.key] = record
                    answered.append(record.text)
    return {
        name: {
            "mode": mode,
            "results": results[name],
            "totals": summary.total(records[name].values()).to_dict(),
            "by_category": summary.by_category(records[name], records["default"]),
        }
        for name, mode in modes.items()
    }


def differing(found: Mapping[str, Mapping[str, Any]]) -> list[int]:
    """Return the indices of prompts whose tokens or texts differ."""
    answers = [[(each["token_ids"], each["text"]) for each in decoding["results"]] for decoding in found.values()]
    return [i for i, same in enumerate(zip(*answers, strict=True)) if any(answer != same[0] for answer in same)]


def _show(found: Mapping[str, Mapping[str, Any]], title: str, warning: str) -> None:
    base = found["default"]["totals"]["tokens_per_second"]
    rows = []
    for name, contents in found.items():
        totals = contents["totals"]
        speed, figures = totals["tokens_per_second"], [str(totals["new_tokens"]), number(totals["decode_s"], 2)]
        figures += [number(speed), times(speed / base if speed and base else None), number(totals["alpha"], 3)]
        rows.append([name, contents["mode"], *figures, number(totals["tau"], 2)])
    head = ("decoding", "mode", "tokens", "seconds", "tok/s", "speedup", "alpha", "tau")
    console.print(Section(title, head, rows, left=2).table())
    keys = {"tok/s": "tokens_per_second", "speedup": "speedup", "alpha": "alpha", "tau": "tau"}
    categories = found["default"]["by_category"]
    rows = [
        [category, contents["mode"], *(ranged(contents["by_category"][category], key) for key in keys.values())]
        for category, contents in product(categories, found.values())
    ]
    if len(categories) > 1:
        console.print(Section("By category", ("category", "mode", *keys), rows, left=2).table())
    for line in filter(None, (warning, "Measured once, so the noise is unknown; bench mtbench --runs 3 gives ranges.")):
        print_line(line)


def _demo(args: argparse.Namespace) -> str | None:
    """Return the name of built-in prompts; None with --questions."""
    if args.questions and args.demo:
        raise ValueError(f"--demo is {args.demo}, and --questions gives other prompts; use one or the other")
    return None if args.questions else args.demo or DEFAULT_DEMO


def _demo_questions(demo: str) -> QuestionSet:
    texts = json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))[demo]
    questions = tuple(Question(id=i, category=demo, turns=(text,)) for i, text in enumerate(texts, 1))
    return QuestionSet(name=demo, label=DEMOS[demo], source="built-in", questions=questions)


def _template(file: str | None, demo: str | None) -> str | None:
    if file is None:
        return None
    if demo not in (None, "chat"):
        raise ValueError(f"--template has no effect on demo {demo}; use --demo chat or drop --template")
    return read_text(Path(file), "Jinja text")


def _output_file(name: str) -> Path:
    """Return the path of the results; ValueError if it is not writable."""
    file = Path(name)
    if file.is_dir() or not os.access(file.parent, os.W_OK | os.X_OK):
        raise ValueError(f"--save-output {name} is not writable; use a file in a writable folder")
    return file


def _encoder(tokenizer: Tokenizer, demo: str | None, template: str | None) -> Encode:
    """Return the function that encodes a question after earlier answers."""
    if demo not in (None, "chat"):
        return lambda question, answers: tokenizer.encode(question.turns[0])
    if template is not None:
        tokenizer.chat_template = template
    elif demo and not tokenizer.has_chat_template:
        raise ValueError("the checkpoint has no chat template; pass one with --template FILE, or use --demo te")

    def encode(question: Question, answers: Sequence[str]) -> list[int]:
        if not (ids := prompt_ids(tokenizer, question, answers)):
            raise ValueError("the chat template renders nothing; use one that prints `messages`")
        return ids

    return encode


def _with_ends(params: SamplingParams, tokenizer: Tokenizer, template: str | None) -> SamplingParams:
    """Return the parameters with the end-of-turn tokens of `template` as stops."""
    from sharesd.models.tokenizer import ends_of_turn

    ends = [tokenizer.backend.token_to_id(token) for token in ends_of_turn(template)]
    return replace(params, stop_token_ids=tuple(i for i in ends if i is not None))
