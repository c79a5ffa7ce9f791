"""Load of a model with progress on stderr, and interactive decoding, which Ctrl-C stops."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from compile.start_times import START
from sharesd.cli.console import err_console, loading_bars, plan_table
from sharesd.config import EngineConfig, Mode
from sharesd.sampling_params import SamplingParams

if TYPE_CHECKING:
    from offload.plan import Plan
    from sharesd.engine.outputs import Completion, TokenChunk
    from sharesd.llm import LLM
    from sharesd.runtime import Runtime


def follows() -> bool:
    """True if torchrun started this process as a rank other than 0."""
    return os.environ.get("RANK", "0") != "0"


def load_llm(config: EngineConfig, modes: Sequence[Mode], **options: bool) -> LLM:
    """Load models that modes need, with options of `LLM.from_config`; ranks above 0 work and then exit."""
    if config.tensor_parallel > 1 and follows():
        from sharesd.cli.tp_worker import follow

        sys.exit(follow(config.device))
    START.follow()
    with err_console.status("importing torch"):
        with START.phase("import torch"):
            import torch  # noqa: F401
        with START.phase("import sharesd"):
            from sharesd.llm import LLM

    def planned(plan: Plan) -> None:
        err_console.print(plan_table(plan.reasons))

    with loading_bars() as progress:
        llm = LLM.from_config(config, modes, progress=progress, planned=planned, **options)
    chosen = _chosen(llm.runtime)
    if chosen:
        err_console.print(chosen, style="dim", highlight=False, markup=False, soft_wrap=True)
    return llm


def _chosen(runtime: Runtime) -> str:
    """Return chosen drafters and context with reasons; "" if as given."""
    parts = [] if runtime.auto is None else [str(runtime.auto)]
    if runtime.config.max_context == "auto" and (parts or runtime.max_context < runtime.target.max_context):
        parts.append(f"context of {runtime.max_context:,} tokens: {runtime.context_reason}")
    if runtime.rows_reason:
        rows = runtime.cache.batch
        parts.append(f"{rows} row{'s' * (rows > 1)} decoded together: {runtime.rows_reason}")
    return "; ".join(parts)


def warm_up(llm: LLM, mode: Mode, params: SamplingParams, *, each_kind: bool = False) -> None:
    with err_console.status(f"compiling mode {mode}"):
        llm.runtime.warm_up(mode, params, each_kind=each_kind)


def answer(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    show: Callable[[TokenChunk], None],
    *,
    mode: Mode | None = None,
    answers: list[Completion] | None = None,
) -> list[Completion]:
    """Decode prompts together; Ctrl-C ends unfinished answers with `finish_reason` None.

    Chunks go to `answers`, if given. Raises the first RequestError after the last chunk, if prompts failed.
    """
    from sharesd.engine.outputs import Completion  # late: importing torch takes seconds

    answers, error = [Completion() for _ in prompts] if answers is None else answers, None
    chunks = llm.stream(prompts, params, mode=mode)
    with suppress(KeyboardInterrupt), ctrl_c_noted() as stopped, closing(chunks):
        for chunk in chunks:
            START.end("first token")
            answers[chunk.row].add(chunk)
            show(chunk)
            error = error or chunk.error
            if stopped():
                return answers
        if error is not None:
            raise error
    return answers


@contextmanager
def ctrl_c_noted() -> Iterator[Callable[[], bool]]:
    """Yield a check for Ctrl-C, whose second press raises KeyboardInterrupt."""
    noted = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)
