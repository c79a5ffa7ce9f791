"""Training run: from a folder of answers to a trained head, with a checkpoint in a new folder at each evaluation."""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from multigpu.journal import settings_of
from sharesd.config import DType, EngineConfig, Mode
from sharesd.devices.selection import device_of
from sharesd.drafters.eagle.head import Eagle, Eagle3
from sharesd.drafters.heads.checkpoint import load_head, new_head, save_head
from sharesd.drafters.heads.config import Kind, mode_of
from sharesd.models.checkpoint import Progress, content_hash, read_config
from sharesd.models.decoder import Decoder
from sharesd.models.hub import resolve
from sharesd.models.loader import load_decoder
from sharesd.reports import environment
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.cost_model import Costs
from sharesd_files import atomic_files, atomic_path, atomic_write, files_hash
from train.data.packed_dataset import PackedRows, read_split
from train.data.shards import SETTINGS, keep_settings, shards_in
from train.heads.distributed import ALONE, Processes
from train.heads.draft_decoder import DraftDecoder, Learner, initial_draft, save_draft
from train.heads.evaluate import Acceptance, acceptance, best_chain
from train.heads.hidden_state_cache import StateStore
from train.heads.init_weights import begin_linear, initial_head, most_frequent, with_masks
from train.heads.losses import Teacher
from train.heads.metrics_log import MetricsLog
from train.heads.teacher import FrozenTarget, Lesson
from train.heads.trainer import Recipe, Trainer

LAST, BEST, STATE = "last", "best", "training.pt"
"""Names in a training folder: latest head, best head, training state."""
STEP = "step-"
"""Prefix of the names of checkpoint folders."""
FITTED = 64
"""Maximum rows for the least-squares initialisation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Head, data and evaluation of a training run."""

    kind: Kind | Literal["draft"]
    init: Path | None = None
    """Initial head, with draft tokens and taps; None: target's last block."""
    data: Path
    target: str | None
    dtype: DType = "auto"
    """Dtype of target and heads."""
    device: str = "auto"
    threads: int
    """Number of threads; constant, since the bits of sums depend on it."""
    max_length: int = 1024
    seed: int = 0
    draft_vocab: int | None = None
    """Number of tokens that the head can draft; None: all."""
    taps: tuple[int, ...] = ()
    """Depths of hidden states (EAGLE-3) or target layers (GLIDE); empty: defaults."""
    held_out: float = 0.05
    """Share of prompts for evaluation."""
    chain: int = 5
    """Draft tokens per chain in evaluations."""
    draft_length: int = 1
    """`parallel`: draft tokens per pass."""
    layers: int = 1
    """`parallel`, `draft`: number of blocks."""
    hidden_size: int | None = None
    """`draft`: hidden size; None: half of the target's, a multiple of 64."""


class TrainingRun:
    """Trainer, evaluation and checkpoints of one process; process 0 writes."""

    journal: MetricsLog
    """Metrics log; like `provenance` and `costs`, only on process 0."""
    provenance: Provenance
    costs: Costs

    def __init__(
        self,
        task: Task,
        recipe: Callable[[PackedRows], Recipe],
        progress: Progress,
        processes: Processes = ALONE,
    ) -> None:
        """Load data, target and head; no file is written.

        `recipe` is called with the training rows.

        Raises ValueError for options that do not fit together.
        """
        self.task, self.processes = task, processes
        self.split = read_split(task.data, task.max_length, task.held_out)
        for places, purpose, remedy in (
            (self.split.train, "train on", "lower it"),
            (self.split.held_out, "measure with", "raise it, or add answers"),
        ):
            if not places:
                raise ValueError(f"--held-out {task.held_out} leaves no answers to {purpose}; {remedy}")
        self.rows = PackedRows(self.split.train, task.max_length, seed=task.seed)
        self._held_out = PackedRows(self.split.held_out, task.max_length, shuffle=False)
        self.recipe = recipe(self.rows)
        folder = resolve(task.target, progress=progress)
        answers = [task.data / SETTINGS, *shards_in(task.data)]
        self._hashes = {"target_sha256": content_hash(folder), "data_sha256": files_hash(answers)}
        self._hashes |= {} if task.init is None else {"init_sha256": content_hash(task.init)}
        dtype = torch.bfloat16 if task.dtype == "auto" else getattr(torch, task.dtype)
        device = device_of(task.device)
        target = load_decoder(folder, dtype=dtype, device=device, progress=progress)
        if task.max_length > target.max_context:
            raise ValueError(
                f"--max-length is {task.max_length} but the target supports {target.max_context} tokens; lower it"
            )
        self._written = self._first_head(folder, target)
        """Head in the dtype of decoding."""
        self.head = _twin(self._written, target)
        weight_VD, ids_K = target.head.weight, None if self._written.ids is None else self._written.get_buffer("ids")
        products = torch.bfloat16 if self.recipe.bf16 else next(self.head.parameters()).dtype
        weight_KD = (weight_VD if ids_K is None else weight_VD[ids_K]).to(products)
        teacher = Teacher(weight_KD, target.config.final_logit_softcapping)
        head_config = self._written.config
        target_bytes = sum(parameter.nbytes for parameter in target.parameters())
        self.frozen = FrozenTarget(target, head_config.taps, task.max_length, head_config.target_layers)
        self.trainer = Trainer(self.head, self.frozen, teacher, self.rows, self.recipe, processes)
        head_bytes = sum(parameter.nbytes for parameter in self.head.parameters())
        self.fixed_bytes = target_bytes + teacher.weight_KD.nbytes + 4 * head_bytes
        """Bytes of target, teacher, and head with gradient and two moments."""

    def _first_head(self, folder: Path, target: Decoder) -> Learner:
        task = self.task
        if task.kind == "draft":
            return initial_draft(folder, target, layers=task.layers, hidden_size=task.hidden_size)
        if task.init is not None:
            head = load_head(task.init, target)
            if (task.kind, head.config.kind) == ("parallel", "eagle3"):
                assert isinstance(head, Eagle3)
                return with_masks(head, target, task.draft_length)
            if head.config.kind != task.kind:
                raise ValueError(f"--init {task.init} is a head of kind {head.config.kind}, not {task.kind}")
            if head.config.draft_length < task.draft_length:
                raise ValueError(
                    f"--init {task.init} drafts {head.config.draft_length} tokens but --unroll is "
                    f"{task.draft_length}; lower --unroll"
                )
            return head
        ids_K = None
        if task.draft_vocab is not None:
            every = map(self.rows.__getitem__, range(len(self.rows)))
            ids_K = most_frequent(every, target.vocab_size, task.draft_vocab)
        sizes = {"draft_length": task.draft_length, "num_hidden_layers": task.layers}
        changes = sizes if task.kind == "parallel" else {}
        if task.kind != "glide" and task.taps and not 1 <= min(task.taps) <= max(task.taps) <= len(target.blocks):
            given = ",".join(map(str, task.taps))
            raise ValueError(
                f"--taps is {given} but the target has {len(target.blocks)} blocks; give numbers from 1 to "
                f"{len(target.blocks)}, or leave it out"
            )
        return initial_head(task.kind, read_config(folder), target, ids_K=ids_K, taps=task.taps, **changes)

    @property
    def states_bytes(self) -> int:
        """Return the bytes of the hidden states of all texts."""
        tokens = sum(place.length for places in (self.split.train, self.split.held_out) for place in places)
        return tokens * self.frozen.bytes_per_token

    def begin(self, out: Path, costs: Costs | None, states: Path | None = None) -> None:
        """Resume the training in a folder, or start it with an evaluation.

        `costs` of rounds are measured unless given. Hidden states are stored in `states`, if given. Raises ValueError
        if the folder's settings differ, the number of processes included.
        """
        first = self.processes.first
        if states is not None:
            self._open_states(states)
        if first:
            out.mkdir(parents=True, exist_ok=True)
            self._keep_settings(out)
        state = read_state(out / LAST)  # which process 0 replaces once the others come to the first measures
        self.out, self._best, self._kept = out, 0.0, list[int]()
        self.is_resumed = state is not None
        """Folder, best tau, and the steps of the heads that were best."""
        if state is not None:
            self._resume(state)
        self._agree(-1 if state is None else self.trainer.step)
        if first:
            self.provenance = Provenance(out, str(device_of(self.task.device)))
            self.journal = MetricsLog(out, -1 if state is None else self.trainer.step)
            if state is None:
                if isinstance(self.head, Eagle) and self.task.init is None:
                    begin_linear(self.head, self._first_lessons())
                self._write()
                link(out, LAST, 0)
            self.costs = costs or self._measured_costs()
        self.processes.follow_first([parameter.detach() for parameter in self.head.parameters()])
        if state is None:
            self.check()

    def _open_states(self, folder: Path) -> None:
        """Store the states of this process's share of texts, each text once."""
        depths = sorted({*self.head.config.taps, self.frozen.decoder.normed_depth})
        depends: dict[str, Any] = {"target": self.task.target, "dtype": self.task.dtype, "depths": depths}
        if self.head.config.target_layers:
            depends["layers"] = self.head.config.target_layers
        if not self.processes.first:
            self.processes.wait()
        store = self.frozen.store = StateStore(folder, depends)
        if self.processes.first:
            self.processes.wait()
        if self.processes.number > 1:
            for rows in (self.rows, self._held_out):
                for number in self.processes.share(range(len(rows))):
                    self.frozen.keep(rows[number])
            store.flush()
            self.processes.wait()
            store.find()

    def _resume(self, state: dict[str, Any]) -> None:
        before, number = state.get("processes", 1), self.processes.number
        if before != number:  # as with threads, the bits of sums depend on it
            raise ValueError(
                f"{self.out / LAST} was trained by {before} processes, not {number}; use {before}, or give another "
                "--out-dir"
            )
        self.trainer.resume(state["trainer"])
        self._best, self._kept = state["best"], state["kept"]

    def _agree(self, step: int) -> None:
        """Raise ValueError if the processes have different states."""
        if self.processes.totals([step])[0] != step * self.processes.number:
            raise ValueError(f"{self.out / LAST} differs between processes; give all of them the same folder")

    def _first_lessons(self) -> Iterator[Lesson]:
        for number in range(min(FITTED, len(self.rows))):
            yield from self.frozen.lessons(self.rows[number])

    def advance(self) -> dict[str, float]:
        """Run one training step, and log its metrics."""
        started = time.perf_counter()
        found = self.trainer.advance()
        if self.processes.first:
            self.journal.add(self.trainer.step, **found, seconds=round(time.perf_counter() - started, 3))
        return found

    def check(self) -> None:
        """Evaluate on this process's share of held-out texts and write a checkpoint."""
        rows = [self._held_out[number] for number in self.processes.share(range(len(self._held_out)))]
        device, share = self.head.get_buffer("cos").device, self.trainer.loss_on(rows)
        total = torch.zeros((), dtype=self.frozen.dtype, device=device)
        found = acceptance(self.head, self.frozen, rows, self.task.chain, lambda lesson: total.add_(share(lesson)))
        found = Acceptance(self.processes.totals(found.reached), self.processes.totals(found.accepted))
        [total] = self.processes.sums([total])
        if self.processes.first:
            self._keep(found, total.item())

    def _keep(self, found: Acceptance, loss: float) -> None:
        """Log an evaluation, and write head and training state."""
        length, speed_up = best_chain(found.taus, self.costs)
        values: dict[str, Any] = {
            "held_out_loss": loss,
            "conditional_acceptance": found.rates,
            "tau_chains": found.taus[-1],
            "expected_speedup": speed_up,
            "best_length": length,
        }
        self.journal.add(self.trainer.step, **values)
        self.journal.draw()
        self.provenance.update()
        folder, step, is_best = self._write(), self.trainer.step, values["tau_chains"] > self._best
        if is_best:
            self._best, self._kept = values["tau_chains"], [*self._kept, step]
        trained = {"best": self._best, "kept": self._kept, "processes": self.processes.number}
        write_state({"trainer": self.trainer.state(), **trained}, folder)
        for name in (BEST, LAST) if is_best else (LAST,):
            link(self.out, name, step)
        drop_others(self.out, {*self._kept, step})

    def close(self) -> None:
        """Close the log, and write new hidden states to disk."""
        if self.processes.first:
            self.journal.close()
        if self.frozen.store is not None:
            self.frozen.store.flush()

    @torch.no_grad()
    def _write(self) -> Path:
        """Write the head into the folder of its step, and return that."""
        for slot, parameter in zip(self._written.parameters(), self.head.parameters(), strict=True):
            slot.copy_(parameter)
        folder = self.out / f"{STEP}{self.trainer.step}"
        write_head(self._written, folder)
        return folder

    def _keep_settings(self, out: Path) -> None:
        """Write the settings; ValueError if they differ in more than added steps."""
        settings, path = self._settings(), out / SETTINGS
        steps = settings["steps"]
        before = settings_of(path).get("steps") if path.exists() else steps
        has_more = isinstance(before, int) and steps > before
        keep_settings(out, {**settings, "steps": before} if has_more else settings)
        if has_more:
            atomic_write(path, json.dumps(settings, indent=2) + "\n")

    def _settings(self) -> dict[str, Any]:
        """Return the settings on which the trained head depends."""
        task = {name: value for name, value in asdict(self.task).items() if name not in ("device", "chain")}
        task["init"] = None if self.task.init is None else str(self.task.init)
        sizes = {"answers": len(self.split.train), "held_out_answers": len(self.split.held_out)}
        return {**task, "data": self.task.data.name, **sizes, **asdict(self.recipe), **self._hashes}

    def _measured_costs(self) -> Costs:
        """Return the costs of rounds with this head, measured by the engine."""
        task, trained = self.task, str(self.out / LAST)
        mode: Mode = "classic" if task.kind == "draft" else mode_of(task.kind)
        config = EngineConfig(
            target=task.target,
            mode=mode,
            heads=() if mode == "classic" else (trained,),
            draft=trained if mode == "classic" else None,
            dtype=task.dtype,
            device=task.device,
            threads=task.threads,
            max_draft=task.chain,
        )
        params = SamplingParams()
        return Runtime(config).warm_up(mode, params).variant(params).policy.live.table


def _twin(head: Learner, target: Any) -> Learner:
    """Return a trainable copy of the head, in the dtype of lessons."""
    if isinstance(head, DraftDecoder):
        wide = torch.promote_types(head.decoder.embed.weight.dtype, torch.float32)
        return copy.deepcopy(head).to(wide).requires_grad_(True)
    wide = torch.promote_types(head.place["dtype"], torch.float32)
    ids_K = None if head.ids is None else head.get_buffer("ids")
    twin = new_head(head.config, target, ids_K=ids_K, own_lm_head=head.own_lm_head).to(wide)
    found = head.state_dict()
    if found.keys() != twin.state_dict().keys():
        raise ValueError(f"cannot resume from a head with {', '.join(found)}; pass one trained by this command")
    twin.load_state_dict(found)
    return twin


class Provenance:
    """Command, software, machine and load of each start of a training, the latest last."""

    def __init__(self, folder: Path, device: str) -> None:
        """Add a start to the file in a folder."""
        self._path = folder / "provenance.json"
        self._starts: list[dict[str, Any]] = json.loads(self._path.read_text("utf-8")) if self._path.exists() else []
        self._starts.append({"command": environment.command("train"), "environment": environment.environment(device)})
        self.update()

    def update(self) -> None:
        """Write the file, with the load since the start."""
        self._starts[-1]["environment"] |= environment.load_meter().read()
        atomic_write(self._path, json.dumps(self._starts, indent=2, ensure_ascii=False) + "\n")


def write_head(head: Learner, folder: Path) -> None:
    """Write a head in the public layout, replacing an existing one."""
    with atomic_files(folder) as fresh:
        if isinstance(head, DraftDecoder):
            save_draft(head, fresh)
        else:
            save_head(head, fresh)


def write_state(state: dict[str, Any], folder: Path) -> None:
    """Write the result of `Trainer.state`."""
    with atomic_path(folder / STATE) as fresh:
        try:
            torch.save(state, fresh)
        except RuntimeError as error:  # of a full disk, too
            raise OSError(f"{folder / STATE} cannot be written ({error}); free some space there") from error


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the last written state, or None."""
    path = folder / STATE
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def link(out: Path, name: str, step: int) -> Path:
    """Let a name lead to a checkpoint, atomically; return the name's path."""
    path, fresh = out / name, out / f".{name}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(f"{STEP}{step}")
    if path.is_dir() and not path.is_symlink():  # a copied run: copies follow links
        shutil.rmtree(path)
    return fresh.replace(path)


def drop_others(out: Path, steps: Collection[int]) -> None:
    """Remove other steps' checkpoints, and all states but the last."""
    for folder in out.glob(f"{STEP}*"):
        if int(folder.name.removeprefix(STEP)) not in steps:
            shutil.rmtree(folder)
        elif folder.name != f"{STEP}{max(steps)}":
            (folder / STATE).unlink(missing_ok=True)
