"""`gpu`: everything that ShareSD promises of a GPU, measured in one go of at most some ten minutes.

For the embedded model and for widened ones: speed of naive, share at several quantizations, and classic; acceptance, c
and v; the share of the measured copy bandwidth; exactness; graphs compiled after warm-up; start and memory. A section
that fails reports its error, and the others go on. gpu.json and gpu.md are rewritten after each section.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmark import arguments
from benchmark.environment import environment
from benchmark.records import replace_file, write_json
from benchmark.wide_shapes import SHAPES
from sharesd import options
from sharesd.config import EngineConfig, Mode, SamplingParams
from sharesd.console import console, err_console

EMBEDDED = "135m"
QUANTS = ("hqq:4:64,head=4", "hqq:8:64,head=8", "hqq:2:64,down=4,head=4", "bnb:4:64")
NUM_PROMPTS, MAX_NEW_TOKENS = 4, 96
BUDGET_S = 540.0
"""Sections are no longer started after this time."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "gpu",
        help="the whole agenda for a GPU in one go",
        description="Measure speed, acceptance, exactness, start and memory on a GPU, for the embedded model and for "
        "widened ones. --device cpu runs the same sections on a CPU, to try them out.",
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu")
    parser.add_argument(
        "--sizes", default=f"{EMBEDDED},1b,7b", metavar="LIST", help=f"{EMBEDDED} and any of {', '.join(SHAPES)}"
    )
    parser.add_argument("--quants", default=";".join(QUANTS), metavar="LIST", help="quantizations, with ; between")
    parser.add_argument("--num-prompts", type=arguments.number, default=NUM_PROMPTS, metavar="N")
    parser.add_argument("--max-new-tokens", type=arguments.number, default=MAX_NEW_TOKENS, metavar="N")
    parser.add_argument("--compile", default="auto", choices=("auto", "regional", "full", "off"))
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="S", help="seconds; no section starts later")
    arguments.add_out_dir(parser, "gpu")


def run(args: argparse.Namespace) -> int:
    """Measure section by section; returns 0, or 1 if a section failed."""
    sizes = arguments.each("--sizes", str, args.sizes)
    for size in sizes:
        if size != EMBEDDED and size not in SHAPES:
            raise ValueError(f"--sizes names {size!r}; choose from {EMBEDDED}, {', '.join(SHAPES)}")
    quants = arguments.each("--quants", str, args.quants, ";")
    configs = {quant: _config(args, quant) for quant in quants}
    from sharesd.device import device_of

    device_of(args.device)  # ValueError without a GPU, before anything else
    report = _Report(arguments.out_folder(args.out_dir, "gpu"), args.device, args.budget)
    report.section("bandwidth", lambda: _bandwidth(args.device))
    report.section("start", lambda: _starts(args.device))
    with tempfile.TemporaryDirectory() as scratch:
        for size in sizes:
            target = None if size == EMBEDDED else str(Path(scratch) / size)
            if target is not None:
                report.section(f"widen {size}", partial(_widen, size, target))
            for index, (quant, config) in enumerate(configs.items()):
                modes: tuple[Mode, ...] = ("naive", "share") if index else ("naive", "share", "classic")
                of_this = replace(config, target=target)
                report.section(f"{size} {quant}", partial(_measure, of_this, modes, args))
    console.print(f"report: {report.folder / 'gpu.md'}", highlight=False, soft_wrap=True)
    return 1 if report.failed else 0


def _config(args: argparse.Namespace, quant: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    options.add_model_options(parser)
    values = parser.parse_args(["--device", args.device, "--quant", quant, "--compile", args.compile])
    return options.engine_config(values, modes=("share",))


class _Report:
    """What has been measured, on disk after every section."""

    def __init__(self, folder: Path, device: str, budget_s: float) -> None:
        self.folder, self._budget_s, self._started = folder, budget_s, time.perf_counter()
        self.values: dict[str, Any] = {
            "command": arguments.command(),
            "environment": environment(device),
            "sections": {},
        }

    @property
    def failed(self) -> bool:
        return any("error" in section for section in self.values["sections"].values())

    def section(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure, or note why not."""
        started = time.perf_counter()
        if started - self._started > self._budget_s:
            found: dict[str, Any] = {"skipped": f"the {self._budget_s:g} s were used up"}
        else:
            err_console.print(f"measuring {name}", highlight=False)
            try:
                found = measure()
            except Exception as error:  # a long measurement on a borrowed machine: report it and go on with the rest
                found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
                err_console.print(f"{name} failed: {found['error']}", highlight=False, markup=False, soft_wrap=True)
        found["seconds"] = time.perf_counter() - started
        self.values["sections"][name] = found
        write_json(self.folder / "gpu.json", self.values)
        replace_file(self.folder / "gpu.md", _markdown(self.values))


def _bandwidth(device: str) -> dict[str, Any]:
    """Bytes read and written per second by a large copy."""
    import torch

    source = torch.empty(2**28 if device.startswith("cuda") else 2**26, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(8):
        _synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        best = min(best, time.perf_counter() - started)
    return {"copy_bytes_per_second": 2 * source.nbytes / best}


def _starts(device: str) -> dict[str, Any]:
    """Seconds of a whole process that says eight tokens: with whatever the caches hold, and then with warm ones."""
    command = [sys.executable, "-m", "sharesd", "generate", "Hello", "--max-new-tokens", "8", "--device", device]
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - started)
    return {"first_s": seconds[0], "warm_s": seconds[1]}


def _widen(size: str, out: str) -> dict[str, Any]:
    from benchmark.widening import widen
    from sharesd.models.progress import silent
    from sharesd.models.resolve import resolve

    name = f"SmolLM2-135M-Instruct widened to {size.upper()}"
    return {"num_parameters": widen(resolve(None), Path(out), SHAPES[size], name=name, seed=0, progress=silent)}


def _measure(config: EngineConfig, modes: Sequence[Mode], args: argparse.Namespace) -> dict[str, Any]:
    """Speed, acceptance, costs and exactness of all modes on one loaded model."""
    import gc

    import torch

    from benchmark.conversation import prompt_ids
    from benchmark.environment import num_compiled_graphs
    from benchmark.questions import load
    from sharesd.load import Runtime

    if args.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    runtime = Runtime(config, modes)
    questions = load("mtbench", None, args.num_prompts).questions
    prompts = [prompt_ids(runtime.tokenizer, question, []) for question in questions]
    found: dict[str, Any] = {"load_s": runtime.load_seconds, "weight_bytes": runtime.weight_bytes, "modes": {}}
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=temperature, seed=1, ignore_eos=True)
        engines = {mode: runtime.engine(mode, warm=params) for mode in modes}
        graphs = num_compiled_graphs()
        texts: dict[str, list[list[int]]] = {}
        for mode, engine in engines.items():
            total = None
            texts[mode] = []
            for prompt in prompts:
                texts[mode].append(engine.complete([prompt], params)[0].token_ids)
                if total is None:
                    total = engine.stats
                else:
                    total.merge(engine.stats)
            assert total is not None
            costs = engine.way(params).policy.costs
            same = sum(a == b for a, b in zip(texts[mode], texts["naive"], strict=True))
            found["modes"][f"{mode} T={temperature:g}"] = {
                "tokens_per_second": total.tokens_per_second,
                "tau": total.tau,
                "alpha": total.alpha,
                "identical": same / len(prompts),
                "costs": asdict(costs),
                "compile_s": runtime.compile_seconds[mode],
            }
        found["graphs_after_warm_up"] = found.get("graphs_after_warm_up", 0) + num_compiled_graphs() - graphs
    if args.device.startswith("cuda"):
        found["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    del runtime, engines, engine
    gc.collect()
    if args.device.startswith("cuda"):
        torch.cuda.empty_cache()
    return found


def _synchronize(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _markdown(values: dict[str, Any]) -> str:
    """The tables of the report."""
    machine, sections = values["environment"], values["sections"]
    bandwidth = sections.get("bandwidth", {}).get("copy_bytes_per_second")
    head = ["model", "drafts", "mode", "tok/s", "x naive", "tau", "alpha", "c", "v", "of bandwidth", "identical"]
    rows: list[list[str]] = []
    notes: list[str] = []
    for name, section in sections.items():
        for kind in ("error", "skipped"):
            if kind in section:
                notes.append(f"- {name}: {kind}: {section[kind]}")
        for mode, found in section.get("modes", {}).items():
            size, quant = name.split(" ", 1)
            base = section["modes"][f"naive {mode.split()[1]}"]["tokens_per_second"]
            step, draft = found["costs"]["step"], found["costs"]["draft"]
            one, widest = step.get(1), step.get(max(step, default=1))
            speed = found["tokens_per_second"]
            moved = section["weight_bytes"] * speed / found["tau"] / bandwidth if bandwidth and found["tau"] else None
            rows.append(
                [
                    *(size, quant, mode, f"{speed:.1f}", f"{speed / base:.2f}", f"{found['tau']:.2f}"),
                    f"{found['alpha']:.2f}" if draft else "-",
                    f"{draft / one:.2f}" if draft and one else "-",
                    f"{widest / one:.2f}" if one and widest and len(step) > 1 else "-",
                    f"{100 * moved:.0f} %" if moved and mode.startswith("naive") else "-",
                    f"{100 * found['identical']:.0f} %",
                ]
            )
    start = sections.get("start", {})
    lines = [
        f"# ShareSD on {machine.get('gpu') or machine['cpu']}",
        f"{machine['date']}, torch {machine['torch']}, CUDA {machine['cuda']}, gemlite {machine['gemlite']}",
        f"    {values['command']}",
        arguments.markdown_table(head, rows, left=3),
        "c: draft step over plain step. v: widest verify step over plain step. of bandwidth: weight bytes that plain "
        "steps read over the measured copy bandwidth. The embedded model's weights came from a 4-bit file, which "
        "flatters its 4-bit drafts.",
    ]
    if bandwidth:
        lines.append(f"Copy bandwidth: {bandwidth / 1e9:.0f} GB/s.")
    if "warm_s" in start:
        lines.append(f"Start to eight tokens: {start['first_s']:.1f} s at first, {start['warm_s']:.1f} s again.")
    return "\n\n".join([*lines, *(["\n".join(notes)] if notes else [])]) + "\n"
