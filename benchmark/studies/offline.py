"""`offline`: built-in prompts answered by plain, speculative and prompt-lookup decoding, with all texts in one file.

The three ways share one target. `default` is plain decoding (mode naive), `speculative` drafts with a second model
(mode classic) or, without one, with the model's own quantized self (mode share), `ngram` drafts with what followed the
last tokens when they came before (mode ngram).
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich import box
from rich.table import Table

from benchmark import arguments
from benchmark.questions.job import model_name
from benchmark.questions.records import write_json
from benchmark.reports.text import number, size, times
from quant.config import QuantConfig
from sharesd.cli.console import console, err_console
from sharesd.cli.parse_types import DTYPES
from sharesd.config import DType, EngineConfig, Mode, SamplingParams

if TYPE_CHECKING:
    from sharesd.engine.engine import Engine
    from sharesd.models.base import CausalModel
    from sharesd.models.tokenizer import Tokenizer

PROMPTS_FILE = Path(__file__).parents[1] / "data" / "offline_prompts.json"
DEMOS = {"te": "English completions", "tc": "Chinese completions", "chat": "chat"}
SAVE_OUTPUT = "inference_results_with_speculative.json"
WAYS = ("default", "speculative", "ngram")
"""What is compared, by its key in the results."""
SPARE_STEPS = 2
"""Verify steps that the KV cache holds beyond the context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """What the models of a run keep in the device's memory."""

    weight_bytes: int
    """All weights, those of drafts included."""
    slot_bytes: int
    """KV of one token, that of a draft model included."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "offline",
        help="built-in prompts: plain, speculative and prompt-lookup decoding side by side",
        description="Answer built-in prompts by plain decoding, with a draft model and by prompt lookup. The exit "
        "status is 0 if all three give the same texts, else 1.",
    )
    parser.set_defaults(run=run, parser=parser)
    group = parser.add_argument_group("model")
    group.add_argument("--target", metavar="MODEL", help="the model that decides (default: the embedded one)")
    group.add_argument(
        "--draft-model", metavar="MODEL", help="the model that drafts (default: the model's own quantized self)"
    )
    group.add_argument("--num-speculative-tokens", type=int, default=5, metavar="K", help="draft tokens per round")
    group.add_argument("--ngram-prompt-lookup-max", type=int, default=3, metavar="N", help="longest match")
    group.add_argument("--ngram-prompt-lookup-min", type=int, default=1, metavar="N", help="shortest match")
    group.add_argument("--dtype", choices=(*get_args(DType), *DTYPES), default="auto", help="auto: bfloat16")
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:N, or auto: cuda where there is one")
    group.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="processes that share the model, one per device",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=_number,
        metavar="F",
        help="part of the device's memory, above 0 up to 1, that weights and KV cache may fill: the context is "
        "shortened to that",
    )
    group.add_argument("--enforce-eager", action="store_true", help="compile nothing")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that a checkpoint brings along")
    group = parser.add_argument_group("prompts and answers")
    group.add_argument("--demo", choices=DEMOS, default="te", help=", ".join(f"{k}: {v}" for k, v in DEMOS.items()))
    group.add_argument("--template", metavar="FILE", help="demo chat: Jinja chat template (default: the checkpoint's)")
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="tokens per answer at most")
    group.add_argument("--temperature", type=_number, default=0.0, metavar="T", help="0 = greedy")
    group.add_argument("--seed", type=int, default=0, help="seed of the noise")
    group.add_argument("--save-output", metavar="FILE", default=SAVE_OUTPUT, help="where the results go")


def run(args: argparse.Namespace) -> int:
    """Answer all prompts in three ways and save what came out; returns 0 if the texts are equal, else 1."""
    config, params = _config(args), _params(args)
    output, template = _output_file(args.save_output), _template(args)

    from benchmark.environment import environment
    from sharesd.cli.startup import load_runtime, start_engine
    from sharesd.models.hub import resolve  # torch takes seconds, mistakes should not
    from sharesd.models.tokenizer import load_tokenizer

    folder = resolve(config.target)
    texts = json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))[args.demo]
    tokenizer = load_tokenizer(folder)
    prompts = [_encode(tokenizer, text, args.demo, template) for text in texts]
    params = _with_ends(params, tokenizer, template)
    needed = max(map(len, prompts)) + params.max_new_tokens
    config = replace(config, max_context=_longest_context(config, needed))
    if args.gpu_memory_utilization is not None:
        affordable = _affordable_context(config, args.gpu_memory_utilization, needed)
        config = replace(config, max_context=affordable)
    ways: dict[str, Mode] = dict(zip(WAYS, ("naive", config.mode, "ngram"), strict=True))
    runtime = load_runtime(config, tuple(ways.values()))
    if needed > runtime.max_context:
        raise ValueError(
            f"the longest prompt and --max-new-tokens {params.max_new_tokens} need {needed} tokens, and the model's "
            f"context holds {runtime.max_context}; lower --max-new-tokens"
        )
    engines = {way: start_engine(runtime, mode, params) for way, mode in ways.items()}
    found = answer_all(engines, texts, prompts, params)
    unequal = differing(found)
    settings = {
        "command": arguments.command(),
        "model": model_name(config.target),
        "speculative_model": None if config.draft is None else model_name(config.draft),
        "demo": args.demo,
        "template": args.template,
        "num_speculative_tokens": config.num_draft,
        "ngram_prompt_lookup_min": config.ngram_min,
        "ngram_prompt_lookup_max": config.ngram_max,
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "device": str(runtime.device),
        "compile": runtime.compile,
        "tensor_parallel_size": args.tensor_parallel,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "max_context": runtime.max_context,
        "quant": str(config.quant),
    }
    machine = environment(str(runtime.device))
    write_json(output, {**found, "equal": not unequal, "settings": settings, "environment": machine})
    console.print(_table(found, f"{settings['model']} · {DEMOS[args.demo]}"))
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
    """Each way's answers and totals. The ways answer each prompt right after each other: a slow moment hits all alike.

    `seconds` are those of decoding, without `prefill_seconds` and the one token that the prefill gives.
    """
    from benchmark.timed import generate
    from sharesd.engine.stats import Stats

    totals = {way: Stats() for way in engines}
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in engines}
    with err_console.status("answering") as status:
        for i, (text, prompt) in enumerate(zip(texts, prompts, strict=True), 1):
            for way, engine in engines.items():
                status.update(f"prompt {i} of {len(prompts)}: {way}")
                [completion] = generate(engine, [prompt], params)
                totals[way].merge(engine.stats)
                results[way].append(
                    {
                        "prompt": text,
                        "text": completion.text,
                        "token_ids": completion.token_ids,
                        "finish_reason": completion.finish_reason,
                        **_figures(engine.stats),
                    }
                )
    return {
        way: {"mode": engine.mode, "results": results[way], "totals": _figures(totals[way])}
        for way, engine in engines.items()
    }


def differing(found: Mapping[str, Mapping[str, Any]]) -> list[int]:
    """Prompts, from 0, to which not all ways gave the same tokens and text."""
    answers = [[(r["token_ids"], r["text"]) for r in way["results"]] for way in found.values()]
    return [i for i, same in enumerate(zip(*answers, strict=True)) if any(answer != same[0] for answer in same)]


def _figures(stats: Any) -> dict[str, Any]:
    tried = stats.sources["accepted"] + stats.sources["recovered"]
    return {
        "new_tokens": stats.new_tokens,
        "prefill_seconds": stats.prefill_s,
        "seconds": stats.decode_s,
        "tokens_per_second": stats.tokens_per_second if stats.decoded_tokens else None,
        "acceptance": stats.alpha if tried else None,
        "tau": stats.tau if stats.rounds else None,
    }


def _table(found: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for name in ("decoding", "mode", "tokens", "seconds", "tok/s", "speedup", "alpha", "tau"):
        table.add_column(name, justify="left" if name in ("decoding", "mode") else "right", no_wrap=True)
    base = found["default"]["totals"]["tokens_per_second"]
    for way, contents in found.items():
        totals = contents["totals"]
        speed = totals["tokens_per_second"]
        table.add_row(
            way,
            contents["mode"],
            str(totals["new_tokens"]),
            number(totals["seconds"], 2),
            number(speed),
            times(speed / base if speed and base else None),
            number(totals["acceptance"], 3),
            number(totals["tau"], 2),
        )
    return table


def _config(args: argparse.Namespace) -> EngineConfig:
    if args.tensor_parallel < 1:
        raise ValueError(f"--tensor-parallel is {args.tensor_parallel}; it must be at least 1")
    if args.num_speculative_tokens < 1:
        raise ValueError(f"--num-speculative-tokens is {args.num_speculative_tokens}; it must be at least 1")
    shortest, longest = args.ngram_prompt_lookup_min, args.ngram_prompt_lookup_max
    if not 1 <= shortest <= longest:
        raise ValueError(
            f"--ngram-prompt-lookup-min is {shortest} and --ngram-prompt-lookup-max is {longest}; "
            "give lengths from 1 on, the longest last"
        )
    fraction = args.gpu_memory_utilization
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"--gpu-memory-utilization is {fraction:g}; it must be above 0 and at most 1")
    if fraction is not None and args.tensor_parallel > 1:
        raise ValueError(
            f"--gpu-memory-utilization is {fraction:g}, which knows one device, and --tensor-parallel is "
            f"{args.tensor_parallel}; leave one of them out"
        )
    return EngineConfig(
        target=args.target,
        draft=args.draft_model,
        mode="share" if args.draft_model is None else "classic",
        num_draft=args.num_speculative_tokens,
        ngram_min=shortest,
        ngram_max=longest,
        dtype=DTYPES.get(args.dtype, args.dtype),  # type: ignore[arg-type]
        device=args.device,
        tensor_parallel=args.tensor_parallel,
        compile="off" if args.enforce_eager else "auto",
        trust_remote_code=args.trust_remote_code,
    )


def _params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed)


def _template(args: argparse.Namespace) -> str | None:
    """The text of --template."""
    if args.template is None:
        return None
    if args.demo != "chat":
        raise ValueError(f"--template has no effect on demo {args.demo}; use --demo chat or drop --template")
    try:
        return Path(args.template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--template {args.template} cannot be read ({reason}); give a Jinja file") from error


def _output_file(name: str) -> Path:
    """Where results go, known to be possible before anything is computed."""
    file = Path(name)
    if file.is_dir():
        raise ValueError(f"--save-output {name} is a folder; name a file in it")
    if not file.parent.is_dir():
        raise ValueError(f"--save-output is {name}, but there is no folder {file.parent}; make it, or name another")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise ValueError(f"--save-output is {name}, but {file.parent} cannot be written; name another folder")
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
    """Answers also end where a turn of the user's own template ends."""
    from sharesd.models.tokenizer import END_OF_TURN

    ends = [tokenizer.backend.token_to_id(token) for token in END_OF_TURN if template and token in template]
    return replace(params, stop_token_ids=tuple(i for i in ends if i is not None))


def _longest_context(config: EngineConfig, needed: int) -> int:
    """The usual context, or the longer one that is needed; never more than the draft model can take."""
    context = max(config.planned_context, needed)
    if config.draft is None:
        return context
    return min(context, _outline(config.draft, config).max_context)


def _affordable_context(config: EngineConfig, fraction: float, needed: int) -> int:
    """The context, at most the config's, with which weights and KV fit into this part of the device's memory.

    ValueError if the weights alone do not fit, or if no room is left for `needed` tokens. What steps need for a moment
    is not counted.
    """
    from compile.attention import SLOT_MULTIPLE
    from sharesd.execution.step_widths import fixed_width

    device, total = _device_memory(config.device)
    footprint = _footprint(config, device)
    room = int(total * fraction)
    part = f"--gpu-memory-utilization {fraction:g} of {size(total)} is {size(room)}"
    if footprint.weight_bytes >= room:
        raise ValueError(f"{part} and the weights take {size(footprint.weight_bytes)}; raise it or use a smaller model")
    slots = (room - footprint.weight_bytes) // footprint.slot_bytes // SLOT_MULTIPLE * SLOT_MULTIPLE
    context = slots - SPARE_STEPS * fixed_width(device, config.most_draft)
    if context < needed:
        raise ValueError(
            f"{part}, which besides weights of {size(footprint.weight_bytes)} holds {max(context, 0)} tokens, and the "
            f"longest prompt needs {needed}; raise it or lower --max-new-tokens"
        )
    return min(context, config.planned_context)


def _device_memory(name: str) -> tuple[str, int]:
    """The kind of the device and its memory; on a CPU the machine's."""
    import psutil
    import torch

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return "cpu", psutil.virtual_memory().total
    try:
        return "cuda", torch.cuda.get_device_properties("cuda" if name == "auto" else name).total_memory
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(f"device is {name!r}, which torch does not find; use --device cpu") from error


def _footprint(config: EngineConfig, device: str) -> Footprint:
    """Sizes of the target and what drafts for it, from their shapes alone: no weight is read."""
    from torch import nn

    from sharesd.models.decoder import Decoder

    names = (config.target, *([config.draft] if config.draft is not None else []))
    weights = slot = 0
    for name in names:
        model = _outline(name, config)
        assert isinstance(model, nn.Module)
        weights += sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))  # shared ones once
        if device == "cpu" and isinstance(model, Decoder) and model.config.tied:
            weights += model.head.weight.nbytes  # packed apart from the embedding
        cache = model.new_cache(1, 1)  # type: ignore[operator]
        slot += cache.nbytes // cache.slots
        if config.draft is None:
            weights += _quantized_bytes(model, config.quant)
    return Footprint(weight_bytes=weights, slot_bytes=slot)


def _outline(target: str | None, config: EngineConfig) -> CausalModel:
    """A model without memory behind its weights."""
    import torch

    from sharesd.models.decoder import Decoder
    from sharesd.models.decoder_config import Unsupported
    from sharesd.models.hub import resolve
    from sharesd.models.loader import decoder_config

    folder = resolve(target)
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    try:
        return Decoder(decoder_config(folder), dtype=dtype, device="meta")
    except Unsupported:
        from transformers import AutoConfig, AutoModelForCausalLM

        from sharesd.models.hf import HFModel
        from sharesd.models.quiet import quiet_transformers
    try:
        with quiet_transformers(), torch.device("meta"):
            trust = {"trust_remote_code": config.trust_remote_code}
            described = AutoConfig.from_pretrained(folder, **trust)
            return HFModel(AutoModelForCausalLM.from_config(described, dtype=dtype, **trust))
    except (OSError, KeyError, ImportError, ValueError, RuntimeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"transformers cannot tell the size of {folder} ({reason}); give another checkpoint"
        ) from error


def _quantized_bytes(model: Any, quant: QuantConfig) -> int:
    """Bytes of the model's quantized linears: codes, and a scale and an offset of 2 bytes for each group."""
    from torch import nn

    head = getattr(model, "head", None) or model.model.get_output_embeddings()
    total = 0
    for module in model.modules():
        bits = quant.head_bits if module is head else quant.bits
        if bits is not None and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"):
            num_weights = module.weight.numel()
            total += num_weights * bits // 8 + 4 * num_weights // quant.group_size
    return total


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value
