"""`eagle`, `eagle3`, `parallel`, `glide`, `draft`: train on the target's answers."""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from multigpu.launcher_replicas import rank_and_world
from sharesd.cli.console import console, err_console, loading_bars
from sharesd.cli.parse_types import DTYPES
from sharesd.drafters import registry
from train.data.shards import settings_of

if TYPE_CHECKING:
    from sharesd.speculation.cost_model import Costs
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
SAMPLE = 3
"""Steps of a dry run; the first is not timed."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommands."""
    for kind, (does, defaults) in KINDS.items():
        parser = subparsers.add_parser(
            kind,
            help=f"{does} on what `generate` wrote",
            description=f"{does[0].upper()}{does[1:]} on the target's own answers, which `generate` wrote. The target "
            "stays as it is. Processes of a launcher (torchrun, accelerate launch) train together.",
        )
        parser.set_defaults(run=run, parser=parser, kind=kind)
        _add_options(parser, kind)
        parser.set_defaults(**defaults)


def _add_options(parser: argparse.ArgumentParser, kind: str) -> None:
    group = parser.add_argument_group("input and output")
    group.add_argument("--data", required=True, metavar="DIR", help="answers of the target, as `generate` wrote them")
    group.add_argument("--out-dir", required=True, metavar="DIR", help="for heads (last, best), log and curves")
    group.add_argument("--target", metavar="MODEL", help="its checkpoint (default: what wrote the answers)")
    group.add_argument("--resume", action="store_true", help="go on with the training in --out-dir, if there is one")
    group.add_argument("--dry-run", action="store_true", help="print the plan, from a few steps, and write nothing")
    group = parser.add_argument_group("data")
    group.add_argument("--max-length", type=int, default=1024, metavar="N", help="tokens per row; longer texts are cut")
    group.add_argument("--held-out", type=float, default=0.05, metavar="SHARE", help="of the prompts, to measure with")
    group.add_argument("--seed", type=int, default=0, help="of the order of texts")
    group.add_argument(
        "--states",
        metavar="DIR",
        help="keep the target's hidden states there, so that it reads each text once (default: it reads them anew)",
    )
    if kind == "draft":
        _add_decoder_options(parser.add_argument_group("decoder"))
    else:
        _add_head_options(parser.add_argument_group("head"), kind)
    group = parser.add_argument_group("training")
    length = group.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, metavar="N", help="optimizer steps")
    length.add_argument("--epochs", type=int, default=10, metavar="N", help="passes over the data")
    group.add_argument("--batch", type=int, default=4, metavar="N", help="rows per step, of all processes together")
    group.add_argument("--lr", type=float, default=3e-4, help="highest learning rate")
    group.add_argument("--warmup", type=float, default=0.05, metavar="SHARE", help="of the steps, in which it rises")
    group.add_argument("--clip", type=float, default=0.5, metavar="NORM", help="of gradients, at most")
    group.add_argument("--weight-decay", type=float, default=0.0)
    group.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="muon: for the matrices between embedding and LM head (Jordan et al. 2024); AdamW for the others",
    )
    if kind != "draft":
        _add_chain_options(group, kind)
    group.add_argument("--kl-weight", type=float, default=1.0, help="of the divergence from the target's choice")
    group.add_argument(
        "--rejection-weight", type=float, default=0.0, help="of the probability that a drawn guess is rejected"
    )
    group.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of matrix products in training")
    group = parser.add_argument_group("measuring")
    group.add_argument("--check-every", type=int, default=100, metavar="N", help="steps between checkpoints")
    group.add_argument("--chain", type=int, default=5, metavar="K", help="guesses per chain that are measured")
    group.add_argument(
        "--costs",
        metavar="C,V",
        help="of a draft step, and of verifying a chain of K, in plain steps (default: as the engine measures them)",
    )
    group = parser.add_argument_group("machine")
    group.add_argument("--dtype", default="auto", help=f"of the target and the head: auto (bf16), {', '.join(DTYPES)}")
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:N, or auto: cuda where there is one")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one per core)")


def _add_head_options(group: Any, kind: str) -> None:
    group.add_argument(
        "--init",
        metavar="DIR",
        help="begin as this trained head, with its draft tokens and depths, for example on more answers (default: "
        + ("a linear map" if kind == "eagle" else "as the target's last block")
        + (")" if kind != "parallel" else "); an eagle3 head will do"),
    )
    group.add_argument(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="the head guesses the N tokens that the answers have most often, through an LM head of its own or, of "
        "eagle and glide, rows of the target's",
    )
    if kind == "parallel":
        group.add_argument("--layers", type=int, default=1, metavar="N", help="blocks of the head, 1 or 2")
    if kind == "glide":
        group.add_argument(
            "--target-layers",
            metavar="N,N",
            help="layers of the target whose keys and values it looks into, from 0 (default: the last)",
        )
    elif kind != "eagle":
        group.add_argument(
            "--taps",
            metavar="N,N,N",
            help="hidden states that it reads, behind so many blocks (default: 2, half, all but 3)",
        )


def _add_decoder_options(group: Any) -> None:
    group.add_argument("--layers", type=int, default=3, metavar="N", help="it begins as so many of the target's")
    group.add_argument("--hidden-size", type=int, metavar="N", help="default: half of the target's, in whole 64")


def _add_chain_options(group: Any, kind: str) -> None:
    group.add_argument(
        "--unroll",
        default="3",
        metavar="N,N",
        help="tokens that one pass guesses; several numbers follow each other in equal shares of training"
        if kind == "parallel"
        else "steps of a chain that are trained; several numbers follow each other in equal shares of training",
    )
    if kind == "parallel":
        group.add_argument(
            "--anchors", type=float, default=0.25, metavar="SHARE", help="of the places, behind which masks are trained"
        )
    group.add_argument("--decay", type=float, default=0.8, help="weight of each of them, relative to the one before")
    group.add_argument("--feature-weight", type=float, help="of the distance from the target's hidden states")


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit status."""
    rank, world = rank_and_world()
    _check(args, world)
    costs = _costs(args)
    made, out = settings_of(Path(args.data)), Path(args.out_dir)
    if not (args.resume or args.dry_run) and out.exists() and any(out.iterdir()):
        raise ValueError(f"--out-dir {out} is not empty; add --resume to go on there, or give another folder")
    taps = _numbers(args, "target_layers", "29,20") if args.kind == "glide" else _numbers(args, "taps", "2,15,27")
    unroll = _numbers(args, "unroll", "1,2,4")
    if min(unroll) < 1:
        raise ValueError(f"--unroll is {args.unroll}; it must be at least 1")
    if args.kind == "parallel" and not max(2, args.chain) <= max(unroll):
        raise ValueError(
            f"--unroll is {args.unroll} and --chain {args.chain}; the head guesses as many tokens as --unroll says, at "
            "least 2, and chains of no more can be measured"
        )
    states = None if args.states is None else Path(args.states)
    with loading_bars(enabled=rank == 0) as progress:
        from compile.adaptive_threads import STEP_THREADS
        from compile.cpp_extension import keep_freed_memory  # torch takes seconds, mistakes should not
        from train.heads.distributed import ALONE, accelerate_started_one, join
        from train.heads.trainer import Recipe, steps_of
        from train.heads.training_run import Task, TrainingRun

        if accelerate_started_one():
            said = (
                "accelerate launch has started one process; where there are no GPUs it starts several with --multi_gpu"
            )
            err_console.print(said, highlight=False, soft_wrap=True)
        processes = join(rank, world, args.device) if world > 1 else ALONE
        processes.wait()  # all have found --out-dir empty before one writes there
        threads = args.threads or STEP_THREADS.available
        STEP_THREADS.fix(threads)
        keep_freed_memory(FREED)
        task = Task(
            kind=args.kind,
            init=None if args.init is None else Path(args.init),
            data=Path(args.data),
            target=args.target or made.get("target"),
            dtype=DTYPES.get(args.dtype, args.dtype),  # type: ignore[arg-type]
            device=args.device if world == 1 else processes.device,
            threads=threads,
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
        _say(_plan(session))
        if states is not None:
            _check_states(session, states)
    if args.dry_run:
        sample = _sample(session)
        if rank == 0:
            _say(sample)
    else:
        session.begin(out, costs, states)
        _train(session, args.check_every)
    processes.leave()
    return 0


def _check_states(session: TrainingRun, folder: Path) -> None:
    from train.heads.hidden_state_cache import check_room

    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    _say(f"hidden states: {session.states_bytes / 1e9:.2f} GB in {folder}, {stored / 1e9:.2f} GB of it there")
    check_room(folder, session.states_bytes - stored)


def _train(session: TrainingRun, check_every: int) -> None:
    """All steps that are left."""
    trainer, total, first = session.trainer, session.recipe.steps, session.processes.first
    if first:
        chain, costs = session.task.chain, session.costs
        draft, verify = (
            seconds / costs.of_step(1)
            for seconds in (costs.draft + costs.draft_begin / chain, costs.of_step(1 + chain))
        )
        _say(f"in plain steps, a draft step costs {draft:.2f} and verifying a chain of {chain} costs {verify:.2f}")
    for record in session.journal.records if first else ():
        if "rates" in record:
            _say(_found(record, total))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(
        *columns, TimeRemainingColumn(), console=err_console, disable=not (first and err_console.is_terminal)
    )
    with closing(session), bars:
        bar = bars.add_task("training", total=total, completed=trainer.step)
        while trainer.step < total:
            loss = session.advance()["loss"]
            bars.update(bar, completed=trainer.step, description=f"loss {loss:.3f}")
            if trainer.step % check_every == 0 or trainer.step == total:
                session.check()
                if first:
                    _say(_found(session.journal.records[-1], total))


def _found(record: dict[str, Any], total: int) -> str:
    """A line about held-out texts."""
    rates = " ".join(f"{100 * rate:.0f}" for rate in record["rates"])
    gain = f"{record['speed_up']:.2f}x plain decoding with chains of {record['best_length']}"
    return f"step {record['step']} of {total}: held out, accepted by position {rates} %, tau {record['tau']:.2f}, " + (
        gain if record["best_length"] else "no chain pays"
    )


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
    import psutil

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


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _check(args: argparse.Namespace, world: int) -> None:
    """ValueError for numbers that mean nothing, here or for so many processes."""
    for name in ("max_length", "batch", "chain", "check_every", "epochs", "steps", "threads", "draft_vocab"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if args.batch % world:
        raise ValueError(f"--batch is {args.batch} and {world} processes share its rows; give a multiple of {world}")
    for name in ("lr", "clip", "decay"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be above 0")
    if not 0 < getattr(args, "anchors", 1.0) <= 1:
        raise ValueError(f"--anchors is {args.anchors}; give a share above 0, at most 1")
    for name in ("draft_vocab", "taps", "target_layers", "layers"):
        value = getattr(args, name, None)
        if getattr(args, "init", None) is not None and value != args.parser.get_default(name):
            said = f"--{name.replace('_', '-')} {value}"
            raise ValueError(f"{said} has no effect with --init, whose head has its own; drop one of the two")
    for name in ("held_out", "warmup"):
        if not 0 <= getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give a share from 0 up to 1")
    weights = {name: getattr(args, name) for name in ("kl_weight", "feature_weight", "rejection_weight")}
    if min(weights.values()) < 0 or not any(weights.values()):
        said = ", ".join(f"--{name.replace('_', '-')} {weight}" for name, weight in weights.items())
        raise ValueError(f"the weights of losses are {said}; give none below 0 and at least one above")
    if DTYPES.get(args.dtype, args.dtype) not in ("auto", *DTYPES.values()):
        raise ValueError(f"--dtype is {args.dtype!r}; give auto or one of {', '.join(DTYPES)}")


def _costs(args: argparse.Namespace) -> Costs | None:
    if args.costs is None:
        return None
    from sharesd.speculation.cost_model import Costs

    try:
        draft, verify = map(float, args.costs.split(","))
    except ValueError:
        raise ValueError(f"--costs is {args.costs!r}; give two numbers, for example 0.1,1.5") from None
    if not (draft > 0 and verify > 0):
        raise ValueError(f"--costs is {args.costs!r}; both must be above 0")
    return Costs(step={1: 1.0, 1 + args.chain: verify}, draft=draft, single_pass=args.kind == "parallel")


def _numbers(args: argparse.Namespace, name: str, example: str) -> tuple[int, ...]:
    given = getattr(args, name, None)
    try:
        return tuple(map(int, given.split(","))) if given else ()
    except ValueError:
        raise ValueError(f"--{name.replace('_', '-')} is {given!r}; give numbers, for example {example}") from None
