"""`eagle`, `eagle3`, `parallel`, `glide`, `draft`: train on the target's answers."""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from multigpu.launcher_replicas import rank_and_world
from sharesd.cli.console import err_console, loading_bars, print_line
from sharesd.cli.parse_types import DTYPES
from sharesd.drafters import registry
from sharesd.drafters.selection import best_of
from sharesd.reports.environment import load_meter
from train.data.shards import settings_of
from train.heads.options import add_options, check_options, costs_of, numbers_of

if TYPE_CHECKING:
    from train.heads.training_run import TrainingRun

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{head.layout: (head.help, dict(head.training)) for head in registry.head_specs()},
    "draft": (
        "train a small decoder for mode classic",
        {"draft_vocab": None, "init": None, "unroll": "1", "decay": 1.0, "feature_weight": 0.0},
    ),
}
FREED = 2**31 - 1
"""Bytes of freed memory kept for the next step."""
SILENCE = 5.0
"""Seconds between lines of progress without a terminal."""
SAMPLE = 3
"""Steps of a dry run; the first is not timed."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommands."""
    for kind, (does, defaults) in KINDS.items():
        parser = subparsers.add_parser(
            kind,
            help=f"{does} on what `generate` wrote",
            description=f"{does[0].upper()}{does[1:]} on the target's own answers, which `generate` wrote. The target "
            "does not change. Processes of a launcher (torchrun, accelerate launch) train together.",
        )
        parser.set_defaults(run=run, parser=parser, kind=kind)
        add_options(parser, kind)
        parser.set_defaults(**defaults)


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit status."""
    load_meter()
    rank, world = rank_and_world()
    check_options(args, world)
    costs = costs_of(args)
    made, out = settings_of(Path(args.data)), Path(args.out_dir)
    if not (args.resume or args.dry_run) and out.exists() and any(out.iterdir()):
        raise ValueError(f"--out-dir {out} is not empty; add --resume to continue there, or give another folder")
    taps = numbers_of(args, "target_layers", "29,20") if args.kind == "glide" else numbers_of(args, "taps", "2,15,27")
    unroll = numbers_of(args, "unroll", "1,2,4")
    if min(unroll) < 1:
        raise ValueError(f"--unroll is {args.unroll}; it must be at least 1")
    if args.kind == "parallel" and not max(2, args.chain) <= max(unroll):
        raise ValueError(
            f"--unroll is {args.unroll} and --chain {args.chain}; the head drafts --unroll tokens, at least 2, and "
            "--chain may not exceed that"
        )
    states = None if args.states is None else Path(args.states)
    with loading_bars(enabled=rank == 0) as progress:
        from compile.adaptive_threads import STEP_THREADS
        from compile.cpp_extension import keep_freed_memory  # late: importing torch takes seconds
        from train.heads.distributed import ALONE, accelerate_started_one, join
        from train.heads.trainer import Recipe, steps_of
        from train.heads.training_run import Task, TrainingRun

        if accelerate_started_one():
            note = "accelerate launch has started one process; without GPUs it starts several with --multi_gpu"
            print_line(note, err_console)
        processes = join(rank, world, args.device) if world > 1 else ALONE
        processes.wait()  # all have found --out-dir empty before one writes there
        STEP_THREADS.fix(args.threads or STEP_THREADS.available)
        keep_freed_memory(FREED)
        task = Task(
            kind=args.kind,
            init=None if args.init is None else Path(best_of(args.init)),
            data=Path(args.data),
            target=args.target or made.get("target"),
            dtype=DTYPES.get(args.dtype, args.dtype),
            device=args.device if world == 1 else processes.device,
            threads=STEP_THREADS.max_size,
            max_length=args.max_length,
            seed=args.seed,
            draft_vocab=args.draft_vocab,
            taps=taps,
            held_out=args.held_out,
            chain=args.chain,
            draft_length=max(unroll) if args.kind == "parallel" else 1,
            layers=getattr(args, "layers", 1),
            hidden_size=getattr(args, "hidden_size", None),
        )

        def recipe(rows: Any) -> Recipe:
            return Recipe(
                steps=args.steps or steps_of(rows, args.epochs, args.batch),
                batch=args.batch,
                lr=args.lr,
                warmup=args.warmup,
                clip=args.clip,
                weight_decay=args.weight_decay,
                optimizer=args.optimizer,
                unroll=unroll,
                decay=args.decay,
                kl_weight=args.kl_weight,
                feature_weight=args.feature_weight,
                anchors=getattr(args, "anchors", 1.0),
                rejection_weight=args.rejection_weight,
                bf16=args.precision == "bf16",
            )

        session = TrainingRun(task, recipe, progress, processes)
    if rank == 0:
        print_line(_plan(session))
        if states is not None:
            _check_states(session, states)
    if args.dry_run:
        sample = _sample(session)
        if rank == 0:
            print_line(sample)
    else:
        session.begin(out, costs, states)
        _train(session, args.check_every)
    processes.leave()
    return 0


def _check_states(session: TrainingRun, folder: Path) -> None:
    from train.heads.hidden_state_cache import check_room

    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    sizes = f"{session.states_bytes / 1e9:.2f} GB in {folder}, {stored / 1e9:.2f} GB of them stored already"
    print_line(f"hidden states: {sizes}")
    check_room(folder, session.states_bytes - stored)


def _train(session: TrainingRun, check_every: int) -> None:
    """Run the remaining steps."""
    trainer, total, first = session.trainer, session.recipe.steps, session.processes.first
    if first:
        chain, costs = session.task.chain, session.costs
        draft, verify = (
            seconds / costs.of_step(1)
            for seconds in (costs.chain.step + costs.chain.begin / chain, costs.of_step(1 + chain))
        )
        print_line(
            f"in plain steps, a draft step costs {draft:.2f} and verifying a chain of {chain} costs {verify:.2f}"
        )
    for record in session.journal.records if first else ():
        if "conditional_acceptance" in record:
            print_line(_found(record, total))
    if first and session.is_resumed:
        more = "" if trainer.step < total else ", and is finished; more --epochs or --steps continue it"
        print_line(f"the training in {session.out} has {trainer.step} of {total} steps{more}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(
        *columns, TimeRemainingColumn(), console=err_console, disable=not (first and err_console.is_terminal)
    )
    with closing(session), bars:
        places, begun, started = 0, trainer.step, time.perf_counter()
        last_line = started
        bar = bars.add_task("training", total=total, completed=trainer.step)
        while trainer.step < total:
            found = session.advance()
            places, now = places + int(found["places"]), time.perf_counter()
            speed = places / (now - started)
            about = f"loss {found['loss']:.3f}{_accepted(session)}, {speed:,.0f} tok/s"
            bars.update(bar, completed=trainer.step, description=about)
            if bars.disable and first and now - last_line > SILENCE and trainer.step < total:
                left = (now - started) / (trainer.step - begun) * (total - trainer.step)
                err_console.print(f"step {trainer.step} of {total}: {about}, {left:,.0f} s left", highlight=False)
                last_line = now
            if trainer.step % check_every == 0 or trainer.step == total:
                session.check()
                if first:
                    print_line(_found(session.journal.records[-1], total))


def _accepted(session: TrainingRun) -> str:
    """Return the latest acceptance of held-out texts, for the progress line."""
    records = session.journal.records if session.processes.first else []
    rates = next((one["conditional_acceptance"] for one in reversed(records) if "conditional_acceptance" in one), None)
    return f", acceptance {100 * rates[0]:.0f} %" if rates else ""


def _found(record: dict[str, Any], total: int) -> str:
    """Return a line about held-out texts."""
    rates = " ".join(f"{100 * rate:.0f}" for rate in record["conditional_acceptance"])
    gain = f"{record['expected_speedup']:.2f}x plain decoding with chains of {record['best_length']}"
    figures = f"held out, conditional acceptance {rates} %, tau of chains {record['tau_chains']:.2f}"
    return f"step {record['step']} of {total}: {figures}, {gain if record['best_length'] else 'no chain is faster'}"


def _plan(session: TrainingRun) -> str:
    task, recipe, split = session.task, session.recipe, session.split
    parameters = sum(parameter.numel() for parameter in session.head.parameters()) / 1e6
    tokens, held_out = (sum(place.length for place in places) for places in (split.train, split.held_out))
    epochs = recipe.steps * recipe.batch / len(session.rows)
    shared = f", shared by {session.processes.number} processes" if session.processes.number > 1 else ""
    return (
        f"{task.kind} of {parameters:.1f}M parameters, {session.head.config.draft_vocab_size:,} draft tokens: "
        f"{recipe.steps} steps of {recipe.batch} rows of {task.max_length} tokens{shared}, {epochs:.1f} epochs of "
        f"{len(split.train)} answers ({tokens:,} tokens); held out: {len(split.held_out)} answers ({held_out:,} tokens)"
    )


def _sample(session: TrainingRun) -> str:
    """Return the estimate of a dry run for the whole training."""
    session.trainer.advance()
    started = time.perf_counter()
    for _ in range(SAMPLE - 1):
        session.trainer.advance()
    seconds = (time.perf_counter() - started) / (SAMPLE - 1)
    return (
        f"memory: {session.fixed_bytes / 1e6:,.0f} MB for the target, the head and its optimizer, "
        f"{psutil.Process().memory_info().rss / 1e6:,.0f} MB in all; time: {seconds:.2f} s a step, "
        f"{seconds * session.recipe.steps / 60:.1f} min for {session.recipe.steps} steps, without checkpoints"
    )
