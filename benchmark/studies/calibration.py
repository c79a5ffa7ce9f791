"""`sharesd tune --calibrate`: a model answers prompts, and weights of drafts are rounded for these answers.

Legend: B rows of a batch, V vocabulary.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from offload.plan import DoesNotFit
from quant.config import QuantConfig
from sharesd.cli.console import console, loading_bars
from sharesd.config import EngineConfig
from sharesd.field_types import DefaultLimit
from sharesd.llm import LLM
from sharesd.models.checkpoint import Progress, content_hash
from sharesd.models.decoder import Decoder
from sharesd.models.loader import decoder_config, load_decoder
from sharesd.reports import environment
from sharesd.reports.questions import Question, prompt_ids
from sharesd.sampling_params import SamplingParams
from sharesd.startup.resolve import resolve_config, with_dequantize
from sharesd.weights.calibrate import calibrate, move_to_file, require_enough, tasks_of
from sharesd.weights.kept_calibration import CalibrationText, KeptCalibration
from sharesd.weights.quant_tuning_cache import load_tuned, save_tuned, tuning_key
from sharesd_files import made_once, scratch_folder

if TYPE_CHECKING:
    from sharesd.startup.resolve import ResolvedConfig

PROMPTS = Path(__file__).parent.parent / "data" / "calibration_prompts.txt"
"""Prompts, a line each: stories, letters, explanations, advice, sums, code, edits; none of a benchmark."""
TEMPERATURE = 0.7
MAX_NEW_TOKENS = 64
"""Longest answers, in tokens."""
MAX_CONTEXT = 512
"""Longest prompts and answers together, in tokens; longer prompts are left out."""
BATCHES = (32, 8, 1)
"""Prompts that are answered together: the first number for whose KV there is memory."""
_PLAIN_TUNE = "`sharesd tune` without --calibrate"


def run(config: EngineConfig, *, is_chosen: bool) -> None:
    """Calibrate the config's quantization, or if it was not chosen the best measured, for `--draft-quant auto`.

    Raises:
        ValueError: the target or the quantization cannot be calibrated, or answers are too few.
        OSError: the disk is full; layers that were finished are kept.
    """
    started, key = time.perf_counter(), tuning_key(with_dequantize(config))
    quant = replace(config.quant if is_chosen else load_tuned(key) or config.quant, calibrated=False)
    config = replace(config, quant=quant)
    require_whole(config)
    with loading_bars() as progress:
        resolved = resolve_config(config, ("share",), progress=progress)
        require_calibrated(resolved)
        kept = KeptCalibration(content_hash(resolved.folder), quant)
        outline = Decoder(decoder_config(resolved.folder), dtype=resolved.dtype, device="meta")
        layers = list(dict.fromkeys(task.layer for task in tasks_of(outline, quant)))
        with made_once(kept.folder):  # another process may be calibrating the same
            answers = kept.answers()
            if not answers:
                answers = own_answers(config, progress)
                gc.collect()  # the weights that answered, before they are read as plain linears
                require_enough(answers)
                kept.begin(resolved.folder, layers, answers)
            if kept.problem() is not None:
                with _loaded(resolved, progress) as decoder:
                    calibrate(decoder, answers, kept, progress=progress)
    seconds = time.perf_counter() - started
    save_tuned(key, quant, {"command": environment.command(), "calibration": str(kept.folder)})
    num_tokens = sum(len(each.answer) for each in answers)
    text = f"--draft-quant auto now uses {kept.quant}, of {num_tokens:,} tokens, in {seconds:.0f} s: {kept.folder}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def require_whole(config: EngineConfig) -> None:
    """Raise ValueError for options with which linears are in parts or in several places."""
    if config.tensor_parallel > 1:
        raise ValueError(
            f"tensor_parallel is {config.tensor_parallel}, whose ranks have parts of linears; calibrate without it"
        )
    if config.split.enabled:
        raise ValueError("stages have devices of their own; calibrate on one device, which stages then use")


def require_calibrated(resolved: ResolvedConfig) -> None:
    """Raise ValueError for a mixture, and for what does not run at full precision, or not as a native decoder."""
    name, config = resolved.config.target or "the embedded model", resolved.config
    try:
        decoder = decoder_config(resolved.folder)
    except ValueError as reason:
        raise ValueError(f"{name} cannot be calibrated: {reason}, and its weights run through transformers") from reason
    if decoder.experts is not None:
        raise ValueError(
            f"{name} is a mixture of experts, and drafts of mixtures are not calibrated; use {_PLAIN_TUNE}"
        )
    if config.dequantize is False:
        remedy = "use --dequantize" if config.target_quant is None else "leave out --target-quant"
        raise ValueError(f"{name} runs as it is stored, and drafts of such weights are not calibrated; {remedy}")


@contextmanager
def _loaded(resolved: ResolvedConfig, progress: Progress) -> Iterator[Decoder]:
    """Yield the decoder with torch's linears; blocks of an offloaded target are in a scratch file each."""
    load = partial(load_decoder, resolved.folder, dtype=resolved.dtype, device=resolved.device, progress=progress)
    if resolved.offload is None:
        yield load()
        return
    with scratch_folder(resolved.offload.folder) as scratch:
        yield load(on_block_loaded=partial(move_to_file, scratch), mmap_embeddings=resolved.device.type == "cpu")


def own_answers(config: EngineConfig, progress: Progress) -> list[CalibrationText]:
    """Return the model's own answers to the built-in prompts, at temperature 0.7; some may be empty."""
    lines = PROMPTS.read_text("utf-8").splitlines()
    questions = [Question(id=number, category="", turns=(text,)) for number, text in enumerate(lines)]
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=TEMPERATURE, seed=0)
    with _answering(config, progress) as llm:
        room = llm.max_context - MAX_NEW_TOKENS
        prompts = [ids for ids in (prompt_ids(llm.tokenizer, each, []) for each in questions) if len(ids) <= room]
        answers: list[list[int]] = [[] for _ in prompts]
        num_ended = 0
        for chunk in llm.stream(prompts, params) if prompts else ():
            answers[chunk.row] += chunk.token_ids
            num_ended += chunk.finish_reason is not None
            progress("answering prompts", num_ended, len(prompts))
    return list(map(CalibrationText, prompts, answers))


def _answering(config: EngineConfig, progress: Progress) -> LLM:
    """Return the target for the most rows that fit."""
    plain = replace(config, mode="naive", max_context=DefaultLimit(MAX_CONTEXT), quant=QuantConfig())
    for batch in BATCHES[:-1]:
        with suppress(DoesNotFit):
            return LLM.from_config(replace(plain, max_batch=batch), ("naive",), progress=progress)
    return LLM.from_config(replace(plain, max_batch=BATCHES[-1]), ("naive",), progress=progress)
