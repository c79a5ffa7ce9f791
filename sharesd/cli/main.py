"""Command line of `sharesd generate | chat | cache`; imports torch last."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from textwrap import shorten
from typing import Any

from compile.start_times import START
from sharesd import __version__
from sharesd.cli import cache as cache_command
from sharesd.cli import generate_file
from sharesd.cli.console import err_console
from sharesd.cli.options import (
    Parser,
    add_mode_option,
    add_model_options,
    add_sampling_options,
    add_trace_option,
    engine_config,
    main_guard,
    mode_of,
    modes_of_heads,
    parse,
    request_settings,
    sampling_params,
)
from sharesd.cli.process import INTERRUPTED
from sharesd.cli.startup import answer, follows, load_llm, warm_up
from sharesd.cli.user_text import encode, read_text, require_utf8
from sharesd.data.json_lines import finite
from sharesd.data.request_errors import RequestError
from sharesd.drafters import registry, selection
from sharesd.drafters.registry import Need

PROG = "python -m sharesd"


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    return main_guard(lambda: _run(argv, prog))


def _run(argv: Sequence[str] | None, prog: str) -> int:
    args = parse(make_parser(prog), argv)
    return args.run(args)


def make_parser(prog: str = PROG) -> Parser:
    parser = Parser(prog=prog, description="Lossless speculative decoding with one shared model.")
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", dest="command", required=True)

    generate = commands.add_parser(
        "generate",
        help="answer prompts",
        description="Answer prompts and stream the text to stdout. A prompt is an instruction, put to the model "
        "through its chat template if it has one; --raw continues it as plain text instead. Many prompts can be given "
        "as a file, and answered by several processes.",
    )
    generate.set_defaults(run=_generate, parser=generate)
    generate.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="a text, or - for stdin; several are decoded together"
    )
    add_mode_option(generate, several=False)
    generate.add_argument(
        "--raw", action="store_true", help="continue the prompt as plain text, without the chat template"
    )
    generate.add_argument("--system", default=argparse.SUPPRESS, metavar="TEXT", help="system prompt")
    generate.add_argument(
        "--json", action="store_true", help="print a JSON object per prompt (statistics: of all) instead of text"
    )
    generate.add_argument("--logprobs", action="store_true", help="with --json: log-probability of every token")
    generate.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="on a terminal, color tokens by source and name their drafters; then show statistics",
    )
    add_trace_option(generate)
    add_model_options(generate)
    add_sampling_options(generate, max_new_tokens=512)
    generate_file.add_options(generate)

    chat = commands.add_parser(
        "chat",
        help="talk with the model",
        description="Talk with the model. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.",
    )
    chat.set_defaults(run=_chat, parser=chat)
    add_mode_option(chat, several=False)
    chat.add_argument("--system", default=argparse.SUPPRESS, metavar="TEXT", help="system prompt")
    chat.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="color tokens by source and name their drafters; show statistics of each answer",
    )
    add_model_options(chat)
    add_sampling_options(chat, max_new_tokens=1024)

    cache_command.add_parser(commands)
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="show versions and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(versions())
        parser.exit()


def versions() -> str:
    return f"sharesd {__version__}, torch {_installed('torch')}, transformers {_installed('transformers')}"


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _generate(args: argparse.Namespace) -> int:
    mode = mode_of(args)
    system = _system(args)
    for prompt in args.prompts:
        require_utf8(prompt, "the prompt")
    if args.raw and system is not None:
        raise ValueError("--system has no effect with --raw, which skips the chat template; use one or the other")
    generate_file.check_options(args)
    if args.logprobs and not args.json and args.file is None:
        raise ValueError("--logprobs needs --json; add it, or drop --logprobs")
    params = replace(sampling_params(args, warns=args.file is None), logprobs=args.logprobs)
    config = engine_config(args, modes=(mode,))
    if args.file is not None:
        work = generate_file.GenerateWork(config, mode, params, args.raw, system, request_settings(args))
        return generate_file.run(args, work)
    config = replace(config, max_batch=len(args.prompts))

    prompts = [] if config.tensor_parallel > 1 and follows() else _read_prompts(args.prompts)  # only rank 0 reads stdin
    llm = load_llm(config, (mode,))
    ids = [encode(llm.tokenizer, prompt, raw=args.raw, system=system) for prompt in prompts]
    warm_up(llm, mode, params)

    from sharesd.cli.display import AnswerWriter, legend, shows_colors, start_table, stats_dict, stats_table
    from sharesd.engine.outputs import Completion

    if args.verbose and not args.json and shows_colors():
        err_console.print(legend())
    titles = [shorten(prompt, 80, placeholder=" …") for prompt in prompts]
    writer = AnswerWriter(llm.tokenizer, titles=titles, by_source=args.verbose)
    answers, failure = [Completion() for _ in ids], None
    try:
        answer(llm, ids, params, (lambda chunk: None) if args.json else writer.write, answers=answers)
    except RequestError as error:
        failure = error
    writer.end()
    llm.runtime.close_trace()
    report, stats = llm.runtime.report(mode), llm.runtime.engine.stats
    if args.json:
        common = {"mode": mode, "stats": stats_dict(stats, report)}
        for prompt, done in zip(prompts, answers, strict=True):
            if done.finish_reason != "error":
                done.logprobs = done.logprobs and [finite(logprob) for logprob in done.logprobs]
                print(json.dumps({"prompt": prompt, **asdict(done), **common}, ensure_ascii=False), flush=True)
    if args.verbose:
        err_console.print(stats_table({mode: stats}, report))
        err_console.print(start_table(START))
    if failure is not None:
        raise failure
    return 0 if all(done.finish_reason for done in answers) else INTERRUPTED


def _system(args: argparse.Namespace) -> str | None:
    """Return the system prompt of `--system`, or None."""
    system = getattr(args, "system", None)
    return None if system is None else require_utf8(system, "--system")


def _read_prompts(given: Sequence[str]) -> list[str]:
    """Return the prompts, with stdin for `-`; ValueError for an empty one."""
    if given.count("-") > 1:
        raise ValueError("the prompt - is given twice, but stdin can be read only once")
    prompts = [read_text(sys.stdin, "stdin").removesuffix("\n") if prompt == "-" else prompt for prompt in given]
    empty = next((given[i] for i, prompt in enumerate(prompts) if not prompt.strip()), None)
    if empty is not None:
        raise ValueError("stdin is empty; pipe a prompt into it" if empty == "-" else f"the prompt {empty!r} is empty")
    return prompts


def _chat(args: argparse.Namespace) -> int:
    mode = mode_of(args)
    params, system = sampling_params(args), _system(args)
    # Modes that need weights in addition to the target's are loaded only on request.
    wanted = {mode, *modes_of_heads(args), *(selection.needing(Need.SECOND_MODEL) if hasattr(args, "draft") else ())}
    wanted |= {registry.NAIVE, *registry.names("table")}
    modes = tuple(each for each in registry.modes() if each in wanted)
    config = engine_config(args, modes=modes)

    llm = load_llm(config, modes)

    from sharesd.cli.chat import Chat

    return Chat(llm, mode, params, system=system, verbose=args.verbose).run()
