"""Command `prompts`: user prompts sampled from the target (Magpie).

A chat model also predicts the user's turn. Sampling this turn gives any number of prompts, similar to the model's
training data (Xu et al. 2024, arXiv 2406.08464).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multigpu.journal import Journal, keep_settings, read_lines, read_records, with_fields
from sharesd.cli import options
from sharesd.cli.console import loading_bars, print_line
from sharesd.config import EngineConfig
from sharesd.conversations import run_conversations
from sharesd.field_types import DefaultLimit
from sharesd.models.tokenizer import Tokenizer
from sharesd.sampling_params import SamplingParams
from sharesd_files import atomic_write

if TYPE_CHECKING:
    from sharesd.engine.outputs import TokenChunk
    from sharesd.llm import LLM

FLAG = "--out"
SHORTEST = 8
"""Minimum characters of a prompt."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "prompts",
        help="sample user prompts from the target, for `generate`",
        description="Let the target write the user's message of its chat template, and keep distinct results.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help="JSON Lines, as `generate --prompts` reads them; rerun to resume",
    )
    group.add_argument(
        "--num-prompts", type=int, default=1000, metavar="N", help="prompts to sample; a few are dropped"
    )
    group.add_argument(
        "--max-new-tokens",
        type=int,
        default=160,
        metavar="N",
        help="maximum tokens per prompt; longer ones are dropped",
    )
    group.add_argument("--temperature", type=float, default=1.0)
    group.add_argument("--top-p", type=float, default=0.9, metavar="P")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--max-batch", type=int, default=DefaultLimit(32), metavar="N", help="prompts decoded at once")


def run(args: argparse.Namespace) -> int:
    """Sample and write the prompts; return the exit status."""
    out = Path(args.out)
    if out.suffix != ".jsonl" or out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"--out is {args.out}; give a .jsonl file in an existing folder")
    if args.num_prompts < 1:
        raise ValueError(f"--num-prompts is {args.num_prompts}; it must be at least 1")
    if not args.temperature > 0:
        raise ValueError(f"--temperature is {args.temperature}, at which all prompts are equal; raise it")
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed
    )
    config = replace(options.engine_config(args, modes=("naive",)), max_batch=args.max_batch)
    settings, part = (Path(args.out + end) for end in (".settings.json", ".part"))
    if out.exists() and not settings.exists():
        raise ValueError(f"{FLAG} is {out}, which exists but has no {settings.name}; give another file")
    keep_settings(settings, _settings(config, params, args.num_prompts), FLAG)
    if not out.exists():
        with Journal(part, FLAG) as journal:
            _sample_prompts(config, params, args.num_prompts, journal)
            _write_kept(out, part)
        part.unlink()
    print_line(f"{out}: {sum(1 for _ in read_lines(out)):,} distinct prompts of {args.num_prompts:,} sampled")
    return 0


def _sample_prompts(config: EngineConfig, params: SamplingParams, num: int, journal: Journal) -> None:
    """Sample the prompts missing in the journal, and append them."""
    done = {record["index"] for record in _sampled(journal.path)}
    left = iter([index for index in range(num) if index not in done])
    with loading_bars() as progress:
        from sharesd.llm import LLM  # late: importing torch takes seconds

        llm = LLM.from_config(config, ("naive",), progress=progress)
        llm.runtime.warm_up("naive", params)
        begin = before_user(llm.tokenizer)

        def take(wait: bool) -> tuple[int, _Prompt] | None:
            index = next(left, None)
            return None if index is None else (index, _Prompt(begin, params, index))

        progress("prompts", len(done), num)
        for number, (index, prompt, mistake) in enumerate(run_conversations(llm, take), 1 + len(done)):
            if mistake is not None:
                raise mistake
            journal.add(
                {"index": index, "text": prompt.completion.text, "ended": prompt.completion.finish_reason == "stop"}
            )
            progress("prompts", number, num)


def _sampled(journal: Path) -> Iterator[dict[str, Any]]:
    return (record for _, record in read_records(journal, FLAG, with_fields("index", "text", "ended")))


def _write_kept(out: Path, journal: Path) -> None:
    """Write finished, distinct prompts of sufficient length, by number."""
    sampled = sorted(_sampled(journal), key=lambda one: one["index"])
    kept = dict.fromkeys(text for one in sampled if one["ended"] and len(text := one["text"].strip()) >= SHORTEST)
    atomic_write(out, "".join(json.dumps({"prompt": text}) + "\n" for text in kept))


class _Prompt:
    """Prompt in progress; the text depends on number and seed only."""

    goes_on = False

    def __init__(self, begin: list[int], params: SamplingParams, index: int) -> None:
        from sharesd.engine.outputs import Completion

        self._begin, self._params, self._index = begin, params, index
        self.completion = Completion()

    def next_prompt(self, llm: LLM) -> tuple[list[int], SamplingParams, int]:
        return self._begin, self._params, self._index

    def take(self, chunk: TokenChunk) -> None:
        self.completion.add(chunk)


def _settings(config: EngineConfig, params: SamplingParams, num: int) -> dict[str, Any]:
    """Return the settings on which prompts depend."""
    return {
        "num_prompts": num,
        "target": config.target,
        **({} if config.lora is None else {"lora": config.lora}),
        **({} if config.target_quant is None else {"target_quant": config.target_quant}),
        "dtype": config.dtype,
        "compile": config.compile,
        "exact": config.exact,
        "max_context": config.max_context,
        "sampling": asdict(params),
    }


def before_user(tokenizer: Tokenizer) -> list[int]:
    """Return the template's tokens before the first user message.

    Raises ValueError if there are none.
    """
    mark = "<the user's message>"
    text = tokenizer.render_chat([{"role": "user", "content": mark}])
    before = tokenizer.encode(text[: text.index(mark)], add_special_tokens=False)
    if not before:
        raise ValueError(
            "the chat template writes nothing before the user's message, from which the target could continue"
        )
    return before
