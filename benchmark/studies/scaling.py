"""`scaling`: what a step costs against context length, verify width and batch, beside the least that memory allows.

A step must at least read the weights of the blocks and the head, and the live KV. These bytes over the bandwidth of
memory are its floor. The bandwidth is that of summing a large buffer with the same threads, measured right before every
step, so that both see the same machine. Weights that stay in the processor's caches can undercut the floor.

`context` counts the live slots of KV, those that the step itself writes included. Texts are not read: keys and values
are zeros, which changes no time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmark import arguments
from benchmark.arguments import markdown_table, rich_table
from benchmark.questions.job import model_name
from benchmark.questions.records import replace_file, write_json
from sharesd.cli import options
from sharesd.cli.console import console, loading_bars
from sharesd.config import FEWEST_CONTEXT, EngineConfig, SamplingParams
from sharesd.models.progress import Progress, silent

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from sharesd.engine.engine import Engine
    from sharesd.kvcache.static import StaticKVCache

REPEATS = 15
"""Times that each step is timed."""
WARM_CALLS = 4
"""Of each step before: compilation, the capture of a graph, caches."""
DRAFT_STEPS = 2
"""Tokens of a draft that is timed; its time is divided by them."""
BUFFER_BYTES = 256 * 2**20
"""Read to measure the bandwidth: larger than the caches of most processors."""
AXES = ("context", "width", "batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A step that is timed."""

    axis: str
    """Which of AXES it is measured for."""
    part: str
    """`target`: a verify step; `draft`: one draft step with quantized weights."""
    context: int
    """Live slots of KV per row, those of the step itself included."""
    width: int
    """Rows of the step per sequence."""
    batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """What was found out about a point."""

    point: Point
    step_rows: int
    """Rows per sequence that the step ran with: `width`, or more where steps are padded."""
    weight_bytes: int
    """Weights that it reads, in the dtype in which they are stored."""
    kv_bytes: int
    """Keys and values that it reads or writes."""
    median_ms: float
    min_ms: float
    floor_ms: float
    """These bytes over the median of the bandwidths."""
    times_floor: float
    """Median of each time over its own floor, by the bandwidth measured right before it; 1 = as memory allows."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "scaling",
        help="what does a step cost against context, width and batch?",
        description="Time steps of the target and of the quantized draft, beside the floor that memory sets. Each axis "
        "is measured with the others at the first value of their lists.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    group = parser.add_argument_group("scaling")
    lists = {"contexts": "128,512,2048,8192", "widths": "1,2,4,8,16,32,64", "batches": "1,2,4,8"}
    helps = {"contexts": "live tokens per row", "widths": "rows of a verify step", "batches": "sequences at once"}
    for name, default in lists.items():
        group.add_argument(
            f"--{name}", type=arguments.numbers, default=default, metavar="LIST", help=f"{helps[name]}, ascending"
        )
    group.add_argument(
        "--repeats", type=arguments.number, default=REPEATS, metavar="N", help="times that each step is timed"
    )
    arguments.add_out_dir(group, "scaling")


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables, write scaling.json and scaling.md; returns the exit status."""
    longest = args.contexts[-1]
    given = FEWEST_CONTEXT if args.max_context == "auto" else args.max_context
    if args.max_context != "auto" and given < longest:
        raise ValueError(f"--max-context is {given} and --contexts goes to {longest}; drop --max-context or raise it")
    if args.contexts[0] < max(args.widths[-1], DRAFT_STEPS):
        raise ValueError(
            f"--contexts begins with {args.contexts[0]} and a step has up to {max(args.widths[-1], DRAFT_STEPS)} rows; "
            "begin with a context that holds them"
        )
    plain = argparse.Namespace(**{**vars(args), "max_context": max(longest, given)})
    config = options.engine_config(plain, modes=("share",))
    if config.given_tree is not None:
        raise ValueError("--tree does not belong here, scaling measures chains; drop it")
    if config.draft_window != "auto":
        raise ValueError("--draft-window does not belong here, scaling measures draft steps that see all; drop it")
    points = list(points_of(args.contexts, args.widths, args.batches))
    out_dir = arguments.out_folder(args.out_dir, "scaling")
    with loading_bars() as progress:
        figures, facts = measure(config, points, repeats=args.repeats, progress=progress)
    report = _report(args, config, figures, facts)
    write_json(out_dir / "scaling.json", report)
    replace_file(out_dir / "scaling.md", _markdown(report["settings"]["model"], figures, facts["bandwidth"]))
    _show(figures, facts["bandwidth"], out_dir)
    return 0


def points_of(contexts: Sequence[int], widths: Sequence[int], batches: Sequence[int]) -> Iterator[Point]:
    """The steps to time: along each axis, with the others at the first of their values."""
    base = {"context": contexts[0], "width": widths[0], "batch": batches[0]}
    for axis, values in zip(AXES, (contexts, widths, batches), strict=True):
        for value in values:
            place = {**base, axis: value}
            yield Point(axis=axis, part="target", **place)
            if axis == "context":
                yield Point(axis=axis, part="draft", **{**place, "width": 1})


def measure(
    config: EngineConfig, points: Sequence[Point], *, repeats: int, progress: Progress = silent
) -> tuple[list[Figure], dict[str, Any]]:
    """A figure for each point, and facts of the run, `bandwidth` (bytes per second) among them.

    ValueError where a context exceeds the model's own. Where steps have a fixed width, which the runtime is told when
    it is made, there is a runtime for each width; else one serves all, and all points take turns.
    """
    from sharesd.runtime import Runtime

    timed: list[tuple[Point, _Step, list[tuple[float, float]]]] = []
    facts: dict[str, Any] = {}
    waiting = list(points)
    done = 0
    while waiting:
        width = waiting[0].width
        runtime = Runtime(replace(config, num_draft=max(1, width - 1)), ("share",), progress=progress)
        if max(point.context for point in points) > runtime.target.max_context:
            raise ValueError(
                f"--contexts goes to {max(point.context for point in points)} and the model's context is "
                f"{runtime.target.max_context} tokens; drop what is longer"
            )
        engine = runtime.engine("share")
        here = [point for point in waiting if engine.widths is None or point.width == width]
        waiting = [point for point in waiting if point not in here]
        steps = [_Step(engine, point) for point in here]
        bandwidth = Bandwidth(runtime.device)
        pairs: list[list[tuple[float, float]]] = [[] for _ in steps]  # bytes per second, seconds
        for step in steps:
            for _ in range(WARM_CALLS):
                step.seconds()
        for repeat in range(repeats):
            for step, found in zip(steps, pairs, strict=True):
                found.append((bandwidth.sample(), step.seconds()))
            progress("timing steps", done + (repeat + 1) * len(steps), repeats * len(points))
        done += repeats * len(steps)
        timed += zip(here, steps, pairs, strict=True)
        facts = {
            "device": str(runtime.device),
            "dtype": str(runtime.dtype).removeprefix("torch."),
            "compile": runtime.compile,
            "architecture": runtime.target.name,
        }
        for step in steps:
            step.release()
        del runtime, engine  # before the next one is loaded
    facts["bandwidth"] = median(rate for _, _, found in timed for rate, _ in found)
    figures = {point: _figure(point, step, found, facts["bandwidth"]) for point, step, found in timed}
    return [figures[point] for point in points], facts


class Bandwidth:
    """The bandwidth of memory, by summing a large buffer with torch's threads."""

    def __init__(self, device: torch.device, num_bytes: int = BUFFER_BYTES) -> None:
        import torch

        from compile.huge_pages import huge_pages

        if device.type == "cpu":  # on pages like those of the weights
            self._buffer = huge_pages(num_bytes // 8 * 8).view(torch.int64).fill_(1)
        else:
            self._buffer = torch.ones(num_bytes // 8, dtype=torch.int64, device=device)

    def sample(self) -> float:
        """Bytes per second, measured now."""
        return self._buffer.nbytes / _seconds(lambda: self._buffer.sum().item())


class _Step:
    """A point with all that its step needs: a KV cache of its own, over the model of an engine in mode share."""

    def __init__(self, engine: Engine, point: Point) -> None:
        import torch

        from sharesd.drafters.share.drafter import ShareDrafter
        from sharesd.engine.engine import Engine as NewEngine
        from sharesd.speculation.draft_tree import DraftTree, chain

        drafter = engine.drafter
        assert isinstance(drafter, ShareDrafter)
        self._draft = point.part == "draft"
        self.rows = point.width
        if not self._draft and engine.widths:
            self.rows = next(width for width in engine.widths if width >= point.width)
        own_rows = DRAFT_STEPS if self._draft else point.width
        cache = engine.target.new_cache(point.batch, point.context + self.rows)
        cache.lengths.fill_(point.context - own_rows)
        low_bytes, _ = drafter.extra_bytes()
        drafts = ShareDrafter(engine.target, cache, drafter.switch, shapes=[chain(DRAFT_STEPS)], low_bytes=low_bytes)
        own = NewEngine(
            target=engine.target,
            tokenizer=engine.tokenizer,
            cache=cache,
            drafter=drafts,
            max_context=engine.max_context,
            widths=engine.widths,
            graphs=engine.graphs,
            gumbel=engine.gumbel,
        )
        self._round: Any = own.way(SamplingParams()).round()
        self._drafter = drafts
        self._tree = DraftTree(torch.zeros(point.batch, point.width - 1, dtype=torch.int64))
        self._shape = chain(DRAFT_STEPS)
        self.weight_bytes = weight_bytes(engine.target, low=self._draft)  # type: ignore[arg-type]
        self.kv_bytes = kv_bytes(engine.target, cache, point)

    def seconds(self) -> float:
        """How long the step takes now. Its rows are idle, so it changes nothing."""
        import torch

        with torch.inference_mode():
            if self._draft:
                return (
                    _seconds(lambda: self._drafter.draft(self._round.drafting, self._shape).tokens.tolist())
                    / DRAFT_STEPS
                )
            return _seconds(lambda: self._round.verify(self._tree).counted_BX.tolist())

    def release(self) -> None:
        """Drop the model and the cache."""
        self._round = self._drafter = None  # type: ignore[assignment]


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def weight_bytes(model: nn.Module, *, low: bool) -> int:
    """Bytes of the weights that a step reads: all but tables of which it reads a few rows. `low`: a draft step's."""
    found = {tensor.data_ptr(): tensor.nbytes for tensor in _weights(model, low)}
    return sum(found.values())


def _weights(module: nn.Module, low: bool) -> Iterator[Tensor]:
    from torch import nn

    from quant.switch_linear import SwitchLinear
    from sharesd.models.decoder import Decoder

    if isinstance(module, SwitchLinear):
        module = module.low if low else module.full
    own = {} if isinstance(module, Decoder) else {**module._parameters, **module._buffers}  # a decoder's are for RoPE
    yield from (tensor for tensor in own.values() if tensor is not None)
    for child in module.children():
        if not isinstance(child, nn.Embedding):  # as a head, a tied one is met there
            yield from _weights(child, low)


def kv_bytes(model: object, cache: StaticKVCache, point: Point) -> int:
    """Bytes of live keys and values: in each layer of the whole context, or of its window."""
    from sharesd.models.decoder import Decoder

    windows = [kind.window for kind in model.config.layers] if isinstance(model, Decoder) else [0] * len(cache.k)
    slots = [min(point.context, window + point.width - 1) if window else point.context for window in windows]
    pairs = zip(cache.k, cache.v, slots, strict=True)
    return sum((k.nbytes + v.nbytes) // cache.slots * num for k, v, num in pairs)


def _figure(point: Point, step: _Step, pairs: Sequence[tuple[float, float]], bandwidth: float) -> Figure:
    num_bytes, seconds = step.weight_bytes + step.kv_bytes, [time for _, time in pairs]
    return Figure(
        point=point,
        step_rows=step.rows,
        weight_bytes=step.weight_bytes,
        kv_bytes=step.kv_bytes,
        median_ms=1e3 * median(seconds),
        min_ms=1e3 * min(seconds),
        floor_ms=1e3 * num_bytes / bandwidth,
        times_floor=median(time * rate / num_bytes for rate, time in pairs),
    )


def cost_ratios(figures: Sequence[Figure]) -> dict[int, float]:
    """c at each context: the median of a draft step over that of a target step of one row, where both are there."""
    steps = {(f.point.part, f.point.context): f.median_ms for f in figures if f.point.axis == "context"}
    plain = all(f.point.width == 1 for f in figures if f.point.axis == "context")
    contexts = dict.fromkeys(f.point.context for f in figures if f.point.axis == "context")
    return {context: steps["draft", context] / steps["target", context] for context in contexts} if plain else {}


def _report(
    args: argparse.Namespace, config: EngineConfig, figures: Sequence[Figure], facts: dict[str, Any]
) -> dict[str, Any]:
    from benchmark.environment import environment

    return {
        "settings": {
            "command": arguments.command(),
            "model": model_name(config.target),
            "quant": str(config.quant),
            "repeats": args.repeats,
            **{name: facts[name] for name in ("device", "dtype", "compile", "architecture")},
        },
        "environment": environment(facts["device"]),
        "bandwidth_bytes_per_s": facts["bandwidth"],
        "cost_ratio_c": {str(context): ratio for context, ratio in cost_ratios(figures).items()},
        "steps": [
            {
                **asdict(figure.point),
                **{name: value for name, value in asdict(figure).items() if name != "point"},
            }
            for figure in figures
        ],
    }


_HEAD = ("median ms", "min ms", "floor ms", "x floor", "MB", "c")


def _rows(axis: str, figures: Sequence[Figure]) -> list[list[str]]:
    """The lines of an axis, for people."""
    ratios = cost_ratios(figures)
    rows = []
    for figure in figures:
        point = figure.point
        if point.axis != axis:
            continue
        padded = f" (as {figure.step_rows})" if figure.step_rows != point.width else ""
        shows_c = point.part == "draft" and point.context in ratios
        rows.append(
            [
                point.part,
                f"{getattr(point, axis)}{padded}",
                *(f"{value:.3f}" for value in (figure.median_ms, figure.min_ms, figure.floor_ms)),
                f"{figure.times_floor:.2f}",
                f"{(figure.weight_bytes + figure.kv_bytes) / 1e6:.1f}",
                f"{ratios[point.context]:.3f}" if shows_c else "",
            ]
        )
    return rows


def _titles(figures: Sequence[Figure]) -> dict[str, str]:
    """For each axis a title that says where the others stand."""
    base = {axis: min(getattr(f.point, axis) for f in figures if f.point.part == "target") for axis in AXES}
    return {
        axis: f"by {axis} ({', '.join(f'{other} {base[other]}' for other in AXES if other != axis)})" for axis in AXES
    }


def _show(figures: Sequence[Figure], bandwidth: float, out_dir: Path) -> None:
    for axis, title in _titles(figures).items():
        console.print(rich_table(f"steps {title}", ("part", axis, *_HEAD), _rows(axis, figures)))
    console.print(f"bandwidth of memory: {bandwidth / 1e9:.1f} GB/s", highlight=False)
    console.print(f"details: {out_dir / 'scaling.md'}", markup=False, highlight=False, soft_wrap=True)


def _markdown(model: str, figures: Sequence[Figure], bandwidth: float) -> str:
    parts = [
        f"# Steps of {model}",
        f"Bandwidth of memory, measured right before each step: {bandwidth / 1e9:.1f} GB/s in the median. floor: "
        "weights of the blocks and the head, as they are stored, and live KV (MB: both), over this bandwidth. x floor: "
        "the median of the ratios of each time to the floor by its own bandwidth. c: a draft step over a target step "
        "of one row at the same context.",
    ]
    for axis, title in _titles(figures).items():
        parts += [f"## {title[0].upper()}{title[1:]}", markdown_table(("part", axis, *_HEAD), _rows(axis, figures))]
    return "\n\n".join(parts) + "\n"
