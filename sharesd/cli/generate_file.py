"""Answers to the prompts of a file: `generate --prompts FILE --out OUT`.

Answers are appended to OUT.part as they end, then written to OUT in order. With the same settings, an answer depends
only on prompt, index and seed, so any number of processes writes the same answers. Only `stats` differ.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from multigpu import launcher_replicas
from multigpu.data_parallel import (
    LocalTaskQueue,
    Numbered,
    Replica,
    TaskQueue,
    environments,
    function_of,
    run_tasks,
    start,
)
from multigpu.journal import Journal, keep_settings, read_records, with_fields, write_in_order
from multigpu.ray_cluster import RayReplicas
from sharesd.cli import batch_requests, options
from sharesd.cli.batch_requests import BatchLine
from sharesd.cli.console import err_console, loading_bars, print_line, set_up_logging, warn
from sharesd.cli.flags import warn_of_idle_noise
from sharesd.cli.user_text import encode
from sharesd.config import OFFLINE_CHUNK, EngineConfig, Mode
from sharesd.conversations import run_conversations
from sharesd.data.chat_messages import text_of
from sharesd.data.json_lines import checked, each_record, finite, text_lines
from sharesd.data.prompt_files import conversation_in_parts, read_each
from sharesd.field_types import DefaultLimit
from sharesd.models.checkpoint import Progress, silent
from sharesd.sampling_params import SamplingParams, cut_by_context

if TYPE_CHECKING:
    from sharesd.engine.outputs import TokenChunk
    from sharesd.llm import LLM

FLAG = "--out"
MAX_BATCH = DefaultLimit(8)
MAX_NAMED = 10
"""Max failed prompts named on the terminal; the file has all."""
WARNING = "warning"
"""Field of a replica's result that the first process shows, once, and does not write."""
WORK = "sharesd.cli.generate_file:answer"

Prompt = str | list[dict[str, Any]] | BatchLine
"""Text, conversation, or request in OpenAI's batch format."""
Replicas = list[Replica] | RayReplicas | None
"""Processes that answer; None: this one."""


class GenerateWork(NamedTuple):
    config: EngineConfig
    mode: Mode
    params: SamplingParams
    raw: bool
    system: str | None
    serving: dict[str, Any]
    """Fields of the server's settings, for requests in OpenAI's batch format."""


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts in a file")
    group.add_argument(
        "--prompts",
        dest="file",
        metavar="FILE",
        help="answer the prompts of a file: .txt, one per line; else JSON or JSON Lines, of texts, of records with "
        "instruction, prompt, question or messages, or of requests in OpenAI's batch format",
    )
    group.add_argument(
        "--out",
        metavar="FILE",
        help="file of the answers, as JSON Lines in the same order; rerun to resume",
    )
    group.add_argument(
        "--max-batch", type=int, metavar="N", help=f"prompts decoded at once by a process (default: {MAX_BATCH})"
    )
    options.add_request_options(group)
    options.add_replicas_option(group)
    group.add_argument(
        "--ray",
        action="store_true",
        help="run replicas on the Ray cluster at RAY_ADDRESS or on this machine; starts one if there is none",
    )


def check_options(args: argparse.Namespace) -> None:
    """Warn of options without effect; ValueError for missing or contradictory ones."""
    if args.file is None:
        if not args.prompts:
            raise ValueError("no prompt; give a text, - for stdin, or --prompts FILE --out FILE")
        if args.out is not None:
            raise ValueError(f"{FLAG} needs --prompts FILE; add it, or drop {FLAG}")
        given = {"--max-batch": args.max_batch, "--replicas": args.replicas, "--ray": args.ray}
        given |= {options.REQUEST_FLAGS[name]: True for name in options.request_settings(args)}
        idle = [flag for flag, value in given.items() if value]
        if idle:
            warn(f"{', '.join(idle)}: no effect without --prompts FILE")
        return
    if args.prompts:
        raise ValueError(f"--prompts is {args.file} but a prompt {args.prompts[0]!r} is given as well; drop one")
    if args.out is None:
        raise ValueError(f"--prompts is {args.file} but --out is missing; add --out FILE for the answers")
    idle = [flag for flag, value in (("--json", args.json), ("--verbose", args.verbose)) if value]
    if idle:
        warn(f"{', '.join(idle)}: no effect with --prompts, whose answers are JSON Lines in {FLAG}")
    if args.max_batch is not None and args.max_batch < 1:
        raise ValueError(f"--max-batch is {args.max_batch}; it must be at least 1")


def _check_options_of_format(args: argparse.Namespace, work: GenerateWork, in_batch_format: bool) -> None:
    """Raise ValueError for options that the format of the prompts leaves without effect."""
    if not in_batch_format:
        warn_of_idle_noise(args)
        if work.serving:
            flags = ", ".join(options.REQUEST_FLAGS[name] for name in work.serving)
            raise ValueError(
                f"{flags}: only for requests in OpenAI's batch format, which --prompts does not have; drop it"
            )
        return
    limit = args.parser.get_default("max_new_tokens")
    plain = SamplingParams(seed=work.params.seed, max_new_tokens=limit)
    given = [name for name, value in asdict(work.params).items() if value != asdict(plain)[name]]
    idle = [*(["system"] if work.system is not None else []), *(["raw"] if work.raw else []), *given]
    if idle:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        raise ValueError(
            f"{flags}: no effect on requests in OpenAI's batch format, whose bodies have their own settings; drop it"
        )


def run(args: argparse.Namespace, work: GenerateWork) -> int:
    """Answer prompts without an answer; return 1 if any failed, else 0."""
    work = work._replace(
        config=replace(work.config, max_batch=args.max_batch or MAX_BATCH, prefill_chunk=OFFLINE_CHUNK),
    )
    out, settings, part = (Path(args.out + end) for end in ("", ".settings.json", ".part"))
    rank, world = launcher_replicas.rank_and_world()
    options.check_launched(args, world)
    if args.ray and world > 1:
        raise ValueError(f"--ray is given but a launcher has started {world} processes; use one or the other")
    if rank > 0:
        return launcher_replicas.serve_rank_0(work, work.config.device)
    prompts = read(Path(args.file), raw=work.raw)
    in_batch_format = isinstance(prompts[0][1], BatchLine)
    _check_options_of_format(args, work, in_batch_format)
    how = batch_requests.WORK if in_batch_format else WORK
    if args.ray:
        if args.replicas == 0:
            raise ValueError("--replicas is 0; it must be at least 1")
        options.check_ray(work.config, "data")
    places = [] if args.replicas is None or args.ray else environments(args.replicas, work.config.device)
    if not out.parent.is_dir():
        raise ValueError(f"{FLAG} is {out}, but the folder {out.parent} does not exist; create it, or give another")
    if out.exists() and not settings.exists():
        raise ValueError(f"{FLAG} is {out}, which exists but has no {settings.name}; give another file")
    keep_settings(settings, _settings(args, work, in_batch_format), FLAG)
    with Journal(part, FLAG) as journal:
        done = {record["index"] for record in _records(out if out.exists() else part)}
        left: list[tuple[int, Prompt]] = []
        for index, (_, prompt) in enumerate(prompts):
            if index in done:
                continue
            if isinstance(prompt, BatchLine) and prompt.error is not None:
                line = batch_requests.failure_line(prompt, index, prompt.error)
                journal.add({"index": index, "prompt": prompt.body, **line})
            else:
                left.append((index, prompt))
        replicas: Replicas = None
        if args.ray:
            replicas = RayReplicas(args.replicas or 1, work.config.device)
        elif world > 1:
            replicas = launcher_replicas.replicas(how, work, work.config.device, needed=bool(left))
        elif places and left:
            replicas = start(how, work, places)
        speed = _answer(how, work, left, replicas, journal) if left else ""
        if not out.exists():
            write_in_order(out, part, len(prompts))
        part.unlink()
    failed = {record["index"]: _reason(record["error"]) for record in _records(out) if record.get("error")}
    named = [f"\n  {prompts[index][0]}: {reason}" for index, reason in failed.items()][:MAX_NAMED]
    more = [f"\n  and {len(failed) - MAX_NAMED} more"] if len(failed) > MAX_NAMED else []
    print_line(
        f"{out}: {len(prompts)} prompts = {len(prompts) - len(failed)} answered + {len(failed)} failed "
        f"({len(done)} of them before){''.join(named + more)}{speed}",
        err_console,
    )
    return 1 if failed else 0


@contextmanager
def answering(
    work: str,
    settings: Any,
    tasks: Sequence[Numbered],
    replicas: Replicas,
    *,
    max_assigned: int,
) -> Iterator[Iterator[Numbered]]:
    """Yield results of `work` (`module:function`), by `replicas` or by this process."""
    with loading_bars() as progress:
        if replicas is None:
            results = function_of(work)(settings, LocalTaskQueue(tasks), progress)
        elif isinstance(replicas, RayReplicas):
            results = replicas.run_tasks(work, settings, tasks, max_assigned=max_assigned)
        else:
            results = run_tasks(tasks, replicas, max_assigned=max_assigned)

        def shown() -> Iterator[Numbered]:
            progress("answering", 0, len(tasks))
            for done, result in enumerate(results, 1):
                yield result
                progress("answering", done, len(tasks))

        with closing(results):  # type: ignore[type-var]
            yield shown()


def _answer(
    how: str, work: GenerateWork, left: Sequence[tuple[int, Prompt]], replicas: Replicas, journal: Journal
) -> str:
    """Write answers of replicas or of this process; return their speed."""
    prompts, num_tokens, warned = dict(left), 0, False
    with answering(how, work, left, replicas, max_assigned=work.config.max_batch) as results:
        started = time.perf_counter()
        for index, result in results:
            warning = result.pop(WARNING, None)
            if warning is not None and not warned:
                warn(f"answers may be cut: {warning}")
                warned = True
            prompt = prompts[index]
            shown = prompt.body if isinstance(prompt, BatchLine) else prompt
            journal.add({"index": index, "prompt": shown, **result})
            num_tokens += _num_tokens(result)
        seconds = time.perf_counter() - started
    what = f"prompts and the start of {len(replicas)} replicas" if replicas else "prompts"
    return f"\n  {num_tokens:,} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tok/s, {what} included"


def _reason(error: Any) -> str:
    return error["message"] if isinstance(error, dict) else error


def _num_tokens(result: dict[str, Any]) -> int:
    return result["stats"]["new_tokens"] if "stats" in result else 0


def answer(work: GenerateWork, tasks: TaskQueue, progress: Progress | None = None) -> Iterator[Numbered]:
    """Load the model and return answers; `progress` is None in replicas."""
    if progress is None:
        set_up_logging(os.environ.get("LOGLEVEL", "WARNING"))
    from sharesd.llm import LLM  # late: importing torch takes seconds

    llm = LLM.from_config(work.config, (work.mode,), progress=progress or silent)
    llm.runtime.warm_up(work.mode, work.params)

    def take(wait: bool) -> tuple[int, _Question] | None:
        task = tasks.take(wait)
        return None if task is None else (task[0], _Question(work, *task))

    def answers() -> Iterator[Numbered]:
        try:
            for number, question, reason in run_conversations(llm, take):
                yield number, {"error": str(reason)} if reason else question.record()
        finally:
            llm.runtime.close_trace()

    return answers()


class _Question:
    goes_on = False

    def __init__(self, work: GenerateWork, index: int, prompt: str | list[dict[str, Any]]) -> None:
        from sharesd.engine.outputs import Completion

        self._work, self._index, self._prompt = work, index, prompt
        self._answer = Completion()
        self._warning: str | None = None

    def next_prompt(self, llm: LLM) -> tuple[list[int], SamplingParams, int]:
        work = self._work
        ids = encode(llm.tokenizer, self._prompt, raw=work.raw, system=work.system)
        self._warning = cut_by_context([(len(ids), work.params)], llm.max_context)
        return ids, work.params, self._index

    def take(self, chunk: TokenChunk) -> None:
        self._answer.add(chunk)

    def record(self) -> dict[str, Any]:
        """Return the answer's fields; only `stats` vary between runs."""
        stats = self._answer.stats
        warning = {} if self._warning is None else {WARNING: self._warning}
        return self._fields() | ({} if stats is None else {"stats": stats.to_dict()}) | warning

    def _fields(self) -> dict[str, Any]:
        found = self._answer
        record = {"text": found.text, "token_ids": found.token_ids, "finish_reason": found.finish_reason}
        if found.logprobs is None:
            return record
        return {**record, "logprobs": [finite(logprob) for logprob in found.logprobs]}


def read(path: Path, *, raw: bool) -> list[tuple[str, Prompt]]:
    """Return prompts with their places; ValueError for a record without one."""
    found: Sequence[tuple[str, Any]] = text_lines(path) if path.suffix == ".txt" else each_record(path)
    if not found:
        raise ValueError(f"{path} has no prompts; give a file with prompts")
    if batch_requests.is_batch(found):
        return list(batch_requests.batch_lines(found))
    return read_each(checked(found), lambda where, record: _prompt(where, record, raw))


def _prompt(where: str, record: Any, raw: bool) -> Prompt:
    """Return a prompt, or raise ValueError with the place."""
    if isinstance(record, str):
        if not record.strip():
            raise ValueError(f"{where}: the prompt is empty; fill it in, or remove it")
        return record
    try:
        messages = conversation_in_parts(record)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise ValueError(f"{where} has no user message; add one, or remove it")
    if len(messages) == 1 and (raw or isinstance(messages[0]["content"], str)):
        return _prompt(where, text_of(messages[0]["content"]), raw)
    if raw:
        raise ValueError(f"{where} is a conversation, but --raw continues texts; drop one or the other")
    return messages


def _records(path: Path) -> Iterator[dict[str, Any]]:
    return (record for _, record in read_records(path, FLAG, with_fields("index", "prompt")))


def _settings(args: argparse.Namespace, work: GenerateWork, in_batch_format: bool) -> dict[str, Any]:
    file, config = Path(args.file), work.config
    return {
        "prompts": [file.name, hashlib.sha256(file.read_bytes()).hexdigest()],
        "target": config.target,
        **({} if config.lora is None else {"lora": config.lora}),
        "dtype": config.dtype,
        **({} if config.kv_dtype == "auto" else {"kv_dtype": config.kv_dtype}),
        "compile": config.compile,
        "exact": config.exact,
        "max_context": config.max_context,
        "raw": work.raw,
        "system": work.system,
        "sampling": asdict(work.params),
        **({"answers as": work.serving} if in_batch_format else {}),
        **({"ranks that split sums": config.tensor_parallel} if config.tensor_parallel_style == "reduce" else {}),
    }
