"""Training steps, reproducible from a checkpoint.

The order of data is a function of seed and epoch. Learning rate and random draws are functions of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from sharesd.drafters.parallel.head import Parallel
from train.data.packed_dataset import PackedRows
from train.heads.distributed import ALONE, Processes
from train.heads.draft_decoder import Learner
from train.heads.losses import Losses, Teacher, losses, with_anchors
from train.heads.teacher import FrozenTarget, Lesson, num_counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Hyperparameters of a training."""

    steps: int
    batch: int
    """Packed rows per step, of all processes together."""
    lr: float
    """Maximum learning rate."""
    warmup: float = 0.05
    """Share of warmup steps; a cosine decay to `lr` / 10 follows."""
    clip: float = 0.5
    """Maximum norm of a step's gradient."""
    weight_decay: float = 0.0
    optimizer: Literal["adamw", "muon"] = "adamw"
    unroll: tuple[int, ...] = (3,)
    """Numbers of unrolled chain steps, each for an equal share of training."""
    decay: float = 0.8
    """Weight of a chain step, relative to the previous one."""
    kl_weight: float = 1.0
    feature_weight: float = 0.0
    anchors: float = 1.0
    """Parallel heads: share of positions with masks, drawn in each step."""
    rejection_weight: float = 0.0
    bf16: bool = False
    """Matrix products in bfloat16; weights and moments keep the lessons' dtype."""

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return self.lr * (step + 1) / rising
        progress = (step - rising) / max(1, self.steps - rising)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    def unroll_at(self, step: int) -> int:
        """Return the number of unrolled chain steps in a training step."""
        return self.unroll[min(step * len(self.unroll) // self.steps, len(self.unroll) - 1)]


class Trainer:
    """Trainer of a head; all processes advance in step."""

    def __init__(
        self,
        head: Learner,
        frozen: FrozenTarget,
        teacher: Teacher,
        rows: PackedRows,
        recipe: Recipe,
        processes: Processes = ALONE,
    ) -> None:
        self.head, self.recipe, self.step = head, recipe, 0
        self._frozen, self._teacher, self._rows, self._processes = frozen, teacher, rows, processes
        self._epoch, self._row = 0, 0  # of the next step
        self._optimizers = _optimizers(head, recipe)

    def advance(self) -> dict[str, float]:
        """Run one training step, and return its metrics.

        Raises ValueError if the gradient is not finite.
        """
        recipe, head, processes = self.recipe, self.head, self._processes
        lessons = [lesson for row in self._next_rows() for lesson in self._frozen.lessons(row)]
        if isinstance(head, Parallel):
            dice = torch.Generator().manual_seed(self.step * processes.number + processes.index)
            lessons = [with_anchors(lesson, recipe.anchors, dice) for lesson in lessons]
        unroll = recipe.unroll_at(self.step)
        counts = [sum(int(lesson.counted(step).sum()) for lesson in lessons) for step in range(unroll)]
        counts = processes.totals(counts)  # so the loss is a mean over places, not over means
        parts = self._learn(lessons, self._weights(counts))
        found = {name: part.item() for name, part in zip(("loss", *Losses._fields), parts, strict=True)}
        found["gradient"] = clip_grad_norm_(head.parameters(), recipe.clip).item()
        if not math.isfinite(found["gradient"]):
            raise ValueError(f"the gradient of step {self.step} is {found['gradient']}; lower --lr, or train in fp32")
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = found["lr"] = recipe.lr_at(self.step)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return found | {"places": counts[0]}

    def loss_on(self, rows: Sequence[dict[str, Tensor]]) -> Callable[[Lesson], Tensor]:
        """Return the function of a lesson's share in these rows' loss.

        The rows are those of this process; all of their lessons, of all processes, sum up to the coming step's loss.
        """
        counts = [sum(num_counted(row, step) for row in rows) for step in range(self.recipe.unroll_at(self.step))]
        weights, everywhere = self._weights(self._processes.totals(counts)), torch.Generator()

        @torch.no_grad()
        def share(lesson: Lesson) -> Tensor:
            lesson = with_anchors(lesson, 1.0, everywhere) if isinstance(self.head, Parallel) else lesson
            return self._parts([lesson], weights)[0]

        return share

    def _weights(self, counts: Sequence[int]) -> list[float]:
        """Return the weight of a position in each chain step."""
        decays = [self.recipe.decay**step for step in range(len(counts))]
        return [decay / sum(decays) / max(1, count) for decay, count in zip(decays, counts, strict=True)]

    def _parts(self, lessons: list[Lesson], weights: list[float]) -> tuple[Tensor, ...]:
        """Return the loss and its parts."""
        recipe, device = self.recipe, self.head.get_buffer("cos").device.type
        with torch.autocast(device, torch.bfloat16, enabled=recipe.bf16):  # weights are cast once for all texts
            found = losses(
                self.head,
                lessons,
                self._teacher,
                weights,
                feature=recipe.feature_weight > 0,
                rejection=recipe.rejection_weight > 0,
            )
            loss = recipe.kl_weight * found.divergence + recipe.feature_weight * found.feature
            return loss + recipe.rejection_weight * found.rejection, *found

    def _learn(self, lessons: list[Lesson], weights: list[float]) -> Sequence[Tensor]:
        """Compute loss, its parts, and gradients, summed over all processes."""
        head, processes = self.head, self._processes
        device = head.get_buffer("cos").device
        parts: Sequence[Tensor] = [torch.zeros((), dtype=self._frozen.dtype, device=device)] * 4
        if lessons:  # an epoch's last step may have fewer rows than there are processes
            loss, *others = self._parts(lessons, weights)
            loss.backward()
            parts = [part.detach() for part in (loss, *others)]
        if processes.number > 1:
            learning = [parameter for parameter in head.parameters() if parameter.requires_grad]
            gradients = [torch.zeros_like(slot) if slot.grad is None else slot.grad for slot in learning]
            for slot, gradient in zip(learning, processes.sums(gradients), strict=True):
                slot.grad = gradient
        return processes.sums(parts)

    def state(self) -> dict[str, Any]:
        """Return the state of head, optimizers and data order."""
        place = {"step": self.step, "epoch": self._epoch, "row": self._row}
        return place | {"head": self.head.state_dict(), "optimizers": [one.state_dict() for one in self._optimizers]}

    def resume(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state`."""
        self.step, self._epoch, self._row = state["step"], state["epoch"], state["row"]
        self.head.load_state_dict(state["head"])
        for optimizer, found in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(found)
        self._rows.set_epoch(self._epoch)

    def _next_rows(self) -> list[dict[str, Tensor]]:
        """Return this process's rows of the next step."""
        if self._row >= len(self._rows):
            self._epoch, self._row = self._epoch + 1, 0
            self._rows.set_epoch(self._epoch)
        first, self._row = self._row, min(self._row + self.recipe.batch, len(self._rows))
        return [self._rows[number] for number in self._processes.share(range(first, self._row))]


def _optimizers(head: Learner, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return AdamW, or Muon for inner matrices with AdamW for the rest."""
    outer = set() if head.lm_head is None else set(head.lm_head.parameters())
    outer |= {head.mask_embeds, head.mask_states} if isinstance(head, Parallel) else set()
    matrices, others = list[Parameter](), list[Parameter]()
    for parameter in (one for one in head.parameters() if one.requires_grad):
        inner = recipe.optimizer == "muon" and parameter.ndim == 2 and parameter not in outer
        (matrices if inner else others).append(parameter)
    lr, decay = recipe.lr, recipe.weight_decay
    found: list[torch.optim.Optimizer] = []
    if matrices:  # its steps are scaled so that AdamW's rates suit it
        found.append(torch.optim.Muon(matrices, lr, decay, adjust_lr_fn="match_rms_adamw"))
    return [*found, torch.optim.AdamW(others, lr, (0.9, 0.95), weight_decay=decay, fused=True)]


def steps_of(rows: PackedRows, epochs: int, batch: int) -> int:
    """Return the number of steps in `epochs` epochs."""
    total = 0
    for epoch in range(epochs):
        rows.set_epoch(epoch)
        total += math.ceil(len(rows) / batch)
    rows.set_epoch(0)
    return total
