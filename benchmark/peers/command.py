"""`peers`: comparison of ShareSD with other runtimes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import psutil

from benchmark import arguments
from benchmark.peers.measure import PeerResult, figures, measure
from benchmark.peers.peer import PEERS, PeerSettings
from benchmark.peers.process import Worker
from benchmark.report import Report
from multigpu.data_parallel import num_cores
from sharesd.cli import options
from sharesd.cli.console import err_console, loading_bars, print_line
from sharesd.models.hub import gguf_of, resolve_target
from sharesd.reports import environment
from sharesd.reports import questions as question_files
from sharesd.reports.environment import conditions, version_of
from sharesd.reports.questions import prompt_ids, require_room
from sharesd.reports.tables import Section, bullets, number, percent, times, write_json

HEAD = ("runtime", "decoding", "tok/s", "range", "x naive", "own text", "first", "read")
LEGEND = (
    "tok/s: generated tokens over the time from the first token to the last, of each prompt's fastest repeat (range: "
    "repeats as a whole). x naive: over `sharesd naive`. own text: share of answers with the tokens of the runtime's "
    "own plain decoding. first: time to the first token. read: tokens of prompts per second of it."
)
NOTES = """- Every runtime has its own process; they alternate after each answer, in a different order each time.
- One clock times the tokens as they come out. Tokens of the first delivery count as prefill.
- transformers is uncompiled. The assistant is a copy quantized as `--draft-quant` says.
- OpenVINO GenAI and llama.cpp have the weights of `--gguf`, which may be those of a smaller model than the others have.
- `sharesd bench serve` compares servers with many requests at once."""


def add_parser(subparsers: Any) -> None:
    text = "ShareSD and other runtimes: transformers, OpenVINO GenAI, llama.cpp"
    parser = subparsers.add_parser("peers", help=text, description=f"Measure greedy decoding and prefill of {text}.")
    parser.set_defaults(run=run, parser=parser)
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--peers",
        default=",".join(PEERS),
        metavar="LIST",
        help="runtimes, with commas, or single variants as RUNTIME:VARIANT (sharesd:naive); those that are not "
        "installed are named in the report",
    )
    group.add_argument("--gguf", metavar="FILE", help="weights for OpenVINO and llama.cpp (default: the target's)")
    arguments.add_questions(group, 4, 64)
    group.add_argument("--repeats", type=arguments.number, default=3, metavar="R", help="measure R times")
    arguments.add_out_dir(group, "peers")
    options.add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure all rows and write the report; return 1 if all failed."""
    rows = [PeerResult(name, variant, PEERS[name].missing()) for name, variant in variants_of(args.peers)]
    if args.max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens is {args.max_new_tokens}; decoding can be timed from 2 on")
    if args.gguf is not None and not os.path.isfile(args.gguf):
        raise ValueError(f"--gguf {args.gguf} does not exist; use an existing file")
    modes = (*PEERS["sharesd"].variants, "auto")
    config = options.engine_config(args, modes=modes)
    asked = question_files.first_turns(args.questions, args.num_questions)
    out_dir = environment.out_folder(args.out_dir, "peers")

    from sharesd.devices.selection import device_of
    from sharesd.models.tokenizer import load_tokenizer

    config = replace(config, device=str(device_of(config.device)), max_context=config.planned_context)  # for all
    with loading_bars() as progress:
        tokenizer = load_tokenizer(resolve_target(config, progress=progress))
    lengths = {"max_new_tokens": args.max_new_tokens, "max_context": config.planned_context}
    require_room(tokenizer, asked.questions, **lengths)
    prompts = [prompt_ids(tokenizer, question, []) for question in asked.questions]
    num_threads = config.threads or min(num_cores(), psutil.cpu_count(logical=False) or num_cores())
    gguf = str(args.gguf or gguf_of(config.target) or "") or None
    ours = tuple(row.variant for row in rows if row.runtime == "sharesd")
    settings = PeerSettings(
        config=config, num_tokens=args.max_new_tokens, num_threads=num_threads, modes=ours, gguf=gguf
    )
    with loading_bars() as progress:

        def report(what: str, done: int, total: int) -> None:
            progress(what, done, total)
            if not err_console.is_terminal:
                print_line(f"{done}/{total} {what}", err_console)

        measure(rows, prompts, repeats=args.repeats, open_worker=lambda name: Worker(name, settings), report=report)
    same = {"num_threads": num_threads, "repeats": args.repeats, "gguf": gguf, "num_tokens": args.max_new_tokens}
    about = conditions(config, modes, questions=asked.label, prompt_tokens=list(map(len, prompts)), **same)
    about["environment"] |= {PEERS[name].pip: version_of(PEERS[name].pip) for name in PEERS}
    found = figures(rows, lambda name: next(iter(PEERS[name].variants)))
    results = [_result(row, each) for row, each in zip(rows, found, strict=True)]
    write_json(out_dir / "peers.json", {**about, "rows": results})
    report_of(about, results).publish(out_dir, "peers", remarks=remarks(results))
    return 0 if any(row.failure is None for row in rows) else 1


def variants_of(text: str) -> list[tuple[str, str]]:
    """Return distinct (runtime, variant) pairs of a list; ValueError for unknown ones."""
    found: list[tuple[str, str]] = []
    for part in text.split(","):
        name, _, variant = part.strip().partition(":")
        if name not in PEERS:
            raise ValueError(f"--peers names {name!r}; choose from {', '.join(PEERS)}")
        known = PEERS[name].variants
        if variant and variant not in known:
            raise ValueError(f"--peers names {part.strip()!r}; {name} has {', '.join(known)}")
        found += [(name, each) for each in ([variant] if variant else known)]
    return list(dict.fromkeys(found))


def report_of(about: dict[str, Any], results: Iterable[dict[str, Any]]) -> Report:
    rows = []
    for result in results:
        if found := result["figures"]:
            low, high = found["tokens_per_second_range"]
            speeds = [number(found["tokens_per_second"]), f"{low:.1f} to {high:.1f}", times(found["ratio_to_naive"])]
            first, read = f"{1e3 * found['first_token_s']:.0f} ms", number(found["read_per_second"], 0)
            rows.append([result["runtime"], result["variant"], *speeds, percent(found["same_as_plain"]), first, read])
    decodings = [f"{result['runtime']} {result['variant']}: {result['how']}" for result in results]
    settings, lengths = about["settings"], about["settings"]["prompt_tokens"]
    return Report(
        title=f"ShareSD and its peers: {settings['model']}",
        intro=f"{len(lengths)} prompts ({settings['questions']}, first turns) of {min(lengths)} to {max(lengths)} "
        f"tokens, {settings['num_tokens']} new tokens each, greedy.",
        sections=[
            Section("", HEAD, rows, left=2, text=LEGEND),
            Section("Remarks", text=bullets(remarks(results))),
            Section("Variants", text=bullets(decodings)),
            Section("How it is measured", text=NOTES),
        ],
        settings=about["settings"],
        environment=about["environment"],
    )


def remarks(results: Iterable[dict[str, Any]]) -> list[str]:
    """Return remarks on failed rows and on texts that differ between repeats."""
    named = {f"{result['runtime']} {result['variant']}": result for result in results}
    lines = [f"{name}: {result['failure']}" for name, result in named.items() if result["failure"]]
    changing = [n for n, result in named.items() if result["figures"] and not result["figures"]["same_in_all_repeats"]]
    return [*lines, *([f"texts that differ between repeats: {', '.join(changing)}"] if changing else [])]


def _result(row: PeerResult, found: dict[str, Any] | None) -> dict[str, Any]:
    samples = [{"repeat": r, "prompt": b, **asdict(sample)} for (r, b), sample in row.samples.items()]
    return {
        "runtime": row.runtime,
        "variant": row.variant,
        "how": PEERS[row.runtime].variants[row.variant],
        "failure": row.failure,
        "figures": found,
        "samples": [{name: value for name, value in s.items() if name != "token_ids"} for s in samples],
    }
