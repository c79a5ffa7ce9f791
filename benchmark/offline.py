"""`offline`: built-in prompts with plain, speculative and prompt-lookup decoding.

`default` is mode naive, `ngram` prompt lookup, `speculative` mode classic with a draft model, else mode share.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark import arguments
from sharesd.cli import options
from sharesd.cli.console import console, err_console
from sharesd.cli.environment import conditions, load_meter, resolved_settings
from sharesd.cli.tables import Section, number, times, write_json
from sharesd.config import Mode
from sharesd.data.json_lines import read_text
from sharesd.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sharesd.engine.engine import Engine
    from sharesd.models.tokenizer import Tokenizer

PROMPTS_FILE = Path(__file__).parent / "data" / "offline_prompts.json"
DEMOS = {"te": "English completions", "tc": "Chinese completions", "chat": "chat"}
SAVE_OUTPUT = "inference_results_with_speculative.json"
DECODINGS = ("default", "speculative", "ngram")  # keys of the results
NUM_DRAFT = 5


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "offline",
        help="built-in prompts: plain, speculative and prompt-lookup decoding side by side",
        description="Answer built-in prompts by plain decoding, with a draft model and by prompt lookup. The exit "
        f"status is 0 if all three give the same texts, else 1. Drafts have {NUM_DRAFT} tokens by default.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    options.add_sampling_options(parser)
    group = parser.add_argument_group("prompts and results")
    group.add_argument("--demo", choices=DEMOS, default="te", help=", ".join(f"{k}: {v}" for k, v in DEMOS.items()))
    group.add_argument("--template", metavar="FILE", help="demo chat: Jinja chat template (default: the checkpoint's)")
    group.add_argument("--save-output", metavar="FILE", default=SAVE_OUTPUT, help="where the results go")
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for end in ("min", "max"):
        parser.add_argument(f"--ngram-prompt-lookup-{end}", dest=f"ngram_{end}", type=int, **hidden)
    parser.add_argument("--enforce-eager", dest="compile", action="store_const", const="off", **hidden)
    arguments.add_removed(parser, gpu_memory_utilization="--max-context auto, the default, takes what memory holds")


def run(args: argparse.Namespace) -> int:
    """Answer prompts by three decodings; return 0 for equal texts, else 1."""
    load_meter()
    speculative: Mode = "classic" if getattr(args, "draft", None) is not None else "share"
    modes: dict[str, Mode] = dict(zip(DECODINGS, ("naive", speculative, "ngram"), strict=True))
    config = options.engine_config(args, modes=("naive", "ngram", speculative))
    config = replace(config, num_draft=config.num_draft or NUM_DRAFT)
    params = options.sampling_params(args)
    output, template = _output_file(args.save_output), _template(args)
    from sharesd.cli.startup import load_runtime, start_engine
    from sharesd.models.hub import resolve_target  # torch takes seconds, mistakes should not
    from sharesd.models.tokenizer import load_tokenizer

    texts = json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))[args.demo]
    tokenizer = load_tokenizer(resolve_target(config))
    prompts = [_encode(tokenizer, text, args.demo, template) for text in texts]
    params = _with_ends(params, tokenizer, template)
    runtime = load_runtime(config, tuple(modes.values()))
    needed = max(map(len, prompts)) + params.max_new_tokens
    if needed > runtime.max_context:
        raise ValueError(
            f"the longest prompt and --max-new-tokens {params.max_new_tokens} need {needed} tokens, and the model's "
            f"context holds {runtime.max_context}; lower --max-new-tokens"
        )
    engines = {name: start_engine(runtime, mode, params) for name, mode in modes.items()}
    found = answer_all(engines, texts, prompts, params)
    unequal = differing(found)
    sampling = {"max_tokens": params.max_new_tokens, "temperature": params.temperature, "seed": params.seed}
    about = conditions(
        config,
        tuple(modes.values()),
        demo=args.demo,
        template=args.template,
        max_context=runtime.max_context,
        **sampling,
    )
    about["settings"] |= resolved_settings(runtime)
    write_json(output, {**found, "equal": not unequal, **about})
    console.print(_section(found, f"{about['settings']['model']} · {DEMOS[args.demo]}").table())
    if unequal:
        numbers = ", ".join(str(i + 1) for i in unequal)
        err_console.print(f"[bold red]the texts of prompts {numbers} differ[/], see {output}", highlight=False)
    else:
        console.print(f"all {len(prompts)} texts are equal in the three ways", highlight=False)
    console.print(f"results: {output}", markup=False, highlight=False, soft_wrap=True)
    return 1 if unequal else 0


def answer_all(
    engines: Mapping[str, Engine], texts: Sequence[str], prompts: Sequence[list[int]], params: SamplingParams
) -> dict[str, dict[str, Any]]:
    """Return answers and totals by decoding; speeds exclude prefill and first token."""
    from benchmark.timed import generate
    from sharesd.engine.stats import Stats

    totals = {name: Stats() for name in engines}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    with err_console.status("answering") as status:
        for i, (text, prompt) in enumerate(zip(texts, prompts, strict=True), 1):
            for name, engine in engines.items():
                status.update(f"prompt {i} of {len(prompts)}: {name}")
                [done] = generate(engine, [prompt], params)
                totals[name].merge(engine.stats)
                answer = {"text": done.text, "token_ids": done.token_ids, "finish_reason": done.finish_reason}
                results[name].append({"prompt": text, **answer, **engine.stats.to_dict()})
    return {
        name: {"mode": engine.mode, "results": results[name], "totals": totals[name].to_dict()}
        for name, engine in engines.items()
    }


def differing(found: Mapping[str, Mapping[str, Any]]) -> list[int]:
    """Return the indices of prompts whose tokens or texts differ."""
    answers = [[(each["token_ids"], each["text"]) for each in decoding["results"]] for decoding in found.values()]
    return [i for i, same in enumerate(zip(*answers, strict=True)) if any(answer != same[0] for answer in same)]


def _section(found: Mapping[str, Mapping[str, Any]], title: str) -> Section:
    base = found["default"]["totals"]["tokens_per_second"]
    rows = []
    for name, contents in found.items():
        totals = contents["totals"]
        speed, figures = totals["tokens_per_second"], [str(totals["new_tokens"]), number(totals["decode_s"], 2)]
        figures += [number(speed), times(speed / base if speed and base else None), number(totals["alpha"], 3)]
        rows.append([name, contents["mode"], *figures, number(totals["tau"], 2)])
    return Section(title, ("decoding", "mode", "tokens", "seconds", "tok/s", "speedup", "alpha", "tau"), rows, left=2)


def _template(args: argparse.Namespace) -> str | None:
    if args.template is None:
        return None
    if args.demo != "chat":
        raise ValueError(f"--template has no effect on demo {args.demo}; use --demo chat or drop --template")
    return read_text(Path(args.template), "Jinja text")


def _output_file(name: str) -> Path:
    """Return the path of the results; ValueError if it is not writable."""
    file = Path(name)
    if file.is_dir() or not os.access(file.parent, os.W_OK | os.X_OK):
        raise ValueError(f"--save-output {name} cannot be written; name a file in a folder that can")
    return file


def _encode(tokenizer: Tokenizer, text: str, demo: str, template: str | None) -> list[int]:
    if demo != "chat":
        return tokenizer.encode(text)
    if template is not None:
        tokenizer.chat_template = template
    elif not tokenizer.has_chat_template:
        raise ValueError("the checkpoint has no chat template; give one with --template FILE, or use --demo te")
    ids = tokenizer.chat([{"role": "user", "content": text}])
    if not ids:
        raise ValueError("the chat template renders nothing; give one that shows `messages`")
    return ids


def _with_ends(params: SamplingParams, tokenizer: Tokenizer, template: str | None) -> SamplingParams:
    """Return the parameters with the end-of-turn tokens of `template` as stops."""
    from sharesd.models.tokenizer import END_OF_TURN

    ends = [tokenizer.backend.token_to_id(token) for token in END_OF_TURN if template and token in template]
    return replace(params, stop_token_ids=tuple(i for i in ends if i is not None))
