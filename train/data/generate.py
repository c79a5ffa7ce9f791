"""Command `generate`: answers of the target, to train draft heads on."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from multigpu.data_parallel import Numbered, TaskQueue, environments, start
from multigpu.launcher_replicas import rank_and_world
from sharesd.cli import options
from sharesd.cli.console import print_line, set_up_logging, warn
from sharesd.cli.generate_file import answering
from sharesd.config import OFFLINE_CHUNK, EngineConfig, Mode
from sharesd.conversations import run_conversations
from sharesd.data.json_lines import records
from sharesd.data.prompt_files import Message, conversation
from sharesd.drafters import registry
from sharesd.field_types import DefaultLimit
from sharesd.models.checkpoint import Progress, silent
from sharesd.sampling_params import SamplingParams
from train.data.multi_turn import AnswerTurns, Unusable, prompts_of, seed_of
from train.data.shards import AnswerShard, answers_in, keep_settings

Key = tuple[int, int]
"""(number of the record in the input, index of the answer)."""


class Wanted(NamedTuple):
    """Record of the input."""

    number: int
    source: str
    talk: tuple[list[Message], list[Message]] | None
    """System and user messages; None if the conversation is skipped."""
    reason: str = ""
    """Reason for skipping the record."""


WORK = "train.data.generate:answer"


class Work(NamedTuple):
    """Settings of the worker that generates answers."""

    config: EngineConfig
    mode: Mode
    warm: SamplingParams
    """Parameters for warmup, with the highest temperature of all answers."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "generate",
        help="have the target answer prompts, as data for draft heads",
        description="Let the target answer prompts, one user turn after the other, and store its tokens. Rerun to "
        "resume; several processes (--replicas, torchrun, accelerate launch) share the prompts.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    group = parser.add_argument_group("data")
    group.add_argument(
        "--prompts",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON or JSON Lines: instructions, questions, messages or ShareGPT's conversations",
    )
    group.add_argument(
        "--out-dir", required=True, metavar="DIR", help="folder of the answers; an existing one is resumed"
    )
    group.add_argument(
        "--num-prompts", type=int, metavar="N", help="records of each file, drawn at random (default: all)"
    )
    group.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="maximum tokens per answer")
    group.add_argument(
        "--temperature", default="0", metavar="T,T", help="0 = greedy; of several, each answer uses the next one"
    )
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="top-p of answers with a temperature above 0"
    )
    group.add_argument("--samples", type=int, default=1, metavar="N", help="answers to each record")
    group.add_argument(
        "--seed", type=int, default=0, help="seed; that of each answer is derived from it and the answer's number"
    )
    group = parser.add_argument_group("decoding (without effect on the answers)")
    group.add_argument("--mode", default="hybrid", help=", ".join(registry.modes()))
    group.add_argument(
        "--max-batch", type=int, default=DefaultLimit(8), metavar="N", help="conversations decoded at once"
    )
    options.add_replicas_option(group)
    group.add_argument(
        "--gpu-index", type=int, metavar="N", help="GPU to use (default: LOCAL_RANK, if a launcher sets it)"
    )


def run(args: argparse.Namespace) -> int:
    """Generate the missing answers; return the exit status."""
    temperatures, params = _sampling(args)
    rank, world = rank_and_world()
    mode = options.mode_of(args)
    config = replace(options.engine_config(args, modes=(mode,)), max_batch=args.max_batch, prefill_chunk=OFFLINE_CHUNK)
    options.check_launched(args, world)
    places = _places(args, config)
    config = replace(config, device=_device(args, config))
    wanted = read(args.prompts, args.num_prompts, args.seed)
    every = [(record, sample) for record in wanted for sample in range(args.samples)][rank::world]
    keys = {(record.number, sample) for record, sample in every}
    skipped = Counter[str](record.reason for record, _ in every if record.talk is None)
    failed = Counter[str]()
    folder = Path(args.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    keep_settings(folder, _settings(args, config, temperatures))

    def dialogue(record: Wanted, sample: int) -> AnswerTurns:
        assert record.talk is not None
        temperature = temperatures[(record.number + sample) % len(temperatures)]
        seed = seed_of(args.seed, record.number, sample)
        sampling = replace(params, temperature=temperature, seed=seed, top_p=args.top_p if temperature else 1.0)
        return AnswerTurns(record.number, sample, record.source, *record.talk, sampling)

    with AnswerShard(folder, rank, world) as shard:
        before = written(folder, keys)
        left = [one for one in every if one[0].talk is not None and (one[0].number, one[1]) not in before]
        work = Work(config, mode, replace(params, temperature=max(temperatures)))
        dialogues = [(number, dialogue(*one)) for number, one in enumerate(left)]
        speed = _answer(work, dialogues, places, shard, skipped, failed) if left else ""
    after = written(folder, keys)
    if len(after) + skipped.total() + failed.total() != len(every):
        raise RuntimeError(
            f"{len(every)} answers were wanted, and {len(after)} written + {skipped.total()} skipped + "
            f"{failed.total()} failed are a different number"
        )
    process = f" (process {rank} of {world})" if world > 1 else ""
    reasons = [
        f"\n  {what} {number}: {reason}"
        for what, counts in (("skipped", skipped), ("failed", failed))
        for reason, number in counts.most_common()
    ]
    print_line(
        f"{folder}{process}: {len(every)} wanted = {len(after)} written ({len(before)} of them before) "
        f"+ {skipped.total()} skipped + {failed.total()} failed{''.join(reasons)}{speed}"
    )
    return 0


def _answer(
    work: Work,
    dialogues: list[tuple[int, AnswerTurns]],
    places: list[dict[str, str]],
    shard: AnswerShard,
    skipped: Counter[str],
    failed: Counter[str],
) -> str:
    """Generate and write all conversations; return a summary line."""
    num_tokens, replicas = 0, start(WORK, work, places) if places else None
    with answering(WORK, work, dialogues, replicas, max_assigned=work.config.max_batch) as results:
        started = time.perf_counter()
        for _, result in results:
            if isinstance(result, ValueError):
                (skipped if isinstance(result, Unusable) else failed)[str(result)] += 1
            else:
                shard.add(result)
                spans = (span for sequence in result["sequences"] for span in sequence["loss_spans"])
                num_tokens += sum(end - begin for begin, end in spans)
        seconds = time.perf_counter() - started
    what = f"prompts and the start of {len(places)} replicas" if places else "prompts"
    return f"\n  {num_tokens:,} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tok/s, {what} included"


def answer(work: Work, tasks: TaskQueue, progress: Progress | None = None) -> Iterator[Numbered]:
    """Load the engine and generate the conversations in `tasks`.

    Yields a record, or the reason why a conversation is skipped. In a replica `progress` is None.
    """
    if progress is None:
        set_up_logging(os.environ.get("LOGLEVEL", "WARNING"))
    from sharesd.llm import LLM  # late: importing torch takes seconds

    llm = LLM.from_config(work.config, (work.mode,), progress=progress or silent)
    llm.runtime.warm_up(work.mode, work.warm, each_kind=True)
    talks = run_conversations(llm, tasks.take)
    return ((number, reason or talk.record()) for number, talk, reason in talks)


def read(files: Sequence[str], limit: int | None, seed: int) -> list[Wanted]:
    """Read numbered records, at most `limit` of each file, drawn at random.

    Records that are unusable or repeat an earlier prompt have a reason instead of messages. Numbers and reasons do not
    depend on the draw, and a larger draw contains every smaller one.
    """
    drawn, seen, numbers = [], set[str](), count()
    for name in files:
        here = [_wanted(number, *found, seen) for found, number in zip(records(Path(name)), numbers, strict=False)]
        if limit is not None:
            random.Random(seed).shuffle(here)
        drawn += sorted(here[:limit], key=lambda record: record.number)
    if not drawn:
        raise ValueError(f"{', '.join(files)}: no records; give files with records")
    return drawn


def _wanted(number: int, where: str, record: Any, seen: set[str]) -> Wanted:
    """Return a record's messages or the reason against it; updates `seen`."""
    try:
        talk = prompts_of(conversation(record))
    except ValueError as error:
        return Wanted(number, where, None, str(error))
    key = json.dumps(talk)
    if key in seen:
        return Wanted(number, where, None, "asks what an earlier one does")
    seen.add(key)
    return Wanted(number, where, talk)


def written(folder: Path, wanted: set[Key]) -> set[Key]:
    """Return the numbers of answers already in the shards."""
    return {(record["index"], record["sample"]) for _, _, record in answers_in(folder)} & wanted


def _sampling(args: argparse.Namespace) -> tuple[list[float], SamplingParams]:
    for name in ("num_prompts", "max_new_tokens", "samples", "max_batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    try:
        temperatures = [float(part) for part in args.temperature.split(",")]
    except ValueError:
        raise ValueError(f"--temperature is {args.temperature!r}; give numbers, for example 0,0.7,1") from None
    if args.top_p != 1 and not any(temperatures):
        warn("no effect on greedy decoding: --top-p; --temperature 1 samples")
    chosen = (
        [temperatures[(i + j) % len(temperatures)] for j in range(args.samples)] for i in range(len(temperatures))
    )
    if any(each.count(0) > 1 for each in chosen):
        raise ValueError(
            f"--samples {args.samples} at --temperature {args.temperature} answers some records greedily twice, "
            "with the same result; lower --samples or give other temperatures"
        )
    params = SamplingParams(max_new_tokens=args.max_new_tokens, top_p=args.top_p)
    for temperature in temperatures:
        replace(params, temperature=temperature)  # which checks it
    return temperatures, params


def _places(args: argparse.Namespace, config: EngineConfig) -> list[dict[str, str]]:
    """Return the replicas' environments; empty if this process answers itself."""
    if args.replicas is None:
        return []
    if args.gpu_index is not None:
        raise ValueError(f"--gpu-index is {args.gpu_index}, but --replicas assigns GPUs; drop one or the other")
    return environments(args.replicas, config.device)


def _device(args: argparse.Namespace, config: EngineConfig) -> str:
    """Return --device, with the GPU's index if one is given."""
    if args.gpu_index is not None:
        if config.device not in ("auto", "cuda"):
            raise ValueError(f"--gpu-index is {args.gpu_index} but --device is {config.device}; drop one or the other")
        return f"cuda:{args.gpu_index}"
    local = os.environ.get("LOCAL_RANK")
    if local is not None and config.device in ("auto", "cuda"):
        import torch

        if torch.cuda.is_available():
            return f"cuda:{local}"
    return config.device


def _settings(args: argparse.Namespace, config: EngineConfig, temperatures: list[float]) -> dict[str, Any]:
    """Return the settings that answers depend on."""
    return {
        "target": config.target,
        **({} if config.lora is None else {"lora": config.lora}),
        **({} if config.target_quant is None else {"target_quant": config.target_quant}),
        "dtype": config.dtype,
        "prompts": [[Path(name).name, hashlib.sha256(Path(name).read_bytes()).hexdigest()] for name in args.prompts],
        "temperatures": temperatures,
        "top_p": args.top_p,
        "samples": args.samples,
        "seed": args.seed,
        "max_new_tokens": args.max_new_tokens,
        "max_context": config.max_context,
    }
